"""The oracle really is float64: against NumPy, and by watching every operator that runs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.models.sam3.upstream import upstream
from harness.parity.metrics import bitwise_different
from harness.parity.oracle import oracle, reference

NARROW = {torch.float32, torch.float16, torch.bfloat16, torch.complex64}


class Watch(TorchDispatchMode):
    """Records the operators that return anything narrower than float64; views of what exists compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow: set[str] = set()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators += 1
        computed = func is not torch.ops.aten.detach.default
        if computed and any(isinstance(leaf, torch.Tensor) and leaf.dtype in NARROW for leaf in tree_leaves(result)):
            self.narrow.add(str(func))
        return result


def watched_oracle(module: nn.Module, args: tuple[torch.Tensor, ...], names: list[str]) -> dict[str, np.ndarray]:
    with Watch() as watch:
        result = oracle(module, args, names)
    assert watch.operators > 0
    assert watch.narrow == set()
    return result


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleDict(parts)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*self.parts.values(), *args)


def seeded(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.requires_grad_(False).copy_(values / max(parameter.shape[-1], 1) ** 0.5)
    return module.eval()


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- upstream's hard-coded fp32 spots ---


def rope_attention() -> nn.Module:
    with upstream():
        from sam3.model.vitdet import Attention

        return seeded(Attention(64, 4, use_rope=True, rope_pt_size=(3, 3), rope_interp=True, input_size=(6, 6)))


def test_attention_with_complex_rope_is_float64_to_the_last_digits():
    module, x = rope_attention(), random(2, 6, 6, 64)
    found = watched_oracle(module, (x,), ["y"])["y"]
    weights = {name: tensor.numpy().astype(np.float64) for name, tensor in module.named_parameters()}
    table = module.freqs_cis.numpy().astype(np.complex128)

    tokens = x.numpy().astype(np.float64).reshape(2, 36, 64)
    qkv = (tokens @ weights["qkv.weight"].T + weights["qkv.bias"]).reshape(2, 36, 3, 4, 16).transpose(2, 0, 3, 1, 4)

    def rotated(heads: np.ndarray) -> np.ndarray:
        pairs = np.ascontiguousarray(heads).view(np.complex128) * table
        return np.ascontiguousarray(pairs).view(np.float64)

    q, k, v = rotated(qkv[0]), rotated(qkv[1]), qkv[2]
    scores = q @ k.swapaxes(-1, -2) / 4
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (scores / scores.sum(-1, keepdims=True)) @ v
    wanted = mixed.transpose(0, 2, 1, 3).reshape(2, 36, 64) @ weights["proj.weight"].T + weights["proj.bias"]
    np.testing.assert_allclose(found.reshape(2, 36, 64), wanted, rtol=0, atol=1e-14 * np.abs(wanted).max())


def test_converting_the_module_alone_would_not_be_enough():
    """Why the oracle runs below the operators: `.double()` falls back to fp32 in the rotary encoding."""
    module, x = rope_attention(), random(2, 6, 6, 64)
    exact = oracle(module, (x,), ["y"])["y"]
    with torch.no_grad():
        converted = copy.deepcopy(module).double()(x.double()).numpy()
    assert 1e-10 < np.abs(converted - exact).max() < 1e-5


def test_roi_align_is_the_mean_of_bilinear_samples_in_float64():
    """`sampling_ratio=-1`: each bin is the mean over ceil(size / 7) samples in each direction."""
    with upstream():
        from torchvision.ops import roi_align
    features = random(1, 3, 20, 24)
    boxes = torch.tensor([[[2.3, 3.1, 17.9, 14.7]], [[5.55, 1.2, 9.01, 16.6]]])
    module = Call(lambda f, b: roi_align(f, b.float().transpose(0, 1).unbind(0), 7))
    found = watched_oracle(module, (features, boxes), ["y"])["y"]
    f = features.numpy().astype(np.float64)[0]
    for roi, box in enumerate(boxes.numpy().astype(np.float64)[:, 0]):
        width, height = box[2] - box[0], box[3] - box[1]
        per_bin = np.ceil(height / 7), np.ceil(width / 7)
        for i in range(7):
            for j in range(7):
                ys = box[1] + height / 7 * (i + (np.arange(per_bin[0]) + 0.5) / per_bin[0])
                xs = box[0] + width / 7 * (j + (np.arange(per_bin[1]) + 0.5) / per_bin[1])
                samples = [bilinear(f, y, x) for y in ys for x in xs]
                np.testing.assert_allclose(found[roi, :, i, j], np.mean(samples, axis=0), rtol=1e-13, atol=1e-14)


def bilinear(f: np.ndarray, y: float, x: float) -> np.ndarray:
    top, left = int(y), int(x)
    dy, dx = y - top, x - left
    upper = f[:, top, left] * (1 - dx) + f[:, top, left + 1] * dx
    lower = f[:, top + 1, left] * (1 - dx) + f[:, top + 1, left + 1] * dx
    return upper * (1 - dy) + lower * dy


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "after a forward pass"])
def test_position_encodings_are_float64_whether_they_were_cached_or_not(warm):
    with upstream():
        from sam3.model.position_encoding import PositionEmbeddingSine

        module = PositionEmbeddingSine(num_pos_feats=16, normalize=True).eval()
    x = random(1, 3, 5, 7)
    if warm:
        reference(module, (x,), ["pos"])
    before = {size: table.clone() for size, table in module.cache.items()}
    found = watched_oracle(module, (x,), ["pos"])["pos"]
    assert module.cache.keys() == before.keys()
    assert all(torch.equal(module.cache[size], before[size]) for size in before)

    period = 10000 ** (2 * (np.arange(8) // 2) / 8)

    def encoded(position: np.ndarray, last: int) -> np.ndarray:
        angle = position[:, None] / (last + 1e-6) * 2 * np.pi / period
        return np.stack([np.sin(angle[:, 0::2]), np.cos(angle[:, 1::2])], axis=2).reshape(len(position), 8)

    rows, columns = encoded(np.arange(1.0, 6), 5), encoded(np.arange(1.0, 8), 7)
    wanted = np.concatenate([np.repeat(rows[:, None], 7, 1), np.repeat(columns[None], 5, 0)], axis=2)
    np.testing.assert_allclose(found[0], wanted.transpose(2, 0, 1), rtol=0, atol=1e-14)


def decoder() -> nn.Module:
    with upstream():
        from sam3.model.decoder import TransformerDecoder, TransformerDecoderLayer

        layer = TransformerDecoderLayer(
            "relu", 32, 64, 0.0, nn.MultiheadAttention(32, 2), n_heads=2, use_text_cross_attention=True
        )
        module = TransformerDecoder(
            32,
            False,
            None,
            layer,
            2,
            6,
            True,
            box_refine=True,
            boxRPB="log",
            presence_token=True,
            resolution=64,
            stride=16,
        )

    def run(part: nn.Module, tgt: torch.Tensor, memory: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, boxes, presence, _ = part(
            tgt,
            memory,
            pos=memory * 0.1,
            valid_ratios=torch.ones(1, 1, 2),
            spatial_shapes=torch.tensor([[4, 4]]),
            level_start_index=torch.tensor([0]),
            memory_text=text,
            text_attention_mask=torch.tensor([[False, False, True]]),
            apply_dac=False,
        )
        return hidden, boxes, presence

    return seeded(Call(run, decoder=module))


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "after a forward pass"])
def test_the_decoder_computes_nothing_in_less_than_float64_and_the_same_function(warm):
    module, args = decoder(), (random(6, 1, 32), random(16, 1, 32, seed=2), random(3, 1, 32, seed=3))
    names = ["hidden", "boxes", "presence"]
    with upstream():
        if warm:
            reference(module, args, names)
        cached = module.parts["decoder"].compilable_cord_cache
        exact = watched_oracle(module, args, names)
        assert module.parts["decoder"].compilable_cord_cache is cached
        plain = reference(module, args, names)
    for name in names:
        assert exact[name].dtype == np.float64
        error = np.abs(exact[name] - plain[name]).max()
        assert 0 < error < 2e-6 * max(1, np.abs(exact[name]).max())


def test_the_state_of_the_caches_does_not_change_the_oracle():
    args = (random(6, 1, 32), random(16, 1, 32, seed=2), random(3, 1, 32, seed=3))
    names = ["hidden", "boxes", "presence"]
    with upstream():
        fresh, warm = decoder(), decoder()
        reference(warm, args, names)
        one, other = oracle(fresh, args, names), oracle(warm, args, names)
    for name in names:
        assert bitwise_different(one[name], other[name]) == 0, name


# --- every way in which a module can ask for fp32 ---


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x: x.float() / 3, lambda x: x / 3),
        (lambda x: x.to(torch.float32).sin(), np.sin),
        (lambda x: x.half().exp(), np.exp),
        (lambda x: x.bfloat16() * 0.1, lambda x: x * 0.1),
        (lambda x: x.type(torch.float32).cos(), np.cos),
        (lambda x: x.type_as(torch.ones(1, dtype=torch.float32)).exp(), np.exp),
        (lambda x: x + torch.arange(4, dtype=torch.float32) / 3, lambda x: x + np.arange(4) / 3),
        (lambda x: x + torch.arange(4) / 3, lambda x: x + np.arange(4) / 3),
        (lambda x: x * torch.tensor(0.1), lambda x: x * 0.1),
        (lambda x: x * torch.tensor([0.1] * 4, dtype=torch.float32), lambda x: x * 0.1),
        (lambda x: x * torch.as_tensor(0.1), lambda x: x * 0.1),
        (lambda x: x * x.new_tensor(0.1), lambda x: x * 0.1),
        (lambda x: x * torch.full((4,), 0.1, dtype=torch.float32), lambda x: x * 0.1),
        (lambda x: x + torch.linspace(0, 1, 4, dtype=torch.float32), lambda x: x + np.linspace(0, 1, 4)),
        (lambda x: torch.zeros(4, dtype=torch.float32).add_(x).exp(), np.exp),
        (lambda x: torch.empty(4, dtype=torch.float32).copy_(x / 3), lambda x: x / 3),
        (lambda x: torch.sum(x / 3, dtype=torch.float32)[None], lambda x: (x / 3).sum()[None]),
        (lambda x: torch.softmax(x, 0, dtype=torch.float32), lambda x: np.exp(x) / np.exp(x).sum()),
        (lambda x: torch.polar(torch.ones(4), x.float()).imag, np.sin),
        (lambda x: torch.complex(x.float(), x.float()).abs(), lambda x: np.sqrt(2) * np.abs(x)),
        (lambda x: torch.as_tensor(np.float32([0.1] * 4)) * x, lambda x: np.float64(np.float32(0.1)) * x),
    ],
)  # fmt: skip
def test_every_request_for_fp32_becomes_float64(function, wanted):
    x = torch.tensor([0.3, -1.7, 2.9, 0.01])
    found = watched_oracle(Call(function), (x,), ["y"])["y"]
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, wanted(x.numpy().astype(np.float64)), rtol=4e-15, atol=1e-16)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(12, 12),
        lambda: nn.LayerNorm(12),
        lambda: nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 12)),
        lambda: nn.TransformerEncoderLayer(12, 2, 24, batch_first=True, activation="gelu"),
        lambda: Call(lambda m, x: m(x, x, x, key_padding_mask=torch.zeros(2, 6, dtype=torch.bool))[0],
                     m=nn.MultiheadAttention(12, 3, batch_first=True)),
        lambda: Call(lambda m, x: m(x.reshape(2, 6, 3, 4)), m=nn.Conv2d(6, 8, 3, padding=1)),
        lambda: Call(lambda m, x: m(x.reshape(2, 6, 3, 4)), m=nn.ConvTranspose2d(6, 8, 2, stride=2)),
        lambda: Call(lambda m, x: m(x.reshape(2, 6, 3, 4)), m=nn.GroupNorm(2, 6)),
        lambda: Call(lambda m, x: m(x.reshape(2, 6, 3, 4)), m=nn.Upsample(scale_factor=2, mode="bilinear")),
        lambda: Call(lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x)),
        lambda: Call(lambda x: torch.nn.functional.grid_sample(x.reshape(2, 6, 3, 4), x.sigmoid().reshape(2, 6, 6, 2))),
        lambda: Call(lambda x: torch.einsum("bqc,bkc->bqk", x, x)),
    ],
)  # fmt: skip
def test_modules_without_fp32_in_them_agree_with_their_conversion(make):
    module, x = seeded(make()), random(2, 6, 12)
    found = watched_oracle(module, (x,), ["y"])["y"]
    with torch.no_grad():
        wanted = copy.deepcopy(module).double()(x.double()).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-13)


# --- it leaves everything as it was ---


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("index", torch.arange(3))
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.count += x / 3
        return self.count * self.weight, self.index + 1, x > 0, x


def test_the_module_and_its_inputs_stay_as_they_were():
    module, x = Stateful(), torch.tensor([1.0, -2.0, 3.0])
    before, weight = x.clone(), module.weight
    found = oracle(module, (x,), ["sum", "index", "mask", "same"])
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(module.count, torch.zeros(3)) and module.count.dtype is torch.float32
    assert module.weight is weight and weight.dtype is torch.float32
    assert torch.equal(x, before)
    np.testing.assert_allclose(found["sum"], np.array([1, -2, 3]) / 3, rtol=1e-15)
    assert found["index"].dtype == np.int64 and found["mask"].dtype == np.bool_
    assert found["same"].dtype == np.float64


def test_the_default_dtype_comes_back_after_a_failure():
    with pytest.raises(RuntimeError):
        oracle(Call(lambda x: x @ x), (torch.ones(2, 3),), ["y"])
    assert torch.get_default_dtype() is torch.float32


def test_what_has_no_float64_form_is_refused_instead_of_computed_in_fp32():
    table = torch.zeros(3)
    with pytest.raises(TypeError, match="in place"):
        oracle(Call(lambda x: table.add_(x)), (torch.ones(3),), ["y"])
    with pytest.raises(TypeError, match="bits"):
        oracle(Call(lambda x: torch.ones(3, dtype=torch.int32).view(torch.float32) + x), (torch.ones(3),), ["y"])


@pytest.mark.parametrize("run", [reference, oracle])
def test_outputs_are_named_and_counted(run):
    module = Call(lambda x: (x + 1, x + 2))
    assert list(run(module, (torch.ones(2),), ["a", "b"])) == ["a", "b"]
    assert list(run(Call(lambda x: x), (torch.ones(2),), ["a"])) == ["a"]
    assert list(run(Call(lambda x: [x]), (torch.ones(2),), ["a"])) == ["a"]
    for names in (["a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="2 outputs"):
            run(module, (torch.ones(2),), names)
    with pytest.raises(ValueError, match="NoneType"):
        run(Call(lambda x: (x, None)), (torch.ones(2),), ["a", "b"])


def test_the_reference_is_the_module_itself_and_repeats_bitwise():
    module, x = rope_attention(), random(2, 6, 6, 64)
    first, second = (reference(module, (x,), ["y"])["y"] for _ in range(2))
    with torch.no_grad():
        assert bitwise_different(first, module(x).numpy()) == 0
    assert bitwise_different(first, second) == 0
    assert first.dtype == np.float32


def test_outputs_do_not_share_memory_with_inputs_or_weights():
    weight = nn.Linear(3, 3)
    x = torch.ones(3)
    for run in (reference, oracle):
        found = run(Call(lambda part, x: (x, part.bias), part=weight), (x,), ["x", "bias"])
        found["x"][:] = 7
        found["bias"][:] = 7
    assert torch.equal(x, torch.ones(3))
    assert not (weight.bias == 7).any()
