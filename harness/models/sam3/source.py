"""Computes the PyTorch side of a component, and of questions to whole models; slow results are cached."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.compiler.lowering.symbolic import takes_symbolic_axes
from harness.core.case import Case
from harness.core.precision import PRECISIONS
from harness.core.program import Arrays, Program, Symbolic
from harness.core.settings import Settings
from harness.core.weights import Weights
from harness.models.sam3.components.component import Component
from harness.models.sam3.fixtures import AnyQuestion, Fixture
from harness.models.sam3.groups import note_groups
from harness.parity.references import Reference, RunModule, runner_of
from harness.parity.trace import independent_calls, run_trace

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.captures import Capture
    from harness.parity.cache import ArrayCache

BUILDER = "harness.models.sam3.build"
ORACLE = "harness.parity.oracle"
SHARED = "harness.parity.part_cache"
DRAWS = "harness.parity.monte_carlo"


class Source:
    """The PyTorch side of a case; to be used inside `harness.models.sam3.upstream.upstream()`.

    Attributes:
        component: The case's component.
        module: Its torch module, fp32 on the CPU, in evaluation mode.
        samples: Its captured inputs, by sample name; the first is the main one.
        programs: The programs by the name of the first sample that each answers; a program answers all samples whose
            shapes differ in symbolic axes alone.
        trace: One call for each sample.
    """

    def __init__(self, component: Component, case: Case, settings: Settings) -> None:
        """Builds the model and takes the component out of it.

        Raises:
            HarnessError: The checkpoint, photograph or cache cannot be used.
        """
        from harness.core.files import cache_root
        from harness.models.sam3.build import build_architecture, give_weights
        from harness.parity.cache import ArrayCache

        self.component = component
        self._case = case
        self._settings = settings
        self._cache = ArrayCache(cache_root())
        self._runner = runner_of(PRECISIONS[case.precision])
        capture = component.captured_by
        self._inputs = capture.load_inputs(settings.image)
        model = build_architecture(case.scale, interactive=component.interactive)
        note_groups(model)
        self.module: torch.nn.Module = component.build(model).eval()
        is_cached = self._cache.path(_capture_key(capture, self._inputs, case, settings)).exists()
        give_weights(
            model,
            case.seed,
            settings.checkpoint,
            weights=case.weights,
            allow_partial=settings.allow_partial,
            part=self.module if is_cached else None,
        )
        capture_model = model if not is_cached and component.interactive is capture.interactive else None
        activations = captured_activations(capture, case, settings, capture_model)
        self.samples: dict[str, Mapping[str, torch.Tensor]] = dict(component.samples(activations))
        symbolic = component.symbolic if takes_symbolic_axes(case) else {}
        program_names = same_shape_samples(self.samples, symbolic)
        self.programs = {
            sample: Program(sample, self.module, self.samples[sample], component.outputs, component.uses_rope, symbolic)
            for sample in dict.fromkeys(program_names.values())
        }
        self.trace = independent_calls(self.samples, program_names)

    def reference(self) -> Reference:
        """Returns PyTorch's outputs of two runs on the CPU, in eager fp32 or under autocast, and in float64."""
        runner = self._runner
        key = self._key(f"{runner.kind} {self.component.name}", (*self._output_modules, runner.code))

        def make() -> Arrays:
            # The cached trunk results are fp32 or float64; under autocast the trunk returns others for the same input.
            half = PRECISIONS[self._case.precision].is_half
            with nullcontext() if half else self._shared_trunk(self.module):
                return Reference.run_twice(lambda: run_trace(self.programs, self.trace, runner.run)).to_arrays()

        return replace(Reference.from_arrays(self._cache.get_or_make(key, make)), exact=self._oracle())

    def _oracle(self) -> Arrays:
        """Returns PyTorch's float64 outputs, which every precision shares."""
        from harness.parity.oracle import oracle

        def make() -> Arrays:
            with self._shared_trunk(self.module):
                return run_trace(self.programs, self.trace, oracle)

        return self._cache.get_or_make(
            self._key(f"oracle {self.component.name}", (*self._output_modules, ORACLE)), make
        )

    def draws(self, names: Sequence[str]) -> Arrays:
        """Returns further errors of PyTorch in the named outputs, see `harness.parity.monte_carlo`."""
        from harness.parity.monte_carlo import draw_errors

        def make() -> Arrays:
            precision = PRECISIONS[self._case.precision]
            run = partial(run_trace, self.programs, run=self._runner.run)
            (errors,) = draw_errors(self.programs, self.trace, names, [run], precision, self._case.seed)
            return errors

        code = (*self._output_modules, self._runner.code, ORACLE, DRAWS)
        kind = f"draws {self._runner.kind} {self.component.name} {' '.join(sorted(names))}"
        return self._cache.get_or_make(self._key(kind, code), make)

    @property
    def _output_modules(self) -> tuple[str, ...]:
        """Returns the modules whose code determines the component's outputs, except the module that runs it."""
        capture_module = self.component.captured_by.module
        return (capture_module, BUILDER, self.component.build.__module__, "harness.parity.trace", SHARED)

    def _shared_trunk(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        return shared_trunk(module, self._cache, self._case, self._settings)

    def _key(self, kind: str, code: Sequence[str]) -> dict[str, Any]:
        return cache_key(kind, self._case, self._settings, self._inputs.images, self._inputs.description(), code)


AskFeatures = Callable[[RunModule, "Sequence[torch.Tensor]", Arrays | None], Arrays]
"""Answers a question about encoded features in one run, given the first run's answer if the run is in float64."""


class UpstreamModel:
    """Upstream's model with the weights of a case, built when it is first needed, and its cached answers to questions.

    To be used inside `harness.models.sam3.upstream.upstream()`.

    Attributes:
        half: Whether the case is in half precision, so that the reference runs under autocast.
    """

    def __init__(self, case: Case, settings: Settings) -> None:
        """Opens the cache.

        Raises:
            HarnessError: The cache cannot be used.
        """
        from harness.core.files import cache_root
        from harness.parity.cache import ArrayCache

        precision = PRECISIONS[case.precision]
        self.half = precision.is_half
        self._runner = runner_of(precision)
        self._case = case
        self._settings = settings
        self._cache = ArrayCache(cache_root())
        self._encoded: tuple[Path, list[list[torch.Tensor]]] | None = None

    @cached_property
    def image(self) -> Any:
        """Builds the image model."""
        return build(self._case, self._settings)

    @cached_property
    def interactive(self) -> Any:
        """Builds the image model with upstream's tracker and interactive predictor."""
        return build(self._case, self._settings, interactive=True)

    @cached_property
    def video(self) -> Any:
        """Builds the video model."""
        from harness.models.sam3.build import build_video_model

        return build_video_model(self.interactive, self._case.scale)

    def answer(self, module: str, question: AnyQuestion, actual: Arrays | None = None) -> Reference:
        """Returns upstream's answer to a question.

        Args:
            module: The module whose function `answer` gives it.
            question: The question.
            actual: The compiled model's answer, on which upstream's may depend.

        Raises:
            HarnessError: Checkpoint, photograph or cache cannot be used.
        """
        reference: Reference = import_module(module).answer(self, question, actual or {})
        return reference

    def cached(self, module: str, question: AnyQuestion, make: Callable[[], Reference], **key: Any) -> Reference:
        """Returns upstream's answer to a question, which the code of a module makes if it is not in the cache.

        The arguments `key` are what the answer depends on besides.
        """
        code = (BUILDER, module, SHARED, ORACLE, self._runner.code)
        key |= {"question": question.description(), "digest": question.digest()}
        key |= _model_key(f"{module} {self._runner.kind}", self._case, self._settings, code)
        return Reference.from_arrays(self._cache.get_or_make(key, lambda: make().to_arrays()))

    def ask_photograph(
        self, question: AnyQuestion, encoding: torch.nn.Module, features: int, ask: AskFeatures, *, float64: bool
    ) -> Reference:
        """Returns the answers to a question about a photograph, of two runs and in float64.

        Args:
            question: The question.
            encoding: Encodes the photograph, uint8 [3, h, w], as features; those of the last photograph are kept.
            features: Number of the features.
            ask: Answers the question about features.
            float64: Whether the question is also answered in float64.
        """
        from harness.parity.oracle import oracle

        if self._encoded is None or self._encoded[0] != question.image or (float64 and len(self._encoded[1]) < 3):
            self._encoded = None  # the features of two photographs would not fit into memory
            self._encoded = question.image, self._encode(question.image, encoding, features, float64)
        first_features, second_features, *exact_features = self._encoded[1]
        first = ask(self._runner.run, first_features, None)
        again = ask(self._runner.run, second_features, None)
        return Reference(first, again, ask(oracle, exact_features[0], first) if float64 else {})

    def _encode(self, image: Path, encoding: torch.nn.Module, count: int, float64: bool) -> list[list[torch.Tensor]]:
        """Returns the features of a photograph in two runs and, if asked for, in float64."""
        import numpy as np
        import torch

        from harness.parity.oracle import oracle
        from harness.runtime.sam3.images import load_image

        pixels = torch.from_numpy(np.array(load_image(image))).permute(2, 0, 1)

        def encode(run: RunModule) -> list[torch.Tensor]:
            arrays = run(encoding, (pixels,), [str(number) for number in range(count)])
            return [torch.from_numpy(array) for array in arrays.values()]

        # The cached trunk results are fp32 or float64; under autocast the trunk returns others for the same input.
        with nullcontext() if self.half else self.shared_trunk(encoding):
            features = [encode(self._runner.run) for _ in range(2)]
        if float64:
            with self.shared_trunk(encoding):
                features.append(encode(oracle))
        return features

    def shared_trunk(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """Caches the results of the module's vision transformer for the duration of the context."""
        return shared_trunk(module, self._cache, self._case, self._settings)


def same_shape_samples(samples: Mapping[str, Mapping[str, torch.Tensor]], symbolic: Symbolic) -> dict[str, str]:
    """Returns, for each sample, the first sample whose shapes are equal except in symbolic axes.

    Without symbolic axes each sample stands for itself.
    """
    if not symbolic:
        return {sample: sample for sample in samples}
    first_sample: dict[Any, str] = {}
    representatives = {}
    for sample, args in samples.items():
        shapes = tuple(
            tuple(0 if number in symbolic.get(name, {}) else extent for number, extent in enumerate(tensor.shape))
            for name, tensor in args.items()
        )
        representatives[sample] = first_sample.setdefault(shapes, sample)
    return representatives


def captured_activations(capture: Capture, case: Case, settings: Settings, model: Any = None) -> Any:
    """Returns the activations that a run captures with the model of a case, cached; to be used inside `upstream()`.

    Args:
        capture: The run.
        case: Determines scale, seed and weights.
        settings: Checkpoint and photograph.
        model: The model with its weights, interactive if the run needs that; it is built if None.
    """
    import torch

    from harness.core.files import cache_root
    from harness.parity.cache import ArrayCache

    cache, inputs = ArrayCache(cache_root()), capture.load_inputs(settings.image)

    def make() -> Arrays:
        whole = build(case, settings, interactive=capture.interactive) if model is None else model
        with shared_trunk(whole, cache, case, settings):
            tensors = capture.run(whole, inputs)
        return {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}

    arrays = cache.get_or_make(_capture_key(capture, inputs, case, settings), make)
    return capture.restore({name: torch.from_numpy(array) for name, array in arrays.items()})


def _capture_key(capture: Capture, inputs: Fixture, case: Case, settings: Settings) -> dict[str, Any]:
    code = (capture.module, BUILDER)
    return cache_key(capture.kind, case, settings, inputs.images, inputs.description(), code)


def build(case: Case, settings: Settings, *, interactive: bool = False) -> Any:
    """Builds the case's image model, with the case's weights or those of a checkpoint."""
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
    """Returns the key of a cached array: kind, weights, inputs, import closure of the modules `code`, and versions."""
    inputs = {"prompts": prompts, "images": [hashlib.sha256(image.read_bytes()).hexdigest() for image in images]}
    return _model_key(kind, case, settings, code) | inputs


def shared_trunk(
    module: torch.nn.Module, cache: ArrayCache, case: Case, settings: Settings
) -> AbstractContextManager[None]:
    """Caches the results of the module's vision transformer for the duration of the context, across all cases."""
    from sam3.model.vitdet import ViT

    from harness.parity.part_cache import cache_part

    trunk = next((part for part in module.modules() if isinstance(part, ViT)), None)
    if trunk is None:
        return nullcontext()
    return cache_part(trunk, cache, _model_key("trunk", case, settings, (BUILDER, ORACLE, SHARED)))


def _model_key(kind: str, case: Case, settings: Settings, code: Sequence[str]) -> dict[str, Any]:
    from harness.parity.cache import versions
    from harness.parity.closure import closure_digest

    return {
        "kind": kind,
        "scale": str(case.scale),
        "weights": _describe_weights(case, settings),
        "code": closure_digest(*code),
        "versions": versions(),
    }


def _describe_weights(case: Case, settings: Settings) -> str:
    if settings.checkpoint is None:
        return f"seed {case.seed}" if case.weights == Weights.SEEDED else f"{case.weights}, seed {case.seed}"
    with settings.checkpoint.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{digest}, the rest from seed {case.seed}"
