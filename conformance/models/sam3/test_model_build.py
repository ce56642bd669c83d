"""The builder: `full` is upstream's own model, `shallow` the same with fewer repetitions."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from conformance.support.sentences import sentence
from conformance.support.shallow import shallow_model
from harness.core.case import TINY, Scale
from harness.core.errors import HarnessError
from harness.models.sam3.build import FEATURE_SIZES, MEMORY_SIZES, build_architecture
from harness.models.sam3.patches.patch import replaced
from harness.models.sam3.scales import SCALES, scaled
from harness.models.sam3.upstream import upstream
from harness.models.sam3.vocabulary import vocabulary_path

REPEATED = {
    "backbone.vision_backbone.trunk.blocks": (32, 2),
    "backbone.language_backbone.encoder.transformer.resblocks": (24, 2),
    "geometry_encoder.encode": (3, 2),
    "transformer.encoder.layers": (6, 2),
    "transformer.decoder.layers": (6, 2),
}
"""Stack of layers → how many `full` (as published) and `shallow` have."""
INTERACTIVE = {"inst_interactive_predictor.model.transformer.encoder.layers": (4, 1)}
"""The same of what only the interactive model has."""


@cache
def upstreams_own(interactive: bool) -> Any:
    """The model that upstream's builder makes when nobody interferes, without memory for its weights."""
    linspace = torch.linspace
    with (
        upstream(),
        # ViT calls .item() on this one, which has no value on the meta device.
        replaced(torch, "linspace", lambda *args, **kwargs: linspace(*args, device="cpu", **kwargs)),
        torch.device("meta"),
    ):
        from sam3.model_builder import build_sam3_image_model

        return build_sam3_image_model(
            bpe_path=str(vocabulary_path()),
            device="cpu",
            load_from_HF=False,
            enable_inst_interactivity=interactive,
        )


@cache
def architecture(scale: str, interactive: bool = False) -> Any:
    return build_architecture(scale, interactive=interactive)


def tensors(model: torch.nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named}


def modules(model: torch.nn.Module) -> dict[str, tuple[str, str]]:
    return {name: (type(module).__qualname__, module.extra_repr()) for name, module in model.named_modules()}


@pytest.mark.parametrize("interactive", [False, True])
def test_full_is_upstreams_own_model(interactive: bool) -> None:
    ours, theirs = architecture("full", interactive), upstreams_own(interactive)
    assert tensors(ours) == tensors(theirs)
    assert modules(ours) == modules(theirs)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    assert not theirs.training


def test_full_has_the_published_size() -> None:
    model = upstreams_own(False)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) in range(830, 860)
    for name, (full, shallow) in REPEATED.items():
        assert len(model.get_submodule(name)) == full
        assert len(shallow_model().get_submodule(name)) == shallow
    for name, (full, shallow) in INTERACTIVE.items():
        assert len(upstreams_own(True).get_submodule(name)) == full
        assert len(architecture("shallow", True).get_submodule(name)) == shallow


def kinds(model: torch.nn.Module) -> set[tuple[Any, ...]]:
    """Every distinct module, by type, configuration and shapes; the drop rate has no effect in evaluation mode."""
    found = set()
    for module in model.modules():
        name = type(module).__qualname__
        configuration = "" if name == "DropPath" else module.extra_repr()
        shapes = tuple(
            (local, tuple(tensor.shape))
            for local, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        )
        found.add((name, configuration, shapes, getattr(module, "window_size", None)))
    return found


@pytest.mark.parametrize("interactive", [False, True])
def test_every_kind_of_layer_of_full_is_in_shallow(interactive: bool) -> None:
    assert kinds(upstreams_own(interactive)) == kinds(architecture("shallow", interactive))


def test_rope_tables_of_full_are_in_shallow() -> None:
    full = {name: buffer for name, buffer in architecture("full").named_buffers() if "freqs_cis" in name}
    shallow = {name: buffer for name, buffer in shallow_model().named_buffers() if "freqs_cis" in name}
    assert len(full) == 32
    assert len(shallow) == 2
    for buffer in full.values():
        assert any(torch.equal(buffer, other) for other in shallow.values())


@pytest.mark.parametrize("scale", SCALES)
def test_shallow_names_are_names_of_full(scale: str) -> None:
    names = set(dict(architecture(scale).named_parameters()))
    assert names <= set(dict(upstreams_own(False).named_parameters()))


def test_scales_are_the_cases_scales() -> None:
    assert set(SCALES) == {*Scale, TINY}
    assert SCALES["full"] == {}


def test_model_is_fp32_on_the_cpu_for_evaluation() -> None:
    model = shallow_model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"cpu"}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(module.training for module in model.modules())


def test_scaled_undoes_itself() -> None:
    with upstream():
        import sam3.model_builder

        before = dict(vars(sam3.model_builder))
        with scaled("shallow"):
            assert sam3.model_builder.ViT is not before["ViT"]
        assert dict(vars(sam3.model_builder)) == before


@pytest.mark.parametrize("scale", ["small", "", "FULL"])
def test_unknown_scale(scale: str) -> None:
    with pytest.raises(HarnessError, match=sentence("unknown-name", scales="full, shallow")):
        build_architecture(scale)


def test_position_encodings_are_upstreams_and_never_traced() -> None:
    encoding = shallow_model().backbone.vision_backbone.position_encoding
    assert set(encoding.cache) == {(size, size) for size in FEATURE_SIZES}
    from sam3.model.position_encoding import PositionEmbeddingSine

    fresh = PositionEmbeddingSine(num_pos_feats=256, normalize=True, scale=None, temperature=10000)
    for size in FEATURE_SIZES:
        torch.testing.assert_close(encoding.cache[size, size], fresh(torch.zeros(1, 1, size, size))[0], rtol=0, atol=0)
    memories = architecture("shallow", True).inst_interactive_predictor.model.maskmem_backbone.position_encoding
    assert set(memories.cache) == {(size, size) for size in MEMORY_SIZES}
    with upstream(), torch.no_grad():
        program = torch.export.export(encoding, (torch.zeros(1, 256, 72, 72),), strict=False)
    assert all(type(cached) is torch.Tensor for cached in encoding.cache.values())
    assert torch.equal(program.module()(torch.ones(1, 256, 72, 72)), encoding(torch.ones(1, 256, 72, 72)))
