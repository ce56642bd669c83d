"""Finds the files of a checkpoint and recognizes them by their first bytes, before anything large is imported."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from harness.core.errors import HarnessError
from harness.runtime.manifest import File

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
"""First bytes of the formats of torch.save: a ZIP archive, or a pickle before torch 1.6."""
_TAR, _TAR_OFFSET = b"ustar", 257
"""Mark of a tar archive (POSIX.1-1988), the format of torch 0.1, and its offset in bytes."""
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_INDEX = ".index.json"
ADAPTER_CONFIG = "adapter_config.json"
"""Name of the file in which PEFT says what an adapter is for."""
_T = TypeVar("_T")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


class AdapterConfig(Struct, frozen=True):
    """The fields of PEFT's description of a LoRA that say how it is merged."""

    base_model_name_or_path: str | None = None
    peft_type: str = "LORA"
    r: int | None = None
    lora_alpha: float | None = None
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None


@dataclass(frozen=True)
class CheckpointDescription:
    """The description of a checkpoint by a model that takes it, plain data that lets a command open it once.

    Attributes:
        sentence: What it is.
        abilities: What the model can do with it, in the model's words.
    """

    sentence: str
    abilities: tuple[str, ...]


class _Index(Struct, frozen=True):
    weight_map: dict[str, str]


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint.

    Attributes:
        weights: Files with named tensors.
        index: File that lists which of them has which tensor, if there are several.
        adapter: PEFT's description of a LoRA, if the weights have one.
        base: Files of the weights that the LoRA is added to, if they are elsewhere.
    """

    weights: tuple[Path, ...]
    index: Path | None = None
    adapter: Path | None = None
    base: CheckpointFiles | None = None

    @property
    def all(self) -> tuple[Path, ...]:
        """Returns every file, descriptions first."""
        described = [path for path in (self.adapter, self.index) if path is not None]
        return (*described, *self.weights, *(() if self.base is None else self.base.all))


def find_checkpoint(path: Path) -> CheckpointFiles:
    """Returns the files of a checkpoint.

    Args:
        path: A file of weights, an index of several, or a folder with one of these or with an adapter of PEFT.

    Raises:
        HarnessError: A file is missing, or it is not clear which one is meant.
    """
    if not path.exists():
        raise HarnessError(f"The checkpoint {path} does not exist; check the path.")
    if path.is_dir():
        return _find_in_folder(path)
    if not path.is_file():
        raise HarnessError(f"The checkpoint {path} is not a file; give the .pt or .safetensors file itself.")
    if path.name == ADAPTER_CONFIG:
        return _find_adapter(path)
    return _find_parts(path) if path.suffix == ".json" else CheckpointFiles((path,))


def _find_in_folder(folder: Path) -> CheckpointFiles:
    if (folder / ADAPTER_CONFIG).is_file():
        return _find_adapter(folder / ADAPTER_CONFIG)
    indices = sorted(path for path in folder.iterdir() if path.name.endswith(_INDEX))
    files = indices or sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    if len(files) != 1:
        names = ", ".join(path.name for path in files)
        raise HarnessError(
            f"The folder {folder} has several checkpoints, {names}; give one of these files."
            if files
            else f"The folder {folder} has no checkpoint; give a .pt or .safetensors file, or the folder of one."
        )
    return find_checkpoint(files[0])


def _find_parts(index: Path) -> CheckpointFiles:
    names = sorted(set(read_index(index).values()))
    if outside := next((name for name in names if Path(name).name != name), None):
        raise HarnessError(f"The index {index} names the part {outside!r}, which is no name in its folder; repair it.")
    if absent := [name for name in names if not (index.parent / name).is_file()]:
        raise HarnessError(
            f"The checkpoint {index} lacks {len(absent)} of its {len(names)} parts ({', '.join(absent[:3])}"
            f"{', …' if len(absent) > 3 else ''}); download them into its folder."
        )
    return CheckpointFiles(tuple(index.parent / name for name in names), index)


def _find_adapter(description: Path) -> CheckpointFiles:
    """Finds an adapter and its base, whose path `base_model_name_or_path` begins at the adapter's folder or here."""
    folder = description.parent
    base = read_adapter_config(description).base_model_name_or_path
    found = next((folder / name for name in _ADAPTERS if (folder / name).is_file()), None)
    if not base:
        candidates = [found] if found else sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
        if len(candidates) != 1:
            raise HarnessError(f"The adapter {folder} has {len(candidates)} files of weights; leave the one it is.")
        return CheckpointFiles((candidates[0],), adapter=description)
    if found is None:
        raise HarnessError(f"The adapter {folder} has no {_ADAPTERS[0]}; save it again with PEFT's save_pretrained.")
    paths = [place for place in (folder / base, Path(base)) if place.exists()]
    if not paths:
        raise HarnessError(
            f"The adapter {folder} belongs to {base}, which is no file or folder here: write the path of the base's "
            f"weights as base_model_name_or_path into {ADAPTER_CONFIG}, or save the merged model."
        )
    if paths[0].name == ADAPTER_CONFIG or (paths[0] / ADAPTER_CONFIG).is_file():
        raise HarnessError(f"The adapter {folder} belongs to another adapter, {paths[0]}; save the merged model.")
    return CheckpointFiles((found,), adapter=description, base=find_checkpoint(paths[0]))


def read_adapter_config(path: Path) -> AdapterConfig:
    """Returns PEFT's description of a LoRA.

    Raises:
        HarnessError: The file cannot be read or is something else.
    """
    return _read_json(path, AdapterConfig, "description of an adapter")


def read_index(path: Path) -> dict[str, str]:
    """Returns the name of the file that has each tensor of a checkpoint in parts.

    Raises:
        HarnessError: The file cannot be read or is something else.
    """
    return _read_json(path, _Index, "index of a checkpoint").weight_map


def _read_json(path: Path, kind: type[_T], name: str) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise HarnessError(f"The file {path} cannot be read: {error.strerror}; check its permissions.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HarnessError(
            f"The file {path} is no {name} or damaged ({error}); give the file of the weights or download it again."
        ) from error


def checkpoint_file_problem(path: Path) -> str | None:
    """Returns why a path cannot be a checkpoint, by names and first bytes; None if it may be one."""
    try:
        files = find_checkpoint(path)
    except HarnessError as error:
        return str(error)
    except OSError as error:
        return f"The checkpoint {path} cannot be read: {error.strerror}; check its permissions."
    weights = (*files.weights, *(() if files.base is None else files.base.weights))
    return next(filter(None, map(_file_problem, weights)), None)


def _file_problem(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            head = file.read(_TAR_OFFSET + len(_TAR))
    except OSError as error:
        return f"The checkpoint {path} cannot be read: {error.strerror}; check its permissions."
    if path.suffix == ".safetensors":
        # Eight bytes with the length of a header in JSON, then the header.
        if head[8:9] == b"{":
            return None
        return f"The checkpoint {path} is not a safetensors file or is truncated; download it again."
    if head.startswith((_ZIP, _PICKLE)) or head[_TAR_OFFSET:] == _TAR:
        return None
    return f"The file {path} is not a checkpoint; give a .pt file saved by torch or a .safetensors file."


def checkpoint_digest(path: Path) -> File:
    """Returns the size and checksum of a checkpoint; those of several files are of all, in the format of sha256sum.

    Raises:
        HarnessError: A file is missing.
        OSError: A file cannot be read.
    """
    from harness.runtime.weights import file_digest

    files = find_checkpoint(path).all
    digests = [file_digest(file) for file in files]
    if len(files) == 1:
        return digests[0]
    lines = "".join(f"{digest.sha256}  {file.name}\n" for file, digest in zip(files, digests, strict=True))
    return File(sum(digest.bytes for digest in digests), hashlib.sha256(lines.encode()).hexdigest())
