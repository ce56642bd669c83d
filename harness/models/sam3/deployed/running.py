"""Compiles the whole model into a folder inside a case, and loads it where the case runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from harness.compiler.deployment.deployable import Deployable
from harness.compiler.deployment.describing import check_matches
from harness.core.case import Case
from harness.core.files import scratch_folder
from harness.core.outcome import Stage
from harness.runtime.manifest import read_any_manifest
from harness.runtime.sam3.model import Sam3

if TYPE_CHECKING:
    from harness.compiler.execution.run import Run


@contextmanager
def deployed_model(run: Run, parent: Path) -> Iterator[Sam3 | None]:
    """Loads the folder that the settings of a case name, or compiles one, and yields the model for the context.

    Args:
        run: The case, and the executor that runs it.
        parent: The folder in which the compiled model gets its own folder, which is removed in the end.

    Yields:
        The model, or None if it cannot be run here.

    Raises:
        HarnessError: The settings name a folder of another case.
        ModelError: The folder of the settings is damaged.
    """
    from harness.compiler.deployment.compiling import compile_into
    from harness.compiler.deployment.deployable import ArtifactSpec
    from harness.models.registry import subjects

    progress, executor = run.progress, run.executor
    deployable = deployable_of(run.case)
    options = subjects()[run.case.component].options
    with ExitStack() as stack:
        if run.settings.model is not None:
            folder = run.settings.model
            manifest = read_any_manifest(folder)
            check_matches(manifest, run.case, run.settings, deployable.options.read(folder, manifest), options)
        else:
            folder = stack.enter_context(scratch_folder(parent))
            spec = ArtifactSpec(deployable, run.case, run.settings, options)
            with progress.time_steps(_stage_of) as on_stage:
                compiled = compile_into(spec, folder, run.schedules, on_stage, for_emulation=executor.emulates)
            outcome = progress.outcome
            outcome.kernels += compiled.kernels
            outcome.lost_schedules += compiled.lost_schedules
            sizes = {name: file.bytes for name, file in compiled.manifest.files.items()}
            outcome.sizes["library"] = sum(size for file, size in sizes.items() if file.endswith(".so"))
            outcome.sizes["parameters"] = sum(size for file, size in sizes.items() if file.endswith(".safetensors"))
        if executor.run_problem(run.case.target) is not None:
            yield None
            return
        with progress.time_stage(Stage.LOAD):
            model = Sam3(executor.load_model(folder))
        with progress.time_stage(Stage.RUN):
            yield model
        executor.close()  # other processes may be waiting for the device


def deployable_of(case: Case) -> Deployable:
    """Returns what `sam3-tvm compile` writes of the model of a case."""
    from harness.models.registry import models, subjects

    deployable = models()[subjects()[case.component].model].deployable
    assert deployable is not None  # its whole models are subjects
    return deployable


def _stage_of(step: str) -> Stage:
    """Returns the stage of a compilation step: export for `export ground`, compile for the packing of weights."""
    name = step.split()[0]
    return Stage(name) if name in list(Stage) else Stage.COMPILE
