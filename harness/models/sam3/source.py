"""Computes the PyTorch side of a component, and of questions to whole models; slow results are cached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.compiler.lowering.symbolic import takes_symbolic_axes
from harness.core.case import Case, Weights
from harness.core.checkpoint_file import checkpoint_digest
from harness.core.files import cache_root
from harness.core.precision import PRECISIONS
from harness.core.program import Arrays, Program, Symbolic
from harness.core.settings import Settings
from harness.models.sam3.build import build_video_model
from harness.models.sam3.captures import BUILDER, Activations, Capture
from harness.models.sam3.components.component import Component
from harness.models.sam3.fixtures import AnyQuestion, Fixture, PhotographQuestion
from harness.models.sam3.groups import note_groups
from harness.models.sam3.upstream import source_digest
from harness.parity.cache import ArrayCache, versions
from harness.parity.closure import closure_digest
from harness.parity.monte_carlo import draw_errors
from harness.parity.oracle import oracle
from harness.parity.part_cache import cache_part
from harness.parity.references import Reference, RunModule, independent_calls, run_trace, runner_of
from harness.runtime.sam3.images import load_image

ORACLE = "harness.parity.oracle"
SHARED = "harness.parity.part_cache"
DRAWS = "harness.parity.monte_carlo"

AskFeatures = Callable[[RunModule, Sequence[torch.Tensor], Arrays | None], Arrays]
"""Answers a question about encoded features in one run, given the first run's answer if the run is in float64."""


class UpstreamModel:
    """Upstream's model with the weights of a case, built when it is first needed, and what it computes, cached.

    To be used inside `harness.models.sam3.upstream.upstream()`.

    Attributes:
        half: Whether the case is in half precision, so that the reference runs under autocast.
        runner: Runs modules in the case's precision.
        cache: The cache.
    """

    def __init__(self, case: Case, settings: Settings, builder: str = BUILDER) -> None:
        """Opens the cache of a model that the module `builder` builds.

        Raises:
            HarnessError: The cache cannot be used.
        """
        precision = PRECISIONS[case.precision]
        self.half = precision.is_half
        self.runner = runner_of(precision)
        self.cache = ArrayCache(cache_root())
        self._case = case
        self._settings = settings
        self._builder = builder
        self._encoded: tuple[Path, list[list[torch.Tensor]]] | None = None

    @cached_property
    def image(self) -> Any:
        """Builds the image model."""
        return import_module(self._builder).image_model(self._build(interactive=False))

    @cached_property
    def interactive(self) -> Any:
        """Builds the image model with upstream's tracker and interactive predictor."""
        return import_module(self._builder).image_model(self.whole)

    @cached_property
    def whole(self) -> Any:
        """Builds the whole model, as the builder returns it."""
        return self._build(interactive=True)

    @cached_property
    def video(self) -> Any:
        """Builds the video model."""
        return build_video_model(self.interactive, self._case.scale)

    def _build(self, *, interactive: bool) -> Any:
        return import_module(self._builder).build_case(self._case, self._settings, interactive=interactive)

    def key(self, kind: str, code: Sequence[str], inputs: Fixture | None = None) -> dict[str, Any]:
        """Returns the key of a cached array: kind, weights, inputs, import closure of the modules `code`, versions."""
        key = {
            "kind": kind,
            "scale": str(self._case.scale),
            "weights": self._weights,
            "code": closure_digest(*code),
            "versions": versions() | {"sam3": source_digest()},
        }
        return key if inputs is None else key | {"inputs": inputs.description(), "digest": inputs.digest()}

    @cached_property
    def _weights(self) -> str:
        """Describes the weights."""
        case, checkpoint = self._case, self._settings.checkpoint
        if checkpoint is None:
            return f"seed {case.seed}" if case.weights == Weights.SEEDED else f"{case.weights}, seed {case.seed}"
        return f"{checkpoint_digest(checkpoint).sha256}, the rest from seed {case.seed}"

    def shared_trunk(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """Caches the results of the module's vision transformer for the duration of the context, across all cases."""
        from sam3.model.vitdet import ViT

        trunk = next((part for part in module.modules() if isinstance(part, ViT)), None)
        if trunk is None:
            return nullcontext()
        return cache_part(trunk, self.cache, self.key("trunk", (self._builder, ORACLE, SHARED)))

    def capture_key(self, capture: Capture) -> dict[str, Any]:
        """Returns the key of the activations that a run captures."""
        return self.key(capture.kind, (capture.module, self._builder), capture.load_inputs(self._settings.image))

    def captured(self, capture: Capture, model: Any = None) -> Activations:
        """Returns the activations that a run captures, with a model that is built already if one is given."""

        def make() -> Arrays:
            whole = model or self._build(interactive=capture.interactive)
            with self.shared_trunk(whole):
                tensors = capture.run(whole, capture.load_inputs(self._settings.image))
            return {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}

        arrays = self.cache.get_or_make(self.capture_key(capture), make)
        return Activations({name: torch.from_numpy(array) for name, array in arrays.items()})

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
        code = (self._builder, module, SHARED, ORACLE, self.runner.code)
        key |= self.key(f"{module} {self.runner.kind}", code, question)
        return Reference.from_arrays(self.cache.get_or_make(key, lambda: make().to_arrays()))

    def ask_photograph(
        self, module: str, question: PhotographQuestion, encoding: Callable[[], torch.nn.Module], ask: AskFeatures
    ) -> Reference:
        """Returns the answers to a question about a photograph, of two runs and in float64, cached as by `cached`.

        Args:
            module: The module whose code asks.
            question: The question.
            encoding: Returns a module that encodes the photograph, uint8 [3, h, w], as features, whose names are its
                `outputs`; the features of the last photograph are kept.
            ask: Answers the question about features.
        """

        def make() -> Reference:
            float64 = question.float64
            if self._encoded is None or self._encoded[0] != question.image or (float64 and len(self._encoded[1]) < 3):
                self._encoded = None  # the features of two photographs would not fit into memory
                self._encoded = question.image, self._encode(question.image, encoding(), float64)
            first_features, second_features, *exact_features = self._encoded[1]
            first = ask(self.runner.run, first_features, None)
            again = ask(self.runner.run, second_features, None)
            return Reference(first, again, ask(oracle, exact_features[0], first) if float64 else {})

        return self.cached(module, question, make)

    def _encode(self, image: Path, encoding: Any, float64: bool) -> list[list[torch.Tensor]]:
        """Returns the features of a photograph in two runs and, if asked for, in float64."""
        pixels = torch.from_numpy(np.array(load_image(image))).permute(2, 0, 1)

        def encode(run: RunModule) -> list[torch.Tensor]:
            return [torch.from_numpy(array) for array in run(encoding, (pixels,), encoding.outputs).values()]

        with self.trunk_of_run(encoding):
            features = [encode(self.runner.run) for _ in range(2)]
        if float64:
            with self.shared_trunk(encoding):
                features.append(encode(oracle))
        return features

    def trunk_of_run(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """Caches as `shared_trunk`, but nothing under autocast, where the trunk returns others for the same input."""
        return nullcontext() if self.half else self.shared_trunk(module)


class Source:
    """The PyTorch side of a component in a case; to be used inside `harness.models.sam3.upstream.upstream()`.

    Attributes:
        component: The case's component.
        module: Its torch module, fp32 on the CPU, in evaluation mode.
        samples: Its captured inputs, by sample name; the first is the main one.
        programs: The programs by the name of the first sample that each answers; a program answers all samples whose
            shapes differ in symbolic axes alone.
        trace: One call for each sample.
    """

    def __init__(self, component: Component, case: Case, settings: Settings) -> None:
        """Builds the model, and takes the component out of it.

        Raises:
            HarnessError: The checkpoint, photograph or cache cannot be used.
        """
        self.component = component
        self._case = case
        capture = component.captured_by
        self._upstream = UpstreamModel(case, settings, capture.builder)
        build = import_module(capture.builder)
        self._inputs = capture.load_inputs(settings.image)
        model = build.build_architecture(case.scale, interactive=component.interactive)
        note_groups(model)
        self.module: torch.nn.Module = component.build(model).eval()
        is_cached = self._upstream.cache.path(self._upstream.capture_key(capture)).exists()
        build.give_weights(model, case, settings, self.module if is_cached else None)
        capture_model = model if not is_cached and component.interactive is capture.interactive else None
        activations = self._upstream.captured(capture, capture_model)
        self.samples: dict[str, Mapping[str, torch.Tensor]] = dict(component.samples(activations))
        symbolic = component.symbolic if takes_symbolic_axes(case) else {}
        program_names = same_shape_samples(self.samples, symbolic)
        self.programs = {
            sample: Program(sample, self.module, self.samples[sample], component.outputs, component.uses_rope, symbolic)
            for sample in dict.fromkeys(program_names.values())
        }
        self.trace = independent_calls(self.samples, program_names)

    def reference(self) -> Reference:
        """Returns PyTorch's outputs of two runs on the CPU, in eager fp32 or under autocast, and in float64.

        Every precision shares those in float64.
        """
        runner = self._upstream.runner

        def run_twice() -> Arrays:
            with self._upstream.trunk_of_run(self.module):
                return Reference.run_twice(lambda: run_trace(self.programs, self.trace, runner.run)).to_arrays()

        def run_oracle() -> Arrays:
            with self._upstream.shared_trunk(self.module):
                return run_trace(self.programs, self.trace, oracle)

        runs = Reference.from_arrays(self._cached(runner.kind, (runner.code,), run_twice))
        return replace(runs, exact=self._cached("oracle", (ORACLE,), run_oracle))

    def draws(self, names: Sequence[str]) -> Arrays:
        """Returns further errors of PyTorch in the named outputs, see `harness.parity.monte_carlo`."""
        runner = self._upstream.runner

        def draw() -> Arrays:
            precision = PRECISIONS[self._case.precision]
            run = partial(run_trace, self.programs, run=runner.run)
            (errors,) = draw_errors(self.programs, self.trace, names, [run], precision, self._case.seed)
            return errors

        kind = f"draws {runner.kind} {' '.join(sorted(names))}"
        return self._cached(kind, (runner.code, ORACLE, DRAWS), draw)

    def _cached(self, kind: str, code: Sequence[str], make: Callable[[], Arrays]) -> Arrays:
        """Returns outputs of the component, which depend on the modules `code` besides the component's own."""
        component = self.component
        capture = component.captured_by
        own_code = (capture.module, component.build.__module__, capture.builder, "harness.parity.references", SHARED)
        key = self._upstream.key(f"{kind} {component.name}", (*own_code, *code), self._inputs)
        return self._upstream.cache.get_or_make(key, make)


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
