"""Merges low-rank adaptations (LoRA, Hu et al. 2021) into the weights that they belong to, in float32.

W ← W + α/r · B A, where A is r × in, B is out × r and α is PEFT's `lora_alpha` or a tensor `alpha`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from harness.core.checkpoint_file import ADAPTER_CONFIG, AdapterConfig
from harness.core.errors import HarnessError
from harness.models.sam3.checkpoints.names import bare_name, by_bare_name

if TYPE_CHECKING:
    import torch

_FACTOR = re.compile(r"(.+?)(?:\.lora)?\.lora_([AB])(?:\.(?!weight$)(\w+))?(?:\.weight)?")
"""Names of A and B: PEFT's, with or without the adapter's name, and those of plain parameters."""
_KIND = re.compile(r".*\b_*(lora|dora|loha|lokr|hada)_.*", re.IGNORECASE)
"""Names of every low-rank adaptation, also of kinds that are not merged."""
_BASE = re.compile(r"\.(base_layer|original_layer)(?=\.)")
"""Names that PEFT and others put between a module and its weight where LoRA is around it."""
_Number = TypeVar("_Number", int, float)
ALPHA = ".alpha"
"""End of the name of a LoRA's scale."""
_WEIGHTS = ("weight", "in_proj_weight")
_MERGING = "merge it where it was trained (PEFT's merge_and_unload) and give the merged file"


@dataclass(frozen=True)
class Lora:
    """The tensors of a LoRA and of its base.

    Attributes:
        path: Path of the checkpoint, which errors name.
        tensors: Tensors of the file that has the LoRA.
        base: Tensors of the file that it is added to; empty if they are in the same one.
        config: PEFT's description, if there is one.
    """

    path: Path
    tensors: Mapping[str, torch.Tensor]
    base: Mapping[str, torch.Tensor] = field(default_factory=dict)
    config: AdapterConfig | None = None

    @property
    def exists(self) -> bool:
        """Returns whether there is anything to merge or to refuse."""
        return bool(self.base) or any(map(_KIND.fullmatch, self.tensors))

    def refuse(self, reason: str) -> NoReturn:
        """Raises an error of one sentence.

        Raises:
            HarnessError: Always.
        """
        raise HarnessError(f"The LoRA of {self.path} cannot be merged: {reason}; {_MERGING}.")

    def scale(self, module: str, rank: int, alpha: torch.Tensor | None) -> float:
        """Returns what the product of B and A is multiplied by.

        Raises:
            HarnessError: It is not known, or the rank is another one.
        """
        config = self.config or AdapterConfig()
        stated = self._by_pattern(config.rank_pattern, module, config.r)
        if stated not in (rank, None):
            self.refuse(f"{module} has rank {rank}, and {ADAPTER_CONFIG} says {stated}")
        if alpha is not None and alpha.numel() == 1 and not alpha.is_complex():
            value: float | None = float(alpha.item())
        else:
            value = self._by_pattern(config.alpha_pattern, module, config.lora_alpha)
        if value is None or not math.isfinite(value):
            self.refuse(
                f"its scale is unknown, give the folder of its {ADAPTER_CONFIG}, with a number lora_alpha in it"
            )
        return value / (math.sqrt(rank) if config.use_rslora else rank)

    def _by_pattern(
        self, patterns: Mapping[str, _Number] | None, module: str, default: _Number | None
    ) -> _Number | None:
        """Returns what PEFT's description says for a module, whose name ends with a pattern, or else for all."""
        try:
            found = (value for key, value in (patterns or {}).items() if re.fullmatch(rf"(.*\.)?{key}", module))
            return next(found, default)
        except re.error as error:
            self.refuse(f"a pattern of its {ADAPTER_CONFIG} is no regular expression ({error})")


def merge(lora: Lora) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Returns the base's tensors with the LoRA added in float32, and the names of those that it changed.

    A tensor of an adapter that is no factor replaces its base's, as PEFT's `modules_to_save` and biases do.

    Raises:
        HarnessError: A tensor of the LoRA is of another kind, has no target, or does not fit it.
    """
    kind = (lora.config or AdapterConfig()).peft_type
    if kind != "LORA":
        lora.refuse(f"its method is {kind}, which is another method")
    factors: dict[str, dict[str, torch.Tensor]] = {}
    written: dict[str, str] = {}  # the name in the file, which errors have, of each module with factors
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in lora.tensors.items():
        if (factor := _FACTOR.fullmatch(name)) is not None:
            name_in_file = _BASE.sub("", factor[1])
            module = bare_name(name_in_file)
            sides = factors.setdefault(module, {})
            written[module] = name_in_file
            if factor[2] in sides:
                lora.refuse(f"{factor[1]} has several, the last is {name}")
            sides[factor[2]] = tensor
        elif _KIND.fullmatch(name):
            lora.refuse(f"{name} is of a kind that is not known here")
        else:
            base_name = _BASE.sub("", name)
            if base_name in plain:
                lora.refuse(f"it has {base_name} twice")
            plain[base_name] = tensor
    alphas = {
        module: plain.pop(name)
        for name in list(plain)
        if name.endswith(ALPHA) and (module := bare_name(name.removesuffix(ALPHA))) in factors
    }
    merged = _with_replacements(lora, plain)
    names, doubled = by_bare_name(merged)
    if doubled:
        lora.refuse(f"its base has {doubled[0]} twice")
    changed = []
    for module, sides in factors.items():
        if sides.keys() != {"A", "B"}:
            lora.refuse(f"{written[module]} has lora_{next(iter(sides))} alone")
        target = next((names[name] for leaf in _WEIGHTS if (name := f"{module}.{leaf}") in names), None)
        if target is None:
            lora.refuse(f"it is for {written[module]}, of which there are no weights beside it")
        merged[target] = _added(lora, written[module], merged[target], sides, alphas.get(module))
        changed.append(target)
    return merged, tuple(changed)


def _with_replacements(lora: Lora, plain: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not lora.base:
        return dict(plain)
    merged = dict(lora.base)
    names, _ = by_bare_name(merged)
    for name, tensor in plain.items():
        target = names.get(bare_name(name))
        if target is None:
            lora.refuse(f"it replaces {name}, which its base does not have")
        merged[target] = tensor
    return merged


def _added(
    lora: Lora, module: str, weight: torch.Tensor, sides: Mapping[str, torch.Tensor], alpha: torch.Tensor | None
) -> torch.Tensor:
    parts = (sides["A"], sides["B"], weight)
    if not all(part.ndim > 1 and part.is_floating_point() for part in parts):
        lora.refuse(f"{module} is no matrix of floating-point numbers")
    down, up = sides["A"].float(), sides["B"].float()
    rows, columns = weight.shape[0], weight[0].numel()
    down, up = down.flatten(1), up.flatten(1)
    if down.shape != (up.shape[1], columns) or len(up) != rows:
        down, up = down.T, up.T  # some store in × r and r × out
    rank = len(down)
    if not rank or down.shape != (up.shape[1], columns) or len(up) != rows:
        shapes = " and ".join("×".join(map(str, sides[side].shape)) for side in "AB")
        lora.refuse(f"the factors of {module} are {shapes}, and its weight is {rows}×{columns}")
    change = (up @ down).mul_(lora.scale(module, rank, alpha))
    return change.view(weight.shape).add_(weight.float())
