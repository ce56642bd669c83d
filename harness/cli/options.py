"""Defines options that several commands share, reads their values, and checks that the compiler is installed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.console import print_sentence
from harness.compiler.deployment.deployable import Deployable
from harness.compiler.targets import TARGETS
from harness.compiler.tuned import database
from harness.core.budget import NO_GROUPS, Groups, read_budgets
from harness.core.case import WEIGHTS, Case, Weights
from harness.core.checkpoint_file import checkpoint_file_problem
from harness.core.errors import HarnessError
from harness.core.names import select_names
from harness.core.processes.threads import OPTION_VARIABLE, configure_threads
from harness.core.processors import CPU_VARIABLE, CUDA_VARIABLE, Processors
from harness.models.registry import DEFAULT_MODEL, models, subjects

COMPILES = ("tvm", "torch", "sam3")
"""Modules that compiling and verifying need, all from the extra `verify`."""


JSON_ADVICE = "choose another file with --json"
"""Advice for the user if the file of that option cannot be written."""


def prepare_compiler(threads: int | None) -> None:
    """Checks that this installation can compile and verify, and makes this process and its children use `threads`.

    Raises:
        HarnessError: This is the base installation, or there are not as many CPUs.
    """
    require_compiler()
    configure_threads(threads)


def require_compiler() -> None:
    """Checks that this installation can compile and verify.

    Raises:
        HarnessError: This is the base installation.
    """
    modules = [name for name in COMPILES if find_spec(name) is None]
    if modules:
        names = " and ".join(filter(None, [", ".join(modules[:-1]), modules[-1]]))
        raise HarnessError(
            f"{names} {'is' if len(modules) == 1 else 'are'} not installed: this installation runs compiled models; "
            "to compile and verify them, pip install 'sam3-tvm[verify]'"
        )


def check_number(value: float | None) -> float | None:
    """Returns the value of an option that has no range, which would exclude NaN.

    Raises:
        BadParameter: The value is NaN.
    """
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is no number")
    return value


def _check_checkpoint(path: Path | None) -> Path | None:
    problem = None if path is None else checkpoint_file_problem(path)
    if problem is not None:
        raise HarnessError(problem)
    return path


CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        callback=_check_checkpoint,
        help="Weights: sam3.pt, safetensors, a trainer's file, or a folder, see `inspect`. Default: seeded.",
    ),
]
PartialOption = Annotated[bool, typer.Option(help="Accept a checkpoint that lacks parameters.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the weights.")]
WEIGHTS_HELP = f"{', '.join(Weights)}: distribution of weights without a checkpoint. Default: {Weights.SEEDED}."
WeightsOption = Annotated[str | None, typer.Option(help=WEIGHTS_HELP)]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        envvar=OPTION_VARIABLE,
        help="Threads of TVM and PyTorch. Default: one for each fast core that may be used, see doctor.",
    ),
]
DatabaseOption = Annotated[
    Path | None,
    typer.Option(help="Folder of a tuning database. Default: the one in fixtures/tuned that fits this machine."),
]
UntunedOption = Annotated[bool, typer.Option("--untuned", help="Leave tuning databases out.")]
CpuOption = Annotated[
    str | None,
    typer.Option(envvar=CPU_VARIABLE, help="CPU to compile for, as LLVM names it: x86-64-v3. Default: this machine's."),
]
CpusOption = Annotated[
    list[str] | None,
    typer.Option(
        "--cpu",
        envvar=CPU_VARIABLE,
        help="CPU to compile for, as LLVM names it: x86-64-v3; repeat for one folder that has code for several. "
        "Default: this machine's.",
    ),
]
CudaArchOption = Annotated[
    str | None,
    typer.Option(
        envvar=CUDA_VARIABLE, help="NVIDIA architecture to compile for: sm_89. Default: the GPU's here, or several."
    ),
]
BudgetOption = Annotated[
    list[Path] | None,
    typer.Option(help="File of `sam3-tvm budget`, which says what stays float32; repeat for several components."),
]
RayAddressOption = Annotated[
    str | None, typer.Option(help="HOST:PORT of the Ray cluster. Default: RAY_ADDRESS, or this machine.")
]
RemoteOption = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of a device to run on, usually an SSH tunnel's end; see serve-device."),
]


def chosen_weights(
    weights: str | Sequence[str] | None, checkpoint: Path | None, available: Sequence[str] = WEIGHTS
) -> tuple[str, ...]:
    """Returns the distributions of drawn weights: those that `--weights` names, or `seeded`.

    Raises:
        HarnessError: A name is unknown, or a checkpoint gives the weights.
    """
    names = (weights,) if isinstance(weights, str) else weights
    if names and checkpoint is not None:
        raise HarnessError(
            "--weights and --checkpoint contradict each other, because a checkpoint has weights of its own: "
            "give one of them"
        )
    return select_names("weights", names or (Weights.SEEDED.value,), available)


def check_ray(ray: bool, address: str | None, alone: Mapping[str, object]) -> None:
    """Refuses an address without `--ray`, and options that do not go with it.

    Args:
        ray: The value of `--ray`.
        address: The value of `--ray-address`.
        alone: The values of the options that do not go with `--ray`, by flag.
    """
    if ray and (flag := next((flag for flag, value in alone.items() if value not in (None, False)), "")):
        raise HarnessError(f"--ray and {flag} contradict each other: leave one of them out")
    if address is not None and not ray:
        raise HarnessError("--ray-address is for --ray: give that, too")


def model_of(checkpoint: Path) -> str:
    """Returns the name of the first model that takes a checkpoint; the default one's if none does."""
    for name, model in models().items():
        if model.describe_checkpoint is not None:
            with suppress(HarnessError):
                model.describe_checkpoint(checkpoint)
                return name
    return DEFAULT_MODEL


def print_checkpoint(name: str, checkpoint: Path | None) -> tuple[str, ...]:
    """Prints what a checkpoint is, as a model says that takes it, and returns what the model can do with it.

    Raises:
        HarnessError: It is none of the model's.
    """
    describe = models()[name].describe_checkpoint
    if checkpoint is None or describe is None:
        return ()
    description = describe(checkpoint)
    print_sentence(description.sentence)
    return description.abilities


def chosen_database(db: Path | None, untuned: bool, targets: Collection[str], processors: Processors) -> Path | None:
    """Returns the tuning database for processors, and prints a note on what does not fit.

    Raises:
        HarnessError: The database cannot be used, or the options contradict each other.
    """
    if db is not None and untuned:
        raise HarnessError("--db and --untuned contradict each other: give one of them")
    if db is not None:
        for target in targets:
            database.open_database(db, target)
    tunable = [name for name in targets if TARGETS[name].tunable]
    if untuned or not tunable:
        return None
    chosen = db or database.find_default_database(tunable[0], processors)
    for notice in () if chosen is None else database.open_database(chosen, tunable[0]).notices(processors):
        print_sentence(f"Note: {notice}")
    return chosen


def chosen_groups(files: Sequence[Path] | None, cases: Sequence[Case]) -> dict[str, Groups]:
    """Returns the groups of products that stay float32, by subject; a whole model has those of all components.

    A file for none of the cases gives a note and no error, because the command that reproduces one of several cases
    names all files.

    Raises:
        HarnessError: A file is not a budget, is for something else than these cases, or no file is for any of them.
    """
    groups: dict[str, Groups] = {}
    unused: list[str] = []
    registry, names = subjects(), ", ".join(dict.fromkeys(case.component for case in cases))
    for file, budget in read_budgets(files or ()).items():
        matching = [case for case in cases if case.component == budget.component or registry[case.component].whole]
        for case in matching:
            budget.check_fits(case, registry[case.component].model, file)
            groups[case.component] = groups.get(case.component, NO_GROUPS).union(budget.float32)
        if not matching:
            unused.append(f"{file} is a budget for {budget.component}, not for {names}")
    if unused and not groups:
        raise HarnessError(f"{unused[0]}: give another --component or file")
    for sentence in unused:
        print_sentence(f"Note: {sentence}.")
    return groups


def chosen_deployable(model: str) -> Deployable:
    """Returns the deployable part of a model.

    Raises:
        HarnessError: The model is unknown, or has nothing to deploy.
    """
    select_names("model", (model,), tuple(models()))
    deployable = models()[model].deployable
    if deployable is None:
        raise HarnessError(f"the model {model} has nothing to deploy: choose another --model")
    return deployable
