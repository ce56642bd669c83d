"""The drift of tracked objects, frame by frame: a plot and a table of what the last `verify --component video` saved.

python -m perf.video_drift --out docs/evidence/video_drift.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.compiler.targets import HOST
from harness.core.case import DEFAULT_STRATEGY, Case, Scale
from harness.core.settings import SEEDED
from harness.models.sam3.source import UpstreamModel
from harness.models.sam3.subjects import VIDEO
from harness.models.sam3.upstream import upstream
from harness.models.sam3.video.drift import TENSORS, Drift, drift
from harness.models.sam3.video.script import SCRIPTS, UPSTREAM
from harness.parity.cache import load_outputs, saved_folder
from harness.parity.references import select

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def drifts(case: Case) -> dict[str, Drift]:
    """The drift of each tensor of each question that is asked in float64, by name.

    Raises:
        HarnessError: The case was not verified, or its reference cannot be made.
    """
    found: dict[str, Drift] = {}
    with upstream():
        model = UpstreamModel(case, SEEDED)
        for question in SCRIPTS[0].questions(case, SEEDED):
            if question.float64:
                actual = load_outputs(saved_folder(case) / question.name)
                reference = model.answer(UPSTREAM, question).part("frames")
                for name in TENSORS:
                    found[f"{question.name}, {name}"] = drift(
                        select(actual, "frames"), reference.first, reference.exact, name
                    )
    return found


def drawn(found: dict[str, Drift]) -> Figure:
    """One plot for each tensor: rms errors against float64 by frame."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2 * len(found)), layout="constrained")
    for axes, (name, each) in zip(figure.subplots(len(found), squeeze=False)[:, 0], found.items(), strict=True):
        axes.semilogy(each.frames, each.torch, marker="o", markersize=3, label="PyTorch fp32")
        axes.semilogy(each.frames, each.compiled, marker="s", markersize=3, label="compiled")
        axes.set(title=name, xlabel="frames after the prompt", ylabel="rms error against float64")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    return figure


def main() -> None:
    """Writes the plot, and prints the table."""
    parser = argparse.ArgumentParser(description="The drift of tracked objects, of what verify saved.")
    parser.add_argument("--out", type=Path, required=True, help="a PNG file")
    given: Any = parser.parse_args()
    found = drifts(Case(VIDEO.name, DEFAULT_STRATEGY, HOST.name, Scale.SHALLOW.value))
    drawn(found).savefig(given.out, dpi=150, metadata={"Software": None})
    for name, each in found.items():
        print(f"{name}: ratio over the last frames {each.ratio:.3f}")
        for frame, compiled, torch in zip(each.frames, each.compiled, each.torch, strict=True):
            print(f"  frame {frame:3d}: compiled {compiled:.3e}, PyTorch {torch:.3e}")


if __name__ == "__main__":
    main()
