"""Reads the named tensors of a checkpoint's files, and takes them out of whatever a trainer wrapped around them."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.checkpoint_file import (
    CheckpointFiles,
    checkpoint_file_problem,
    find_checkpoint,
    read_adapter_config,
    read_index,
)
from harness.core.errors import HarnessError
from harness.models.sam3.checkpoints.lora import ALPHA, Lora, merge

if TYPE_CHECKING:
    import torch

_EMA = re.compile(r"(.*_)?ema(_.*)?")
"""Wrappers of moving averages, which are what a trainer evaluates: they are taken where others are beside them."""
_MODEL = re.compile(
    r"model|(model_)?state_dict|model_state|module|_orig_mod|_fsdp_wrapped_module|base_model|net|network|params"
    r"|weights|shadow"
)
"""Wrappers of weights: entries of a dictionary, or beginnings of all names, as in `module.backbone`."""
_STATE = re.compile(
    r"(.*_)?(optim(izers?)?|(lr_)?sched(ulers?)?|scaler|rng|loss(es)?|meters?|steps?|epochs?|iter(ations?)?|callbacks"
    r"|averaged|dataset|elapsed|loops)(_.*)?|random_state"
)
"""Entries that belong to training and may have tensors."""
_MAX_DEPTH = 8
_GLOBAL = re.compile(r"GLOBAL (\S+)")


@dataclass(frozen=True)
class Content:
    """The named tensors of a checkpoint.

    Attributes:
        tensors: Tensors by their names in the model that was saved; LoRA is merged.
        wrappers: Names around the weights that were taken, from the outside to the inside.
        remainder: Number of tensors of each other entry, zero for most, by its path.
        unknown: Those that have tensors and are neither state of training nor weights beside their average.
        merged: Names of the weights that a LoRA changed.
    """

    tensors: Mapping[str, torch.Tensor]
    wrappers: tuple[str, ...] = ()
    remainder: Mapping[str, int] = field(default_factory=dict)
    unknown: Mapping[str, int] = field(default_factory=dict)
    merged: tuple[str, ...] = ()


def read_content(path: Path, *, values: bool = True) -> Content:
    """Reads a checkpoint, with its parts, and merges its LoRA in float32.

    Args:
        path: The file or folder.
        values: Whether the tensors are read and merged, or on the device `meta` without values, which takes no time.

    Raises:
        HarnessError: A file is missing, damaged or no checkpoint, has code, two sets of weights, or a LoRA that does
            not fit.
    """
    problem = checkpoint_file_problem(path)
    if problem is not None:
        raise HarnessError(problem)
    files = find_checkpoint(path)
    content = _read_files(files, path)
    config = None if files.adapter is None else read_adapter_config(files.adapter)
    base = {} if files.base is None else _read_files(files.base, files.base.weights[0]).tensors
    if not values:
        content, base = replace(content, tensors=_without_values(content.tensors)), _without_values(base)
    lora = Lora(path, content.tensors, base, config)
    if not lora.exists:
        return content
    tensors, merged = merge(lora)
    return replace(content, tensors=tensors, merged=merged)


def _without_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns tensors without values, but for a LoRA's scales."""
    return {name: tensor if name.endswith(ALPHA) else tensor.to("meta") for name, tensor in tensors.items()}


def _read_files(files: CheckpointFiles, path: Path) -> Content:
    if files.index is None:
        return _unwrap(_read(files.weights[0]), path)
    tensors: dict[str, Any] = {}
    places = read_index(files.index)
    for part in files.weights:
        content = _read(part)
        for name, value in content.items():
            if places.get(name) != part.name:
                raise HarnessError(
                    f"The index {files.index} does not say that {part.name} has {name}; download all its parts again."
                )
            tensors[name] = value
    if absent := sorted(places.keys() - tensors.keys()):
        raise HarnessError(
            f"The checkpoint {files.index} lacks {len(absent)} tensors that it lists ({absent[0]}); "
            "download all its parts again."
        )
    return _unwrap(tensors, path)


def _unwrap(content: Mapping[str, Any], path: Path) -> Content:
    wrappers: list[str] = []
    remainder: dict[str, int] = {}
    unknown: dict[str, int] = {}

    def leave(names: Iterable[str], is_average: bool = False) -> None:
        for name in names:
            entry, count = ".".join([*wrappers, name]), _count(content[name])
            remainder[entry] = count
            if count and not (_STATE.fullmatch(name) or (is_average and _is_wrapper(name))):
                unknown[entry] = count

    for _ in range(_MAX_DEPTH):
        content = _nested(content)
        found = [name for name, value in content.items() if _is_wrapper(name) and _has_weights(value)]
        averages = [name for name in found if _EMA.fullmatch(name)]
        found = averages or found
        if len(found) > 1:
            raise HarnessError(
                f"The checkpoint {path} has several sets of weights, {', '.join(found)}; save one of them alone, "
                "and give that file."
            )
        if not found:
            break
        leave((name for name in content if name != found[0]), bool(averages))
        wrappers += found
        content = _with_text_keys(content[found[0]])
    tensors = {name: value for name, value in content.items() if _is_tensor(value)}
    leave(name for name in content if name not in tensors)
    return Content(tensors, tuple(wrappers), remainder, unknown)


def _nested(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns names that begin with wrappers as dictionaries of these, as if they had been saved so."""
    tensors = [name for name, value in content.items() if _is_tensor(value)]
    heads = {name.partition(".")[0] for name in tensors}
    wrappers = {head for head in heads if _is_wrapper(head)}
    if wrappers & content.keys() or not all(map(_STATE.fullmatch, heads - wrappers)):
        return content
    nested: dict[str, Any] = {}
    for name, value in content.items():
        head, _, rest = name.partition(".")
        if head in wrappers:
            nested.setdefault(head, {})[rest] = value
        else:
            nested[name] = value
    return nested


def _is_wrapper(name: str) -> bool:
    return bool(_EMA.fullmatch(name) or _MODEL.fullmatch(name))


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _has_weights(value: object, depth: int = _MAX_DEPTH) -> bool:
    """Returns whether a value is a dictionary of named tensors, or has one in a wrapper."""
    if not isinstance(value, Mapping) or not depth:
        return False
    return any(
        _is_tensor(item) or (isinstance(name, str) and _is_wrapper(name) and _has_weights(item, depth - 1))
        for name, item in value.items()
    )


def _count(value: object) -> int:
    """Returns the number of tensors in nested dictionaries and lists."""
    return sum(map(_is_tensor, _values(value)))


def _values(value: object) -> Iterator[object]:
    remaining, visited = [value], set()
    while remaining:
        item = remaining.pop()
        if id(item) in visited:
            continue
        visited.add(id(item))
        yield item
        if isinstance(item, Mapping):
            remaining += item.values()
        elif isinstance(item, list | tuple | set):
            remaining += item


def _with_text_keys(content: Mapping[Any, Any]) -> dict[str, Any]:
    return {name if isinstance(name, str) else f"[{name!r}]": value for name, value in content.items()}


def _read(path: Path) -> dict[str, Any]:
    """Returns the content of a file, a mapping."""
    try:
        content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    except OSError as error:
        raise HarnessError(f"The checkpoint {path} cannot be read: {error.strerror}; check its permissions.") from error
    if not isinstance(content, dict):
        raise HarnessError(
            f"The checkpoint {path} holds a {type(content).__name__} instead of named tensors; "
            "use the published sam3.pt."
        )
    return _with_text_keys(content)


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
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # what it cannot read is an error below
            return torch.load(path, map_location="cpu", weights_only=True, mmap=archive or None)
    except pickle.UnpicklingError as error:
        code = _GLOBAL.search(str(error))
        raise HarnessError(
            f"The checkpoint {path} holds pickled code besides tensors{f' ({code[1]})' if code else ''}, which is "
            "never run; save its tensors alone or convert it to safetensors."
        ) from error
    except Exception as error:  # a damaged pickle is a program for another machine: it may raise anything
        raise HarnessError(
            f"The checkpoint {path} cannot be read, it is damaged or no checkpoint ({_first_line(error)}); "
            "download it again."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
