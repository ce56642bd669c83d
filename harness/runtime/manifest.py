"""The manifest of an artifact folder: `manifest.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

from harness.runtime.errors import Sam3Error

FORMAT = 1
"""Version of the folder's layout; a runtime reads the version that it was written for and no other."""
MANIFEST = "manifest.json"
VARIANTS = "variants.json"
"""Describes a folder for several CPUs; see `harness.runtime.variants`."""
VARIANT = "variant.json"
"""Describes one CPU's part of such a folder: its manifest as long as it has no weights."""
LIBRARY = "model.so"
PACKING_LIBRARY = "packing.so"
"""Packs the weights of every entry point; runs on the machine that compiled, whatever was compiled for."""
CUDART = "libcudart.so.13"
"""CUDA's runtime library, as TVM 0.27 is linked with it; NVIDIA allows to pass it on (CUDA EULA, attachment A)."""
RUNTIME_LIBRARIES = (
    *(f"libtvm_runtime{device}.{suffix}" for device in ("", "_cuda", "_metal") for suffix in ("so", "dylib")),
    CUDART,
)
"""Libraries in a folder for machines where TVM is not installed."""
OPTIONAL = (PACKING_LIBRARY, *RUNTIME_LIBRARIES)
"""Files that a folder may lack and still run."""

Description = TypeVar("Description")


def weights_file(entry: str) -> str:
    """Returns the name of the file with the weights of an entry point."""
    return f"{entry}.safetensors"


class ArtifactError(Sam3Error):
    """A folder that is no artifact, is damaged, or was made for another machine or version, told in one sentence."""


@dataclass(frozen=True)
class Capacity:
    """How long one prompt may be.

    Attributes:
        points, boxes: Of a prompt that says what to look for; with the 32 tokens of the text and the CLS token, the
            defaults make a prompt of 128 tokens.
        clicks: Points of a prompt for one object; 0 where the model answers no such prompts.
        video: Whether objects are tracked through videos; only a model that answers clicks does.
    """

    points: int = 47
    boxes: int = 48
    clicks: int = 0
    video: bool = False

    def includes(self, other: Capacity) -> bool:
        """Returns whether a model of this capacity answers every prompt that one of the other capacity answers."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(own >= others for own, others in pairs)


DEFAULT_CAPACITY = Capacity()
"""Without prompts for one object."""
DEFAULT_CLICKS = 16
"""As many as upstream's tracker reads (`max_point_num_in_prompt_enc` of `Sam3TrackerPredictor`)."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that goes into an entry point or comes out: a dimension is a number, or a letter where any will do.

    Attributes:
        below: Of an input that indexes something: its values are at least 0 and less than this, a number or the letter
            of a dimension; None of any other, and in folders that were compiled before there were ranges.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    below: int | str | None = None


@dataclass(frozen=True)
class Entry:
    """The signature of an entry point; `weights` are names in its weights file, in the order in which it takes them."""

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
    """Everything about an artifact that is not in its library or its weights.

    Attributes:
        format: `FORMAT` of the version that wrote it.
        made: How it was made: when (UTC), versions of the packages, the options that were given.
        target: Name of the target.
        system, architecture: What the library runs on, `Linux` and `x86_64` for instance.
        cpu: LLVM's name of the CPU that host code was compiled for.
        cpu_features: The features of it that the code may use, in LLVM's spelling.
        architectures: Architectures of GPUs that the library has code for, as
            `harness.runtime.devices.architecture_problem` reads them; none if it runs on every one.
        scale, strategy: Which model, and how its rotary position encoding was compiled.
        precision: Type in which weights and operands of products are kept: `fp32`, `fp16` or `bf16`. Inputs and
            outputs of the entry points are as `entries` says, and no half type is among them.
        float32: Groups of products that stayed float32 in a half precision.
        model: Name of the model that was compiled.
        frontend: Name of the frontend through which it was.
        weights: Where the weights are from: `seed 0`, or name and digest of a checkpoint.
        trained: Whether they are from a checkpoint.
        capacity: The longest prompt.
        point_prompts: Whether the weights know points; those in Transformers' layout do not.
        vocabulary: Name of the tokenizer's vocabulary file.
        entries: The entry points, by name.
        files: Every other file of the folder, by name.
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
    capacity: Capacity
    vocabulary: str
    entries: Mapping[str, Entry]
    files: Mapping[str, File]
    point_prompts: bool = True
    architectures: tuple[str, ...] = ()
    precision: str = "fp32"
    float32: tuple[str, ...] = ()
    model: str = "sam3"
    frontend: str = "torch"
    format: int = FORMAT

    def to_json(self) -> str:
        """Returns the text of `manifest.json`."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def read_manifest(folder: Path, name: str = MANIFEST) -> Manifest:
    """Reads a folder's manifest.

    Args:
        folder: The folder.
        name: Name of the file.

    Raises:
        ArtifactError: There is none, or it is of another version or damaged.
    """
    return read_description(folder / name, _manifest)


def read_description(path: Path, parse: Callable[[dict[str, Any]], Description]) -> Description:
    """Reads a file that describes its folder, in JSON.

    Args:
        path: The file.
        parse: Makes the description of what the file has; may raise what wrong types and missing keys raise.

    Raises:
        ArtifactError: There is none, or it is of another version or damaged.
    """
    folder = path.parent
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder: make one with `sam3-tvm compile --out {folder}`")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(_absent(path)) from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}): compile the model again") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        raise ArtifactError(
            f"{folder} was written in version {found} of the format, this program reads version {FORMAT}: "
            "compile the model again, or use the program that compiled it"
        )
    try:
        return parse(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{path} is damaged ({error!r}): compile the model again") from error


def _absent(path: Path) -> str:
    """Returns what to do about a description that is not there."""
    folder = path.parent
    if (folder / VARIANTS).is_file():
        return f"{folder} is for several CPUs: give the folder of one of them, which is in it"
    if (folder / VARIANT).is_file():
        return f"{folder} has no packed weights yet: load it once on its CPU, within the folder that was compiled"
    return f"{folder} is no compiled model, it has no {path.name}: give the folder that `sam3-tvm compile` wrote"


def _manifest(data: dict[str, Any]) -> Manifest:
    return Manifest(
        **{
            **data,
            "cpu_features": tuple(data["cpu_features"]),
            "architectures": tuple(data.get("architectures", ())),
            "float32": tuple(data.get("float32", ())),
            "capacity": Capacity(**data["capacity"]),
            "entries": {name: _entry(entry) for name, entry in data["entries"].items()},
            "files": {name: File(**file) for name, file in data["files"].items()},
        }
    )


def _entry(data: dict[str, Any]) -> Entry:
    return Entry(_specs(data["inputs"]), _specs(data["outputs"]), tuple(data["weights"]))


def _specs(data: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(spec["name"], tuple(spec["shape"]), spec["dtype"], spec.get("below")) for spec in data)
