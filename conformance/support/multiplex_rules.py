"""Plans scripted videos with upstream's own SAM 3.1, and records what it decides on every frame.

    python -m conformance.support.multiplex_rules FOLDER

writes `fixtures/sam31_rules.json` again; FOLDER is as in `multiplex_truth`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from conformance.support.multiplex_planned import (
    MOST_OBJECTS,
    SESSIONS,
    MultiplexScript,
    PlannedVideo,
    digest,
    occurrences,
    order,
)
from conformance.support.multiplex_truth import import_upstream
from conformance.support.scripted_video import SIZE
from harness.core.settings import REPOSITORY

FIXTURE = REPOSITORY / "fixtures" / "sam31_rules.json"


def configuration() -> dict[str, Any]:
    """Reads the rules' arguments of `build_sam3_multiplex_video_predictor` from its source."""
    builder = importlib.import_module("sam3.model_builder")
    tree = ast.parse(inspect.getsource(builder.build_sam3_multiplex_video_predictor))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (call,) = (node for node in calls if ast.unparse(node.func) == "Sam3MultiplexTrackingWithInteractivity")
    constants = {keyword.arg: keyword.value for keyword in call.keywords if not isinstance(keyword.value, ast.Name)}
    return {str(name): ast.literal_eval(value) for name, value in constants.items()}


class UpstreamVideo:
    """A video that upstream plans; its networks are the script."""

    def __init__(self, base: type[Any], script: MultiplexScript) -> None:
        tracker_class = importlib.import_module(base.__module__).Sam3MultiplexTrackerPredictor
        detector_class = importlib.import_module("sam3.model.sam3_multiplex_detector").Sam3MultiplexDetector
        tracker = tracker_class.__new__(tracker_class)
        torch.nn.Module.__init__(tracker)
        reconditioned = self.reconditioned = set()  # type: ignore[var-annotated]
        tracker.model = torch.nn.Module()
        vars(tracker.model).update(
            multiplex_controller=SimpleNamespace(allowed_bucket_capacity=16, training=False),
            input_mask_size=SIZE,
            add_new_masks=lambda obj_ids, **_: reconditioned.update(map(int, obj_ids)),
            propagate_in_video_preflight=lambda *_, **__: None,
        )
        tracker.is_multiplex = True
        detector = detector_class.__new__(detector_class)
        torch.nn.Module.__init__(detector)
        detector.is_multiplex = True
        given = {"max_num_objects": MOST_OBJECTS} | configuration()
        self.planner = base(tracker, detector, **given)
        self.planner._tracker_update_memories = self._remember
        self.planner._device = torch.device("cpu")
        self.script, self.masks = script, torch.zeros(0)
        self.metadata = self.planner._initialize_metadata()
        self.metadata["obj_id_to_sam2_score_frame_wise"] = defaultdict(dict)

    def _remember(self, *_: Any, low_res_masks: torch.Tensor, **__: Any) -> None:
        self.masks = low_res_masks.clone()

    def step(self, frame: int, reverse: bool) -> dict[str, Any]:
        """Plans a frame; returns the decisions and what is remembered, as `PlannedVideo.step`."""
        script, planner, before = self.script, self.planner, self.metadata
        logits, masks = (torch.from_numpy(array.copy()) for array in script.detections(frame))
        nms = importlib.import_module("sam3.model.sam3_multiplex_detector_utils").nms_masks
        keep = nms(logits.sigmoid()[None], masks[None], planner.score_threshold_detection, 0.1, nms_use_iom=True)[0]
        assert planner.det_nms_thresh == 0.1 and planner.det_nms_use_iom
        boxes = torch.from_numpy(script.boxes(frame))
        scores = (logits - 1e4 * (~keep).float()).sigmoid()
        positive = scores > planner.score_threshold_detection
        positive &= planner._suppress_detections_close_to_boundary(boxes)
        ids = before["obj_ids_all_gpu"].tolist()
        said = [script.tracked(frame, each) for each in ids]
        tracked = (
            torch.stack([torch.from_numpy(mask.copy()) for mask, _ in said]) if ids else torch.zeros(0, SIZE, SIZE)
        )
        present = torch.tensor([float(logit) for _, logit in said])
        self.reconditioned.clear()
        self.masks = torch.zeros(0)
        before["num_buc_per_gpu"][:] = 1
        plan, after = planner.run_tracker_update_planning_phase(
            frame_idx=frame,
            num_frames=script.frames,
            reverse=reverse,
            det_out={"mask": masks, "scores": scores, "bbox": boxes},
            det_keep=positive,
            tracker_low_res_masks_global=tracked,
            tracker_obj_scores_global=present,
            tracker_metadata_prev=before,
            tracker_states_local=[{"obj_ids": ids, "obj_idx_to_id": dict(enumerate(ids))}],
            is_image_only=False,
        )
        self.metadata = after
        memory, kept = after["gpu_metadata"], after["obj_ids_all_gpu"].tolist()
        counts = memory.get("overlap_pair_counts", torch.zeros(0, 0))
        assert memory["N_obj"] == len(kept)
        return {
            "births": [list(pair) for pair in zip(plan["new_det_obj_ids"].tolist(), plan["new_det_fa_inds"].tolist())],  # noqa: B905
            "unmatched": plan["unmatched_trk_obj_ids"].tolist(),
            "matches": {d: each.tolist() for d, each in plan["det_to_matched_trk_obj_ids"].items() if len(each)},
            "confident": sorted([int(each), int(d)] for each, d in plan["trk_id_to_max_iou_high_conf_det"].items()),
            "reconditioned": sorted(self.reconditioned),
            "removed": sorted(map(int, plan["obj_ids_newly_removed"])),
            "masks": self.masks.ravel().tolist(),
            "ids": kept,
            "first_frames": memory["obj_first_frame"].tolist() if kept else [],
            "times_unmatched": memory["consecutive_unmatch_count"].tolist() if kept else [],
            "duplicates": sorted([kept[i], kept[j], int(counts[i, j])] for i, j in counts.nonzero().tolist()),
            "last_occluded": memory["last_occluded_tensor"].tolist() if kept else [],
            "scores": [round(float(after["obj_id_to_score"][each]), 6) for each in kept],
        }


def main(folder: str) -> None:
    """Compares every session, and writes the fixture."""
    base, _ = import_upstream(folder)
    happened: Counter[str] = Counter()
    recorded = []
    for seed in range(SESSIONS):
        script = MultiplexScript(seed)
        theirs, ours = UpstreamVideo(base, script), PlannedVideo(script)
        frames, reverse = order(script)
        digests = []
        for frame in frames:
            expected, found = theirs.step(frame, reverse), ours.step(frame, reverse)
            for name, value in expected.items():
                assert found[name] == value, f"seed {seed}, frame {frame}, {name}: {found[name]} instead of {value}"
            digests.append(digest(expected))
            happened.update(occurrences(expected))
        recorded.append(" ".join(digests))
    FIXTURE.write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"{SESSIONS} sessions are equal: {dict(happened)}")


if __name__ == "__main__":
    main(sys.argv[1])
