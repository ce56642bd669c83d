"""Loads checkpoints: published ones, those of trainers, with LoRA or in parts, in upstream's names or Transformers'."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from harness.core.checkpoint_file import CheckpointDescription
from harness.core.errors import HarnessError
from harness.models.sam3.checkpoints.content import Content, read_content
from harness.models.sam3.checkpoints.hugging_face import (
    POINTS,
    from_hugging_face,
    has_hugging_face_name,
    is_hugging_face,
    is_repeated,
    is_upstream,
)
from harness.models.sam3.checkpoints.names import COMPUTED, bare_name, by_bare_name, model_name, sam_3_1_name

if TYPE_CHECKING:
    import torch

_INTERACTIVE_ONLY = re.compile(r"inst_interactive_predictor\..*|backbone\.vision_backbone\.sam2_convs\..*")
"""Tensors of the video model, which the image model has only if it is built interactive."""

_TRACKER = ("inst_interactive_predictor.model.sam_", "tracker_model.")
"""Beginnings of bare names of the tracker, in either layout."""

POINT_PROMPTS, CLICKS = "points", "clicks"
"""Abilities that some checkpoints lack."""

_MAX_LISTED = 5


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of SAM 3, which may fit a model or not.

    Attributes:
        path: Its file or folder.
        content: Its tensors by the names that they were saved with.
        model: Name of its model.
    """

    path: Path
    content: Content
    model: ClassVar[str] = "SAM 3"

    @classmethod
    def open(cls, path: Path, *, values: bool = True) -> Self:
        """Reads a checkpoint; `values` says whether its tensors have values, see `read_content`.

        Raises:
            HarnessError: It cannot be read, or `check` refuses it.
        """
        checkpoint = cls(path, read_content(path, values=values))
        checkpoint.check()
        return checkpoint

    def check(self) -> None:
        """Checks the names.

        Raises:
            HarnessError: They are those of SAM 3.1, or of both layouts, or some are there twice.
        """
        names = self.content.tensors
        if (name := sam_3_1_name(names)) is not None:
            raise HarnessError(
                f"The checkpoint {self.path} is of SAM 3.1, it has {name}, and the model is SAM 3: "
                "use the published sam3.pt or model.safetensors of SAM 3, or the model sam3.1."
            )
        _, doubled = by_bare_name(names)
        if self.has_transformers_names:
            doubled += [name for name in names if is_upstream(model_name(name)) and not has_hugging_face_name(name)]
        if doubled:
            raise HarnessError(
                f"The checkpoint {self.path} has {len(doubled)} tensors under several names or names of two layouts "
                f"({_shortened(doubled)}); save the model once, under its names alone."
            )

    @property
    def has_transformers_names(self) -> bool:
        """Returns whether its layout is that of Transformers, and not upstream's."""
        return is_hugging_face(self.content.tensors)

    @property
    def has_tracker(self) -> bool:
        """Returns whether it has the weights for clicks and videos."""
        return any(bare_name(name).startswith(_TRACKER) for name in self.content.tensors)

    @property
    def abilities(self) -> tuple[str, ...]:
        """Returns what a model can be asked with it; Transformers' layout has no weights for the detector's points."""
        points = () if self.has_transformers_names else (POINT_PROMPTS,)
        return ("texts", "boxes", *points, *((CLICKS, "video") if self.has_tracker else ()))

    @cached_property
    def repeated(self) -> tuple[str, ...]:
        """Returns the names of tensors that say nothing new: formulas and copies of Transformers' layout."""
        tensors = self.content.tensors
        return tuple(name for name in tensors if is_repeated(name, tensors)) if self.has_transformers_names else ()

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by their names in upstream's image model."""
        if self.has_transformers_names:
            return from_hugging_face(self.content.tensors)
        return {model_name(name): tensor for name, tensor in self.content.tensors.items()}

    def __str__(self) -> str:
        content = self.content
        names = "Transformers' names" if self.has_transformers_names else "upstream's names"
        dtypes = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in content.tensors.values())
        parts = [f"{self.path.name}: {self.model} under {names}, {len(content.tensors)} tensors in {', '.join(dtypes)}"]
        if content.wrappers:
            parts.append(f"taken out of {'.'.join(content.wrappers)}")
        if content.merged:
            parts.append(f"LoRA merged into {len(content.merged)} of them")
        if content.remainder:
            listed = [f"{name} ({count} tensors)" for name, count in content.remainder.items() if count]
            others = [name for name, count in content.remainder.items() if not count]
            parts.append(f"left aside: {', '.join([*listed, *filter(None, [_shortened(others)])])}")
        if self.repeated:
            parts.append(f"computed anew: {len(self.repeated)} tables")
        return "; ".join(parts) + "."


@dataclass(frozen=True)
class Fit:
    """The comparison of a checkpoint's tensors with those of a model.

    Attributes:
        loadable: Tensors that fit, by the model's names.
        missing: Names that the checkpoint should have and has not.
        absent: Names that its layout never has.
        unexpected: Names that the model does not have.
        misshapen: Names of other shapes or dtypes → what they are, and what they should be.
        unused: Names of the tracker's tensors, which this model is built without.
        count: Number of the model's tensors.
    """

    loadable: Mapping[str, torch.Tensor]
    missing: tuple[str, ...]
    absent: frozenset[str]
    unexpected: tuple[str, ...]
    misshapen: Mapping[str, str]
    unused: tuple[str, ...]
    count: int

    @property
    def unloaded(self) -> frozenset[str]:
        """Returns the names of the model's tensors that keep their values."""
        return self.absent.union(self.missing, self.misshapen)

    @property
    def is_whole(self) -> bool:
        """Returns whether everything is there, and nothing else."""
        return not (self.missing or self.unexpected or self.misshapen)

    def __str__(self) -> str:
        changed = [f"{name}: {difference}" for name, difference in self.misshapen.items()]
        return "; ".join(
            [
                _list_names("missing", self.missing),
                _list_names("unexpected", self.unexpected),
                _list_names("misshapen", changed),
            ]
        )


def describe_checkpoint(path: Path) -> CheckpointDescription:
    """Returns what a checkpoint is and can do.

    Raises:
        HarnessError: It cannot be read or is no checkpoint of SAM 3.
    """
    checkpoint = Checkpoint.open(path, values=False)
    check_sam_3(checkpoint)
    return CheckpointDescription(str(checkpoint), checkpoint.abilities)


def check_sam_3(checkpoint: Checkpoint) -> None:
    """Checks that a checkpoint has a tensor of SAM 3, of any scale.

    Raises:
        HarnessError: It has none.
    """
    if not any(map(is_upstream, checkpoint.tensors)):
        raise _other_model(checkpoint)


def spoilt_names(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the names of tensors that have NaN or infinity."""
    import torch

    def is_finite(tensor: torch.Tensor) -> bool:
        wide = tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
        return bool(torch.isfinite(wide).all())

    return [name for name, tensor in tensors.items() if not is_finite(tensor)]


def compare(checkpoint: Checkpoint, model: torch.nn.Module) -> Fit:
    """Compares a checkpoint with a model: every tensor is loadable, unused, unexpected or misshapen."""
    weights = dict(model.state_dict())
    tensors = checkpoint.tensors
    unused = {
        name
        for name in tensors
        if name not in weights and _INTERACTIVE_ONLY.fullmatch(name) and (is_upstream(name) or COMPUTED.fullmatch(name))
    }
    misshapen = {
        name: difference
        for name, tensor in tensors.items()
        if name in weights and (difference := _difference(tensor, weights[name]))
    }
    unloaded = {name for name in weights if name not in tensors and not COMPUTED.fullmatch(name)}
    absent = {name for name in unloaded if checkpoint.has_transformers_names and POINTS.fullmatch(name)}
    return Fit(
        loadable={name: tensor for name, tensor in tensors.items() if name in weights and name not in misshapen},
        missing=tuple(sorted(unloaded - absent)),
        absent=frozenset(absent),
        unexpected=tuple(sorted(name for name in tensors if name not in weights and name not in unused)),
        misshapen=dict(sorted(misshapen.items())),
        unused=tuple(sorted(unused)),
        count=len(weights),
    )


def load_checkpoint(
    model: torch.nn.Module, path: Path, *, allow_partial: bool = False, kind: type[Checkpoint] = Checkpoint
) -> frozenset[str]:
    """Loads a checkpoint into the model, in place; a checkpoint that does not fit changes nothing.

    The names determine the layout, upstream's or Transformers'. Transformers' layout has no weights for point prompts;
    it is loaded with a warning, and so is a part of a checkpoint.

    Args:
        model: The image model, on the CPU.
        path: A file of tensors, an index of several, or the folder of one of these or of an adapter.
        allow_partial: Whether missing, unexpected and misshapen tensors are skipped instead of refused.
        kind: The class of the model's checkpoints.

    Returns:
        Names of the model's tensors that were not loaded; without `allow_partial`, the tensors that the layout never
        has.

    Raises:
        HarnessError: The file is missing, no checkpoint, damaged, of another model, or does not fit.
    """
    import torch

    checkpoint = kind.open(path)
    fit = compare(checkpoint, model)
    if not fit.loadable and not fit.misshapen:
        raise _other_model(checkpoint)
    if unknown := checkpoint.content.unknown:
        listed = _shortened([f"{name}, {count} tensors" for name, count in unknown.items()])
        if not allow_partial:
            raise HarnessError(
                f"The checkpoint {path} has tensors apart from its weights, and nothing says what they are ({listed}); "
                "save the weights alone, or allow a partial load (--allow-partial)."
            )
        warnings.warn(f"The checkpoint {path} is loaded without {listed}.", stacklevel=2)
    if not fit.is_whole:
        seeded = f"{len(fit.unloaded)} of the model's {fit.count} tensors at their seed"
        if not allow_partial:
            raise HarnessError(
                f"The checkpoint {path} does not fit the model: {fit}; use the checkpoint and the scale that belong "
                f"together, or allow a partial load (--allow-partial), which leaves {seeded}."
            )
        warnings.warn(f"The checkpoint {path} is loaded in part: {fit}; this leaves {seeded}.", stacklevel=2)
    if spoilt := spoilt_names(fit.loadable):
        raise HarnessError(
            f"The checkpoint {path} has NaN or infinity in its weights: {_list_names('such', spoilt)}; "
            "its training diverged or the file is damaged, use an earlier one."
        )
    with torch.no_grad():
        weights = model.state_dict()
        for name, tensor in fit.loadable.items():
            weights[name].copy_(tensor)
    if fit.absent:
        warnings.warn(
            f"The checkpoint {path} is in the layout of Transformers, which has no weights for point prompts, "
            "so points mean nothing with it; use the published sam3.pt for them.",
            stacklevel=2,
        )
    return fit.unloaded


def _other_model(checkpoint: Checkpoint) -> HarnessError:
    return HarnessError(
        f"The checkpoint {checkpoint.path} belongs to another model: none of its {len(checkpoint.content.tensors)} "
        "tensors has a name of SAM 3's image model; use the published sam3.pt or model.safetensors."
    )


def _difference(tensor: torch.Tensor, weight: torch.Tensor) -> str:
    """Returns what a tensor is and should be, or nothing if it can be loaded: any floating-point numbers are."""
    import torch

    if tensor.shape != weight.shape:
        return f"{_shape(tensor)} instead of {_shape(weight)}"
    fits = tensor.dtype == weight.dtype or (tensor.is_floating_point() and weight.is_floating_point())
    if not fits or tensor.layout != torch.strided:
        return f"{tensor.dtype} instead of {weight.dtype}".replace("torch.", "")
    return ""


def _shape(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"


def _list_names(kind: str, names: Collection[str]) -> str:
    """Returns the number of names with the names, or, where they are many, with how many each module has."""
    if not names:
        return f"no {kind} tensors"
    if len(names) <= _MAX_LISTED:
        return f"{len(names)} {kind} ({', '.join(names)})"
    modules = Counter(".".join(name.split(".")[:-1][:3]) or name for name in names)
    listed = [f"{module}: {count}" if count > 1 else module for module, count in modules.most_common()]
    return f"{len(names)} {kind} ({_shortened(listed)})"


def _shortened(items: Collection[str]) -> str:
    return ", ".join(list(items)[:_MAX_LISTED]) + (", …" if len(items) > _MAX_LISTED else "")
