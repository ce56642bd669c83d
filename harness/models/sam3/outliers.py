"""Draws weights that have the outliers of trained transformers, by stated statistics.

Seeded weights (`harness.models.sam3.weights`) are even: activations are of order one, and all channels are similar.
Trained weights are not even, and even weights do not show the digits that a kernel loses next to a large number. These
weights have the seeded standard deviations and the following properties; all other tensors are drawn as seeded weights.

- **Heavy tails.** Matrices and kernels of products follow Student's t with five degrees of freedom, about as many as
  most weights of 30 networks have (Dotzel et al. 2024, "Learning from Students", arXiv:2405.03103).
- **Gains of normalizations** are log-normal: 99.8 % of them span three decades, their root mean square is 1, and in a
  few channels they are several times that. Gains of a few channels that enlarge outliers are what Wei et al. 2022 find
  ("Outlier Suppression", arXiv:2209.13325); that a few dimensions carry most of the size of features, Dettmers et al.
  2022 ("LLM.int8()", arXiv:2208.07339). Three decades is a choice on the hard side.
- **Massive activations.** In a few channels of each residual stream an early feed-forward layer adds about a hundred
  times the median activation, the same for every token, and all later layers carry these values along (Sun et al. 2024,
  "Massive Activations in Large Language Models", arXiv:2402.17762, which finds them in vision transformers too, and
  that they act as biases). The normalizations that read such a stream divide by them; their gains are larger by the
  same factor, except in the massive channels, so that later attention still distinguishes tokens. Single tokens of
  large norm (Darcet et al. 2023, "Vision Transformers Need Registers", arXiv:2309.16588) are not drawn.
- **Attention that concentrates.** In a quarter of the heads queries and keys are larger, so that the weights of a row
  gather on a few keys, as in entropy collapse (Zhai et al. 2023, "Stabilizing Transformer Training by Preventing
  Attention Entropy Collapse", arXiv:2303.06296); the other heads are unchanged.

The figures are constants below, and `conformance/models/sam3/test_model_outliers.py` measures their effects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.models.sam3.weights import Part, draw_weights, fill_seeded, generator, is_norm

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from harness.runtime.arrays import Floats

DEGREES_OF_FREEDOM = 5.0
"""Degrees of freedom of Student's t; the fourth moment exists, and the sixth does not."""

GAIN_SIGMA = math.log(1000) / (2 * 3.0902)
"""Standard deviation of the logarithm of gains: 99.8 % of a normal distribution are within 3.0902 deviations."""
MEDIAN_GAIN = math.exp(-(GAIN_SIGMA**2))
"""The median of a log-normal variable whose mean square is 1."""
LARGE_GAIN = 8.0
LARGE_GAINS = 256
"""One channel in this many has the large gain."""

SHARPENING = 2.0
"""Factor of queries and of keys in the heads that concentrate: the logits' standard deviation of 2 becomes 8."""
CONCENTRATED_HEADS = 4
"""One head in this many concentrates."""


@dataclass(frozen=True)
class Stream:
    """A residual stream with massive activations.

    Attributes:
        name: Name of the stream, from which its channels are drawn.
        source: Pattern of the whole name of the bias that adds the massive activations.
        readers: Pattern of the whole names of the gains of the normalizations that read the stream after the bias.
        channels: Number of massive channels.
        size: Absolute value of massive activations, about a hundred times the median of the stream's absolute values.
        level: Root mean square of the other activations.
        projections: Pattern of the whole names of the input projections of attention that reads the unnormalized stream
            as keys and values. There the weights of massive channels are smaller, because massive channels would drown
            the others.
    """

    name: str
    source: str
    readers: str
    channels: int
    size: float
    level: float
    projections: str = ""

    def massive(self, seed: int, width: int) -> npt.NDArray[np.int64]:
        """Returns the massive channels among `width`."""
        return generator(seed, f"massive channels of {self.name}").choice(width, self.channels, replace=False)

    def spread(self, width: int) -> float:
        """Returns the root mean square of a token's activations, in units of the activations that are not massive."""
        return math.sqrt(1 + self.channels * (self.size / self.level) ** 2 / width)


_LATER = r"\.[1-9]\d*\."
STREAMS = (
    Stream("trunk", r".*\.trunk\.blocks\.0\.mlp\.fc2\.bias", rf".*\.trunk\.blocks{_LATER}norm\d\.weight", 4, 50.0, 1.0),
    Stream(
        "text encoder",
        r".*\.resblocks\.0\.mlp\.c_proj\.bias",
        rf".*(\.resblocks{_LATER}ln_\d|\.ln_final)\.weight",
        4,
        50.0,
        0.7,
    ),
    Stream(
        "geometry encoder",
        r"geometry_encoder\.encode\.0\.linear2\.bias",
        rf"geometry_encoder\.(encode{_LATER}norm\d|encode_norm)\.weight",
        2,
        150.0,
        2.7,
    ),
    Stream(
        "fusion encoder",
        r"transformer\.encoder\.layers\.0\.linear2\.bias",
        rf"transformer\.encoder\.layers{_LATER}norm\d\.weight",
        2,
        250.0,
        3.5,
        r"transformer\.decoder\.layers\.\d+\.cross_attn\.in_proj_weight",
    ),
    Stream(
        "memory attention",
        r".*\.model\.transformer\.encoder\.layers\.0\.linear2\.bias",
        rf".*\.model\.transformer\.encoder\.(layers{_LATER}norm\d|norm)\.weight",
        2,
        250.0,
        3.5,
    ),
)
"""The streams that no layer normalizes; the decoder's is normalized after every layer."""


def outlier_weights(model: torch.nn.Module, seed: int, names: Collection[str] | None = None) -> None:
    """Overwrites in place the tensors of `harness.models.sam3.weights.seed_weights`, with the same arguments."""
    heads = _attention_heads(model)

    def fill(part: Part, values: Floats, rng: np.random.Generator) -> None:
        fill_seeded(part, values, rng)
        if is_norm(part.module):
            if part.local == "weight":
                _draw_gains(part, values, seed, rng)
        elif _is_product(part):
            _make_heavy_tailed(values, rng)
            _sharpen(part, values, heads, seed)
            if stream := _stream("projections", part):
                width = values.shape[1]
                values[width:, stream.massive(seed, width)] *= np.float32(stream.level / stream.size)
        elif stream := _stream("source", part):
            massive = stream.massive(seed, len(values))
            values[massive] = np.copysign(np.float32(stream.size), values[massive])

    draw_weights(model, seed, fill, names)


def _stream(role: str, part: Part) -> Stream | None:
    """Returns the stream whose pattern for a role matches the name of a tensor."""
    return next((stream for stream in STREAMS if re.fullmatch(getattr(stream, role), part.name)), None)


def _is_product(part: Part) -> bool:
    """Returns whether a tensor is a matrix or a kernel of products."""
    import torch

    kinds = (torch.nn.Linear, torch.nn.modules.conv._ConvNd, torch.nn.MultiheadAttention)
    return isinstance(part.module, kinds) and part.local.endswith("weight")


def _make_heavy_tailed(values: Floats, rng: np.random.Generator) -> None:
    """Turns normal values into Student's t of the same variance: by definition a normal over a chi variable."""
    half = DEGREES_OF_FREEDOM / 2
    for row in values.reshape(len(values), -1):  # by rows, so that no second tensor of that size is needed
        row /= np.sqrt(rng.standard_gamma(half, row.shape, dtype=np.float32) / np.float32(half - 1))


def _draw_gains(part: Part, values: Floats, seed: int, rng: np.random.Generator) -> None:
    width = len(values)
    rng.standard_normal(dtype=np.float32, out=values)
    np.exp(np.float32(GAIN_SIGMA) * values, out=values)
    values *= np.float32(MEDIAN_GAIN)
    values[rng.choice(width, width // LARGE_GAINS, replace=False)] = LARGE_GAIN
    if stream := _stream("readers", part):
        values[stream.massive(seed, width)] = MEDIAN_GAIN / stream.spread(width)
        values *= np.float32(stream.spread(width))


def _attention_heads(model: torch.nn.Module) -> dict[str, int]:
    """Returns the number of heads of each attention, by its whole name."""
    counts = {name: getattr(module, "num_heads", None) for name, module in model.named_modules()}
    return {name: count for name, count in counts.items() if isinstance(count, int)}


def _sharpen(part: Part, values: Floats, heads: dict[str, int], seed: int) -> None:
    """Enlarges the rows of queries and keys in the heads that concentrate."""
    owner, _, layer = part.name.removesuffix(".weight").rpartition(".")
    if owner not in heads:
        return
    count = heads[owner]
    heads_to_sharpen = concentrated_heads(seed, owner, count)
    if layer in ("qkv", "in_proj_weight"):
        values.reshape(3, count, -1)[:2, heads_to_sharpen] *= np.float32(SHARPENING)
    elif layer in ("q_proj", "k_proj"):
        values.reshape(count, -1)[heads_to_sharpen] *= np.float32(SHARPENING)


def concentrated_heads(seed: int, attention: str, count: int) -> list[int]:
    """Returns the heads that concentrate: a quarter of several heads, or the single head of a cross-attention.

    Args:
        seed: Seed of the weights.
        attention: Whole name of the attention.
        count: Number of heads.
    """
    if count == 1:
        return [0] if "cross" in attention else []
    drawn_heads = generator(seed, f"concentrated heads of {attention}").choice(
        count, count // CONCENTRATED_HEADS, replace=False
    )
    return sorted(int(head) for head in drawn_heads)
