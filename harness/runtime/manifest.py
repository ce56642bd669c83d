"""Defines the manifest of an artifact folder, `manifest.json`, and reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from harness.runtime.errors import ModelError

FORMAT = 1
"""Version of the folder's layout; a runtime reads this version alone."""
MANIFEST = "manifest.json"
VARIANTS = "variants.json"
"""Describes a folder for several CPUs; see `harness.runtime.variants`."""
VARIANT = "variant.json"
"""Describes one CPU's variant in such a folder: its manifest until its weights are packed."""
LIBRARY = "model.so"
PACKING_LIBRARY = "packing.so"
"""Packs the weights of every entry point; runs on the machine that compiled, whatever the target is."""
CUDART = "libcudart.so.13"
"""CUDA's runtime library that TVM 0.27 is linked with; NVIDIA allows its redistribution (CUDA EULA, attachment A)."""
RUNTIME_LIBRARIES = (
    *(f"libtvm_runtime{device}.{suffix}" for device in ("", "_cuda", "_metal") for suffix in ("so", "dylib")),
    CUDART,
)
"""Libraries that a folder has for machines without TVM."""
OPTIONAL = (PACKING_LIBRARY, *RUNTIME_LIBRARIES)
"""Files without which a folder still runs."""

Description = TypeVar("Description")


def weights_file(entry: str) -> str:
    """Returns the name of the file with the weights of an entry point."""
    return f"{entry}.safetensors"


class ArtifactError(ModelError):
    """A folder that is no artifact, is damaged, or was made for another machine or version."""


@dataclass(frozen=True)
class TensorSpec:
    """An input or output tensor of an entry point; a dimension is a number, or a letter where any extent is allowed.

    Attributes:
        below: For an input of indices, their exclusive upper bound: a number or the letter of a dimension; the lower
            bound is 0. None for other tensors and in folders that were compiled before this field existed.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    below: int | str | None = None


@dataclass(frozen=True)
class Entry:
    """The signature of an entry point.

    Attributes:
        inputs, outputs: Its tensors, in order.
        weights: Names in its weights file, in the order in which it takes them.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: tuple[str, ...] = ()


@dataclass(frozen=True)
class File:
    """Size and checksum of a file of the folder."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All facts about an artifact that are not in its library or its weights.

    Attributes:
        format: `FORMAT` of the version that wrote it.
        made: The time (UTC), the versions of the packages and the options of the compilation.
        target: Name of the target.
        system, architecture: The system that the library runs on, for instance `Linux` and `x86_64`.
        cpu: LLVM's name of the CPU that host code was compiled for.
        cpu_features: The features of this CPU that the code may use, in LLVM's spelling.
        architectures: GPU architectures that the library has code for, in the format of
            `harness.runtime.devices.architecture_problem`; empty if it runs on every GPU.
        scale, strategy: Scale of the model and strategy of its rotary position encoding.
        precision: Type of weights and operands of products: `fp32`, `fp16` or `bf16`. Inputs and outputs of the entry
            points have the types in `entries`, and none of these is a half type.
        float32: Groups of products that stay float32 in a half precision.
        model: Name of the compiled model.
        frontend: Name of the frontend that exported and imported the model.
        weights: Origin of the weights: `seed 0`, or name and digest of a checkpoint.
        trained: Whether the weights are from a checkpoint.
        entries: The entry points, by name.
        files: All other files of the folder, by name.
        extra: The model's own part, which its runtime reads; beside the other keys in the file.
    """

    made: Mapping[str, str]
    target: str
    system: str
    architecture: str
    cpu: str
    cpu_features: tuple[str, ...]
    scale: str
    strategy: str
    weights: str
    trained: bool
    entries: Mapping[str, Entry]
    files: Mapping[str, File]
    architectures: tuple[str, ...] = ()
    precision: str = "fp32"
    float32: tuple[str, ...] = ()
    model: str = "sam3"
    frontend: str = "torch"
    format: int = FORMAT
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns the text of `manifest.json`."""
        facts = asdict(self)
        return json.dumps({**facts.pop("extra"), **facts}, indent=1, sort_keys=True) + "\n"


def read_manifest(folder: Path, name: str = MANIFEST) -> Manifest:
    """Reads a folder's manifest.

    Args:
        folder: The folder.
        name: Name of the file.

    Raises:
        ArtifactError: The file is missing, damaged, or of another version.
    """
    return read_description(folder / name, _manifest)


def read_description(path: Path, parse: Callable[[dict[str, Any]], Description]) -> Description:
    """Reads a JSON file that describes its folder.

    Args:
        path: The file.
        parse: Makes the description from the file's contents; may raise the errors of wrong types and missing keys.

    Raises:
        ArtifactError: The file is missing, damaged, or of another version.
    """
    folder = path.parent
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder: make one with `sam3-tvm compile --out {folder}`")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(_absent(path)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}): compile the model again") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        version = data.get("format") if isinstance(data, dict) else None
        raise ArtifactError(
            f"{folder} was written in version {version} of the format, this program reads version {FORMAT}: "
            "compile the model again, or use the program that compiled it"
        )
    try:
        description = parse(data)
        if not has_type(description, type(description)):
            raise TypeError("a value has the wrong type")
        return description
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{path} is damaged ({error!r}): compile the model again") from error


def has_type(value: Any, kind: Any) -> bool:
    """Returns whether a value, and what is in it, has the types of an annotation."""
    inner = get_args(kind)
    if kind is Any:
        return True
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return isinstance(value, kind) and all(has_type(getattr(value, name), hint) for name, hint in hints.items())  # type: ignore[arg-type]
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(has_type(part, inner[0]) for part in value)
    if get_origin(kind) is Mapping:
        parts = value.items() if isinstance(value, dict) else [(None, None)]
        return all(has_type(key, inner[0]) and has_type(part, inner[1]) for key, part in parts)
    return any(has_type(value, one) for one in inner) if inner else type(value) is kind


def _absent(path: Path) -> str:
    """Returns the sentence that says what to do about a missing description."""
    folder = path.parent
    if (folder / VARIANTS).is_file():
        return f"{folder} is for several CPUs: give the folder of one of them, which is in it"
    if (folder / VARIANT).is_file():
        return f"{folder} has no packed weights yet: load it once on its CPU, within the folder that was compiled"
    return f"{folder} is no compiled model, it has no {path.name}: give the folder that `sam3-tvm compile` wrote"


def _manifest(data: dict[str, Any]) -> Manifest:
    names = {one.name for one in fields(Manifest)} - {"extra"}
    return Manifest(
        **{
            **{name: value for name, value in data.items() if name in names},
            "cpu_features": tuple(data["cpu_features"]),
            "architectures": tuple(data.get("architectures", ())),
            "float32": tuple(data.get("float32", ())),
            "entries": {name: _entry(entry) for name, entry in data["entries"].items()},
            "files": {name: File(**file) for name, file in data["files"].items()},
            "extra": {name: value for name, value in data.items() if name not in names},
        }
    )


def _entry(data: dict[str, Any]) -> Entry:
    return Entry(_specs(data["inputs"]), _specs(data["outputs"]), tuple(data["weights"]))


def _specs(data: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(spec["name"], tuple(spec["shape"]), spec["dtype"], spec.get("below")) for spec in data)
