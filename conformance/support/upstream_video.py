"""Runs upstream's video model with scripted networks: its own planning, sessions and outputs, without weights.

Replaced are the methods of its detector and its tracker that run a network; what they were asked is recorded.
"""

from __future__ import annotations

import ast
import inspect
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from conformance.support.scripted_video import SIZE, Script
from harness.models.sam3.patches.patch import replaced
from harness.models.sam3.upstream import import_sam3

import_sam3()

import sam3.model.sam3_video_inference as inference  # noqa: E402
import sam3.model_builder  # noqa: E402
from sam3.model.sam3_image import Sam3ImageOnVideoMultiGPU  # noqa: E402
from sam3.model.sam3_tracking_predictor import Sam3TrackerPredictor  # noqa: E402

inference.logger.setLevel(logging.ERROR)
sam3.model.sam3_video_base.logger.setLevel(logging.ERROR)


def built_configurations() -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads the arguments of `build_sam3_video_model` from its source, with disambiguation and without."""
    tree = ast.parse(inspect.getsource(sam3.model_builder.build_sam3_video_model))
    calls = [
        {keyword.arg: keyword.value for keyword in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Sam3VideoInferenceWithInstanceInteractivity"
    ]
    first, second = (
        {name: ast.literal_eval(value) for name, value in call.items() if not isinstance(value, ast.Name)}
        for call in calls
    )
    return first, second


class ScriptedDetector(Sam3ImageOnVideoMultiGPU):
    """Upstream's detector of videos, with its NMS and its look ahead; its network is a script."""

    def __init__(self, script: Script) -> None:
        torch.nn.Module.__init__(self)
        self.rank, self.world_size = 0, 1
        self.async_all_gather = self.gather_backbone_out = True
        self.backbone = SimpleNamespace(forward_text=lambda texts, device: {})
        self.script = script
        self.asked: list[tuple[int, Any]] = []

    def forward_grounding(
        self, backbone_out: Any, find_input: Any, find_target: Any, geometric_prompt: Any
    ) -> dict[str, Any]:
        frame = int(find_input.img_ids[0])
        self.asked.append((frame, geometric_prompt))
        logits, masks = self.script.detections(frame)
        boxes = torch.zeros(1, len(logits), 4)
        features = {"backbone_fpn": [torch.zeros(1)] * 3, "vision_pos_enc": []}
        return {
            "pred_logits": torch.from_numpy(logits.copy())[None, :, None],
            "pred_boxes": boxes,
            "pred_boxes_xyxy": boxes,
            "pred_masks": torch.from_numpy(masks)[None],
            "prev_encoder_out": {"backbone_out": {"sam2_backbone_out": features}},
        }


class ScriptedTracker(Sam3TrackerPredictor):
    """Upstream's tracker with its rules for overlapping masks; masks, memories and their bookkeeping are scripted."""

    def __init__(self, script: Script) -> None:
        torch.nn.Module.__init__(self)
        self.script = script
        self.low_res_mask_size = self.input_mask_size = SIZE
        self.maskmem_backbone = SimpleNamespace(mask_downsampler=SimpleNamespace(interpol_size=[SIZE, SIZE]))
        self.sam_mask_decoder = SimpleNamespace(conv_s0=lambda x: x, conv_s1=lambda x: x)
        self.given: list[tuple[int, list[bool]]] = []
        self.encoded: list[tuple[list[float], list[float]]] = []
        self.cleared: set[tuple[int, int]] = set()

    def init_state(self, **_: Any) -> dict[str, Any]:
        return {
            "obj_ids": [],
            "output_dict": {"cond_frame_outputs": {}, "non_cond_frame_outputs": {}},
            "mask_inputs_per_obj": {},
            "point_inputs_per_obj": {},
            "obj_id_to_idx": {},
        }

    def _add(self, state: dict[str, Any], object_id: int) -> int:
        if object_id not in state["obj_ids"]:
            state["obj_ids"].append(object_id)
            index = len(state["obj_ids"]) - 1
            state["obj_id_to_idx"][object_id] = index
            state["mask_inputs_per_obj"][index], state["point_inputs_per_obj"][index] = {}, {}
        return int(state["obj_id_to_idx"][object_id])

    def _obj_id_to_idx(self, state: dict[str, Any], object_id: int) -> int:
        return int(state["obj_id_to_idx"][object_id])

    def add_new_mask(
        self, inference_state: Any, frame_idx: int, obj_id: int, mask: torch.Tensor, add_mask_to_memory: bool = False
    ) -> None:
        index = self._add(inference_state, int(obj_id))
        inference_state["mask_inputs_per_obj"][index][frame_idx] = mask
        inference_state["point_inputs_per_obj"][index].pop(frame_idx, None)
        self.given.append((int(obj_id), mask.flatten().tolist()))

    def add_new_points(self, inference_state: Any, frame_idx: int, obj_id: int, **_: Any) -> tuple[Any, ...]:
        index = self._add(inference_state, obj_id)
        inference_state["point_inputs_per_obj"][index][frame_idx] = True
        inference_state["mask_inputs_per_obj"][index].pop(frame_idx, None)
        masks = [torch.from_numpy(self.script.tracked(frame_idx, each)[0])[None] for each in inference_state["obj_ids"]]
        return frame_idx, inference_state["obj_ids"], torch.stack(masks), torch.stack(masks)

    def clear_all_points_in_frame(self, state: Any, frame_idx: int, obj_id: int, need_output: bool) -> None:
        index = state["obj_id_to_idx"][obj_id]
        state["mask_inputs_per_obj"][index].pop(frame_idx, None)
        state["point_inputs_per_obj"][index].pop(frame_idx, None)
        self.cleared.add((obj_id, frame_idx))

    def propagate_in_video_preflight(self, state: Any, run_mem_encoder: bool) -> None:
        for inputs in state["mask_inputs_per_obj"].values():
            for frame in inputs:
                state["output_dict"]["cond_frame_outputs"].setdefault(frame, {})

    def propagate_in_video(self, state: Any, start_frame_idx: int, **_: Any) -> Iterator[tuple[Any, ...]]:
        state["output_dict"]["non_cond_frame_outputs"].setdefault(start_frame_idx, {})
        said = [self.script.tracked(start_frame_idx, each) for each in state["obj_ids"]]
        masks = torch.from_numpy(np.stack([mask for mask, _ in said]))[:, None]
        logits = torch.from_numpy(np.float32([logit for _, logit in said]))[:, None]
        yield start_frame_idx, list(state["obj_ids"]), masks, None, logits

    def remove_object(
        self, state: Any, obj_id: int, strict: bool = False, need_output: bool = True
    ) -> tuple[list[int], list[Any]]:
        if obj_id in state["obj_ids"]:
            kept = [each for each in state["obj_ids"] if each != obj_id]
            for inputs in (state["mask_inputs_per_obj"], state["point_inputs_per_obj"]):
                moved = [inputs[state["obj_id_to_idx"][each]] for each in kept]
                inputs.clear()
                inputs.update(enumerate(moved))
            state["obj_ids"] = kept
            state["obj_id_to_idx"] = {each: index for index, each in enumerate(kept)}
        return state["obj_ids"], []

    def _run_memory_encoder(
        self, state: Any, frame: int, batch: int, masks: torch.Tensor, logits: torch.Tensor, is_mask_from_pts: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        assert len(masks) == len(logits) == batch == len(state["obj_ids"])
        self.encoded.append((masks.flatten().tolist(), logits.flatten().tolist()))
        return torch.zeros(batch), [torch.zeros(batch)]

    def _add_output_per_object(self, **_: Any) -> None:
        return None


class UpstreamVideo(inference.Sam3VideoInferenceWithInstanceInteractivity):
    """Upstream's model of one scripted video, in one session; every frame that it plans is recorded."""

    def __init__(self, script: Script, configuration: dict[str, Any]) -> None:
        super().__init__(detector=ScriptedDetector(script), tracker=ScriptedTracker(script), **configuration)
        self._device = torch.device("cpu")
        self.script = script
        self.recorded: list[dict[str, Any]] = []
        self.session = self.init_state([Image.new("RGB", script.size)] * script.frames)

    def run_tracker_update_planning_phase(self, **kwargs: Any) -> Any:
        self.tracker.given.clear()
        self.tracker.encoded.clear()
        self._plan, self._metadata = super().run_tracker_update_planning_phase(**kwargs)
        return self._plan, self._metadata

    def _det_track_one_frame(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._det_track_one_frame(*args, **kwargs)
        self.recorded.append(facts(kwargs["frame_idx"], self._plan, self._metadata, result[2], self.tracker))
        return result

    def prompt(self, frame: int, text: bool) -> list[Any]:
        asked = {"text_str": "thing"} if text else {"boxes_xywh": [[0.1, 0.1, 0.5, 0.5]], "box_labels": [1]}
        return [shown(*self.add_prompt(self.session, frame, **asked))]

    def propagate(self, start: int | None, limit: int | None, reverse: bool) -> list[Any]:
        with replaced(inference, "tqdm", lambda frames, **_: frames):
            return [shown(*each) for each in self.propagate_in_video(self.session, start, limit, reverse)]

    def click(self, object_id: int, frame: int) -> list[Any]:
        self.tracker.cleared = set()
        given = {"points": torch.zeros(1, 2), "point_labels": torch.ones(1)}
        output = shown(*self.add_prompt(self.session, frame, obj_id=object_id, **given))
        return [output, sorted(self.tracker.cleared)]

    def remove(self, object_id: int) -> list[Any]:
        self.remove_object(self.session, object_id, is_user_action=True)
        return []

    @property
    def tracked(self) -> list[int]:
        """The ids of the tracked objects."""
        return self.session["tracker_metadata"]["obj_ids_all_gpu"].tolist()


def facts(frame: int, plan: Any, metadata: Any, states: Any, tracker: ScriptedTracker) -> dict[str, Any]:
    """What was decided on a frame and is remembered after it, as plain data."""
    ids = metadata["obj_ids_all_gpu"].tolist()
    hotstart = metadata["rank0_metadata"]
    births = len(plan["new_det_obj_ids"])
    return {
        "frame": frame,
        "births": list(zip(plan["new_det_obj_ids"].tolist(), plan["new_det_fa_inds"].tolist(), strict=True)),
        "unmatched": plan["unmatched_trk_obj_ids"].tolist(),
        "matches": {d: ids.tolist() for d, ids in plan["det_to_matched_trk_obj_ids"].items() if len(ids)},
        "confident": [(int(i), int(d)) for i, d in plan["trk_id_to_max_iou_high_conf_det"].items()],
        "removed": sorted(map(int, plan["obj_ids_newly_removed"])),
        "dropped": int(plan["num_obj_dropped_due_to_limit"]),
        "reconditioned": tracker.given[: len(tracker.given) - births],
        "encoded": list(tracker.encoded),
        "ids": ids,
        "buckets": [list(state["obj_ids"]) for state in states],
        "next_id": int(metadata["max_obj_id"]) + 1,
        "all_removed": sorted(map(int, hotstart["removed_obj_ids"])),
        "first_frames": {each: hotstart["obj_first_frame_idx"][each] for each in ids},
        "times_unmatched": {each: len(hotstart["unmatched_frame_inds"].get(each, [])) for each in ids},
        "duplicates": {
            (int(first), int(other)): len(frames)
            for (first, other), frames in hotstart["overlap_pair_to_frame_inds"].items()
            if other in ids
        },
        "last_occluded": {int(i): int(when) for i, when in metadata["obj_id_to_last_occluded"].items()},
        "scores": {each: float(metadata["obj_id_to_score"][each]) for each in ids},
    }


def shown(frame: int, output: dict[str, Any]) -> tuple[Any, ...]:
    """An output as plain data; every dtype is as the planner's."""
    arrays = [output[name] for name in ("out_obj_ids", "out_probs", "out_boxes_xywh", "out_binary_masks")]
    assert [array.dtype.name for array in arrays] == ["int64", "float32", "float32", "bool"]
    return (frame, *(array.tolist() for array in arrays))
