"""Drift: how far tracked masks and memories are from float64 on each frame, the compiled model's and PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.outcome import Verdict, VerdictKind
from harness.core.program import Arrays
from harness.parity.verdict import MAX_R_RMS, unmeasured_verdict
from harness.runtime.sam3.video.bfloat16 import from_bfloat16

Array = npt.NDArray[Any]

LAST = 8
"""Frames at the end of a video whose errors are taken together, since that of one frame varies."""
TENSORS: dict[str, Callable[[Array], Array]] = {"logits": lambda logits: logits, "memories": from_bfloat16}
"""What drifts, and how its values are read."""


@dataclass(frozen=True, eq=False)
class Drift:
    """The errors of a tensor on the frames on which objects are tracked.

    Attributes:
        frames: Their numbers, counted from the frame of the prompt.
        ours: Rms error of the compiled model against float64.
        torch: Rms error of PyTorch fp32 against float64.
    """

    frames: Array
    ours: Array
    torch: Array

    @property
    def ratio(self) -> float:
        """The compiled model's error over PyTorch's, of the last frames together."""
        ours, torch = (math.sqrt(np.square(errors[-LAST:]).mean()) for errors in (self.ours, self.torch))
        return ours / torch if torch else (math.inf if ours else 0.0)


def drift(actual: Arrays, reference: Arrays, exact: Arrays, name: str) -> Drift:
    """The drift of a tensor; frames on which nothing was tracked are left out.

    Args:
        actual: The compiled model's arrays, by answer and name.
        reference: PyTorch's in fp32.
        exact: The same in float64, memories rounded to bfloat16 as always.
        name: A key of `TENSORS`.

    Raises:
        ValueError: The three did not track the same number of objects, or float64 tracked none.
    """
    values = TENSORS[name]
    found = []
    for number in _tracked(exact, name):
        ours, torch, truth = (values(arrays[f"{number}/{name}"]) for arrays in (actual, reference, exact))
        if not ours.shape == torch.shape == truth.shape:
            raise ValueError(f"on frame {number - 1} {len(ours)}, {len(torch)} and {len(truth)} objects are tracked")
        found.append((number - 1, _rms(ours - truth), _rms(torch - truth)))
    if not found:
        raise ValueError("nothing is tracked in float64")
    frames, ours, torch = np.array(found).T
    return Drift(frames.astype(int), ours, torch)


def judge_drift(prefix: str, actual: Arrays, reference: Arrays, exact: Arrays) -> tuple[Verdict, ...]:
    """Judges how errors grow: the ratio of the last frames is at most `MAX_R_RMS`; verdicts have the final figures."""
    verdicts = []
    for name in TENSORS:
        try:
            verdicts.append(_judged(f"{prefix}/drift/{name}", drift(actual, reference, exact, name)))
        except ValueError as error:
            verdicts.append(unmeasured_verdict(f"{prefix}/drift/{name}", np.zeros(0), str(error)))
    return tuple(verdicts)


def _judged(name: str, found: Drift) -> Verdict:
    said = (
        f"rms error {found.ours[-1]:.3g} {found.frames[-1]} frames after the prompt, PyTorch's {found.torch[-1]:.3g}; "
        f"ratio over the last {min(LAST, len(found.frames))} frames {found.ratio:.3g}"
    )
    passed = found.ratio <= MAX_R_RMS
    kind = VerdictKind.STRICT if passed else VerdictKind.FAILED
    verdict = unmeasured_verdict(name, np.zeros(len(found.frames)), said)
    return replace(verdict, kind=kind, outside=int(not passed), r_rms=found.ratio)


def _tracked(exact: Arrays, name: str) -> list[int]:
    numbers = sorted(int(key.partition("/")[0]) for key in exact if key.endswith(f"/{name}"))
    return [number for number in numbers if number > 0 and exact[f"{number}/{name}"].size]


def _rms(difference: Array) -> float:
    return math.sqrt(np.square(difference.astype(np.float64)).mean())
