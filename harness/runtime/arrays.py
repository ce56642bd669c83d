"""Names the types of arrays that many modules use."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Masks = npt.NDArray[np.bool_]
Pixels = npt.NDArray[np.uint8]
