"""The stages of a case: build → export → import → compile → load → run → judge.

Everything here happens in one process, which `harness.worker` isolates; the result is plain data.
"""

from __future__ import annotations

import gc
import hashlib
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.case import Case
from harness.components import COMPONENTS
from harness.errors import HarnessError
from harness.outcome import CaseError, Outcome, Stage, Status, Verdict, VerdictKind
from harness.rope import STRATEGIES
from harness.targets import TARGETS

if TYPE_CHECKING:
    import numpy as np
    import torch
    import tvm

    from harness.components.capture import Activations
    from harness.parity.cache import ArrayCache
    from harness.parity.expectations import Expectation

Arrays = dict[str, "np.ndarray"]
REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Settings:
    """What does not belong to the case's identity.

    Attributes:
        checkpoint: Weights file; None for seeded weights.
        allow_partial: Whether a checkpoint may lack parameters.
        expectation: The expectation that names the case, if there is one.
        image: Photograph to capture the inputs from; None for the one in fixtures/.
        outputs: Folder where the compiled model's outputs are saved, so that they can be judged again.
        judge_saved: Whether to judge the saved outputs instead of compiling and running.
    """

    checkpoint: Path | None = None
    allow_partial: bool = False
    expectation: Expectation | None = None
    image: Path | None = None
    outputs: Path | None = None
    judge_saved: bool = False


@dataclass
class _Progress:
    """Where the case is and how long each stage took."""

    enter: Callable[[str], None]
    stage: Stage = Stage.BUILD
    seconds: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def in_stage(self, stage: Stage) -> Iterator[None]:
        self.stage = stage
        self.enter(stage.value)
        start = time.perf_counter()
        yield
        self.seconds[stage.value] = self.seconds.get(stage.value, 0.0) + time.perf_counter() - start


def run_request(request: tuple[Case, Settings], enter: Callable[[str], None]) -> Outcome:
    """`run_case` as `harness.worker` calls it."""
    from harness.threads import configure_threads

    configure_threads()
    return run_case(*request, enter)


def run_case(case: Case, settings: Settings, enter: Callable[[str], None] = lambda stage: None) -> Outcome:
    """Walk one case through its stages; every error of the case becomes part of the outcome.

    Args:
        case: What to run.
        settings: Weights, expectation, where outputs are kept.
        enter: Called with the name of each stage as it begins.

    Raises:
        HarnessError: If the input or the environment is at fault, not the case.
    """
    target = TARGETS[case.target]
    problem = target.compile_problem()
    if problem is not None:
        return Outcome(Stage.COMPILE, Status.UNAVAILABLE, CaseError("Unavailable", problem))
    progress = _Progress(enter)
    try:
        verdicts = _walk(case, settings, progress)
    except HarnessError:
        raise
    except MemoryError as error:
        return _stopped(progress, Status.OUT_OF_MEMORY, error)
    except Exception as error:
        return _stopped(progress, Status.FAILED, error)
    if verdicts is None:
        reason = target.run_problem() or ""
        return Outcome(
            Stage.LOAD, Status.UNAVAILABLE, CaseError("Unavailable", reason), progress.seconds, progress.sizes
        )
    good = all(verdict.kind in (VerdictKind.STRICT, VerdictKind.ORACLE) for verdict in verdicts)
    status = Status.PASSED if good else Status.FAILED
    error = None if good else CaseError("ParityError", _first_fault(verdicts))
    return Outcome(Stage.JUDGE, status, error, progress.seconds, progress.sizes, verdicts=verdicts)


def _first_fault(verdicts: tuple[Verdict, ...]) -> str:
    faults = [v for v in verdicts if v.kind not in (VerdictKind.STRICT, VerdictKind.ORACLE)]
    return f"{len(faults)} of {len(verdicts)} outputs: {faults[0].name}: {faults[0].reason}"


def _stopped(progress: _Progress, status: Status, error: BaseException) -> Outcome:
    details = "".join(traceback.format_exception(error))[-8000:]
    case_error = CaseError(type(error).__name__, str(error)[:4000], details)
    return Outcome(progress.stage, status, case_error, progress.seconds, progress.sizes)


def _walk(case: Case, settings: Settings, progress: _Progress) -> tuple[Verdict, ...] | None:
    """All stages; None if the compiled code cannot run on this machine."""
    from harness.model.upstream import upstream

    with upstream():
        with progress.in_stage(Stage.BUILD):
            source = Source(case, settings)
            module = source.module()
            samples = source.samples()
        if settings.judge_saved:
            actual = _saved_outputs(case, settings)
        else:
            ran = _compile_and_run(case, module, samples, progress)
            if ran is None:
                return None
            actual = ran
            _save_outputs(case, settings, actual)
        with progress.in_stage(Stage.JUDGE):
            return _judge(source, module, samples, actual, settings)


def _compile_and_run(
    case: Case, module: torch.nn.Module, samples: Mapping[str, Mapping[str, torch.Tensor]], progress: _Progress
) -> Arrays | None:
    import harness.frontend as frontend

    component, target = COMPONENTS[case.component], TARGETS[case.target]
    with progress.in_stage(Stage.EXPORT), STRATEGIES[case.strategy].apply(module):
        programs = {name: frontend.export_program(module, tuple(args.values())) for name, args in samples.items()}
    with progress.in_stage(Stage.IMPORT):
        imported = {name: frontend.import_program(program) for name, program in programs.items()}
    del programs
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as folder:
        libraries = {name: Path(folder) / f"{name}{LIBRARY_SUFFIX}" for name in samples}
        with progress.in_stage(Stage.COMPILE):
            for name, (module_ir, _) in imported.items():
                compile_module(module_ir, case.target, libraries[name])
        progress.sizes["library"] = sum(path.stat().st_size for path in libraries.values())
        if target.run_problem() is not None:
            return None
        actual: Arrays = {}
        for name in samples:
            parameters = list(imported.pop(name)[1].values())
            progress.sizes["parameters"] = max(
                progress.sizes.get("parameters", 0), sum(array.nbytes for array in parameters)
            )
            with progress.in_stage(Stage.LOAD):
                executable = Executable(libraries[name], case.target, parameters)
            del parameters
            with progress.in_stage(Stage.RUN):
                results = executable.run(tuple(tensor.numpy() for tensor in samples[name].values()))
            if len(results) != len(component.outputs):
                raise ValueError(f"{len(results)} outputs instead of {len(component.outputs)}: {component.outputs}")
            actual |= _named(component.outputs, results, name, samples)
            del executable
            gc.collect()
    return actual


LIBRARY_SUFFIX = ".so"


def compile_module(module: tvm.IRModule, target_name: str, library: Path) -> None:
    """Compile an imported module for a target and write the library."""
    import tvm
    from tvm import relax

    target = TARGETS[target_name]
    tvm_target = target.tvm_target()
    with tvm_target, tvm.transform.PassContext(opt_level=3):
        lowered = target.pipeline(tvm_target)(module)
        executable = relax.build(lowered, tvm_target, relax_pipeline=None)
    executable.export_library(str(library))


class Executable:
    """A compiled component on a device, with its parameters."""

    def __init__(self, library: Path, target_name: str, parameters: list[np.ndarray]) -> None:
        """Load the library and move the parameters to the device, packed as the compiled code wants them."""
        import tvm
        from tvm import relax

        self._device = TARGETS[target_name].device()
        self._vm = relax.VirtualMachine(tvm.runtime.load_module(str(library)), self._device)
        tensors = [tvm.runtime.tensor(array, self._device) for array in parameters]
        self._parameters = self._transform(tensors)

    def _transform(self, tensors: list[Any]) -> list[Any]:
        if self._vm.module.implements_function(TRANSFORM_PARAMETERS):
            return list(self._vm[TRANSFORM_PARAMETERS](tensors))
        return tensors

    def run(self, inputs: tuple[np.ndarray, ...]) -> list[np.ndarray]:
        """Run once; the outputs come back as NumPy arrays of their own."""
        import tvm

        arguments = [tvm.runtime.tensor(array, self._device) for array in inputs]
        results = self._vm["main"](*arguments, *self._parameters)
        return [result.numpy() for result in results]


TRANSFORM_PARAMETERS = "main_transform_params"
"""The function that Relax's LiftTransformParams makes: parameters as imported to parameters as `main` wants them."""


def _named(outputs: tuple[str, ...], arrays: Any, sample: str, samples: Mapping[str, Any]) -> Arrays:
    """Output arrays by name; those of all samples but the main one are prefixed by the sample's name."""
    prefix = "" if sample == next(iter(samples)) else f"{sample}/"
    return {f"{prefix}{name}": array for name, array in zip(outputs, arrays, strict=True)}


class Source:
    """The PyTorch side of a case: model, module, inputs, and the key of everything derived from them."""

    def __init__(self, case: Case, settings: Settings) -> None:
        """Nothing is built before it is asked for."""
        from harness.components.capture import load_prompts
        from harness.parity.cache import ArrayCache, cache_root

        self.case = case
        self.component = COMPONENTS[case.component]
        self.cache: ArrayCache = ArrayCache(cache_root())
        self._settings = settings
        prompts = load_prompts()
        self._prompts = prompts if settings.image is None else replace(prompts, image=settings.image)
        self._model: Any = None

    def model(self, interactive: bool = False) -> Any:
        """Upstream's image model, fp32 on the CPU."""
        from harness.model.build import build_model

        return build_model(
            self.case.scale,
            self.case.seed,
            self._settings.checkpoint,
            interactive=interactive,
            allow_partial=self._settings.allow_partial,
        )

    def module(self) -> torch.nn.Module:
        """The component's module, in eval mode."""
        self._model = self.model(self.component.interactive)
        return self.component.build(self._model).eval()

    def key(self, kind: str) -> dict[str, Any]:
        """What a cached array depends on: kind, weights, inputs, code and versions."""
        from harness.parity.cache import code_digest, versions

        return {
            "kind": kind,
            "scale": self.case.scale,
            "weights": _weights_digest(self.case, self._settings),
            "prompts": repr(self._prompts),
            "image": hashlib.sha256(self._prompts.image.read_bytes()).hexdigest(),
            "code": code_digest(*(REPOSITORY / "harness" / part for part in ("model", "components", "parity/oracle.py"))),
            "versions": versions(),
        }

    def activations(self) -> Activations:
        """One captured forward pass of upstream's model, cached on disk."""
        import torch

        from harness.components.capture import Activations, capture

        def make() -> Arrays:
            model = self.model() if self.component.interactive or self._model is None else self._model
            captured = capture(model, self._prompts)
            return {name: tensor.contiguous().numpy() for name, tensor in vars(captured).items()}

        arrays = self.cache.get_or_make(self.key("activations"), make)
        return Activations(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    def samples(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """The component's inputs by sample name."""
        return dict(self.component.samples(self.activations()))


def _weights_digest(case: Case, settings: Settings) -> str:
    if settings.checkpoint is None:
        return f"seed {case.seed}"
    with settings.checkpoint.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _judge(
    source: Source,
    module: torch.nn.Module,
    samples: Mapping[str, Mapping[str, torch.Tensor]],
    actual: Arrays,
    settings: Settings,
) -> tuple[Verdict, ...]:
    import numpy as np

    from harness.parity.oracle import oracle, reference
    from harness.parity.verdict import judge

    outputs = source.component.outputs

    def over_samples(run: Callable[..., Any]) -> Callable[[], Arrays]:
        def make() -> Arrays:
            named: Arrays = {}
            for name, args in samples.items():
                results = run(module, tuple(args.values()), outputs)
                named |= _named(outputs, results.values(), name, samples)
            return named

        return make

    def twice() -> Arrays:
        first, second = over_samples(reference)(), over_samples(reference)()
        unstable = {name for name in first if not np.array_equal(first[name], second[name], equal_nan=_has_nan(first[name]))}
        return first | {f"{AGAIN}{name}": second[name] for name in unstable}

    cached = source.cache.get_or_make(source.key(f"reference {source.component.name}"), twice)
    expected = {name: array for name, array in cached.items() if not name.startswith(AGAIN)}
    return judge(
        actual,
        expected,
        source.cache.get_or_make(source.key(f"oracle {source.component.name}"), over_samples(oracle)),
        reference_again={name: cached.get(f"{AGAIN}{name}", array) for name, array in expected.items()},
        expectation=settings.expectation,
    )


AGAIN = "again:"
"""Prefix under which the second run of a reference is kept, for the outputs in which it differs from the first."""


def _has_nan(array: np.ndarray) -> bool:
    import numpy as np

    return bool(np.issubdtype(array.dtype, np.inexact))


def _outputs_file(case: Case, settings: Settings) -> Path:
    from harness.parity.cache import cache_root

    return (settings.outputs or cache_root() / "outputs") / f"{case.id}-{case.seed}"


def _save_outputs(case: Case, settings: Settings, arrays: Arrays) -> None:
    from harness.parity.saved import save_outputs

    save_outputs(_outputs_file(case, settings), arrays)


def _saved_outputs(case: Case, settings: Settings) -> Arrays:
    from harness.parity.saved import load_outputs

    return dict(load_outputs(_outputs_file(case, settings)))
