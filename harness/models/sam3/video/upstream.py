"""Answers questions about videos with upstream's own video model, as modules whose outputs are tensors.

As modules they run in fp32 and, through `harness.parity.oracle`, in float64. Both round memories to bfloat16, as
upstream does. VB is upstream's model/sam3_video_base.py, VI its model/sam3_video_inference.py and TP its
model/sam3_tracking_predictor.py, with the lines of sam3 0.1.4.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from harness.core.program import Arrays
from harness.models.sam3.images import preprocess
from harness.models.sam3.patches.patch import replaced, wrapped
from harness.models.sam3.patches.tracking import holes_are_filled
from harness.models.sam3.tracker.propagation import tracker_features
from harness.models.sam3.video import STEP
from harness.models.sam3.video.questions import Question, frames_of
from harness.parity.oracle import oracle, reference
from harness.parity.references import Reference, add_prefix
from harness.runtime.arrays import Floats, Pixels
from harness.runtime.sam3.video.tracker import to_bfloat16

if TYPE_CHECKING:
    from harness.models.sam3.source import UpstreamModel

PARTS = (
    *("ids", "scores", "boxes", "masks"),
    *("candidates", "unfilled", "tracker_scores"),
    *("objects", "logits", "object_logits", "memories", "remembered"),
)
"""Names of the outputs of `Tracking` for each answer.

For n visible objects: ids int64 [n], scores [n], boxes [n, 4] as shares of the video (left, top, width, height) and
masks bool [n, h, w]. For m candidates for visible objects: ids int64 [m], mask logits [m, 288, 288] before holes are
filled, and tracker scores [m]. `objects` are the ids that are tracked after the frame, int64. For N objects that were
tracked into the frame: mask logits [N, 288, 288] before holes are filled and object logits [N], none on a frame that
already is a conditioning frame; memories [N, 64, 72, 72]; and whether the memory has the object, bool [N].
"""

_VISIBLE = ("out_obj_ids", "out_probs", "out_boxes_xywh", "out_binary_masks")
"""Names in upstream's output of the first four outputs of `PARTS`."""
_TRACKED = ("logits", "object_logits", "memories")
"""Names of the outputs that are also computed in float64."""

Detections = Mapping[str, Tensor]
Original = Callable[..., Any]
"""The method of upstream's that a recorder replaces and calls."""


def answer(upstream: UpstreamModel, question: Question) -> Reference:
    """Returns upstream's answer to a question; it runs once, and PyTorch's repeatability is checked by components.

    Returns:
        Arrays `frames/0/…` that answer the prompt, `frames/1/…` of the prompt's frame, and so on, with the names in
        `PARTS` and memories in bfloat16; some of them in float64 if the question asks for it. Of each step from
        PyTorch's state, arrays `steps/frame_8/bucket_0/…` with the names in `STEP`, also in float64, and
        `steps/frame_8/bucket_0/state/…`, see `Step`.
    """
    model, frames = upstream.video, frames_of(question)
    tracking = Tracking(model, question, frames)
    exact: Arrays = {}
    with upstream.shared_trunk(model):
        first = reference(tracking, (), tracking.names)
        if question.float64:
            without_steps = msgspec.structs.replace(question, steps=())
            exact_tracking = Tracking(model, without_steps, frames, tracking.detections)
            exact = oracle(exact_tracking, (), exact_tracking.names)
            exact = {name: array for name, array in exact.items() if name.endswith(_TRACKED)}
    for arrays in (first, exact):
        for name in [name for name in arrays if name.endswith("/memories")]:
            arrays[name] = to_bfloat16(arrays[name].astype(np.float32))  # exact, because the values are rounded
    first, exact = add_prefix("frames", first), add_prefix("frames", exact)
    buckets: dict[int, int] = {}
    for step in tracking.steps:
        bucket = buckets[step.frame] = buckets.get(step.frame, -1) + 1
        name = f"steps/frame_{step.frame}/bucket_{bucket}"
        first |= add_prefix(f"{name}/state", step.state) | add_prefix(name, step.outputs)
        exact |= add_prefix(name, oracle(step.module, (), STEP))
    return Reference.from_run(first, exact)


def answer_frames(upstream: UpstreamModel, question: Question) -> Arrays:
    """Returns the numbered frames of upstream's answer, `0/…` and so on, without the arrays whose drift is measured."""
    tracking = Tracking(upstream.video, msgspec.structs.replace(question, steps=()), frames_of(question))
    with upstream.shared_trunk(upstream.video):
        arrays = reference(tracking, (), tracking.names)
    return {name: array for name, array in arrays.items() if not name.endswith(_TRACKED)}


@dataclass(frozen=True, eq=False)
class Step:
    """A bucket of B objects on a frame, before it is tracked and after its memory is encoded.

    Attributes:
        frame: The frame.
        state: What the step is computed from: the frame's features `high_res_0`, `high_res_1` and `features`; by entry
            of the bucket's memory bank the frame, memory in bfloat16, pointer, object logits and score; the frames of
            the conditioning entries in upstream's order; and the logits [B, 1152, 1152] and object logits [B] from
            which the memory is encoded.
        outputs: Upstream's outputs, by the names in `STEP`.
        module: Computes `outputs` again, without arguments.
    """

    frame: int
    state: Arrays
    outputs: Arrays
    module: nn.Module


class Tracking(nn.Module):
    """Upstream's `add_prompt` and `propagate_in_video` on the frames of a question.

    Attributes:
        steps: The steps that the last run recorded on the frames `steps` of the question, one for each bucket.
        detections: The detections of the last run on the prompt's frame, where the detector runs there alone.
    """

    def __init__(
        self,
        model: Any,
        question: Question,
        frames: Sequence[Pixels],
        detections: Detections | None = None,
    ) -> None:
        """Takes the question, and the detections of another run.

        Args:
            model: The video model.
            question: The question.
            frames: The frames.
            detections: Detections to reuse; with them no object is visible.
        """
        super().__init__()
        self.model = model
        self.steps: list[Step] = []
        self.detections = detections
        self._question = question
        self._frames = frames

    @property
    def names(self) -> list[str]:
        """Returns the names of the outputs: `0/ids` answers the prompt, `1/ids` is the first propagated frame."""
        count = len(self._frames) - self._question.frame
        return [f"{answer}/{part}" for answer in range(count + 1) for part in PARTS]

    def forward(self) -> tuple[Tensor, ...]:
        """Returns the tensors of `PARTS` for the prompt and for each frame from the prompt's on."""
        pictures = [Image.fromarray(frame) for frame in self._frames]
        pixels = [preprocess(picture) for picture in pictures]
        recorder = _Recorder(self.model, self._question.steps)
        with (
            quick_masks(),
            _no_inference_mode(),
            recorder.recording(),
            nullcontext() if self.detections is None else replaced(self.model, "_postprocess_output", _empty_output),
            self._detect_once(pixels) if self._question.finds_once else nullcontext(),
        ):
            state = self.model.init_state(pictures, offload_video_to_cpu=True)
            state["input_batch"].img_batch = torch.cat(pixels)
            index, out = self.model.add_prompt(state, self._question.frame, **_prompt(self._question))
            answers = [(index, out, recorder.frames.pop(index))]
            for index, out in self.model.propagate_in_video(state, self._question.frame, None, False):
                answers.append((index, out, recorder.frames.pop(index)))
        self.steps = recorder.steps
        return tuple(tensor for _, out, recorded in answers for tensor in (*_visible_tensors(out), *recorded.values()))

    @contextmanager
    def _detect_once(self, pixels: Sequence[Tensor]) -> Iterator[None]:
        """Runs the detector on the prompt's frame alone, and counts no other frame against an object.

        Upstream runs it on every frame, drops its detections (VI:393), and removes the object because of that. On the
        other frames only the tracker's features are computed, once for each distinct picture.
        """
        allow_detection = True
        encoded: dict[str, dict[str, Any]] = {}

        def features(frame: int) -> dict[str, Any]:
            digest = hashlib.sha256(self._frames[frame].tobytes()).hexdigest()
            if digest not in encoded:
                encoded[digest] = self._features(pixels[frame])
            return encoded[digest]

        def detect(original: Original, *, frame_idx: int, feature_cache: dict[Any, Any], **options: Any) -> Any:
            nonlocal allow_detection
            allow_detection = options["allow_new_detections"]
            if allow_detection and self.detections is None:
                self.detections = original(frame_idx=frame_idx, feature_cache=feature_cache, **options)
            feature_cache.pop(frame_idx - 1, None)
            feature_cache[frame_idx] = (pixels[frame_idx][0], {"tracker_backbone_out": features(frame_idx)})
            assert self.detections is not None
            return self.detections if allow_detection else {name: row[:0] for name, row in self.detections.items()}

        def associate(original: Original, *arguments: Any, **keywords: Any) -> Any:
            new, unmatched, *outputs = original(*arguments, **keywords)
            return (new, unmatched if allow_detection else unmatched[:0], *outputs)

        with (
            wrapped(self.model, "run_backbone_and_detection", detect),
            wrapped(self.model, "_associate_det_trk", associate),
        ):
            yield

    def _features(self, pixels: Tensor) -> dict[str, Any]:
        """Computes the end of `run_backbone_and_detection` (VB:376) from the SAM 2 neck alone."""
        features = tracker_features(
            self.model.detector.backbone.vision_backbone, self.model.tracker.sam_mask_decoder, pixels
        )
        return {"vision_features": features["backbone_fpn"][-1], **features}


class TrackedStep(nn.Module):
    """A step of upstream's tracker: `track_step`, and the memory of the resulting masks."""

    def __init__(self, tracker: Any, tracked: Mapping[str, Any], encoded: Mapping[str, Any]) -> None:
        """Takes the arguments of `track_step` and of `_encode_new_memory`."""
        super().__init__()
        self.tracker = tracker
        self._tracked = dict(tracked)
        self._encoded = dict(encoded)

    def forward(self) -> tuple[Tensor, ...]:
        """Returns the tensors of `STEP`: [B, 288, 288], [B, 256], [B, 1], [B] and [B, 64, 72, 72]."""
        out = self.tracker.track_step(**self._tracked)
        memory, _ = self.tracker._encode_new_memory(**self._encoded)
        return out["pred_masks"][:, 0], out["obj_ptr"], out["object_score_logits"], out["iou_score"], memory


def _empty_frame() -> dict[str, Tensor]:
    """Returns the tensors of a frame on which nothing is recorded yet: those of `PARTS` but for the visible objects."""
    return {
        "candidates": torch.zeros(0, dtype=torch.int64),
        "unfilled": torch.zeros(0),
        "tracker_scores": torch.zeros(0),
        "objects": torch.zeros(0, dtype=torch.int64),
        "logits": torch.zeros(0, 288, 288),
        "object_logits": torch.zeros(0),
        "memories": torch.zeros(0, 64, 72, 72),
        "remembered": torch.zeros(0, dtype=torch.bool),
    }


class _Recorder:
    """A recorder of upstream's video model on each frame, which rounds memories in any dtype."""

    def __init__(self, model: Any, steps: Sequence[int]) -> None:
        self.model = model
        self._current = 0
        self.frames: dict[int, dict[str, Tensor]] = {}
        self.steps: list[Step] = []
        self._step_frames = steps
        self._tracked: dict[int, dict[str, Any]] = {}
        self._exact: list[tuple[dict[str, Any], Tensor]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records every frame for the duration of the context."""
        model, tracker = self.model, self.model.tracker
        with (
            wrapped(model, "_run_single_frame_inference", self._run_frame),
            wrapped(model, "build_outputs", self._build_outputs),
            wrapped(tracker, "_run_single_frame_inference", self._run_bucket),
            wrapped(tracker, "track_step", self._track_step),
            wrapped(tracker, "_suppress_object_pw_area_shrinkage", self._suppress_shrunken),
            wrapped(tracker, "_encode_new_memory", self._encode_memory),
            wrapped(tracker, "_run_memory_encoder", self._run_memory_encoder),
        ):
            yield

    def _run_frame(self, original: Original, inference_state: Any, frame_idx: int, reverse: bool) -> Any:
        self.frames[frame_idx] = _empty_frame()
        self._current = frame_idx
        out = original(inference_state, frame_idx, reverse)
        objects = inference_state["tracker_metadata"]["obj_ids_all_gpu"]
        self.frames[frame_idx]["objects"] = torch.from_numpy(objects.copy())
        return out

    def _append(self, frame: int, **tensors: Tensor) -> None:
        recorded = self.frames[frame]
        recorded |= {name: torch.cat([recorded[name], tensor]) for name, tensor in tensors.items()}

    def _build_outputs(self, original: Original, **arguments: Any) -> Any:
        """Records the candidates of a frame: tracked objects, and new objects with detections' masks (VB:935)."""
        frame, plan = self.frames[arguments["frame_idx"]], arguments["tracker_update_plan"]
        detections, new = arguments["det_out"], torch.from_numpy(plan["new_det_fa_inds"])
        tracked, present = arguments["tracker_low_res_masks_global"], arguments["tracker_obj_scores_global"]
        ids = [*arguments["tracker_metadata_prev"]["obj_ids_all_gpu"], *plan["new_det_obj_ids"]]
        frame["candidates"] = torch.tensor([int(object_id) for object_id in ids], dtype=torch.int64)
        # A bucket is not tracked on its conditioning frame, and no holes of its masks were filled.
        unfilled = frame["logits"] if len(frame["logits"]) == len(tracked) else tracked
        frame["unfilled"] = torch.cat([unfilled, detections["mask"][new]])
        frame["tracker_scores"] = torch.cat([present.sigmoid(), detections["scores"][new]])
        return original(**arguments)

    def _run_bucket(self, original: Original, **arguments: Any) -> Any:
        """Records a tracked bucket on a frame (TP:1051); the same method also takes mask prompts."""
        out, masks = original(**arguments)
        if arguments["mask_inputs"] is None:
            logits, object_logits = out["pred_masks"][:, 0], out["object_score_logits"][:, 0]
            self._append(arguments["frame_idx"], logits=logits, object_logits=object_logits)
        return out, masks

    def _track_step(self, original: Original, **arguments: Any) -> Any:
        if arguments["mask_inputs"] is not None or arguments["frame_idx"] not in self._step_frames:
            return original(**arguments)
        output_dict = arguments["output_dict"]
        copied = {kind: {frame: dict(out) for frame, out in output_dict[kind].items()} for kind in output_dict}
        saved = {**arguments, "output_dict": copied}
        out = original(**arguments)
        self._tracked[id(output_dict)] = saved | {"out": out}
        return out

    def _suppress_shrunken(self, original: Original, masks: Tensor) -> Tensor:
        """Records which objects are in a frame's memory (TP:1334)."""
        remaining: Tensor = original(masks)
        self.frames[self._current]["remembered"] = (remaining > 0).flatten(1).any(dim=1)
        return remaining

    def _encode_memory(self, original: Original, **arguments: Any) -> Any:
        memory, positions = original(**arguments)
        self._exact.append((arguments, memory))
        return round_to_bfloat16(memory), positions

    def _run_memory_encoder(self, original: Original, *positional: Any, **keywords: Any) -> Any:
        """Records a bucket's memory of a frame, from its tracked masks; mask prompts are left out (TP:1120)."""
        self._exact.clear()
        memory, positions = original(*positional, **keywords)
        if not keywords["is_mask_from_pts"]:
            state, frame = positional[0], positional[1]
            self._append(frame, memories=memory.to(torch.get_default_dtype()))
            if (tracked := self._tracked.pop(id(state["output_dict"]), None)) is not None:
                self.steps.append(self._recorded_step(frame, tracked, *self._exact[0]))
        return memory, positions

    def _recorded_step(self, frame: int, tracked: dict[str, Any], encoded: dict[str, Any], memory: Tensor) -> Step:
        out = tracked.pop("out")
        conditioning = tracked["output_dict"]["cond_frame_outputs"]
        entries = {**tracked["output_dict"]["non_cond_frame_outputs"], **conditioning}
        features = (
            level[:, :1].permute(1, 2, 0).unflatten(2, size).clone(memory_format=torch.contiguous_format).numpy()
            for level, size in zip(tracked["current_vision_feats"], tracked["feat_sizes"], strict=True)
        )
        values = (out["pred_masks"][:, 0], out["obj_ptr"], out["object_score_logits"], out["iou_score"], memory)

        def stack(name: str) -> Floats:
            stacked: Floats = torch.stack([entry[name] for entry in entries.values()]).float().numpy()
            return stacked

        state = {
            "frame": np.array([frame]),
            "frames": np.array(list(entries)),
            "conditioning": np.array(tuple(conditioning)),
            "memories": to_bfloat16(stack("maskmem_features")),
            "pointers": stack("obj_ptr"),
            "object_logits": stack("object_score_logits"),
            "scores": np.array([float(entry.get("eff_iou_score", np.nan)) for entry in entries.values()], np.float32),
            "masks": encoded["pred_masks_high_res"][:, 0].clone().numpy(),
            "present": encoded["object_score_logits"][:, 0].clone().numpy(),
            **dict(zip(("high_res_0", "high_res_1", "features"), features, strict=True)),
        }
        outputs = {name: value.clone().numpy() for name, value in zip(STEP, values, strict=True)}
        return Step(frame, state, outputs, TrackedStep(self.model.tracker, tracked, encoded))


def round_to_bfloat16(values: Tensor) -> Tensor:
    """Rounds values to bfloat16, half to even, in their own dtype; memories have no subnormal values."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp(torch.round(mantissa * 256), exponent - 8)


def _visible_tensors(out: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(out[name]) for name in _VISIBLE)


def _empty_output(*_: Any, **__: Any) -> dict[str, Any]:
    """Returns empty outputs for a run that only tracks; upstream computes boxes in fp32 alone."""
    return dict.fromkeys(_VISIBLE, np.zeros(0))


def _prompt(question: Question) -> dict[str, Any]:
    if question.box is None:
        return {"text_str": question.text}
    x0, y0, x1, y1 = question.box
    boxes = torch.tensor([[x0, y0, x1 - x0, y1 - y0]])
    return {"text_str": question.text, "boxes_xywh": boxes, "box_labels": torch.ones(1, dtype=torch.int64)}


@contextmanager
def quick_masks() -> Iterator[None]:
    """Replaces upstream's loops over masks on the CPU by vectorized code; to be used inside `upstream()`.

    The results are the same integers. Untrained weights give many masks with up to a thousand connected components
    each, on which upstream would spend most of its time and memory.
    """
    with vectorized_mask_iou(), vectorized_component_areas():
        yield


@contextmanager
def vectorized_mask_iou() -> Iterator[None]:
    """Computes the same IoU of masks by a matrix product, without an array [N, M, pixels] of gigabytes."""

    def mask_iou(pred_masks: Tensor, gt_masks: Tensor) -> Tensor:
        first, second = (masks.flatten(1).float() for masks in (pred_masks, gt_masks))
        common = first @ second.T
        union = first.sum(1)[:, None] + second.sum(1) - common
        return common / union.clamp(min=1)

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("sam3.") and "mask_iou" in vars(module):
                stack.enter_context(replaced(module, "mask_iou", mask_iou))
        yield


def vectorized_component_areas() -> AbstractContextManager[None]:
    """Counts the areas of all connected components in one pass; upstream makes a mask for each component."""
    from sam3.perflib import connected_components

    def components(values: Tensor) -> tuple[Tensor, Tensor]:
        from skimage.measure import label

        labels = torch.from_numpy(label(values.cpu().numpy()))  # type: ignore[no-untyped-call]
        areas = torch.bincount(labels.flatten())
        areas[0] = 0
        return labels, areas[labels]

    if holes_are_filled.needed():
        return nullcontext()  # `upstream()` has already replaced the function
    return replaced(connected_components, "connected_components_cpu_single", components)


@contextmanager
def _no_inference_mode() -> Iterator[None]:
    """Disables inference mode, because the oracle cannot widen tensors made in it."""
    with (
        torch.no_grad(),
        replaced(torch.inference_mode, "__enter__", lambda self: None),
        replaced(torch.inference_mode, "__exit__", lambda self, *_: None),
    ):
        yield
