"""Layouts of checkpoints that people have: each loads bit for bit, or is refused by name, and nothing is dropped."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from conformance.models.sam3.test_model_checkpoints import NAME, Part, published
from conformance.support.sentences import sentence
from harness.core.case import Case
from harness.core.checkpoint_file import checkpoint_digest
from harness.core.errors import HarnessError
from harness.core.settings import Settings
from harness.models.sam3.checkpoints.loading import (
    Checkpoint,
    compare,
    describe_checkpoint,
    load_checkpoint,
)
from harness.models.sam3.deployed.options import Sam3Options
from harness.runtime.weights import file_digest

pytestmark = pytest.mark.law

State = dict[str, Any]
TRAINING = {
    "optimizer": {"state": {0: {"exp_avg": torch.ones(2), "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-4}]},
    "epoch": 3,
    "loss": {"core": torch.zeros(1)},
    "steps": {"train": 10},
    "scaler": {"scale": 65536.0},
    "best_meter_values": {},
}
"""What upstream's trainer saves beside the model."""


def part(seed: int = 0) -> Part:
    torch.manual_seed(seed)
    return Part()


def plain(model: torch.nn.Module) -> State:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def prefixed(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


WRAPPINGS: dict[str, tuple[Callable[[State], State], str]] = {
    "no prefix": (lambda state: state, ""),
    "DDP": (lambda state: prefixed("module.", state), "module"),
    "compiled": (lambda state: prefixed("_orig_mod.", state), "_orig_mod"),
    "trainer": (lambda state: {"model": state, **TRAINING}, "model"),
    "trainer of DDP": (lambda state: {"model": prefixed("module.", state), **TRAINING}, "model.module"),
    "Lightning": (lambda state: {"state_dict": prefixed("model.", state), "callbacks": {}}, "state_dict.model"),
    "DeepSpeed": (lambda state: {"module": state, "lr_scheduler": {"last": torch.ones(1)}}, "module"),
    "EMA alone": (lambda state: {"ema": state, "epoch": 3}, "ema"),
    "EMA in a module": (lambda state: {"ema": {"module": state, "updates": 3}}, "ema.module"),
    "EMA of swa_utils": (
        lambda state: {"n_averaged": torch.tensor(4), **prefixed("module.", state)},
        "module",
    ),
    "EMA beside weights": (
        lambda state: {"model": {name: tensor + 1 for name, tensor in state.items()}, "model_ema": state},
        "model_ema",
    ),
    "EMA beside weights, by names": (
        lambda state: prefixed("model.", {n: t + 1 for n, t in state.items()}) | prefixed("ema_model.", state),
        "ema_model",
    ),
}


def assert_loads(path: Path, source: torch.nn.Module) -> None:
    target = part(1)
    assert load_checkpoint(target, path) == frozenset()
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("published_names", [False, True])
def test_what_trainers_save_loads_bit_for_bit(wrapping: str, published_names: bool, tmp_path: Path) -> None:
    wrap, wrappers = WRAPPINGS[wrapping]
    source = part()
    state = wrap(published(source) if published_names else plain(source))
    torch.save(state, tmp_path / "trained.pt")
    assert_loads(tmp_path / "trained.pt", source)
    sentence = describe_checkpoint(tmp_path / "trained.pt").sentence
    assert sentence.startswith("trained.pt: SAM 3 under upstream's names, ") and "\n" not in sentence
    assert (f"taken out of {wrappers}" in sentence) == bool(wrappers), sentence
    for entry in ("optimizer (2 tensors)", "epoch", "loss (1 tensors)") if wrapping.startswith("trainer") else ():
        assert entry in sentence


def test_weights_that_nobody_chose_between_are_refused(tmp_path: Path) -> None:
    torch.save({"model": plain(part()), "state_dict": plain(part(1))}, tmp_path / "two.pt")
    with pytest.raises(HarnessError, match=sentence("several-sets", found="model, state_dict")):
        load_checkpoint(part(), tmp_path / "two.pt")


@pytest.mark.parametrize("entry", ["head", "extra"])
def test_tensors_beside_the_weights_are_refused_unless_they_are_of_training(entry: str, tmp_path: Path) -> None:
    torch.save({"model": plain(part()), entry: {"weight": torch.ones(2)}, **TRAINING}, tmp_path / "model.pt")
    with pytest.raises(HarnessError, match=sentence("unknown-tensors", listed=f"{entry}, 1 tensors")):
        load_checkpoint(part(), tmp_path / "model.pt")
    with pytest.warns(UserWarning, match=rf"is loaded without {entry}, 1 tensors"):
        load_checkpoint(part(), tmp_path / "model.pt", allow_partial=True)


def test_a_name_that_two_tensors_have_is_refused(tmp_path: Path) -> None:
    torch.save(plain(part()) | {f"detector.{NAME}": torch.ones(4, 8)}, tmp_path / "twice.pt")
    with pytest.raises(HarnessError, match=sentence("doubled-tensors", doubled=1, doubled2=NAME)):
        load_checkpoint(part(), tmp_path / "twice.pt")


def test_a_dictionary_in_itself_is_refused(tmp_path: Path) -> None:
    state: State = {"model": {}}
    state["model"]["model"] = state
    torch.save(state, tmp_path / "endless.pt")
    with pytest.raises(HarnessError, match=sentence("other-model", tensors=0)):
        load_checkpoint(part(), tmp_path / "endless.pt")


def save_parts(state: State, folder: Path, count: int = 3) -> Path:
    """Writes as Transformers' `save_pretrained` does."""
    places = {name: f"model-{number % count + 1:05}-of-{count:05}.safetensors" for number, name in enumerate(state)}
    for place in set(places.values()):
        save_file({name: tensor for name, tensor in state.items() if places[name] == place}, folder / place)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


def real(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if not tensor.is_complex()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_parts_load_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """By the index and by its folder; half precision is loaded as it is rounded."""
    rounded = part().to(dtype).float()
    index = save_parts({name: tensor.to(dtype) for name, tensor in real(published(part())).items()}, tmp_path)
    for path in (index, tmp_path):
        target = part(1)
        assert load_checkpoint(target, path) == frozenset()
        for name, parameter in rounded.named_parameters():
            assert torch.equal(target.get_parameter(name), parameter)
    assert checkpoint_digest(index) == checkpoint_digest(tmp_path)
    assert checkpoint_digest(index).bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert Checkpoint.open(index).has_tracker is False


def test_a_checkpoint_that_was_described_is_not_opened_again(tmp_path: Path) -> None:
    """For its options and its manifest `compile` asks the description, from which the file may have gone."""
    torch.save(published(part()), tmp_path / "sam3.pt")
    abilities = describe_checkpoint(tmp_path / "sam3.pt").abilities
    assert abilities == ("texts", "boxes", "points")
    described = Settings(checkpoint=tmp_path / "gone.pt", abilities=abilities)
    notes: list[str] = []
    options = Sam3Options().fit(Case("vit", "real", "llvm"), described, notes.append)
    assert (options.clicks, len(notes)) == (0, 1)
    assert options.manifest_part(described)["point_prompts"]


def test_the_checksum_of_one_file_is_its_own(tmp_path: Path) -> None:
    torch.save(published(part()), tmp_path / "sam3.pt")
    assert checkpoint_digest(tmp_path / "sam3.pt") == file_digest(tmp_path / "sam3.pt") == checkpoint_digest(tmp_path)


def _remove_part(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def _rename_tensor(folder: Path) -> None:
    save_file({"other": torch.ones(1)}, folder / "model-00002-of-00003.safetensors")


def _leave_out_tensor(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"] | {"more": "model-00001-of-00003.safetensors"}
    index.write_text(json.dumps({"weight_map": places}))


def _leave_folder(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))


def _break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def _empty_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_remove_part, sentence("missing-parts", absent=1, names=3, absent2="model-00002-of-00003.safetensors")),
        (_rename_tensor, sentence("unlisted-tensor", name="model-00002-of-00003.safetensors", name2="other")),
        (_leave_out_tensor, sentence("missing-tensors", absent=1, absent2="more")),
        (_leave_folder, sentence("part-outside", outside="../a.safetensors")),
        (_break_index, sentence("damaged-description", name="index of a checkpoint")),
        (_empty_index, sentence("damaged-description", error="weight_map")),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    change: Callable[[Path], None], expected: str, tmp_path: Path
) -> None:
    index = save_parts(real(published(part())), tmp_path)
    change(tmp_path)
    with pytest.raises(HarnessError, match=expected):
        load_checkpoint(part(), index)


def test_a_folder_with_two_checkpoints_is_refused(tmp_path: Path) -> None:
    """As the published one is, which has both layouts."""
    torch.save(published(part()), tmp_path / "sam3.pt")
    save_file(real(published(part())), tmp_path / "model.safetensors")
    with pytest.raises(HarnessError, match=sentence("several-checkpoints", names="model.safetensors, sam3.pt")):
        load_checkpoint(part(), tmp_path)


SPOILT = torch.full((4, 8), torch.nan)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({f"detector.{NAME}": SPOILT}, sentence("not-finite", value=f"1 such ({NAME})")),
        ({f"detector.{NAME}": torch.full((4, 8), torch.inf)}, sentence("not-finite", value=1)),
        (
            {f"detector.{NAME}": torch.ones(4, 8, dtype=torch.int8)},
            sentence("does-not-fit", fit=f"1 misshapen ({NAME}: int8 instead of float32)"),
        ),
        (
            {f"detector.{NAME}": torch.ones(16, 8)},
            sentence("does-not-fit", fit=f"1 misshapen ({NAME}: 16×8 instead of 4×8)"),
        ),
        ({f"detector.{NAME}_scale": torch.ones(1)}, sentence("does-not-fit", fit=f"1 unexpected ({NAME}_scale)")),
        (
            {"tracker.surplus.weight": torch.ones(1)},
            sentence("does-not-fit", fit="1 unexpected (inst_interactive_predictor.model.surplus"),
        ),
        (
            {f"detector.adapter.layers.{n}.{leaf}": torch.ones(1) for n in range(9) for leaf in ("a", "b")},
            sentence("does-not-fit", fit="18 unexpected (adapter.layers.0: 2", seeded=0),
        ),
        (
            {"tracker.model.interactive_mask_decoder.iou_token.weight": torch.ones(1)},
            sentence("sam31-checkpoint", name="tracker.model.interactive_mask_decoder.iou_token.weight"),
        ),
        (
            {"detector.backbone.vision_backbone.interactive_convs.0.conv_1x1.bias": torch.ones(1)},
            sentence("sam31-checkpoint"),
        ),
        ({"detector_model.vision_encoder.backbone.layer_norm.weight": torch.ones(1)}, sentence("doubled-tensors")),
    ],
)
def test_what_is_wrong_is_named(changes: State, expected: str, tmp_path: Path) -> None:
    torch.save({"model": published(part()) | changes, **TRAINING}, tmp_path / "sam3.pt")
    with pytest.raises(HarnessError, match=expected) as raised:
        load_checkpoint(part(), tmp_path / "sam3.pt")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["tracker.model.maskmem_tpos_enc", "detector.backbone.propagation_convs.0.weight"])
def test_a_part_of_sam_3_1_is_no_part_of_sam_3(name: str, tmp_path: Path) -> None:
    torch.save(published(part()) | {name: torch.ones(2)}, tmp_path / "sam3.pt")
    with pytest.raises(HarnessError, match=sentence("sam31-checkpoint", name=name)):
        load_checkpoint(part(), tmp_path / "sam3.pt", allow_partial=True)


def test_a_partial_load_says_what_it_leaves(tmp_path: Path) -> None:
    state = published(part())
    del state[f"detector.{NAME}"]
    torch.save(state | {"detector.surplus": torch.ones(1)}, tmp_path / "sam3.pt")
    with pytest.warns(
        UserWarning, match=rf"1 missing \({NAME}\); 1 unexpected \(surplus\).*1 of the model's 7 tensors"
    ):
        assert load_checkpoint(part(), tmp_path / "sam3.pt", allow_partial=True) == {NAME}


KNOWN = (
    *(f"detector.{name}" for name in Part().state_dict()),
    "tracker.no_mem_embed",
    "tracker.sam_mask_decoder.iou_token.weight",
    "detector.backbone.vision_backbone.sam2_convs.0.conv_1x1.bias",
    "detector_model.vision_encoder.backbone.layer_norm.weight",
    "vision_encoder.backbone.layers.0.attention.q_proj.weight",
    "text_encoder.text_model.embeddings.position_ids",
    "tracker_model.shared_image_embedding.positional_embedding",
    "optimizer",
    "n_averaged",
)
WORDS = ["detector", "tracker", "model", "module", "ema", "head", "transformer", "weight", "alpha", "lora_A", "0"]
NAMES = st.sampled_from(KNOWN) | st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(".".join)
WRAPPERS = st.sampled_from(["model", "module", "state_dict", "ema"])
SHAPES = st.sampled_from([(), (1,), (4, 8), (8, 8), (4,), (3,)])
BESIDE = st.sampled_from(["optimizer", "epoch", "step", "model", "head"])


@st.composite
def states(draw: st.DrawFn, beside: st.SearchStrategy[str]) -> State:
    return {name: torch.zeros(draw(SHAPES)) for name in draw(st.lists(beside, max_size=2, unique=True))}


@st.composite
def wrapped_states(draw: st.DrawFn) -> State:
    state = draw(st.sampled_from([plain, published]))(part()) | draw(st.just({}) | states(NAMES))
    for wrapper in draw(st.lists(WRAPPERS, max_size=3)):
        state = prefixed(f"{wrapper}.", state) if draw(st.booleans()) else {wrapper: state}
        state |= draw(states(BESIDE))
        if draw(st.booleans()):
            state.setdefault(draw(BESIDE), draw(states(NAMES)))
    return state


def leaves(value: object) -> int:
    return sum(map(leaves, value.values())) if isinstance(value, dict) else 1


@given(state=wrapped_states(), partial=st.booleans())
@settings(max_examples=300, deadline=None)
def test_no_tensor_is_dropped_without_a_word(
    tmp_path_factory: pytest.TempPathFactory, state: State, partial: bool
) -> None:
    """Every tensor of a file that loads is in the model, or counted among what is said to be left."""
    path = tmp_path_factory.getbasetemp() / "drawn.pt"
    torch.save(state, path)
    model = part(1)
    try:
        checkpoint = Checkpoint.open(path)
        fit = compare(checkpoint, model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_checkpoint(model, path, allow_partial=partial)
    except HarnessError as error:
        assert "\n" not in str(error)
        return
    content, said = checkpoint.content, " ".join(str(warning.message) for warning in caught)
    left = [*fit.unexpected, *fit.misshapen, *content.unknown]
    assert partial or not left
    taken = (fit.loadable, fit.unexpected, fit.misshapen, fit.unused, checkpoint.repeated)
    assert leaves(state) == sum(map(len, taken)) + sum(content.remainder.values())
    assert all(name in said for name in left)
    assert all(name in str(checkpoint) for name, count in content.remainder.items() if count)
    for name, tensor in fit.loadable.items():
        assert torch.equal(model.state_dict()[name], tensor.to(model.state_dict()[name].dtype))
