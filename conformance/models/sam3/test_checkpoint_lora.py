"""LoRA is merged into the weights as its definition says, in float32, or refused by name; it is never ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conformance.models.sam3.test_checkpoint_layouts import WRAPPINGS, part, plain, real
from conformance.models.sam3.test_model_checkpoints import published
from conformance.support.hugging_face import to_hugging_face
from conformance.support.sentences import sentence
from conformance.support.shallow import shallow_model
from harness.core.checkpoint_file import AdapterConfig, checkpoint_digest
from harness.core.errors import HarnessError
from harness.models.sam3.checkpoints.loading import Checkpoint, describe_checkpoint, load_checkpoint
from harness.models.sam3.checkpoints.lora import Lora, merge

pytestmark = pytest.mark.smoke

MODULES = tuple(f"transformer.decoder.bbox_embed.layers.{number}" for number in range(3))
RANK, ALPHA = 2, 8
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": None}

State = dict[str, torch.Tensor]


def factors(modules: tuple[str, ...] = MODULES, leaf: str = ".weight") -> State:
    torch.manual_seed(7)
    weights = plain(part())
    drawn: State = {}
    for module in modules:
        rows, columns = weights[f"{module}.weight"].shape
        drawn |= {
            f"{module}.lora_A{leaf}": torch.randn(RANK, columns),
            f"{module}.lora_B{leaf}": torch.randn(rows, RANK),
        }
    return drawn


def by_definition(state: State, adapter: Mapping[str, torch.Tensor], scale: float = ALPHA / RANK) -> State:
    """W + α/r · B A in float64, rounded once."""
    merged = dict(state)
    for name, down in adapter.items():
        if ".lora_A" in name:
            module = name.partition(".lora_A")[0]
            product = adapter[name.replace("lora_A", "lora_B")].double() @ down.double()
            merged[f"{module}.weight"] = (state[f"{module}.weight"].double() + scale * product).float()
    return merged


def describe(folder: Path, **changes: object) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))


def save_adapter(folder: Path, adapter: State, base: str | None = "../sam3.pt", **changes: object) -> Path:
    """Writes an adapter as PEFT's `save_pretrained` does, beside its base."""
    torch.save(published(part()), folder / "sam3.pt")
    (folder / "adapter").mkdir()
    save_file({f"base_model.model.{n}": t for n, t in adapter.items()}, folder / "adapter/adapter_model.safetensors")
    describe(folder / "adapter", base_model_name_or_path=base, **changes)
    return folder / "adapter"


def assert_loads(path: Path, expected: State) -> None:
    model = part(1)
    assert load_checkpoint(model, path) == frozenset()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)


def test_an_adapter_of_peft_is_merged_as_the_merged_file_is(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path, factors())
    expected = by_definition(plain(part()), factors())
    assert_loads(adapter, expected)
    assert_loads(adapter / "adapter_config.json", expected)
    torch.save(expected, tmp_path / "merged.pt")
    assert_loads(tmp_path / "merged.pt", expected)
    assert "; LoRA merged into 3 of them" in describe_checkpoint(adapter).sentence
    kinds = [
        {name: (tensor.dtype, tensor.shape) for name, tensor in Checkpoint.open(adapter, values=values).tensors.items()}
        for values in (True, False)
    ]
    assert kinds[0] == kinds[1]
    digest = checkpoint_digest(adapter)
    describe(adapter, base_model_name_or_path="../sam3.pt", lora_alpha=ALPHA + 1)
    assert checkpoint_digest(adapter) != digest


@pytest.mark.parametrize("wrapping", ["no prefix", "DDP", "trainer of DDP", "EMA in a module"])
@pytest.mark.parametrize("form", ["peft", "loralib", "transposed", "alphas"])
def test_factors_beside_their_weights_are_merged(form: str, wrapping: str, tmp_path: Path) -> None:
    expected = by_definition(plain(part()), factors())
    state = plain(part())
    if form == "peft":
        for module in MODULES:
            state |= {f"{module}.base_layer.{leaf}": state.pop(f"{module}.{leaf}") for leaf in ("weight", "bias")}
        state |= factors(leaf=".default.weight")
        state = {f"base_model.model.{name}": tensor for name, tensor in state.items()}
    elif form == "transposed":
        state |= {
            name.replace(".lora_", ".lora.lora_"): tensor.T.contiguous() for name, tensor in factors(leaf="").items()
        }
    else:
        state |= factors(leaf="")
    if form == "alphas":
        state |= {f"{module}.alpha": torch.tensor(float(ALPHA)) for module in MODULES}
    else:
        describe(tmp_path)
    torch.save(WRAPPINGS[wrapping][0](state), tmp_path / "unmerged.pt")
    assert_loads(tmp_path / "unmerged.pt" if form == "alphas" else tmp_path, expected)


def test_without_a_change_the_weights_stay_bit_for_bit(tmp_path: Path) -> None:
    still = {name: tensor * ("lora_A" in name) for name, tensor in factors().items()}
    model = part(1)
    load_checkpoint(model, save_adapter(tmp_path, still))
    for name, tensor in part().state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"use_rslora": True}, ALPHA / RANK**0.5),
        ({"alpha_pattern": {r"layers\.\d": 3}}, 3 / RANK),
        ({"rank_pattern": {r"layers\.\d": RANK}, "r": 64}, ALPHA / RANK),
    ],
)
def test_scales_are_those_of_peft(changes: dict[str, Any], scale: float, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path, factors(), **changes)
    assert_loads(adapter, by_definition(plain(part()), factors(), scale))


def test_other_tensors_of_an_adapter_replace_those_of_its_base(tmp_path: Path) -> None:
    replaced = {f"{MODULES[0]}.bias": torch.full((8,), 5.0)}
    adapter = save_adapter(tmp_path, factors() | replaced)
    assert_loads(adapter, by_definition(plain(part()), factors()) | replaced)


def test_a_convolution_is_merged() -> None:
    """PEFT: A has the kernel's size, B is 1 × 1."""
    weight, down, up = torch.randn(6, 4, 3, 3), torch.randn(RANK, 4, 3, 3), torch.randn(6, RANK, 1, 1)
    state = {"conv.weight": weight, "conv.lora_A.weight": down, "conv.lora_B.weight": up}
    merged, changed = merge(Lora(Path("c"), state, config=AdapterConfig(r=RANK, lora_alpha=ALPHA)))
    assert changed == ("conv.weight",) and merged.keys() == {"conv.weight"}
    image = torch.randn(1, 4, 9, 9)
    layered = torch.conv2d(image, weight) + ALPHA / RANK * torch.conv2d(torch.conv2d(image, down), up)
    torch.testing.assert_close(torch.conv2d(image, merged["conv.weight"]), layered, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_transformers_is_merged_into_the_published_file_in_half_precision(tmp_path: Path) -> None:
    """Of queries alone, which are a third of upstream's projection; keys and values stay as they are rounded."""
    state, module = shallow_model().state_dict(), "vision_encoder.backbone.layers.0.attention.q_proj"
    base = {f"detector_model.{name}": tensor.contiguous().half() for name, tensor in to_hugging_face(state).items()}
    save_file(base, tmp_path / "model.safetensors")
    (tmp_path / "adapter").mkdir()
    ones = {f"base_model.model.{module}.lora_{side}.weight": torch.ones(1024, 2) for side in "B"}
    ones |= {f"base_model.model.{module}.lora_A.weight": torch.ones(2, 1024)}
    save_file(ones, tmp_path / "adapter/adapter_model.safetensors")
    describe(tmp_path / "adapter", base_model_name_or_path="../model.safetensors")
    name = "backbone.vision_backbone.trunk.blocks.0.attn.qkv.weight"
    merged = Checkpoint.open(tmp_path / "adapter").tensors[name]
    expected = state[name].half().float()
    expected[:1024] += 2 * ALPHA / RANK
    torch.testing.assert_close(merged, expected, rtol=1e-6, atol=1e-6)


NO_TARGET = {"other.layer.lora_A.weight": torch.ones(RANK, 8), "other.layer.lora_B.weight": torch.ones(8, RANK)}


@pytest.mark.parametrize(
    ("adapter", "changes", "fact"),
    [
        (factors() | NO_TARGET, {}, "other.layer"),
        (factors(), {"r": 4}, f"{MODULES[0]} has rank 2, and adapter_config.json says 4"),
        (
            factors(),
            {"lora_alpha": None},
            "adapter_config.json",
        ),
        (factors(), {"alpha_pattern": {"(": 8}}, "adapter_config.json is no regular expression"),
        (factors(), {"peft_type": "IA3"}, "IA3"),
        (factors() | {f"{MODULES[0]}.lora_magnitude_vector": torch.ones(8)}, {}, "lora_magnitude_vector"),
        (factors() | {f"{MODULES[0]}.lora_B.bias": torch.ones(8)}, {}, "several"),
        (
            factors() | {f"{MODULES[0]}.lora_A.weight": torch.ones(RANK, 9)},
            {},
            "2×9 and 8×2, and its weight is 8×8",
        ),
        (factors() | {f"{MODULES[0]}.lora_A.weight": torch.ones(RANK)}, {}, "no matrix"),
        (factors() | {f"{MODULES[0]}.lora_A.weight": torch.ones(RANK, 8).int()}, {}, "no matrix of floating-point"),
        (factors(MODULES[:1]) | {f"{MODULES[1]}.lora_B.weight": torch.ones(8, 2)}, {}, "layers.1 has lora_B"),
        (factors() | factors(leaf=".default.weight"), {}, "several"),
        (factors() | {"other.bias": torch.ones(8)}, {}, "other.bias"),
    ],
)
def test_what_cannot_be_merged_is_named(adapter: State, changes: dict[str, Any], fact: str, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, adapter, **changes)
    with pytest.raises(HarnessError, match=sentence("cannot-merge", reason=fact)) as raised:
        load_checkpoint(part(), folder, allow_partial=True)
    assert "\n" not in str(raised.value)


def test_a_module_is_named_as_the_file_names_it(tmp_path: Path) -> None:
    module = "tracker.model.obj_ptr_proj.layers.0"
    adapter = {f"{module}.lora_A.weight": torch.ones(RANK, 8), f"{module}.lora_B.weight": torch.ones(8, RANK)}
    with pytest.raises(HarnessError, match=sentence("cannot-merge", reason=f"it is for {module}, of which")):
        load_checkpoint(part(), save_adapter(tmp_path, adapter))
    base = {f"{module}.weight": torch.zeros(8, 8)}
    config = AdapterConfig(r=64, rank_pattern={module: RANK}, lora_alpha=ALPHA)
    merged, changed = merge(Lora(tmp_path, adapter, base, config))
    assert changed == (f"{module}.weight",)
    assert torch.equal(merged[f"{module}.weight"], torch.full((8, 8), float(ALPHA)))


def test_a_description_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        HarnessError, match=sentence("damaged-description", path="adapter_config.json", error="lora_alpha")
    ):
        load_checkpoint(part(), save_adapter(tmp_path, factors(), lora_alpha="8"))


def test_factors_without_a_scale_are_refused(tmp_path: Path) -> None:
    torch.save(plain(part()) | factors(), tmp_path / "unmerged.pt")
    with pytest.raises(HarnessError, match=sentence("cannot-merge", reason="adapter_config.json")):
        load_checkpoint(part(), tmp_path / "unmerged.pt")


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("facebook/sam3", sentence("base-elsewhere", base="facebook/sam3")),
        ("../adapter", sentence("adapter-of-adapter")),
        (None, sentence("other-model", "cannot-merge")),
    ],
)
def test_an_adapter_without_its_base_is_refused(base: str | None, expected: str, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=expected):
        load_checkpoint(part(), save_adapter(tmp_path, factors(), base))


def test_an_adapter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    torch.save(real(published(part())), tmp_path / "sam3.pt")
    describe(tmp_path, base_model_name_or_path="sam3.pt")
    with pytest.raises(HarnessError, match=sentence("no-adapter", adapters="adapter_model.safetensors")):
        load_checkpoint(part(), tmp_path)
