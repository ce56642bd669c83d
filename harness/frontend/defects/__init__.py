"""The registry of defects: one file each, one line each."""

from __future__ import annotations

from harness.frontend.defect import Defect
from harness.frontend.defects import (
    division_rounding,
    grid_sample,
    select_negative,
)

DEFECTS: tuple[Defect, ...] = (
    *grid_sample.DEFECTS,
    *select_negative.DEFECTS,
    *division_rounding.DEFECTS,
)
