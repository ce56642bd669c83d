"""Checkpoints: what fits is loaded bit for bit, what does not is refused in one sentence, and no code is run."""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conformance.support.sentences import sentence
from conformance.support.shallow import build_model, interactive_model, shallow_model
from harness.core.errors import HarnessError
from harness.models.sam3.build import build_architecture
from harness.models.sam3.checkpoints.loading import Checkpoint, load_checkpoint
from harness.models.sam3.weights import seed_weights

NAME = "transformer.decoder.bbox_embed.layers.2.weight"


class Part(torch.nn.Module):
    """A small stand-alone part of the model, whose parameters keep the names that they have in SAM 3."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = torch.nn.ModuleDict(
            {"decoder": torch.nn.ModuleDict({"bbox_embed": torch.nn.ModuleDict({"layers": torch.nn.ModuleList()})})}
        )
        layers = self.get_submodule("transformer.decoder.bbox_embed.layers")
        assert isinstance(layers, torch.nn.ModuleList)
        layers.extend([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)])
        self.register_buffer("freqs_cis", torch.polar(torch.ones(3), torch.arange(3.0)))


def published(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state as the published file names it, with the parts that only the video model has."""
    state = {f"detector.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    state["detector.backbone.vision_backbone.sam2_convs.0.conv_1x1.bias"] = torch.ones(256)
    state["tracker.no_mem_embed"] = torch.ones(1, 1, 256)
    return state


def save_pt(state: dict[str, Any], path: Path) -> None:
    torch.save(state, path)


def save_wrapped(state: dict[str, Any], path: Path) -> None:
    torch.save({"model": state, "epoch": 3}, path)


def save_legacy(state: dict[str, Any], path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def save_safetensors(state: dict[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor for name, tensor in state.items() if not tensor.is_complex()}, path)


FORMATS: dict[str, tuple[Callable[[dict[str, Any], Path], None], str]] = {
    "pt": (save_pt, "sam3.pt"),
    "wrapped": (save_wrapped, "sam3.pt"),
    "legacy": (save_legacy, "old.pth"),
    "safetensors": (save_safetensors, "sam3.safetensors"),
}


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_loads_bit_for_bit(form: str, tmp_path: Path) -> None:
    save, name = FORMATS[form]
    torch.manual_seed(0)
    source, target = Part(), Part()
    save(published(source), tmp_path / name)
    assert not torch.equal(source.get_parameter(NAME), target.get_parameter(NAME))
    assert load_checkpoint(target, tmp_path / name) == frozenset()
    for key, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], tensor), key


def test_the_whole_model_loads(tmp_path: Path) -> None:
    source = interactive_model()
    state = {
        name.replace("inst_interactive_predictor.model.", "tracker.")
        if name.startswith("inst_interactive_predictor.model.")
        else f"detector.{name}": tensor
        for name, tensor in source.state_dict().items()
    }
    save_pt(state, tmp_path / "sam3.pt")
    save_safetensors(state, tmp_path / "sam3.safetensors")
    for file, interactive in (("sam3.pt", False), ("sam3.pt", True), ("sam3.safetensors", False)):
        loaded = build_model("shallow", 1, tmp_path / file, interactive=interactive)
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, source.state_dict()[name]), (file, name)


@pytest.mark.parametrize("prefix", ["", "module.", "module.detector."])
@pytest.mark.parametrize("save", [save_pt, save_wrapped, save_safetensors])
def test_what_a_trainer_saved_loads_bit_for_bit(
    prefix: str, save: Callable[[dict[str, Any], Path], None], tmp_path: Path
) -> None:
    """Without the prefix that published names have, or with that of `DistributedDataParallel`."""
    torch.manual_seed(0)
    source, target = Part(), Part()
    path = tmp_path / ("sam3.safetensors" if save is save_safetensors else "sam3.pt")
    save({prefix + name: tensor.clone() for name, tensor in source.state_dict().items()}, path)
    load_checkpoint(target, path)
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_loaded_as_it_is_rounded(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {name: tensor.to(dtype) for name, tensor in published(Part()).items() if not tensor.is_complex()}
    save_safetensors(state, tmp_path / "sam3_half.safetensors")
    model = Part()
    load_checkpoint(model, tmp_path / "sam3_half.safetensors")
    assert torch.equal(model.get_parameter(NAME), state[f"detector.{NAME}"].float())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transformer.decoder.lora_A.weight", sentence("cannot-merge", reason="transformer.decoder has lora_A")),
        (
            "detector.transformer.decoder.lora_B.weight",
            sentence("cannot-merge", reason="transformer.decoder has lora_B"),
        ),
        ("detector.transformer.decoder.lora_C.weight", sentence("cannot-merge", reason="lora_C.weight")),
        (
            "tracker.model.interactive_mask_decoder.iou_token.weight",
            sentence("sam31-checkpoint", name="tracker.model.interactive_mask_decoder.iou_token.weight"),
        ),
        ("detector.backbone.vision_backbone.propagation_convs.0.conv_1x1.bias", sentence("sam31-checkpoint")),
    ],
)
def test_tensors_that_the_model_does_not_know_are_never_ignored(name: str, expected: str, tmp_path: Path) -> None:
    save_pt(published(Part()) | {name: torch.ones(2)}, tmp_path / "sam3.pt")
    with pytest.raises(HarnessError, match=expected):
        load_checkpoint(Part(), tmp_path / "sam3.pt")


def spoilt(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    state = published(Part())
    for name, tensor in changes.items():
        key = f"detector.{NAME}" if name == "weight" else f"detector.{name}"
        if tensor is None:
            del state[key]
        else:
            state[key] = tensor
    return state


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (spoilt(weight=None), sentence("does-not-fit", fit=f"1 missing ({NAME}); no unexpected")),
        (spoilt(surplus=torch.ones(3)), sentence("does-not-fit", fit="no missing tensors; 1 unexpected (surplus)")),
        (spoilt(weight=torch.ones(4, 9)), sentence("does-not-fit", fit=f"1 misshapen ({NAME}: 4×9")),
        (spoilt(weight=torch.ones(4, 8, dtype=torch.complex64)), sentence("does-not-fit", fit="1 misshapen")),
        (
            spoilt(weight=None, surplus=torch.ones(1)),
            sentence("does-not-fit", fit="1 unexpected (surplus); no misshapen"),
        ),
        (spoilt(**{f"surplus{i}": torch.ones(1) for i in range(9)}), sentence("does-not-fit", fit="surplus4, …)")),
        (
            spoilt(**{name: torch.ones(1) for name in ("pair.a", "pair.b", *(f"surplus{i}" for i in range(4)))}),
            sentence("does-not-fit", fit="6 unexpected (pair: 2, surplus0, surplus1, surplus2, surplus3)"),
        ),
    ],
    ids=["missing", "unexpected", "misshapen", "complex", "both", "many", "five modules"],
)
def test_what_does_not_fit_is_listed_and_refused(state: dict[str, torch.Tensor], expected: str, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "sam3.pt")
    model = Part()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(HarnessError, match=expected):
        load_checkpoint(model, tmp_path / "sam3.pt")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_partial_load_when_asked(tmp_path: Path) -> None:
    state = {f"detector.{name}": tensor for name, tensor in shallow_model().state_dict().items()}
    del state[f"detector.{NAME}"]
    state["detector.transformer.decoder.norm.weight"] = torch.ones(3)
    state["detector.surplus"] = torch.ones(3)
    torch.save(state, tmp_path / "sam3.pt")
    with pytest.warns(UserWarning, match="leaves 2 of the model's"):
        model = build_model("shallow", 5, tmp_path / "sam3.pt", allow_partial=True)
    # What was left out is seeded as if there were no checkpoint, and not what the memory held.
    left_out = {NAME, "transformer.decoder.norm.weight"}
    seeded = build_architecture("shallow")
    seed_weights(seeded, 5, left_out)
    for name in left_out:
        assert torch.equal(model.get_parameter(name), seeded.get_parameter(name))
    for name, parameter in model.named_parameters():
        assert name in left_out or torch.equal(parameter, shallow_model().get_parameter(name)), name


def test_formulas_may_be_absent(tmp_path: Path) -> None:
    state = published(Part())
    del state["detector.freqs_cis"]
    torch.save(state, tmp_path / "sam3.pt")
    model = Part()
    load_checkpoint(model, tmp_path / "sam3.pt")
    assert torch.equal(model.get_buffer("freqs_cis"), Part().get_buffer("freqs_cis"))


class Mischief:
    """Writes a file when it is unpickled the careless way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickled_code_is_refused_and_not_run(tmp_path: Path) -> None:
    evidence = tmp_path / "it ran"
    for name, write in (
        ("zip.pt", lambda path: torch.save({"model": Mischief(evidence)}, path)),
        ("bare.pt", lambda path: path.write_bytes(pickle.dumps({"model": Mischief(evidence)}))),
    ):
        write(tmp_path / name)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with pytest.raises(HarnessError, match=sentence("pickled-code")):
                load_checkpoint(Part(), tmp_path / name)
        assert not warned
    assert not evidence.exists()


def _whole(tmp_path: Path, name: str) -> bytes:
    save, _ = FORMATS["safetensors" if name.endswith("safetensors") else "pt"]
    save(published(Part()), tmp_path / "whole")
    return (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("name", ["sam3.pt", "sam3.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.95])
def test_truncated_file(name: str, share: float, tmp_path: Path) -> None:
    content = _whole(tmp_path, name)
    (tmp_path / name).write_bytes(content[: int(len(content) * share)])
    with pytest.raises(
        HarnessError,
        match=sentence("no-safetensors", "truncated", "damaged-checkpoint", "not-a-checkpoint", path=tmp_path / name),
    ) as raised:
        load_checkpoint(Part(), tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_archive_that_says_that_it_goes_on_elsewhere_is_refused(tmp_path: Path) -> None:
    content = bytearray(_whole(tmp_path, "sam3.pt"))
    content[content.rindex(b"PK\x06\x07") + 16] = 2  # its number of disks
    (tmp_path / "sam3.pt").write_bytes(content)
    with pytest.raises(HarnessError, match=sentence("truncated", path="sam3.pt")):
        Checkpoint.open(tmp_path / "sam3.pt")


@pytest.mark.parametrize("save", [save_pt, save_legacy])
def test_whatever_is_damaged_in_a_pickle_is_one_sentence(
    save: Callable[[dict[str, Any], Path], None], tmp_path: Path
) -> None:
    path, drawn, refused = tmp_path / "damaged.pt", random.Random(0), 0
    save({f"detector.{n}": torch.ones(n) for n in range(3)}, path)
    whole = path.read_bytes()
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(drawn.randint(1, 4)):
            content[drawn.randrange(min(len(content), 700))] = drawn.randrange(256)
        path.write_bytes(content)
        try:
            Checkpoint.open(path)
        except HarnessError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 100


EXTENT = b'{"detector.a": {"dtype": "F32", "shape": [0, 18446744073709551615], "data_offsets": [0, 0]}}'
"""The header of a file of safetensors with an extent beyond 64 bits, of which PyTorch raises a `TypeError`."""


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("letter.pt", b"Dear aunt,\nthank you for the socks.\n", sentence("not-a-checkpoint")),
        ("letter.safetensors", b"Dear aunt,\nthank you for the socks.\n", sentence("no-safetensors")),
        ("extent.safetensors", len(EXTENT).to_bytes(8, "little") + EXTENT, sentence("no-safetensors")),
        (
            "picture.pt",
            (Path(__file__).parents[3] / "fixtures/images/cat.png").read_bytes(),
            sentence("not-a-checkpoint"),
        ),
    ],
)
def test_file_that_is_no_checkpoint(name: str, content: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HarnessError, match=expected) as raised:
        load_checkpoint(Part(), tmp_path / name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [{"layer1.weight": torch.ones(2)}, {}, {"detector.conv.weight": torch.ones(1)}])
def test_checkpoint_of_another_model(content: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save(content, tmp_path / "resnet.pt")
    with pytest.raises(HarnessError, match=sentence("other-model", tensors=len(content))):
        load_checkpoint(Part(), tmp_path / "resnet.pt")


def test_file_that_holds_something_else(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(HarnessError, match=sentence("no-tensors", name="list")):
        load_checkpoint(Part(), tmp_path / "list.pt")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=sentence("no-such-file", path="nowhere.pt")):
        build_model("shallow", 0, tmp_path / "nowhere.pt")
    with pytest.raises(HarnessError, match=sentence("no-checkpoint")):
        load_checkpoint(Part(), tmp_path)
