"""From a photograph and a text to masks, and a second text on the same photograph: PyTorch against the compiled model.

Both in one process, interleaved round by round, after their answers were found to be the same. Every round asks a text
that neither has seen, because the compiled model remembers texts. Peak memory and the time to load are those of
processes of their own.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from harness.case import Scale
from harness.deployment.compiling import Model, compile_model
from harness.machine import describe_machine
from harness.model.build import build_model
from harness.model.upstream import upstream
from harness.runtime import Found, Sam3
from harness.runtime.images import load_image
from harness.settings import REPOSITORY
from harness.threads import configure_threads
from harness.worker import WorkerEnd, run_isolated
from perf.measuring import interleave
from perf.memory import measure

PHOTOGRAPH = REPOSITORY / "fixtures" / "images" / "coffee.png"
TEXT = "cup"
BUDGET_SECONDS = {"photo and text": 60.0, "another text": 40.0}
"""How long PyTorch and TVM together may take; at least five rounds run in any case."""


@pytest.fixture(scope="module")
def scale(request: pytest.FixtureRequest) -> str:
    return str((request.config.getoption("scale") or [Scale.SHALLOW.value])[0])


@pytest.fixture(scope="module")
def artifact(scale: str) -> Any:
    # Not pytest's folder, which stays: at full scale there are gigabytes of weights in it.
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as name:
        compile_model(Model(scale=scale), "llvm", Path(name) / "model")
        yield Path(name) / "model"


@pytest.fixture(scope="module")
def sides(artifact: Path, scale: str) -> Any:
    """The compiled model and upstream's processor, which were asked the same and answered the same."""
    from sam3.model.sam3_image_processor import Sam3Processor

    configure_threads()
    with upstream():
        compiled, processor = Sam3.load(artifact), Sam3Processor(build_model(scale), device="cpu")
        photograph = load_image(PHOTOGRAPH)
        found = compiled.set_image(photograph).segment(text=TEXT)
        check(found, processor.set_text_prompt(TEXT, processor.set_image(photograph)))
        yield compiled, processor, photograph


def check(found: Found, state: dict[str, Any]) -> None:
    """The same queries, scores within 1e-5, boxes within 0.01 pixel, masks but for a millionth of their pixels."""
    assert len(found.scores) == len(state["scores"]) > 0
    np.testing.assert_allclose(found.scores, state["scores"].numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.boxes, state["boxes"].numpy(), rtol=0, atol=0.01)
    assert (found.masks != state["masks"].squeeze(1).numpy()).mean() <= 1e-6


@pytest.mark.parametrize("what", BUDGET_SECONDS)
def test_end_to_end(
    what: str, sides: Any, artifact: Path, scale: str, benchmark: Any, end_to_end_results: list[dict[str, Any]]
) -> None:
    compiled, processor, photograph = sides
    tvm_call, torch_call = calls(what, compiled, processor, photograph)
    result: dict[str, Any] = {"what": what, "scale": scale, "threads": configure_threads()}
    result |= interleave(benchmark, tvm_call, torch_call, budget=BUDGET_SECONDS[what]).summary()
    if what == "photo and text":
        result |= {f"{side}_memory": peak_memory(side, artifact, scale) for side in ("tvm", "torch")}
        result["load_seconds"] = run_isolated("perf.test_end_to_end:load_seconds", artifact).value
    benchmark.extra_info |= result | {"machine": describe_machine()}
    end_to_end_results.append(result)


def calls(
    what: str, compiled: Sam3, processor: Any, photograph: Image.Image
) -> tuple[Callable[[], object], Callable[[], object]]:
    """What is timed, of the compiled model and of PyTorch."""
    ours, theirs = (iter(f"cup {number}" for number in itertools.count()) for _ in range(2))
    if what == "photo and text":
        return (
            lambda: compiled.set_image(photograph).segment(text=next(ours)),
            lambda: processor.set_text_prompt(next(theirs), processor.set_image(photograph)),
        )
    image, state = compiled.set_image(photograph), processor.set_image(photograph)
    return lambda: image.segment(text=next(ours)), lambda: processor.set_text_prompt(next(theirs), state)


def peak_memory(side: str, artifact: Path, scale: str) -> dict[str, int] | None:
    """Bytes that loading adds to a process, how far a photograph and a text rise above that, and both."""
    ended = run_isolated(f"perf.test_end_to_end:{side}_memory", (artifact, scale))
    assert ended.kind is WorkerEnd.OK, ended.error
    if ended.value is None:
        return None
    return {
        "weights_bytes": ended.value.weights,
        "run_bytes": ended.value.run,
        "peak_bytes": ended.value.weights + ended.value.run,
    }


def tvm_memory(request: tuple[Path, str], enter: Callable[[str], None]) -> object:
    """To be called by `harness.worker.run_isolated`."""
    from harness.runtime.loading import load_runtime

    configure_threads()
    load_runtime()
    photograph = load_image(PHOTOGRAPH)

    def load() -> Callable[[], object]:
        model = Sam3.load(request[0])
        return lambda: model.set_image(photograph).segment(text=TEXT)

    return measure(load, enter)


def torch_memory(request: tuple[Path, str], enter: Callable[[str], None]) -> object:
    """To be called by `harness.worker.run_isolated`."""
    from sam3.model.sam3_image_processor import Sam3Processor

    configure_threads()
    photograph = load_image(PHOTOGRAPH)
    with upstream():

        def load() -> Callable[[], object]:
            processor = Sam3Processor(build_model(request[1]), device="cpu")
            return lambda: processor.set_text_prompt(TEXT, processor.set_image(photograph))

        return measure(load, enter)


def load_seconds(artifact: Path, enter: Callable[[str], None]) -> dict[str, float]:
    """How long loading takes in a process that has imported everything, with checksums and without."""
    from harness.runtime.loading import load_runtime

    load_runtime()
    seconds = {}
    for name, check_files in (("checked", True), ("unchecked", False)):
        start = time.perf_counter()
        Sam3.load(artifact, check=check_files)
        seconds[name] = time.perf_counter() - start
    return seconds
