"""What of SAM 3 stays float32 in every half precision: what projects words and the pooled prompt, and what scores."""

from __future__ import annotations

import pytest

from harness.compiler.deployment.deployable import ArtifactSpec
from harness.compiler.lowering.groups import always_float32
from harness.compiler.lowering.route import Lowered, Route
from harness.compiler.lowering.route import lower as lowered
from harness.core.case import Case, Scale
from harness.core.program import Program
from harness.core.settings import SEEDED
from harness.models.registry import models, subjects
from harness.models.sam3.build import build_architecture
from harness.models.sam3.deployed.deployable import DEPLOYABLE
from harness.models.sam3.deployed.entry_points import programs
from harness.models.sam3.deployed.options import GROUNDING_ALONE
from harness.models.sam3.groups import FLOAT32, note_groups
from harness.models.sam3.upstream import upstream
from harness.verify.budget.measurement import Bench

PRESENCE = {f"transformer.decoder.presence_token_head.layers.{layer}" for layer in range(3)}
SCORING = {"dot_prod_scoring", "dot_prod_scoring.prompt_proj"}
BOXES = "transformer.decoder.bbox_embed.layers.2"
RESIZER = "backbone.language_backbone.resizer"
MAKE_MASKS = ("embed_pixels", "mask_predictor")


def in_half_precision(component: str) -> Lowered:
    case = Case(component, "real", "llvm", precision="bf16")
    with models()["sam3"].context():
        program = next(iter(subjects()[component].open(case, SEEDED).programs.values()))
        return lowered(program.module, tuple(program.example.values()), Route.from_case(case))


def test_upstream_has_all_of_it() -> None:
    with upstream():
        model = build_architecture(Scale.SHALLOW, interactive=True)
    assert not [path for path in FLOAT32 if path not in dict(model.named_modules())]
    note_groups(model)
    assert always_float32(model) == {*FLOAT32}


@pytest.mark.parametrize(
    ("component", "groups"),
    [
        ("text_encoder", {RESIZER}),
        ("scoring_head", SCORING),
        ("transformer_decoder", PRESENCE | {BOXES}),
        ("box_head", {BOXES}),
    ],
)
def test_of_a_component_only_that_is(component: str, groups: set[str]) -> None:
    made = in_half_precision(component)
    assert made.float32 == groups
    assert "bfloat16" in {array.dtype.name for array in made.parameters().values()}


@pytest.mark.wide
def test_an_entry_point_keeps_what_its_components_keep() -> None:
    case = Case("sam3", "real", "llvm", precision="bf16")
    spec = ArtifactSpec(DEPLOYABLE, case, SEEDED, GROUNDING_ALONE, ("ground", "encode_text"))
    kept = {item.name: item.float32 for item in spec.import_entries(lambda stage: None)}
    assert kept == {"encode_text": {RESIZER}, "ground": SCORING | PRESENCE | {BOXES}}


def test_what_makes_masks_has_the_groups_of_the_segmentation_head() -> None:
    """Otherwise a budget would not hold for what a compiled model computes in its own way."""
    case = Case("segmentation_head", "real", "llvm")
    with models()["sam3"].context():
        (component,) = subjects()["segmentation_head"].open(case, SEEDED).programs.values()
        made = (each for each in programs(case, SEEDED, GROUNDING_ALONE) if each.name in MAKE_MASKS)
        assert set().union(*map(groups_of, made)) == groups_of(component)


def groups_of(program: Program) -> set[str]:
    route = Route()
    exported = route.export(program.module, tuple(program.example.values()))
    return set(route.groups(exported, route.lower(exported, program.module).module, program.module).values())


def test_it_is_in_no_budget() -> None:
    with models()["sam3"].context():
        bench = Bench(Case("transformer_decoder", "real", "llvm", precision="bf16"), SEEDED)
    assert set(bench.untouched) >= PRESENCE and not PRESENCE.intersection(bench.groups)
    assert "transformer.decoder.layers.0.linear1" in bench.groups
