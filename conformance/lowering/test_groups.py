"""Groups of products: their names are the model's own, and those that are named stay float32."""

from __future__ import annotations

import pytest
import torch
import tvm
from torch import nn
from tvm import relax

from conformance.support.perceptron import Deployed, Perceptron, network, tokens
from conformance.support.sentences import sentence
from harness.compiler.lowering.groups import OUTSIDE, keep_float32, note_paths
from harness.compiler.lowering.route import Lowered, Route
from harness.compiler.schedules.common.origins import bindings_of
from harness.core.errors import HarnessError
from harness.core.precision import ROUNDED_OPERANDS

ARGS = (tokens(),)


def lowered(module: nn.Module, *float32: str, args: tuple = ARGS, precision: str = "bf16") -> Lowered:
    route = Route(precision=precision, float32=frozenset(float32))
    return route.lower(route.export(module.eval(), args), module)


def weights(made: Lowered) -> dict[str, str]:
    """The types of matrices, by name."""
    return {name: array.dtype.name for name, array in made.parameters().items() if array.ndim == 2}


def groups(module: nn.Module, args: tuple = ARGS) -> list[str]:
    route = Route()
    exported = route.export(module.eval(), args)
    return list(route.groups(exported, route.lower(exported, module).module, module).values())


def products(module: tvm.IRModule) -> list[str]:
    """The types of the operands of each product."""
    found = [binding.value for binding in bindings_of(module["main"]) if getattr(binding.value, "op", None) is not None]
    calls = [value for value in found if getattr(value.op, "name", "") in ("relax.matmul", "relax.nn.attention")]
    return ["/".join(sorted({str(operand.ty.dtype) for operand in call.args})) for call in calls]


def test_a_component_and_an_entry_point_have_the_same_names() -> None:
    model = network(0)
    assert groups(Perceptron(model)) == ["trunk.0", "trunk.2", "head", "scale"]
    assert groups(Deployed(model)) == ["trunk.0", "trunk.2", "head"]


def test_without_a_model_names_are_paths_in_what_is_exported() -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            attended, _ = self.attention(x, x, x, need_weights=False)
            return attended @ attended.mT

    x = (torch.randn(9, 3, 64),)
    found = groups(Outside(), x)
    assert set(found[:-1]) == {"attention"} and len(found) >= 4 and found[-1] == OUTSIDE


class Words(nn.Module):
    """A large table, whose rows are read, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(1 << 14, 64), nn.Linear(64, 64)

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        return self.layer(self.words(at))


def test_a_table_is_a_group() -> None:
    at = (torch.arange(8)[None],)
    assert groups(Words(), at) == ["words", "layer"]
    half, wide = (weights(lowered(Words(), *names, args=at)) for names in ((), ("words",)))
    assert half == {"words.weight": "bfloat16", "layer.weight": "bfloat16"}
    assert wide == {"words.weight": "float32", "layer.weight": "bfloat16"}


def test_named_groups_stay_float32() -> None:
    made = lowered(Perceptron(network(0)), "trunk.2", "scale")
    found = weights(made)
    assert {name.rpartition(".")[0]: dtype for name, dtype in found.items()} == {
        "layers.0": "bfloat16",
        "layers.2": "float32",
        "head": "bfloat16",
        "scale": "float32",
    }
    assert products(made.module) == ["bfloat16", "float32", "bfloat16", "float32"]
    assert made.float32 == {"trunk.2", "scale"}


def test_what_always_stays_float32_need_not_be_named() -> None:
    model = network(0)
    for part in (model.trunk[0], model.trunk[2]):
        keep_float32(part)
    for module in (Perceptron(model), Deployed(model)):
        made = lowered(module)
        assert made.float32 == {"trunk.0", "trunk.2"}
        assert products(made.module)[:3] == ["float32", "float32", "bfloat16"]
    named = lowered(Perceptron(model), "head")
    assert named.float32 == {"trunk.0", "trunk.2", "head"}
    assert products(named.module) == ["float32", "float32", "float32", "bfloat16"]
    fp32 = lowered(Perceptron(model), precision="fp32").module
    tvm.ir.assert_structural_equal(fp32, lowered(Perceptron(network(0)), precision="fp32").module)


def test_a_frontend_without_modules_keeps_nothing_of_its_own_accord() -> None:
    model = network(0)
    for part in model.modules():
        keep_float32(part)
    route = Route(frontend="onnx", precision="bf16")
    made = route.lower(route.export(Perceptron(model), ARGS), Perceptron(model))
    assert made.float32 == frozenset() and set(products(made.module)) == {"bfloat16"}


def test_a_group_of_another_model_is_told() -> None:
    assert lowered(Perceptron(network(0)), "trunk.2", "other").float32 == {"trunk.2"}


def test_without_a_choice_nothing_changes() -> None:
    module = Perceptron(network(0))
    imported, bf16 = lowered(module, precision="fp32"), lowered(module)
    assert set(weights(bf16).values()) == {"bfloat16"} and products(bf16.module) == ["bfloat16"] * 4
    every = lowered(module, "trunk.0", "trunk.2", "head", "scale").module
    every["main"] = every["main"].without_attr(ROUNDED_OPERANDS)
    canonical = relax.transform.CanonicalizeBindings()
    tvm.ir.assert_structural_equal(canonical(every), canonical(imported.module))
    tvm.ir.assert_structural_equal(lowered(module, "head", precision="fp32").module, imported.module)


def test_a_weight_of_two_groups_is_rounded_for_the_half_one_alone() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.sin(self.first(x)))

    made = lowered(Tied(), "first")
    assert set(weights(made).values()) == {"float32"}
    assert products(made.module) == ["float32", "bfloat16"]


def test_other_frontends_are_one_sentence() -> None:
    route, module = Route(frontend="onnx", precision="bf16", float32=frozenset(["head"])), Perceptron(network(0))
    with pytest.raises(HarnessError, match=sentence("no-modules", frontends="torch")):
        route.lower(route.export(module, ARGS), module)


def test_paths_are_those_of_the_whole() -> None:
    inner = nn.Sequential(nn.Linear(64, 64))
    note_paths(nn.ModuleDict({"outer": inner}))
    assert groups(inner) == ["outer.0"]
