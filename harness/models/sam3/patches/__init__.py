"""Lists the patches that lift upstream's assumptions, one each; `harness.models.sam3.upstream` applies them."""

from __future__ import annotations

from harness.models.sam3.patches.absent_modules import ABSENT_PSUTIL, ABSENT_TRITON, KEEP_TF32
from harness.models.sam3.patches.devices import (
    CUDA_STAYS_ON_CPU,
    DECODER_COORDINATES_ON_CPU,
    DECODER_WITHOUT_AUTOCAST,
    PIN_MEMORY_DOES_NOTHING,
    POSITION_ENCODING_NOT_PRECOMPUTED,
    ROTARY_TABLES_ON_CPU,
    TRACKER_STATE_ON_CPU,
    TRACKER_WITHOUT_AUTOCAST,
)
from harness.models.sam3.patches.exporting import BOXES_IN_FEATURE_DTYPE, CONSTANT_SPATIAL_SHAPES, NO_ASSERTS_IN_GRAPH
from harness.models.sam3.patches.patch import Patch
from harness.models.sam3.patches.tracking import FEATURES_STAY_FLOAT32, HOLES_ARE_FILLED, NO_MASKS_HAVE_NO_COMPONENTS
from harness.models.sam3.patches.vocabulary import VOCABULARY

IMPORT_PATCHES: tuple[Patch, ...] = (ABSENT_TRITON, ABSENT_PSUTIL, KEEP_TF32)
"""Applied while sam3 is imported, once per process."""

RUN_PATCHES: tuple[Patch, ...] = (
    VOCABULARY,
    POSITION_ENCODING_NOT_PRECOMPUTED,
    DECODER_COORDINATES_ON_CPU,
    DECODER_WITHOUT_AUTOCAST,
    TRACKER_WITHOUT_AUTOCAST,
    ROTARY_TABLES_ON_CPU,
    TRACKER_STATE_ON_CPU,
    FEATURES_STAY_FLOAT32,
    HOLES_ARE_FILLED,
    NO_MASKS_HAVE_NO_COMPONENTS,
    PIN_MEMORY_DOES_NOTHING,
    CUDA_STAYS_ON_CPU,
    CONSTANT_SPATIAL_SHAPES,
    NO_ASSERTS_IN_GRAPH,
    BOXES_IN_FEATURE_DTYPE,
)
"""Applied while the model is built, run or exported."""

__all__ = ["IMPORT_PATCHES", "RUN_PATCHES", "Patch"]
