"""Tracks drawn births and removals with upstream's own buckets of slots, and records what every frame reads.

    python -m conformance.support.multiplex_truth FOLDER

writes `fixtures/sam31_slots.json` again; FOLDER has the package `sam3` of upstream's main branch of July 2026, which
has SAM 3.1's tracker. Networks are replaced by numbers, as `multiplex_script` describes.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import torch._dynamo  # before stand-ins are
import torchvision  # noqa: F401

from conformance.support.multiplex_script import (
    COUNTS,
    FRAMES,
    RECONDITIONED,
    Script,
    State,
    Tracked,
    digest,
    drawn_script,
)
from harness.core.settings import REPOSITORY

FIXTURE = REPOSITORY / "fixtures" / "sam31_slots.json"
SEEDS = range(4)
SIZE = 4
STAND_INS = ("triton", "hydra", "pycocotools", "iopath", "cv2", "decord", "ftfy", "pkg_resources", "skimage", "einops")


class _StandIns:
    """Finds modules that upstream imports and none of its code here runs."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in STAND_INS else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, _module: ModuleType) -> None:
        """Does nothing."""


def import_upstream(folder: str) -> tuple[Any, Any]:
    """Imports upstream's multiplex model from a folder; returns its planner and its tracker's module."""
    sys.path.insert(0, folder)
    sys.meta_path.append(_StandIns())  # type: ignore[arg-type]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=0)  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    base = importlib.import_module("sam3.model.sam3_multiplex_base")
    return base.Sam3MultiplexBase, importlib.import_module("sam3.model.video_tracking_multiplex")


class _MemoryEncoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out_proj = torch.nn.Linear(1, 256)
        self.mask_downsampler = SimpleNamespace(interpol_size=[SIZE, SIZE])


class _Transformer(torch.nn.Module):
    d_model = 256
    decoder = None

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Identity()


class UpstreamTracked:
    """Objects that upstream tracks by a script."""

    def __init__(self, folder: str) -> None:
        self.planner, times = import_upstream(folder)
        builder = importlib.import_module("sam3.model_builder")
        for name in ("_create_multiplex_tri_backbone", "TriHeadVisionOnly"):
            setattr(builder, name, lambda **_: torch.nn.Identity())
        builder._create_multiplex_maskmem_backbone = lambda **_: _MemoryEncoder()
        builder._create_multiplex_transformer = lambda **_: _Transformer()
        times.get_1d_sine_pe = lambda values, dim: values[:, None].expand(-1, dim)
        tracker = builder.build_sam3_multiplex_video_model(load_from_HF=False, device="cpu").eval()
        tracker.hidden_dim = tracker.mem_dim = 1
        tracker.image_size = tracker.input_mask_size = tracker.low_res_mask_size = SIZE
        tracker.maskmem_tpos_enc.data = torch.arange(tracker.num_maskmem).float().view(-1, 1, 1, 1)
        tracker.interactivity_no_mem_embed.data = torch.zeros(1, 1, 1)
        del tracker.obj_ptr_tpos_proj, tracker.interactive_mask_downsample
        tracker.obj_ptr_tpos_proj = lambda encoded: encoded
        tracker.interactive_mask_downsample = lambda masks: masks
        tracker.transformer.encoder.forward = self.attend
        tracker._get_image_feature = self.features
        tracker._use_mask_as_output = self.use_mask
        tracker._forward_sam_heads = self.heads
        tracker._encode_new_memory = self.encode
        tracker.is_multiplex = tracker.is_multiplex_dynamic = True
        tracker.per_obj_inference = False
        tracker.add_output_per_object = tracker._add_output_per_object
        made = tracker.init_state
        cpu = {"device": torch.device("cpu"), "storage_device": torch.device("cpu")}
        tracker.init_state = lambda **arguments: made(**arguments) | cpu
        self.tracker = tracker
        self.reset()

    def reset(self) -> None:
        self.frame = 0
        self.next_id = 0
        self.states: list[Any] = []
        self.reads: list[State] = []

    def features(self, *_: Any) -> tuple[None, Any]:
        maps = [torch.full((1, 1, 1), float(self.frame))] * 3
        part = {
            "vision_feats": maps,
            "vision_masks": [None] * 3,
            "vision_pos_embeds": [torch.zeros(1, 1, 1)] * 3,
            "feat_sizes": [(1, 1)] * 3,
        }
        return None, {"interactive": part, "sam2_backbone_out": part}

    def outputs(self, ids: list[int], share: float) -> dict[str, torch.Tensor]:
        count = len(ids)
        masks = torch.zeros(count, 1, SIZE, SIZE)
        return {
            "low_res_multimasks": masks,
            "high_res_multimasks": masks,
            "ious": torch.ones(count, 1),
            "low_res_masks": masks,
            "high_res_masks": masks,
            "object_score_logits": torch.full((count, 1), 10.0),
            "obj_ptr": torch.tensor([[1000.0 * self.frame + each + share] for each in ids]),
        }

    def use_mask(self, *, multiplex_state: Any, objects_in_mask: Any = None, **_: Any) -> dict[str, torch.Tensor]:
        rows = range(multiplex_state.total_valid_entries) if objects_in_mask is None else objects_in_mask
        return self.outputs([multiplex_state.object_ids[row] for row in rows], 0.5)

    def heads(self, *, multiplex_state: Any, **_: Any) -> dict[str, torch.Tensor]:
        return self.outputs(list(multiplex_state.object_ids), 0.0)

    def encode(self, *, multiplex_state: Any, **_: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        memory = torch.full((multiplex_state.num_buckets, 1, 1, 1), float(self.frame))
        return memory, [torch.zeros_like(memory)]

    def attend(
        self, *, src: Any, memory: Any, memory_pos: Any, memory_image: Any, num_obj_ptr_tokens: int, **_: Any
    ) -> Any:
        count = len(memory) - num_obj_ptr_tokens
        memory, memory_pos = memory.float()[:, :, 0], memory_pos[:, 0, 0]
        assert (memory[:count] == memory_image[:, :1, 0]).all()
        pointers = memory[count:].reshape(-1, 16, memory.shape[1]).transpose(1, 2)
        frames = zip(memory[:count, 0].tolist(), memory_pos[:count].tolist(), strict=True)
        self.reads.append(
            {
                "memories": [[int(frame), int(rank)] for frame, rank in frames],
                "pointers": pointers.tolist(),
                "times": memory_pos[count::16].tolist(),
            }
        )
        return {"memory": src}

    def removable(self, removed: tuple[int, ...]) -> list[int]:
        """Returns the objects whose removal leaves a mask on the first frame of their state, or nobody in it."""
        result = []
        for each in removed:
            state = next(state for state in self.states if each in state["obj_ids"])
            first = min(state["output_dict"]["cond_frame_outputs"])
            leaving = {*result, each}
            staying = [other for other in state["obj_ids"] if other not in leaving]
            masked = [state["mask_inputs_per_obj"][state["obj_id_to_idx"][other]] for other in staying]
            if not staying or any(first in frames for frames in masked):
                result.append(each)
        return result

    def step(self, frame: int, births: int, removed: tuple[int, ...]) -> tuple[list[int], list[State]]:
        """Tracks a frame; returns the objects that were removed, and the states after it."""
        self.frame, self.reads = frame, []
        planner = SimpleNamespace(
            tracker=self.tracker,
            rank=0,
            is_multiplex=True,
            fill_hole_area=0,
            sprinkle_removal_area=0,
            device="cpu",
            reapply_no_object_pointer=False,
        )
        read: dict[int, State] = {}
        if self.states:
            before = list(self.states)
            self.planner._propogate_tracker_one_frame_local_gpu(planner, self.states, frame, reverse=False)
            read = dict(zip(map(id, before), self.reads, strict=True))
            if frame % RECONDITIONED == 0:
                for state in self.states:
                    ids = list(state["obj_ids"])
                    masks = torch.ones(len(ids), SIZE, SIZE, dtype=torch.bool)
                    self.tracker.add_new_masks(state, frame, ids, masks, reconditioning=True)
                    self.tracker.propagate_in_video_preflight(state, run_mem_encoder=True)
            count = sum(len(state["obj_ids"]) for state in self.states)
            metadata = {"num_obj_per_gpu": [count]}
            self.planner._tracker_update_memories(planner, self.states, frame, metadata, torch.zeros(count, SIZE, SIZE))
        if births:
            ids = list(range(self.next_id, self.next_id + births))
            self.next_id += births
            masks = torch.ones(births, SIZE, SIZE)
            self.planner._tracker_add_new_objects(planner, frame, FRAMES, ids, masks, self.states, SIZE, SIZE, {})
        given = {id(state): self.given(state) for state in self.states}
        leaving = self.removable(removed)
        if leaving:
            self.planner._tracker_remove_objects(planner, self.states, leaving)
        result = []
        for state in self.states:
            flat = np.array(state["multiplex_state"].assignments).ravel().tolist()
            places = [flat.index(row) for row in range(len(state["obj_ids"]))]
            result.append(
                {"ids": list(state["obj_ids"]), "places": places, "given": given[id(state)], **read.get(id(state), {})}
            )
        return leaving, result

    def given(self, state: Any) -> list[int]:
        outputs = state["output_dict"]
        out = outputs["cond_frame_outputs"].get(self.frame) or outputs["non_cond_frame_outputs"][self.frame]
        ids = {row: each for each, row in out["local_obj_id_to_idx"].items()}
        return sorted(ids[row] for row in out["conditioning_objects"])


@torch.inference_mode()
def compare(upstream: UpstreamTracked, script: Script) -> list[tuple[list[int], str]]:
    """Compares both on every frame; returns the objects removed on each frame, and the digest of its states."""
    upstream.reset()
    ours = Tracked()
    frames = []
    for frame, (births, removed) in enumerate(zip(script.births, script.removed, strict=True)):
        leaving, theirs = upstream.step(frame, births, removed)
        mine = ours.step(frame, births, leaving)
        assert mine == theirs, (frame, mine, theirs)
        frames.append((leaving, digest(theirs)))
    return frames


def main(folder: str) -> None:
    """Writes the fixture."""
    upstream = UpstreamTracked(folder)
    recorded = {f"{seed} {count}": compare(upstream, drawn_script(seed, count)) for seed in SEEDS for count in COUNTS}
    lines = (f"{json.dumps(name)}: {json.dumps(frames)}" for name, frames in recorded.items())
    FIXTURE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(recorded)} scripts of {FRAMES} frames are equal.")


if __name__ == "__main__":
    main(sys.argv[1])
