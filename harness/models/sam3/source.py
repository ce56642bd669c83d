"""The PyTorch side of a component: module, captured inputs, reference and oracle; what is slow to make is on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.case import Case
from harness.core.precision import PRECISIONS
from harness.core.settings import Settings
from harness.core.subject import Arrays, Program
from harness.models.sam3.components.component import Component
from harness.parity.references import first_and_again, reference_of, run_twice
from harness.parity.trace import independent_calls, run_trace

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.capture import Activations
    from harness.parity.cache import ArrayCache

CAPTURED_BY = ("harness.models.sam3.capture", "harness.models.sam3.build")
"""The modules that captured activations are made by."""
ORACLE = "harness.parity.oracle"
SHARED = "harness.parity.shared"


class Source:
    """Everything about a case that PyTorch knows; to be used inside `harness.models.sam3.upstream.upstream()`.

    Attributes:
        component: The case's component.
        module: Its torch module, fp32 on the CPU, in eval mode.
        samples: Its captured inputs, by sample name; the first is the main one.
        programs: One for each sample, because their shapes differ.
        trace: One call of each.
    """

    def __init__(self, component: Component, case: Case, settings: Settings) -> None:
        """Build the model and take the component out of it.

        Raises:
            HarnessError: If checkpoint, photograph or cache cannot be used.
        """
        from harness.models.sam3.build import build_architecture, give_weights
        from harness.models.sam3.capture import load_prompts
        from harness.parity.cache import ArrayCache, cache_root

        self.component = component
        self._case = case
        self._settings = settings
        self._cache = ArrayCache(cache_root())
        self._reference = reference_of(PRECISIONS[case.precision])
        prompts = load_prompts()
        self._prompts = prompts if settings.image is None else replace(prompts, image=settings.image)
        model = build_architecture(case.scale, interactive=component.interactive)
        self.module: torch.nn.Module = component.build(model).eval()
        captured = self._cache.path(self._key("activations", CAPTURED_BY)).exists()
        give_weights(
            model,
            case.seed,
            settings.checkpoint,
            allow_partial=settings.allow_partial,
            part=self.module if captured else None,
        )
        plain = None if captured or component.interactive else model
        self.samples: dict[str, Mapping[str, torch.Tensor]] = dict(component.samples(self._activations(plain)))
        self.programs = {
            sample: Program(sample, self.module, args, component.outputs, component.uses_rope)
            for sample, args in self.samples.items()
        }
        self.trace = independent_calls(self.samples)

    def reference(self) -> tuple[Arrays, Arrays]:
        """PyTorch on the CPU, eager fp32 or what the precision is held to, run twice."""
        by = self._reference
        key = self._key(f"{by.kind} {self.component.name}", (*self._made_by, by.code))

        def make() -> Arrays:
            with self._shared_trunk(self.module):
                return run_twice(lambda: run_trace(self.programs, self.trace, by.run))

        return first_and_again(self._cache.get_or_make(key, make))

    def oracle(self) -> Arrays:
        """PyTorch float64 on the CPU."""
        from harness.parity.oracle import oracle

        def make() -> Arrays:
            with self._shared_trunk(self.module):
                return run_trace(self.programs, self.trace, oracle)

        return self._cache.get_or_make(self._key(f"oracle {self.component.name}", (*self._made_by, ORACLE)), make)

    @property
    def _made_by(self) -> tuple[str, ...]:
        """The modules that the component's outputs are made by, but for how it is run."""
        return (*CAPTURED_BY, self.component.build.__module__, "harness.parity.trace", SHARED)

    def _activations(self, model: Any) -> Activations:
        """One captured forward pass of upstream's model without the interactive neck, which is built if it is None."""
        import torch

        from harness.models.sam3.capture import Activations, capture

        def make() -> Arrays:
            plain = build(self._case, self._settings) if model is None else model
            with self._shared_trunk(plain):
                captured = vars(capture(plain, self._prompts))
            return {name: tensor.contiguous().numpy() for name, tensor in captured.items()}

        arrays = self._cache.get_or_make(self._key("activations", CAPTURED_BY), make)
        return Activations(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    def _shared_trunk(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        return shared_trunk(module, self._cache, self._case, self._settings)

    def _key(self, kind: str, code: Sequence[str]) -> dict[str, Any]:
        prompts = repr(replace(self._prompts, image=Path(self._prompts.image.name)))
        return cache_key(kind, self._case, self._settings, self._prompts.image, prompts, code)


def build(case: Case, settings: Settings) -> Any:
    """The case's image model, `harness.models.sam3.build.build_model` with the settings' weights."""
    from harness.models.sam3.build import build_model

    return build_model(case.scale, case.seed, settings.checkpoint, allow_partial=settings.allow_partial)


def cache_key(
    kind: str, case: Case, settings: Settings, image: Path, prompts: str, code: Sequence[str]
) -> dict[str, Any]:
    """What a cached array depends on: kind, weights, inputs, the import closure of the modules `code`, and versions."""
    inputs = {"prompts": prompts, "image": hashlib.sha256(image.read_bytes()).hexdigest()}
    return _model_key(kind, case, settings, code) | inputs


def shared_trunk(
    module: torch.nn.Module, cache: ArrayCache, case: Case, settings: Settings
) -> AbstractContextManager[None]:
    """Within the context, the module's vision transformer is not run again on what any case has run it on."""
    from sam3.model.vitdet import ViT

    from harness.parity.shared import shared

    trunk = next((part for part in module.modules() if isinstance(part, ViT)), None)
    if trunk is None:
        return nullcontext()
    return shared(trunk, cache, _model_key("trunk", case, settings, ("harness.models.sam3.build", ORACLE, SHARED)))


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
        return f"seed {case.seed}"
    with settings.checkpoint.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{digest}, the rest from seed {case.seed}"
