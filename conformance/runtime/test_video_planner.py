"""The video planner against upstream's own on scripted videos: every decision, memory mask and output is equal."""

from __future__ import annotations

import inspect

from conformance.support.upstream_video import built_configurations
from conformance.support.video_fuzz import compare
from harness.runtime.sam3.video.rules import DISAMBIGUATED, UNDISAMBIGUATED, Rules

FRAMES = 2000

NAMES = {
    "detection_score": "score_threshold_detection",
    "detection_iou": "det_nms_thresh",
    "matched_iou": "assoc_iou_thresh",
    "tracked_iou": "trk_assoc_iou_thresh",
    "new_score": "new_det_thresh",
    "hotstart_frames": "hotstart_delay",
    "hotstart_unmatched": "hotstart_unmatch_thresh",
    "hotstart_duplicates": "hotstart_dup_thresh",
    "recondition_every": "recondition_every_nth_frame",
    "overlap_iou": "suppress_overlapping_based_on_recent_occlusion_threshold",
}
"""Our rules and upstream's names; the number of objects has no limit upstream but 10,000."""
HAPPENING = (
    *("prompt", "propagate", "click", "remove"),
    *("births", "unmatched", "shared", "confident", "removed", "dropped", "reconditioned", "suppressed", "absent"),
)
"""What must have happened in the sessions, so that their equality says something."""
OFF = {
    "suppress_det_close_to_boundary": False,
    "decrease_trk_keep_alive_for_empty_masklets": False,
    "masklet_confirmation_enable": False,
    "suppress_unmatched_only_within_hotstart": True,  # without it the keep-alive counters decide nothing
    "o2o_matching_masklets_enable": False,
    "reconstruction_bbox_iou_thresh": 0.0,
    "max_num_objects": -1,
}
"""Upstream's rules that no configuration of its builder turns on; this project has none of them."""


def test_sessions_are_decided_as_upstream_decides_them() -> None:
    happened = compare(FRAMES)
    print("videos of the seeds from 0 on:", dict(happened))
    assert not [what for what in HAPPENING if happened[what] < 5]


def test_the_rules_are_those_that_upstreams_builder_configures() -> None:
    from sam3.model.sam3_video_base import Sam3VideoBase

    defaults = {
        name: parameter.default for name, parameter in inspect.signature(Sam3VideoBase.__init__).parameters.items()
    }
    for rules, configuration in zip((DISAMBIGUATED, UNDISAMBIGUATED), built_configurations(), strict=True):
        configured = {**defaults, **configuration}
        assert rules == Rules(**{ours: configured[theirs] for ours, theirs in NAMES.items()})
        assert {name: configured[name] for name in OFF} == OFF
