"""The PyTorch side of a case: model, module, inputs, reference and oracle; what is slow to make is cached on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.case import Case
from harness.core.settings import REPOSITORY, Settings
from harness.models.sam3.components import COMPONENTS

if TYPE_CHECKING:
    import numpy as np
    import torch

    from harness.models.sam3.capture import Activations
    from harness.parity.cache import ArrayCache

Arrays = dict[str, "np.ndarray"]

CODE = tuple(
    REPOSITORY / "harness" / part for part in ("models/sam3", "runtime/sam3", "parity/oracle.py", "parity/shared.py")
)
"""The code that cached arrays depend on."""

AGAIN = "again:"
"""Prefix under which the second run of a reference is kept, for the outputs in which it differs from the first."""


class Source:
    """Everything about a case that PyTorch knows; to be used inside `harness.models.sam3.upstream.upstream()`.

    Attributes:
        component: The case's component.
        module: Its torch module, fp32 on the CPU, in eval mode.
        samples: Its captured inputs, by sample name; the first is the main one.
    """

    def __init__(self, case: Case, settings: Settings) -> None:
        """Build the model and take the component out of it.

        Raises:
            HarnessError: If checkpoint, photograph or cache cannot be used.
        """
        from harness.models.sam3.build import build_architecture, give_weights
        from harness.models.sam3.capture import load_prompts
        from harness.parity.cache import ArrayCache, cache_root

        self.component = COMPONENTS[case.component]
        self._case = case
        self._settings = settings
        self._cache = ArrayCache(cache_root())
        prompts = load_prompts()
        self._prompts = prompts if settings.image is None else replace(prompts, image=settings.image)
        model = build_architecture(case.scale, interactive=self.component.interactive)
        self.module: torch.nn.Module = self.component.build(model).eval()
        captured = self._cache.path(self._key("activations")).exists()
        give_weights(
            model,
            case.seed,
            settings.checkpoint,
            allow_partial=settings.allow_partial,
            part=self.module if captured else None,
        )
        plain = None if captured or self.component.interactive else model
        self.samples: dict[str, Mapping[str, torch.Tensor]] = dict(self.component.samples(self._activations(plain)))

    def named(self, sample: str, arrays: Iterable[np.ndarray]) -> Arrays:
        """Output arrays by name; those of all samples but the main one are prefixed by the sample's name.

        Raises:
            ValueError: If there are not as many as the component has outputs.
        """
        prefix = "" if sample == next(iter(self.samples)) else f"{sample}/"
        return {f"{prefix}{name}": array for name, array in zip(self.component.outputs, arrays, strict=True)}

    def reference(self) -> tuple[Arrays, Arrays]:
        """PyTorch eager fp32 on the CPU, run twice."""
        from harness.parity.oracle import reference

        key = self._key(f"reference {self.component.name}")

        def make() -> Arrays:
            with self._shared_trunk(self.module):
                return run_twice(lambda: self._over_samples(reference))

        return first_and_again(self._cache.get_or_make(key, make))

    def oracle(self) -> Arrays:
        """PyTorch float64 on the CPU."""
        from harness.parity.oracle import oracle

        key = self._key(f"oracle {self.component.name}")

        def make() -> Arrays:
            with self._shared_trunk(self.module):
                return self._over_samples(oracle)

        return self._cache.get_or_make(key, make)

    def _activations(self, model: Any) -> Activations:
        """One captured forward pass of upstream's model without the interactive neck, which is built if it is None."""
        import torch

        from harness.models.sam3.capture import Activations, capture

        def make() -> Arrays:
            plain = build(self._case, self._settings) if model is None else model
            with self._shared_trunk(plain):
                captured = vars(capture(plain, self._prompts))
            return {name: tensor.contiguous().numpy() for name, tensor in captured.items()}

        arrays = self._cache.get_or_make(self._key("activations"), make)
        return Activations(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    def _shared_trunk(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        return shared_trunk(module, self._cache, self._case, self._settings)

    def _over_samples(self, run: Callable[..., Arrays]) -> Arrays:
        results: Arrays = {}
        for sample, args in self.samples.items():
            results |= self.named(sample, run(self.module, tuple(args.values()), self.component.outputs).values())
        return results

    def _key(self, kind: str) -> dict[str, Any]:
        prompts = repr(replace(self._prompts, image=Path(self._prompts.image.name)))
        return cache_key(kind, self._case, self._settings, self._prompts.image, prompts, CODE)


def build(case: Case, settings: Settings) -> Any:
    """The case's image model, `harness.models.sam3.build.build_model` with the settings' weights."""
    from harness.models.sam3.build import build_model

    return build_model(case.scale, case.seed, settings.checkpoint, allow_partial=settings.allow_partial)


def run_twice(run: Callable[[], Arrays]) -> Arrays:
    """What the first of two runs gives and, under `AGAIN`, those arrays of the second that are not bitwise the same."""
    from harness.parity.metrics import bitwise_different

    first, second = run(), run()
    return first | {
        f"{AGAIN}{name}": second[name]
        for name, array in first.items()
        if array.shape != second[name].shape or bitwise_different(array, second[name])
    }


def first_and_again(both: Arrays) -> tuple[Arrays, Arrays]:
    """The two runs of `run_twice`."""
    first = {name: array for name, array in both.items() if not name.startswith(AGAIN)}
    return first, {name: both.get(f"{AGAIN}{name}", array) for name, array in first.items()}


def cache_key(
    kind: str, case: Case, settings: Settings, image: Path, prompts: str, code: Sequence[Path]
) -> dict[str, Any]:
    """What a cached array depends on: kind, weights, inputs, code and versions."""
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
    return shared(trunk, cache, _model_key("trunk", case, settings, CODE))


def _model_key(kind: str, case: Case, settings: Settings, code: Sequence[Path]) -> dict[str, Any]:
    from harness.parity.cache import code_digest, versions

    return {
        "kind": kind,
        "scale": str(case.scale),
        "weights": _weights(case, settings),
        "code": code_digest(*code),
        "versions": versions(),
    }


def _weights(case: Case, settings: Settings) -> str:
    if settings.checkpoint is None:
        return f"seed {case.seed}"
    with settings.checkpoint.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{digest}, the rest from seed {case.seed}"
