"""Lists the patches that lift upstream's assumptions, one each; `harness.models.sam3.upstream` applies them."""

from __future__ import annotations

from harness.models.sam3.patches import devices, exporting, tracking
from harness.models.sam3.patches.patch import Patch

IMPORT_PATCHES: tuple[Patch, ...] = (devices.keep_tf32,)
"""Applied while sam3 is imported, once per process."""

RUN_PATCHES: tuple[Patch, ...] = (
    devices.position_encoding_not_precomputed,
    devices.decoder_coordinates_on_cpu,
    devices.decoder_without_autocast,
    devices.tracker_without_autocast,
    devices.rotary_tables_on_cpu,
    devices.tracker_state_on_cpu,
    devices.trunk_stays_float32,
    devices.features_stay_float32,
    tracking.holes_are_filled,
    tracking.no_masks_have_no_components,
    devices.pin_memory_does_nothing,
    devices.cuda_stays_on_cpu,
    exporting.constant_spatial_shapes,
    exporting.no_asserts_in_graph,
    exporting.boxes_in_feature_dtype,
)
"""Applied while the model is built, run or exported."""

__all__ = ["IMPORT_PATCHES", "RUN_PATCHES", "Patch"]
