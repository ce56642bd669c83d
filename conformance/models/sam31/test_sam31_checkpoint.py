"""A checkpoint of SAM 3.1 is recognized by its names; every tensor is loaded or refused.

No published weights were ever here: the files are full state dictionaries under the published names.
"""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from conformance.support.sentences import sentence
from harness.cli.main import app
from harness.core.errors import HarnessError
from harness.models.sam3.build import build_architecture as build_sam3
from harness.models.sam3.checkpoints import loading as sam3_loading
from harness.models.sam3.checkpoints.names import video_name
from harness.models.sam3.weights import seed_weights
from harness.models.sam31.build import build_architecture
from harness.models.sam31.checkpoint import Sam31Checkpoint
from harness.models.sam31.inspection import inspect_checkpoint

State = dict[str, Any]
load_checkpoint = partial(sam3_loading.load_checkpoint, kind=Sam31Checkpoint)
SLOTS = "tracker.model.output_valid_embed"
MASKS = "tracker.model.maskmem_backbone.mask_downsampler.encoder.0.weight"


@cache
def tiny() -> State:
    model = build_architecture("tiny")
    seed_weights(model, 5)
    return dict(model.state_dict())


def sam_3() -> State:
    state = build_sam3("tiny", interactive=True).state_dict()
    return {video_name(name): torch.zeros_like(tensor) for name, tensor in state.items()}


def saved(state: State, path: Path) -> Path:
    torch.save(state, path)
    return path


def test_the_published_model_has_as_many_tensors_and_numbers() -> None:
    """sam3-export counted the tensors of the published file (474 of the necks and the trunk, 457 of the tracker)."""
    model = build_architecture("full")
    names = list(model.state_dict())
    assert sum(name.startswith("tracker.model.") for name in names) == 457
    assert sum(name.startswith("detector.backbone.vision_backbone.") for name in names) == 474
    assert all(name.startswith(("detector.", "tracker.model.")) for name in names)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == 873


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"model": state, "epoch": 3}])
def test_every_tensor_is_loaded(wrap: Any, tmp_path: Path) -> None:
    path = saved(wrap(tiny()), tmp_path / "sam3.1_multiplex.pt")
    model = build_architecture("tiny")
    assert load_checkpoint(model, path) == frozenset()
    loaded = model.state_dict()
    assert loaded.keys() == tiny().keys()
    assert [name for name, tensor in tiny().items() if not torch.equal(loaded[name], tensor)] == []


def test_half_precision_is_loaded_as_it_is_rounded(tmp_path: Path) -> None:
    half = {name: tensor.half().contiguous() for name, tensor in tiny().items() if tensor.dtype == torch.float32}
    save_file({name: tensor.clone() for name, tensor in half.items()}, tmp_path / "half.safetensors")
    model = build_architecture("tiny")
    load_checkpoint(model, tmp_path / "half.safetensors")
    assert torch.equal(model.state_dict()[SLOTS], half[SLOTS].float())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({SLOTS: None}, sentence("does-not-fit", fit=f"1 missing ({SLOTS})")),
        (
            {"tracker.model.temporal.weight": torch.ones(2)},
            sentence("does-not-fit", fit="1 unexpected (tracker.model.temporal.weight)"),
        ),
        ({"detector.extra": torch.ones(2)}, sentence("does-not-fit", fit="1 unexpected (detector.extra)")),
        (
            {MASKS: torch.zeros(4, 1, 3, 3)},
            sentence("does-not-fit", fit=f"1 misshapen ({MASKS}: 4×1×3×3 instead of 16×32×3×3)"),
        ),
        ({SLOTS: torch.full((16, 256), torch.nan)}, sentence("not-finite", value=SLOTS)),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: State, expected: str, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in (tiny() | change).items() if tensor is not None}
    path = saved(state, tmp_path / "sam3.1_multiplex.pt")
    with pytest.raises(HarnessError, match=expected):
        load_checkpoint(build_architecture("tiny"), path)


def test_a_file_of_sam_3_is_refused_and_the_reverse(tmp_path: Path) -> None:
    earlier, later = saved(sam_3(), tmp_path / "sam3.pt"), saved(tiny(), tmp_path / "sam3.1_multiplex.pt")
    for allow_partial in (False, True):
        with pytest.raises(HarnessError, match=sentence("not-sam31", path="sam3.pt")):
            load_checkpoint(build_architecture("tiny"), earlier, allow_partial=allow_partial)
        with pytest.raises(HarnessError, match=sentence("sam31-checkpoint")):
            sam3_loading.load_checkpoint(build_sam3("tiny"), later, allow_partial=allow_partial)


def test_inspect_says_what_it_is(tmp_path: Path) -> None:
    path = saved(tiny(), tmp_path / "sam3.1_multiplex.pt")
    facts = inspect_checkpoint(path)
    assert facts["checkpoint"].startswith("sam3.1_multiplex.pt: SAM 3.1 under upstream's names, ")
    assert facts["scale"] == "tiny"
    assert facts["does"] == ["texts", "boxes", "points", "clicks", "video"]
    assert not facts["unused"]
    done = CliRunner().invoke(app, ["inspect", str(path)])
    assert done.exit_code == 0
    assert "SAM 3.1 under upstream's names" in re.sub(r"\s+", " ", done.output)
