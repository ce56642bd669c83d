"""Draws seeded weights, which depend on the seed and the parameter's name alone and have no degenerate tensor.

Upstream leaves some parameters at zero, at 1e-6 or uninitialised, where a wrong result would be invisible. Here every
tensor is drawn so that activations stay of order one at every scale, attention is neither uniform nor one-hot, and
boxes, scores and masks are not saturated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from harness.core.processes.threads import thread_count
from harness.runtime.arrays import Floats

if TYPE_CHECKING:
    import torch

_RANDOM_BUFFERS = re.compile(r".*[._]pe_layer\.positional_encoding_gaussian_matrix")
"""Buffers that upstream draws at random when the model is built; all others are formulas and stay."""


@dataclass(frozen=True)
class Distribution:
    """A normal distribution; `std` is multiplied by `1/sqrt(fan_in)` where `by_fan_in` is set."""

    std: float
    mean: float = 0.0
    by_fan_in: bool = False


_NORM_WEIGHT = Distribution(std=0.1, mean=1.0)
_BIAS = Distribution(std=0.05)
_MATRIX = Distribution(std=1.0, by_fan_in=True)
_OTHER = Distribution(std=0.5)


def _gain(gain: float) -> Distribution:
    return Distribution(std=gain, by_fan_in=True)


_BY_NAME: tuple[tuple[str, Distribution], ...] = (
    # Attention logits get a standard deviation of about 2: a few dozen of 5184 keys carry the weight.
    (r".*\.(qkv\.weight|in_proj_weight)", _gain(1.4)),
    # Residual branches stay small against the stream that 32 (24) of them add up to.
    (r".*\.trunk\.blocks\.\d+\.(attn\.proj|mlp\.fc2)\.weight", _gain(0.2)),
    (r".*\.resblocks\.\d+\.(attn\.out_proj|mlp\.c_proj)\.weight", _gain(0.25)),
    (
        r"(detector\.)?(transformer\.encoder\.layers|geometry_encoder\.encode)\.\d+\.(.*\.out_proj|linear2)\.weight",
        _gain(0.4),
    ),
    # The part that all 200 queries get from attention must not drown the part that distinguishes them: with 0.2, the
    # six layers of `full` leave no query above the threshold 0.5 for one prompt, and nearly all queries for another.
    (r"(detector\.)?transformer\.decoder\.layers\.\d+\.(.*\.out_proj|linear2)\.weight", _gain(0.14)),
    # Something is present, so that a score, which is its product with the class, is above 0.5 for some queries.
    (r".*\.presence_token_head\.layers\.2\.bias", Distribution(std=0.05, mean=2.8)),
    (r".*\.token_embedding\.weight", Distribution(std=0.5)),
    (r".*\.(pos_embed|positional_embedding)", Distribution(std=0.3)),
    # Layers before a ReLU keep the variance (He et al. 2015).
    (r".*\.(linear1|layers\.0)\.weight", _gain(1.4)),
    (r".*\.(mask_embed|bbox_embed|presence_token_head)\.layers\.1\.weight", _gain(1.4)),
    (r".*\.pixel_decoder\.conv_layers\.\d+\.weight", _gain(1.4)),
    # Boxes move visibly, and no further than sigmoid still resolves.
    (r".*\.bbox_embed\.layers\.2\.weight", _gain(0.3)),
    (r".*\.reference_points\.weight", Distribution(std=1.0)),
    (r".*\.query_embed\.weight", Distribution(std=1.0)),
    # Mask logits are dot products of 256 numbers: of both signs, and no larger than lets PyTorch's own rounding errors
    # stay within the strict gate after the whole model.
    (r".*\.mask_embed\.layers\.2\.weight", _gain(0.14)),
    (r".*\.instance_seg_head\.weight", _gain(0.5)),
    (r".*\.(gamma|ls_\d\.gamma)", Distribution(std=0.05, mean=0.3)),
    # The tracker: attention to memories as in the trunk; objects are present, so that object scores are above zero.
    (r".*\.model\.transformer\.encoder\.layers\.\d+\.(self_attn|cross_attn_image)\.[qk]_proj\.weight", _gain(1.4)),
    (r"tracker\.model\.transformer\.encoder\.layers\.\d+\.(self|cross)_attn_[qk]_proj\.weight", _gain(1.4)),
    (r".*\.model\.transformer\.encoder\.layers\.\d+\.linear2\.weight", _gain(0.4)),
    (r".*[._]sam_mask_decoder\.transformer\..*\.(lin1|[qk]_proj)\.weight", _gain(1.4)),
    (r".*\.pred_obj_score_head\.layers\.2\.bias", Distribution(std=0.05, mean=2.8)),
    # The layer norms of a mask prompt read 4 and 16 channels: nearly equal channels would enlarge rounding errors.
    (r".*\.mask_downscaling\.[03]\.bias", Distribution(std=1.0)),
    (r".*\.output_hypernetworks_mlps\.\d\.layers\.2\.weight", _gain(0.3)),
    # Some single masks are stable and kept, others are unstable and replaced.
    (r".*\.output_hypernetworks_mlps\.0\.layers\.2\.bias", Distribution(std=0.05, mean=0.15)),
)


def generator(seed: int, name: str) -> np.random.Generator:
    """Returns the random number generator of one parameter, which depends on seed and name alone."""
    digest = blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))


@dataclass(frozen=True)
class Part:
    """One tensor of a model whose values are drawn.

    Attributes:
        name: Whole name of the tensor.
        module: The module that owns the tensor.
        local: Name of the tensor in the module.
        tensor: The tensor itself, fp32.
        distribution: Distribution of the seeded values, fan-in resolved.
    """

    name: str
    module: torch.nn.Module
    local: str
    tensor: torch.Tensor
    distribution: Distribution


Fill = Callable[[Part, Floats, np.random.Generator], None]
"""Fills an array of a tensor's shape with its values, from the tensor's own random numbers."""


def seed_weights(model: torch.nn.Module, seed: int, names: Collection[str] | None = None) -> None:
    """Overwrites in place every parameter, and every buffer that upstream draws at random.

    Args:
        model: SAM 3 image model on the CPU, fp32.
        seed: Any integer; the same seed and name give the same values at every scale.
        names: If given, only the tensors of these names are overwritten.
    """
    draw_weights(model, seed, fill_seeded, names)


def draw_weights(model: torch.nn.Module, seed: int, fill: Fill, names: Collection[str] | None = None) -> None:
    """Overwrites the tensors of `seed_weights`, which has the other arguments, with the values of `fill`."""
    parts = [part for part in _parts(model) if names is None or part.name in names]
    # Each tensor has its own generator, and NumPy draws without holding the interpreter's lock.
    with ThreadPoolExecutor(thread_count()) as pool:
        futures = [pool.submit(_overwrite, part, fill, generator(seed, part.name)) for part in parts]
    for future in futures:
        future.result()


def is_norm(module: torch.nn.Module) -> bool:
    """Returns whether the module is one of PyTorch's or upstream's normalizations."""
    return "norm" in type(module).__name__.lower()


def _parts(model: torch.nn.Module) -> Iterator[Part]:
    visited: set[int] = set()
    for prefix, module in model.named_modules():
        for local, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{local}" if prefix else local
            if id(parameter) not in visited:
                visited.add(id(parameter))
                yield Part(name, module, local, parameter.data, _distribution(module, name, local, parameter))
        for local, buffer in module.named_buffers(recurse=False):
            name = f"{prefix}.{local}" if prefix else local
            if _RANDOM_BUFFERS.fullmatch(name):
                yield Part(name, module, local, buffer.data, Distribution(std=1.0))


def _distribution(module: torch.nn.Module, name: str, local: str, parameter: torch.Tensor) -> Distribution:
    """Returns the distribution of one parameter, by its name or else by its kind, with fan-in resolved."""
    import torch

    match = next((chosen for pattern, chosen in _BY_NAME if re.fullmatch(pattern, name)), None)
    if match is not None:
        distribution = match
    elif is_norm(module):
        distribution = _NORM_WEIGHT if local == "weight" else _BIAS
    elif local.endswith("bias"):
        distribution = _BIAS
    elif isinstance(module, torch.nn.Embedding) or not local.endswith("weight"):
        distribution = _OTHER
    else:
        distribution = _MATRIX
    if not distribution.by_fan_in:
        return distribution
    if isinstance(module, torch.nn.ConvTranspose2d):
        # Each output pixel sees kernel/stride taps per axis of every input channel.
        taps = math.prod(k / s for k, s in zip(module.kernel_size, module.stride, strict=True))
        fan_in = parameter.shape[0] * max(taps, 1.0)
    else:
        fan_in = math.prod(parameter.shape[1:])
    return Distribution(std=distribution.std / math.sqrt(fan_in), mean=distribution.mean)


def fill_seeded(part: Part, values: Floats, rng: np.random.Generator) -> None:
    """Fills an array with the seeded values of a tensor."""
    rng.standard_normal(dtype=np.float32, out=values.reshape(-1))
    if values.size == 1:
        # A single number may come out near zero, which a whole tensor cannot.
        values += np.copysign(np.float32(0.5), values)
    values *= np.float32(part.distribution.std)
    if part.distribution.mean:
        values += np.float32(part.distribution.mean)


def _overwrite(part: Part, fill: Fill, rng: np.random.Generator) -> None:
    import torch

    tensor = part.tensor
    values = tensor.numpy() if tensor.is_contiguous() else np.empty(tuple(tensor.shape), np.float32)
    fill(part, values, rng)
    if not tensor.is_contiguous():
        tensor.copy_(torch.from_numpy(values))
