"""`sam3-tvm inspect` says what a checkpoint is, what it fits and what it does; each mistake is one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from conformance.support.hugging_face import to_hugging_face
from conformance.support.sentences import sentence
from conformance.support.shallow import build_model
from harness.cli.main import app
from harness.core.checkpoint_file import checkpoint_digest
from harness.core.errors import HarnessError
from harness.models.sam3.checkpoints.names import video_name

TEXT_POSITIONS = "detector.backbone.language_backbone.encoder.positional_embedding"
TRACKER_CONVOLUTION = "tracker.maskmem_backbone.mask_downsampler.encoder.0.weight"
State = dict[str, Any]


@cache
def tiny() -> State:
    state = build_model("tiny", 0, interactive=True).state_dict()
    return {video_name(name): tensor for name, tensor in state.items()}


def trainer(state: State) -> State:
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    return {"model": wrapped, "optimizer": {"state": [torch.ones(2)]}, "epoch": 3}


def images(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if name.startswith("detector.")}


def transformers(state: State) -> State:
    return to_hugging_face({name.removeprefix("detector."): tensor for name, tensor in images(state).items()})


def short_texts(state: State) -> State:
    """As distilled files have."""
    return state | {TEXT_POSITIONS: state[TEXT_POSITIONS][:16]}


def other_tracker(state: State) -> State:
    """As SAM 3.1's tracker, whose memory encoder takes 32 channels, would be under SAM 3's names."""
    weight = state[TRACKER_CONVOLUTION]
    return state | {TRACKER_CONVOLUTION: weight.repeat(1, 32, 1, 1)}


def half_a_neck(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if "vision_backbone.convs.3." not in name}


def spoilt(state: State) -> State:
    return state | {TEXT_POSITIONS: torch.full_like(state[TEXT_POSITIONS], torch.nan)}


def unwrapped(text: str) -> str:
    """The words without spaces, ends of lines and the frames of tables, however wide the terminal is."""
    return re.sub(r"[\s│]+", "", text)


ALL = ["texts", "boxes", "points", "clicks", "video"]


@pytest.mark.parametrize(
    ("change", "expected", "words"),
    [
        (
            trainer,
            {"does": ALL, "wrappers": ["model", "module"], "scale": "tiny"},
            ("left aside: optimizer (1 tensors)",),
        ),
        (images, {"does": ALL[:3], "layout": "upstream"}, ("unused", "sam2_convs")),
        (transformers, {"does": ALL[:2], "layout": "Transformers"}, ("under Transformers' names",)),
        (short_texts, {"does": [], "scale": None}, (f"{TEXT_POSITIONS[9:]}: 16×128 instead of 32×128",)),
        (other_tracker, {"does": [], "scale": None}, ("32×3×3 instead of", "stay at their seed")),
        (half_a_neck, {"does": [], "scale": None}, ("4 missing", "vision_backbone.convs.3", "stay at their seed")),
        (spoilt, {"does": [], "not finite": [TEXT_POSITIONS], "scale": "tiny"}, ("not finite",)),
    ],
)
def test_what_a_file_is(
    change: Callable[[State], State], expected: State, words: tuple[str, ...], tmp_path: Path
) -> None:
    torch.save(change(tiny()), tmp_path / "sam3.pt")
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "sam3.pt"), "--json", str(tmp_path / "facts.json")])
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts == facts | expected
    assert facts["sha256"] == checkpoint_digest(tmp_path / "sam3.pt").sha256
    assert facts["bytes"] == (tmp_path / "sam3.pt").stat().st_size
    for words_found in (facts["checkpoint"], facts["sha256"], *words):
        assert unwrapped(words_found) in unwrapped(done.output), done.output


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_told(dtype: str, tmp_path: Path) -> None:
    half = {n: t.to(getattr(torch, dtype)) for n, t in images(tiny()).items() if not t.is_complex()}
    save_file(half, tmp_path / "sam3_half.safetensors")
    done = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    for words in (f"{len(half)} tensors in {dtype}.", f"{dtype}: {len(half)}"):
        assert unwrapped(words) in unwrapped(done.output)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nowhere.pt", sentence("no-such-file", path="nowhere.pt")),
        ("other.pt", sentence("other-model", path="other.pt")),
        ("later.pt", sentence("sam31-checkpoint", path="later.pt", name="tracker.model.interactive_mask_decoder.a")),
        ("", sentence("several-checkpoints", names="later.pt, other.pt")),
    ],
)
def test_what_is_no_checkpoint_of_sam_3_is_refused(name: str, expected: str, tmp_path: Path) -> None:
    torch.save({"layer1.weight": torch.ones(2)}, tmp_path / "other.pt")
    torch.save(images(tiny()) | {"tracker.model.interactive_mask_decoder.a": torch.ones(1)}, tmp_path / "later.pt")
    with pytest.raises(HarnessError, match=expected):
        CliRunner().invoke(app, ["inspect", str(tmp_path / name), "--model", "sam3"], catch_exceptions=False)
