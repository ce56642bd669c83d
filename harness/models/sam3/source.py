"""The PyTorch side of a component: module, captured inputs, reference and oracle; what is slow to make is on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.case import Case
from harness.core.precision import PRECISIONS
from harness.core.program import Arrays, Program, Symbolic
from harness.core.settings import Settings
from harness.core.weights import Weights
from harness.lowering.symbolic import takes_symbolic_axes
from harness.models.sam3.components.component import Component
from harness.models.sam3.groups import note_groups
from harness.parity.references import reference_of, run_twice, split_runs
from harness.parity.trace import independent_calls, run_trace

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.captures import Capture, Inputs
    from harness.parity.cache import ArrayCache

BUILT_BY = "harness.models.sam3.build"
ORACLE = "harness.parity.oracle"
SHARED = "harness.parity.part_cache"
DRAWS = "harness.parity.monte_carlo"


class Source:
    """Everything about a case that PyTorch knows; to be used inside `harness.models.sam3.upstream.upstream()`.

    Attributes:
        component: The case's component.
        module: Its torch module, fp32 on the CPU, in eval mode.
        samples: Its captured inputs, by sample name; the first is the main one.
        programs: By the name of the first sample that each of them answers: those whose shapes are the same but for
            symbolic axes.
        trace: One call of each.
    """

    def __init__(self, component: Component, case: Case, settings: Settings) -> None:
        """Build the model and take the component out of it.

        Raises:
            HarnessError: If checkpoint, photograph or cache cannot be used.
        """
        from harness.files import cache_root
        from harness.models.sam3.build import build_architecture, give_weights
        from harness.parity.cache import ArrayCache

        self.component = component
        self._case = case
        self._settings = settings
        self._cache = ArrayCache(cache_root())
        self._reference = reference_of(PRECISIONS[case.precision])
        capture = component.captured_by
        self._inputs = capture.load_inputs(settings.image)
        model = build_architecture(case.scale, interactive=component.interactive)
        note_groups(model)
        self.module: torch.nn.Module = component.build(model).eval()
        ready = self._cache.path(_capture_key(capture, self._inputs, case, settings)).exists()
        give_weights(
            model,
            case.seed,
            settings.checkpoint,
            weights=case.weights,
            allow_partial=settings.allow_partial,
            part=self.module if ready else None,
        )
        fitting = model if not ready and component.interactive is capture.interactive else None
        activations = captured(capture, case, settings, fitting)
        self.samples: dict[str, Mapping[str, torch.Tensor]] = dict(component.samples(activations))
        symbolic = component.symbolic if takes_symbolic_axes(case) else {}
        answered_by = alike(self.samples, symbolic)
        self.programs = {
            sample: Program(sample, self.module, self.samples[sample], component.outputs, component.uses_rope, symbolic)
            for sample in dict.fromkeys(answered_by.values())
        }
        self.trace = independent_calls(self.samples, answered_by)

    def reference(self) -> tuple[Arrays, Arrays]:
        """PyTorch on the CPU, eager fp32 or what the precision is held to, run twice."""
        by = self._reference
        key = self._key(f"{by.kind} {self.component.name}", (*self._made_by, by.code))

        def make() -> Arrays:
            # What is kept of the trunk is fp32 or float64; under autocast it gives something else for the same input.
            half = PRECISIONS[self._case.precision].is_half
            with nullcontext() if half else self._shared_trunk(self.module):
                return run_twice(lambda: run_trace(self.programs, self.trace, by.run))

        return split_runs(self._cache.get_or_make(key, make))

    def oracle(self) -> Arrays:
        """PyTorch float64 on the CPU."""
        from harness.parity.oracle import oracle

        def make() -> Arrays:
            with self._shared_trunk(self.module):
                return run_trace(self.programs, self.trace, oracle)

        return self._cache.get_or_make(self._key(f"oracle {self.component.name}", (*self._made_by, ORACLE)), make)

    def draws(self, names: Sequence[str]) -> Arrays:
        """Further errors of PyTorch in some outputs, see `harness.parity.monte_carlo`."""
        from harness.parity.monte_carlo import draw_errors

        by = self._reference

        def make() -> Arrays:
            precision = PRECISIONS[self._case.precision]
            run = partial(run_trace, self.programs, run=by.run)
            (errors,) = draw_errors(self.programs, self.trace, names, [run], precision, self._case.seed)
            return errors

        code = (*self._made_by, by.code, ORACLE, DRAWS)
        kind = f"draws {by.kind} {self.component.name} {' '.join(sorted(names))}"
        return self._cache.get_or_make(self._key(kind, code), make)

    @property
    def _made_by(self) -> tuple[str, ...]:
        """The modules that the component's outputs are made by, but for how it is run."""
        captured_by = self.component.captured_by.module
        return (captured_by, BUILT_BY, self.component.build.__module__, "harness.parity.trace", SHARED)

    def _shared_trunk(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        return shared_trunk(module, self._cache, self._case, self._settings)

    def _key(self, kind: str, code: Sequence[str]) -> dict[str, Any]:
        return cache_key(kind, self._case, self._settings, self._inputs.images, described(self._inputs), code)


def alike(samples: Mapping[str, Mapping[str, torch.Tensor]], symbolic: Symbolic) -> dict[str, str]:
    """The first sample of the same shapes but for symbolic axes, for each sample; each its own where there are none."""
    if not symbolic:
        return {sample: sample for sample in samples}
    first: dict[Any, str] = {}
    answered_by = {}
    for sample, args in samples.items():
        shapes = tuple(
            tuple(0 if number in symbolic.get(name, {}) else extent for number, extent in enumerate(tensor.shape))
            for name, tensor in args.items()
        )
        answered_by[sample] = first.setdefault(shapes, sample)
    return answered_by


def captured(capture: Capture, case: Case, settings: Settings, model: Any = None) -> Any:
    """What a run captures with the model of a case, from the cache if it was made before; inside `upstream()`.

    Args:
        capture: The run.
        case: Says scale, seed and weights.
        settings: Weights and photograph.
        model: The model with its weights, interactive as the run wants it; it is built if there is none.
    """
    import torch

    from harness.files import cache_root
    from harness.parity.cache import ArrayCache

    cache, inputs = ArrayCache(cache_root()), capture.load_inputs(settings.image)

    def make() -> Arrays:
        whole = build(case, settings, interactive=capture.interactive) if model is None else model
        with shared_trunk(whole, cache, case, settings):
            tensors = capture.run(whole, inputs)
        return {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}

    arrays = cache.get_or_make(_capture_key(capture, inputs, case, settings), make)
    return capture.restored({name: torch.from_numpy(array) for name, array in arrays.items()})


def _capture_key(capture: Capture, inputs: Inputs, case: Case, settings: Settings) -> dict[str, Any]:
    code = (capture.module, BUILT_BY)
    return cache_key(capture.kind, case, settings, inputs.images, described(inputs), code)


def described(inputs: Inputs) -> str:
    """Inputs in words, with the names of files and not their folders."""
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}  # type: ignore[arg-type]
    return repr({name: value.name if isinstance(value, Path) else value for name, value in values.items()})


def build(case: Case, settings: Settings, *, interactive: bool = False) -> Any:
    """The case's image model, `harness.models.sam3.build.build_model` with its weights or those of a checkpoint."""
    from harness.models.sam3.build import build_model

    return build_model(
        case.scale,
        case.seed,
        settings.checkpoint,
        weights=case.weights,
        interactive=interactive,
        allow_partial=settings.allow_partial,
    )


def cache_key(
    kind: str, case: Case, settings: Settings, images: Sequence[Path], prompts: str, code: Sequence[str]
) -> dict[str, Any]:
    """What a cached array depends on: kind, weights, inputs, the import closure of the modules `code`, and versions."""
    inputs = {"prompts": prompts, "images": [hashlib.sha256(image.read_bytes()).hexdigest() for image in images]}
    return _model_key(kind, case, settings, code) | inputs


def shared_trunk(
    module: torch.nn.Module, cache: ArrayCache, case: Case, settings: Settings
) -> AbstractContextManager[None]:
    """Within the context, the module's vision transformer is not run again on what any case has run it on."""
    from sam3.model.vitdet import ViT

    from harness.parity.part_cache import cache_part

    trunk = next((part for part in module.modules() if isinstance(part, ViT)), None)
    if trunk is None:
        return nullcontext()
    return cache_part(trunk, cache, _model_key("trunk", case, settings, (BUILT_BY, ORACLE, SHARED)))


def _model_key(kind: str, case: Case, settings: Settings, code: Sequence[str]) -> dict[str, Any]:
    from harness.parity.cache import versions
    from harness.parity.closure import closure_digest

    return {
        "kind": kind,
        "scale": str(case.scale),
        "weights": _weights(case, settings),
        "code": closure_digest(*code),
        "versions": versions(),
    }


def _weights(case: Case, settings: Settings) -> str:
    if settings.checkpoint is None:
        return f"seed {case.seed}" if case.weights == Weights.SEEDED else f"{case.weights}, seed {case.seed}"
    with settings.checkpoint.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{digest}, the rest from seed {case.seed}"
