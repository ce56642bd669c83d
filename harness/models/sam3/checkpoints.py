"""Loads published checkpoints: `sam3.pt`, its tensors in safetensors, and Transformers' `model.safetensors`."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.checkpoint_file import checkpoint_file_problem
from harness.core.errors import HarnessError
from harness.models.sam3.hugging_face import POINTS, from_hugging_face, is_hugging_face

if TYPE_CHECKING:
    import torch

_PREFIXES = {"detector.": "", "tracker.": "inst_interactive_predictor.model."}
"""Prefix in the checkpoint → prefix in the image model (see `sam3.model_builder._load_checkpoint`)."""

_WRAPPER = "module."
"""Before every name where `DistributedDataParallel` was saved with the model."""

_SAM_3_1 = re.compile(r"tracker\.model\..*|.*\.(interactive_convs|propagation_convs)\..*")
"""Names of SAM 3.1, whose necks and tracker are others."""

_INTERACTIVE_ONLY = re.compile(r"inst_interactive_predictor\..*|backbone\.vision_backbone\.sam2_convs\..*")
"""Tensors of the video model, which the image model has only if it is built interactive."""

_TRACKER = ("tracker.sam_", "tracker.model.", "tracker_model.", "inst_interactive_predictor.model.sam_")
"""Beginnings of names of the tracker, in every layout."""

_COMPUTED = re.compile(r"(.*\.)?(freqs_cis|attn_mask)")
"""Buffers that are formulas: they are loaded if the checkpoint has them, and may be absent."""

_MAX_LISTED = 5


def video_name(name: str) -> str:
    """Returns the name that a tensor of the image model has in upstream's checkpoint and video model."""
    for checkpoint_prefix, model_prefix in _PREFIXES.items():
        if model_prefix and name.startswith(model_prefix):
            return checkpoint_prefix + name.removeprefix(model_prefix)
    return f"detector.{name}"


def load_checkpoint(model: torch.nn.Module, path: Path, *, allow_partial: bool = False) -> frozenset[str]:
    """Loads a checkpoint into the model, in place; a checkpoint that does not fit changes nothing.

    The names determine the layout, upstream's or Transformers'. Transformers' layout has no weights for point prompts;
    it is loaded with a warning.

    Args:
        model: The image model, on the CPU.
        path: `.safetensors`, or any other name of a file that `torch.save` wrote.
        allow_partial: Whether missing, unexpected and misshapen tensors are skipped instead of refused.

    Returns:
        Names of the model's tensors that were not loaded; without `allow_partial`, the tensors that the layout never
        has.

    Raises:
        HarnessError: The file is missing, no checkpoint, damaged, of another model, or does not fit.
    """
    import torch

    content = _without_wrapper(
        {str(name): value for name, value in _read(path).items() if isinstance(value, torch.Tensor)}
    )
    if (name := next(filter(_SAM_3_1.fullmatch, content), None)) is not None and not allow_partial:
        raise HarnessError(
            f"The checkpoint {path} is of SAM 3.1, it has {name}, and this program knows SAM 3 alone: "
            "use the published sam3.pt or model.safetensors of SAM 3."
        )
    transformers_layout = is_hugging_face(content)
    tensors = from_hugging_face(content) if transformers_layout else _with_model_names(content)
    weights = dict(model.state_dict())
    unexpected = sorted(name for name in tensors if name not in weights and not _INTERACTIVE_ONLY.fullmatch(name))
    unloaded = {name for name in weights if name not in tensors and not _COMPUTED.fullmatch(name)}
    absent = {name for name in unloaded if transformers_layout and POINTS.fullmatch(name)}
    missing = sorted(unloaded - absent)
    misshapen = sorted(
        name
        for name, tensor in tensors.items()
        if name in weights
        and (tensor.shape != weights[name].shape or tensor.is_complex() != weights[name].is_complex())
    )
    if not any(name in weights for name in tensors):
        raise HarnessError(
            f"The checkpoint {path} belongs to another model: none of its {len(tensors)} tensors has a name of SAM 3's "
            "image model; use the published sam3.pt or model.safetensors."
        )
    if (missing or unexpected or misshapen) and not allow_partial:
        raise HarnessError(
            f"The checkpoint {path} does not fit the model: {_list_names('missing', missing)}; "
            f"{_list_names('unexpected', unexpected)}; {_list_names('misshapen', misshapen)}; "
            "use the checkpoint and the scale that belong together, or allow a partial load."
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in weights and name not in misshapen:
                weights[name].copy_(tensor)
    if any(POINTS.fullmatch(name) for name in absent):
        warnings.warn(
            f"The checkpoint {path} is in the layout of Transformers, which has no weights for point prompts, "
            "so points mean nothing with it; use the published sam3.pt for them.",
            stacklevel=2,
        )
    return frozenset([*unloaded, *misshapen])


def has_point_prompts(path: Path) -> bool:
    """Returns whether the names of a checkpoint that `load_checkpoint` takes include weights for point prompts."""
    return not is_hugging_face(_names(path))


def has_tracker(path: Path) -> bool:
    """Returns whether the names of a checkpoint that `load_checkpoint` takes include the tracker's weights."""
    return any(name.startswith(_TRACKER) for name in _names(path))


def _names(path: Path) -> list[str]:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                return list(_without_wrapper(dict.fromkeys(file.keys())))
        except (SafetensorError, OSError):
            return []  # `load_checkpoint` reports the error
    return list(_without_wrapper({str(name): value for name, value in _read(path).items()}))


def _list_names(kind: str, names: Collection[str]) -> str:
    if not names:
        return f"no {kind} tensors"
    listed = ", ".join(list(names)[:_MAX_LISTED])
    return f"{len(names)} {kind} ({listed}{', …' if len(names) > _MAX_LISTED else ''})"


def _read(path: Path) -> Mapping[str, Any]:
    """Returns the flat name → tensor mapping of a file."""
    problem = checkpoint_file_problem(path)
    if problem is not None:
        raise HarnessError(problem)
    try:
        content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    except OSError as error:
        raise HarnessError(f"The checkpoint {path} cannot be read: {error.strerror}; check its permissions.") from error
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]
    if not isinstance(content, dict):
        raise HarnessError(
            f"The checkpoint {path} holds a {type(content).__name__} instead of named tensors; "
            "use the published sam3.pt."
        )
    return content


def _read_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, TypeError, ValueError) as error:  # PyTorch's, of an extent beyond 64 bits
        raise HarnessError(
            f"The checkpoint {path} is not a safetensors file or truncated ({_first_line(error)}); download it again."
        ) from error


def _read_torch(path: Path) -> Any:
    import torch

    # torch.save writes a zip archive, whose table of contents is at the end: a truncated file is no zip archive.
    try:
        archive = zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # it begins like the end of an archive, and goes on like no archive's
        archive = False
    with path.open("rb") as file:
        if file.read(4) == b"PK\x03\x04" and not archive:
            raise HarnessError(f"The checkpoint {path} is truncated; download it again.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=archive or None)
    except pickle.UnpicklingError as error:
        raise HarnessError(
            f"The checkpoint {path} holds pickled code besides tensors, which is never run; "
            "save its tensors alone or convert it to safetensors."
        ) from error
    except Exception as error:  # a damaged pickle is a program for another machine: it may raise anything
        raise HarnessError(
            f"The checkpoint {path} cannot be read, it is damaged or no checkpoint ({_first_line(error)}); "
            "download it again."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _without_wrapper(content: dict[str, Any]) -> dict[str, Any]:
    """Returns tensors by their names in the model that was saved."""
    if all(name.startswith(_WRAPPER) for name in content):
        return {name.removeprefix(_WRAPPER): value for name, value in content.items()}
    return content


def _with_model_names(content: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns tensors by their names in the image model: published ones have a prefix, a trainer's are the model's."""
    renamed = {}
    for name, tensor in content.items():
        prefix = next(filter(name.startswith, _PREFIXES), "")
        renamed[_PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return renamed
