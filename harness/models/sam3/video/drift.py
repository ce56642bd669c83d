"""Measures the drift of tracked masks and memories from float64 on each frame, of the compiled model and of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from harness.core.outcome import Verdict, VerdictKind
from harness.core.program import Array, Arrays
from harness.parity.verdict import MAX_R_RMS, unmeasured_verdict
from harness.runtime.sam3.video.tracker import from_bfloat16

LAST_FRAMES = 8
"""Frames at the end of a video over which errors are averaged, because the error of one frame varies."""
TENSORS: dict[str, Callable[[Array], Array]] = {"logits": lambda logits: logits, "memories": from_bfloat16}
"""Name of a drifting tensor → the function that decodes its values."""


@dataclass(frozen=True, eq=False)
class Drift:
    """The errors of a tensor on the frames with tracked objects.

    Attributes:
        frames: Numbers of the frames, counted from the frame of the prompt.
        compiled: Rms error of the compiled model against float64, the median of the objects.
        torch: Rms error of PyTorch fp32 against float64, the median of the objects.
    """

    frames: Array
    compiled: Array
    torch: Array

    @property
    def ratio(self) -> float:
        """Returns the compiled model's error over PyTorch's, over the last frames."""
        compiled, torch = (math.sqrt(np.square(errors[-LAST_FRAMES:]).mean()) for errors in (self.compiled, self.torch))
        return compiled / torch if torch else (math.inf if compiled else 0.0)


def drift(actual: Arrays, reference: Arrays, exact: Arrays, name: str) -> Drift:
    """Returns the drift of a tensor; frames without tracked objects are left out.

    Args:
        actual: The compiled model's arrays, by answer and name.
        reference: PyTorch's arrays in fp32.
        exact: PyTorch's arrays in float64, with memories rounded to bfloat16 as always.
        name: A key of `TENSORS`.

    Raises:
        ValueError: The three did not track the same number of objects, or float64 tracked none.
    """
    values = TENSORS[name]
    errors = []
    for number in _tracked_frames(exact, name):
        compiled, torch, truth = (values(arrays[f"{number}/{name}"]) for arrays in (actual, reference, exact))
        if not compiled.shape == torch.shape == truth.shape:
            raise ValueError(
                f"on frame {number - 1} {len(compiled)}, {len(torch)} and {len(truth)} objects are tracked"
            )
        errors.append((number - 1, _median_rms(compiled - truth), _median_rms(torch - truth)))
    if not errors:
        raise ValueError("nothing is tracked in float64")
    frames, compiled, torch = np.array(errors).T
    return Drift(frames.astype(int), compiled, torch)


def judge_drift(prefix: str, actual: Arrays, reference: Arrays, exact: Arrays) -> tuple[Verdict, ...]:
    """Judges how errors grow: the ratio of the last frames is at most `MAX_R_RMS`; verdicts have the final figures."""
    verdicts = []
    for name in TENSORS:
        try:
            verdicts.append(_judge_ratio(f"{prefix}/drift/{name}", drift(actual, reference, exact, name)))
        except ValueError as error:
            verdicts.append(unmeasured_verdict(f"{prefix}/drift/{name}", np.zeros(0), str(error)))
    return tuple(verdicts)


def _judge_ratio(name: str, drift: Drift) -> Verdict:
    reason = (
        f"rms error {drift.compiled[-1]:.3g} {drift.frames[-1]} frames after the prompt, "
        f"PyTorch's {drift.torch[-1]:.3g}; "
        f"ratio over the last {min(LAST_FRAMES, len(drift.frames))} frames {drift.ratio:.3g}"
    )
    passed = drift.ratio <= MAX_R_RMS
    kind = VerdictKind.STRICT if passed else VerdictKind.FAILED
    verdict = unmeasured_verdict(name, np.zeros(len(drift.frames)), reason)
    return replace(verdict, kind=kind, outside=int(not passed), r_rms=drift.ratio)


def _tracked_frames(exact: Arrays, name: str) -> list[int]:
    numbers = sorted(int(key.partition("/")[0]) for key in exact if key.endswith(f"/{name}"))
    return [number for number in numbers if number > 0 and exact[f"{number}/{name}"].size]


def _median_rms(difference: Array) -> float:
    """Returns the median of the objects' rms errors.

    Where rounding fills a hole in the mask of one object, its later logits move by percents in any of the three runs.
    """
    axes = tuple(range(1, difference.ndim))
    return float(np.median(np.sqrt(np.square(difference.astype(np.float64)).mean(axis=axes))))
