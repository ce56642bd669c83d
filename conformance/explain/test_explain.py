"""`sam3-tvm explain`: every operator is accounted for, with the kernel or the loops that really compute it."""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm
from rich.console import Console
from tvm import ir, relax
from typer.testing import CliRunner

from conformance.support.commands import run_command
from conformance.support.operators import module_of
from conformance.support.sentences import sentence
from conformance.support.shallow import photograph, shallow_model
from conformance.support.tuning import database_of, record
from harness.cli.main import app
from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.torch_export.frontend import TORCH
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.schedules.common.kernel_info import FEED_FORWARD, Kind, infos_of
from harness.compiler.schedules.common.provenance import LoweringKind, Operator, trace
from harness.compiler.schedules.cpu import cpu_pipeline, rewrite
from harness.compiler.schedules.cpu.blocking import Extents
from harness.compiler.schedules.cpu.schedule import Product, space
from harness.compiler.schedules.cpu.tile import vector_unit
from harness.compiler.targets import TARGETS
from harness.compiler.tuned import database
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.models.sam3.components import COMPONENTS
from harness.models.sam3.upstream import upstream
from harness.verify.explain import Explanation, explain, render

pytestmark = pytest.mark.usefixtures("forked_processes")

op = relax.op
REAL = ("scoring_head", "transformer_encoder", "segmentation_head", "text_encoder")


@cache
def imported(name: str) -> tvm.IRModule:
    component, strategy = COMPONENTS[name], STRATEGIES["real"]
    with upstream():
        module = component.build(shallow_model()).eval()
        inputs = tuple(next(iter(component.samples(photograph()).values())).values())
        with strategy.apply(module):
            program = export_program(module, inputs)
        return TORCH.import_exported(program, strategy)[0]


def traced(module: tvm.IRModule) -> list[Operator]:
    target = TARGETS["llvm"].tvm_target()
    return trace(module, cpu_pipeline(target), target)


@cache
def explained(name: str) -> list[Operator]:
    return traced(imported(name))


def of(operator: Callable[..., relax.Expr], *shapes: tuple[int, ...]) -> list[Operator]:
    return traced(module_of(operator, shapes))


def schedules(operator: Operator) -> list[str]:
    return [name for info in operator.facts for name in info.schedules]


def ways(operators: list[Operator]) -> list[tuple[str, LoweringKind]]:
    return [(operator.name, operator.how) for operator in operators]


@pytest.mark.parametrize("name", REAL)
def test_every_operator_is_told_once_and_every_compiled_function_is_somebodys(name: str) -> None:
    calls = [
        binding.value
        for block in imported(name)["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, ir.Call)
    ]
    operators = explained(name)
    assert [operator.name for operator in operators] == [call.op.name.removeprefix("relax.") for call in calls]
    target = TARGETS["llvm"].tvm_target()
    lowered = cpu_pipeline(target)(imported(name))
    facts = infos_of(lowered)
    compiled = {v.name_hint for v, f in lowered.functions_items() if isinstance(f, tvm.tirx.PrimFunc)}
    reshapes = {name for name in compiled if name.startswith("reshape")}
    told = {function for operator in operators for function in operator.functions}
    # The rest brings operands of kernels into layout or shape.
    assert {name for name in compiled - told if facts[name].kind is not Kind.HELPER} <= reshapes
    for operator in operators:
        assert bool(operator.functions) == (operator.how is not LoweringKind.NOTHING)
        assert operator.name in operator.beside or operator.how is LoweringKind.NOTHING


@pytest.mark.parametrize("name", REAL)
def test_products_convolutions_and_norms_have_kernels(name: str) -> None:
    own = ("matmul", "nn.conv2d", "nn.conv2d_transpose", "nn.attention", "nn.attention_bias")
    norms = ("nn.layer_norm", "nn.group_norm", "nn.softmax")
    operators = explained(name)
    for operator in operators:
        # The kernel of two linear layers is told as the first one's; it does the second one after that.
        second = [fact.algorithm for fact in operator.facts] == [FEED_FORWARD] and operator.how is LoweringKind.FOLDED
        if operator.name in own + norms:
            assert operator.how is LoweringKind.KERNEL or (second and operator.name == "matmul"), operator
        if operator.name in own and operator.name != "nn.attention_bias":
            (info,) = operator.facts
            assert info.kind is Kind.KERNEL and info.flop and info.extents
            assert info.tile or info.algorithm in ("depthwise", "attention of few queries")
        assert operator.how is not LoweringKind.UNSCHEDULED, operator
    assert any(operator.name in own for operator in operators)


def test_what_is_fused_is_told_with_the_kernel() -> None:
    first = next(operator for operator in explained("scoring_head") if operator.name == "matmul")
    assert first.functions == ("matmul_add_relu",)
    assert (first.inputs, first.output) == (("35x256", "256x2048"), "35x2048")
    (info,) = first.facts
    assert info.extents == {"batch": 1, "rows": 35, "depth": 256, "columns": 2048}
    assert (info.operator, info.writes) == ("matmul", ("add", "nn.relu"))
    assert info.flop == 2 * 35 * 256 * 2048
    assert info.bytes_moved is not None and info.bytes_moved >= 4 * (35 * 256 + 256 * 2048 + 2048 + 35 * 2048)
    assert [name for name in first.beside if name not in ("reshape", "permute_dims")] == ["matmul", "add", "nn.relu"]
    relu = next(operator for operator in explained("scoring_head") if operator.name == "nn.relu")
    assert (relu.how, relu.functions, relu.beside) == (LoweringKind.FOLDED, first.functions, first.beside)


def test_attention_folds_the_permutations_around_it() -> None:
    attention = next(operator for operator in explained("transformer_encoder") if operator.name == "nn.attention_bias")
    assert attention.functions[0].startswith("attention")
    (info,) = attention.facts
    assert [info.extents[name] for name in ("batch", "heads", "queries", "channels")] == [1, 8, 5184, 32]
    assert Counter(attention.beside)["permute_dims"] >= 3


def test_a_kernel_of_the_import_that_attention_folds_is_told_with_it() -> None:
    strategy = STRATEGIES["tensorir"]
    with upstream():
        from sam3.model.vitdet import Attention

        attention = Attention(128, 2, use_rope=True, input_size=(3, 5)).eval()
        with strategy.apply(attention):
            program = export_program(attention, (torch.randn(2, 3, 5, 128),))
    operators = traced(TORCH.import_exported(program, strategy)[0])
    rotation = next(operator for operator in operators if operator.name.startswith("call_tir"))
    assert (rotation.name, rotation.how, rotation.functions) == (
        "call_tir rotate_pairs",
        LoweringKind.FOLDED,
        ("attention",),
    )
    assert [info.reads for info in rotation.facts] == [("queries", "keys")]


def test_without_a_kernel_an_operator_falls_to_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        return op.matmul(a, b)

    assert ways(of(product, (40, 50), (50, 60))) == [("matmul", LoweringKind.KERNEL)]
    monkeypatch.delitem(rewrite.KERNELS, "relax.matmul")
    (alone,) = of(product, (40, 50), (50, 60))
    assert (alone.how, alone.functions, schedules(alone)) == (LoweringKind.DEFAULT, ("matmul",), ["reduction"])


OTHERS: dict[str, tuple[Callable[..., relax.Expr], tuple[int, ...], list[tuple[str, LoweringKind]], str]] = {
    "flat": (lambda x: op.abs(x), (64, 1024), [("abs", LoweringKind.DEFAULT)], "flat"),
    "tiled": (lambda x: op.permute_dims(x, [1, 0]), (64, 96), [("permute_dims", LoweringKind.DEFAULT)], "tiled"),
    "rows of a permutation": (
        lambda x: op.permute_dims(x, [1, 0, 2]),
        (128, 24, 256),
        [("permute_dims", LoweringKind.DEFAULT)],
        "rows",
    ),
    "rows": (
        lambda x: op.strided_slice(x, [1], [1], [40]),
        (30, 50),
        [("strided_slice", LoweringKind.DEFAULT)],
        "rows",
    ),
    "reduction": (
        lambda x: op.astype(op.max(op.astype(x, "int32"), 1), "float32"),
        (30, 50),
        [("astype", LoweringKind.DEFAULT), ("max", LoweringKind.DEFAULT), ("astype", LoweringKind.DEFAULT)],
        "reduction",
    ),
    "unscheduled": (lambda x: op.sort(x, 1), (3, 50), [("sort", LoweringKind.UNSCHEDULED)], ""),
    "ours": (lambda x: op.exp(x), (64, 1024), [("exp", LoweringKind.LEGALIZATION)], "flat"),
    "kernel of a legalization": (lambda x: op.nn.softmax(x), (3, 50), [("nn.softmax", LoweringKind.KERNEL)], ""),
    "view": (
        lambda x: op.nn.softmax(op.reshape(op.nn.softmax(x), [50, 3])),
        (3, 50),
        [("nn.softmax", LoweringKind.KERNEL), ("reshape", LoweringKind.VIEW), ("nn.softmax", LoweringKind.KERNEL)],
        "",
    ),
}


@pytest.mark.parametrize(("operator", "shape", "expected", "detail"), OTHERS.values(), ids=OTHERS)
def test_loops_are_told_with_their_schedule(
    operator: Callable[..., relax.Expr], shape: tuple[int, ...], expected: list[tuple[str, LoweringKind]], detail: str
) -> None:
    operators = of(operator, shape)
    assert ways(operators) == expected
    if detail:
        assert schedules(operators[0]) == [detail]


def test_a_group_is_told_whole_and_what_nobody_needs_is_nothing() -> None:
    def operator(x: relax.Expr) -> relax.Expr:
        builder = relax.BlockBuilder.current()
        builder.emit(op.negative(x))
        y = builder.emit(op.exp(builder.emit(op.abs(x))))
        return op.add(y, relax.const(1.0))

    unused, *group = of(operator, (64, 1024))
    assert (unused.name, unused.how, unused.functions) == ("negative", LoweringKind.NOTHING, ())
    assert ways(group) == [
        ("abs", LoweringKind.DEFAULT),
        ("exp", LoweringKind.LEGALIZATION),
        ("add", LoweringKind.DEFAULT),
    ]
    assert {operator.beside for operator in group} == {("abs", "exp", "add")}
    assert len({operator.functions for operator in group}) == 1


def test_what_depends_on_weights_alone_runs_when_the_model_is_loaded() -> None:
    at_load = {operator.name for operator in explained("text_encoder") if operator.at_load}
    assert not at_load & {"matmul", "nn.attention_bias", "nn.layer_norm"}
    module = module_of(lambda x, w: op.add(x, op.exp(w)), [(64, 1024)] * 2)
    module["main"] = module["main"].with_attr("num_input", 1)
    assert [(o.name, o.at_load) for o in traced(module)] == [("exp", True), ("add", False)]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("explain", *arguments)


EXTENTS = {"batch": 1, "rows": 400, "depth": 256, "columns": 256}
BOX_HEAD = Product(Extents(1, 400, 256, 256), "left")
"""The product of the box head's hidden layers."""
TUNED = {"rows": 3, "vectors": 1}
"""A schedule that is not its default."""


def tiles(document: dict[str, Any]) -> set[str]:
    """The tiles of the box head's hidden layers."""
    facts = [info for operator in document["cases"][0]["operators"] for info in operator["facts"]]
    return {f"{i['tile']['rows']}x{i['tile']['columns']}" for i in facts if i["extents"] == EXTENTS}


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    database_of(tmp_path / "db", record(BOX_HEAD.key, TUNED))
    done = run("--component", "box_head", "--db", str(tmp_path / "db"), "--json", str(tmp_path / "box_head.json"))
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "box_head.json").read_text())
    assert tiles(document) == {f"3x{vector_unit(TARGETS['llvm'].tvm_target()).lanes}"}
    (case,) = document["cases"]
    assert (document["schema"], case["component"], case["scale"]) == (1, "box_head", "shallow")
    assert sum(case["totals"].values()) == len(case["operators"])
    for how, count in case["totals"].items():
        assert f"{count} {how}" in done.stdout
    assert f"{len(case['operators'])} operators: " in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["box_head.json", "db"]


@pytest.mark.smoke
def test_each_kernel_has_a_row_and_other_functions_of_an_operator_share_one() -> None:
    def layers(x: relax.Expr, w: relax.Expr, v: relax.Expr) -> relax.Expr:
        builder = relax.BlockBuilder.current()
        for weight in (w, w, v):
            x = builder.emit(op.sort(builder.emit(op.matmul(x, weight)), 1))
        return op.negative(x)

    operators = of(layers, (40, 50), (50, 50), (50, 60))
    console = Console(width=200, file=io.StringIO())
    console.print(render(Explanation(Case("box_head", "real", "llvm"), tuple(operators))))
    rows = re.findall(r"│   (matmul|sort) +│ (\d) +│ (.*?) +│", console.file.getvalue())
    assert rows == [
        ("matmul", "2", "40x50 · 50x50 → 40x50"),
        ("matmul", "1", "40x50 · 50x60 → 40x60"),
        ("sort", "3", "40x50 → 40x50"),
    ]


def test_the_exported_program_and_the_module_are_saved(tmp_path: Path) -> None:
    arguments = ["explain", "--component", "box_head", "--untuned", "--save", str(tmp_path / "saved")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    name = "box_head-real-llvm-shallow"
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [f"{name}.pt2", f"{name}.relax.py"]
    program = torch.export.load(tmp_path / "saved" / f"{name}.pt2")
    assert isinstance(program, torch.export.ExportedProgram)
    module = (tmp_path / "saved" / f"{name}.relax.py").read_text(encoding="utf-8")
    assert "class Module" in module and "R.matmul" in module


def test_untuned_leaves_out_the_database_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "TUNED", tmp_path)
    database_of(tmp_path / database.current_conditions("llvm").tag, record(BOX_HEAD.key, TUNED))
    assert database.find_default_database("llvm") is not None
    file = tmp_path / "box_head.json"
    done = CliRunner().invoke(app, ["explain", "--component", "box_head", "--untuned", "--json", str(file)])
    assert done.exit_code == 0, done.output
    unit = vector_unit(TARGETS["llvm"].tvm_target())
    default = space(BOX_HEAD, unit)[0]
    assert tiles(json.loads(file.read_text())) == {f"{default['rows']}x{default['vectors'] * unit.lanes}"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "metall", "--component", "box_head"), sentence("unknown-name", hint="metal")),
        (("--component", "box_hed"), sentence("unknown-name", hint="box_head")),
        (("--component", "box_head", "--json", "."), sentence("cannot-write", advice="--json")),
        (("--component", "box_head", "--strategy", "none"), sentence("no-strategy", applying="real")),
        (("--component", "box_head", "--db", "nowhere"), sentence("no-database", path="nowhere")),
        (("--component", "box_head", "--db", "nowhere", "--untuned"), sentence("db-or-untuned")),
        (("--component", "box_head", "--precision", "fp8"), sentence("unknown-name", hint="fp32, fp16, bf16")),
        (("--component", "box_head", "--precision", "fp16"), sentence("unsupported-precision", precisions="fp16")),
        (("--component", "box_head", "--frontend", "onx"), sentence("unknown-name", hint="onnx")),
        (("--component", "box_head", "--frontend", "onnx", "--save", "saved"), sentence("save-needs-programs")),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(HarnessError, match=words) as problem:
        app(["explain", *arguments], standalone_mode=False)
    assert "\n" not in str(problem.value)


def test_a_case_that_does_not_get_as_far_as_lowering_is_one_sentence() -> None:
    done = run("--component", "vit", "--strategy", "none")
    assert done.returncode == 2
    reason = "import failed: input_type torch.complex64 is not handled yet"
    assert " ".join(done.stderr.split()) == f"error: cannot explain vit-none-llvm-shallow: {reason}"


@pytest.mark.parametrize("component", ["end_to_end", "tail"])
def test_what_is_no_component_cannot_be_explained(component: str) -> None:
    with pytest.raises(HarnessError, match=sentence("not-a-component", name=component)):
        explain(Case(component, "real", "llvm", "shallow", 0))


GPUS = ("cuda", "metal")


def on(target: str, module: tvm.IRModule) -> list[Operator]:
    tvm_target = TARGETS[target].tvm_target()
    return trace(module, TARGETS[target].pipeline(tvm_target), tvm_target)


# For Metal one component by day: its rules are those of CUDA.
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("scoring_head", "metal"),
        *(pytest.param(name, "metal", marks=pytest.mark.wide) for name in ("transformer_encoder", "segmentation_head")),
        *((name, "cuda") for name in ("scoring_head", "transformer_encoder", "segmentation_head")),
    ],
)
def test_every_operator_is_told_once_on_gpus(name: str, target: str) -> None:
    calls = [b.value for block in imported(name)["main"].body.blocks for b in block.bindings]
    operators = on(target, imported(name))
    names = [call.op.name.removeprefix("relax.") for call in calls if isinstance(call, ir.Call)]
    assert [operator.name for operator in operators] == names
    kernels = ("nn.conv2d", "nn.attention", "nn.attention_bias", "nn.layer_norm", "nn.group_norm", "nn.softmax")
    for operator in operators:
        assert bool(operator.functions) == (operator.how is not LoweringKind.NOTHING)
        assert operator.how is not LoweringKind.UNSCHEDULED, operator
        assert operator.how is LoweringKind.KERNEL or operator.name not in kernels, operator
        if operator.how is LoweringKind.DEFAULT:
            assert schedules(operator), operator
    assert not any(operator.at_load for operator in operators)


@pytest.mark.parametrize("target", GPUS)
def test_a_linear_layer_is_one_kernel_on_gpus(target: str) -> None:
    def layer(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        builder = relax.BlockBuilder.current()
        transposed = builder.emit(op.permute_dims(w, [1, 0]))
        return op.nn.relu(builder.emit(op.add(builder.emit(op.matmul(x, transposed)), b)))

    operators = on(target, module_of(layer, [(40, 50), (60, 50), (60,)]))
    expected = [
        ("permute_dims", LoweringKind.FOLDED),
        ("matmul", LoweringKind.KERNEL),
        ("add", LoweringKind.FOLDED),
        ("nn.relu", LoweringKind.FOLDED),
    ]
    assert ways(operators) == expected
    assert {operator.beside for operator in operators} == {("permute_dims", "matmul", "add", "nn.relu")}
    (info,) = operators[1].facts
    assert info.extents == {"batch": 1, "rows": 40, "depth": 50, "columns": 60}
    assert (info.flop, info.bytes_moved) == (2 * 40 * 50 * 60, 4 * (40 * 50 + 60 * 50 + 60 + 40 * 60))


@pytest.mark.parametrize("target", TARGETS)
def test_layers_that_are_alike_are_told_apart(target: str) -> None:
    """They are one function, and every operator of every layer is found in it."""

    def layers(x: relax.Expr, w: relax.Expr, v: relax.Expr) -> relax.Expr:
        builder = relax.BlockBuilder.current()
        for weight in (w, v, w):
            transposed = builder.emit(op.permute_dims(weight, [1, 0]))
            x = builder.emit(op.nn.relu(builder.emit(op.matmul(x, transposed))))
            x = builder.emit(op.tanh(builder.emit(op.sort(x, 1))))
        return op.negative(x)

    operators = on(target, module_of(layers, [(40, 50), (50, 50), (50, 50)]))
    assert [o.how for o in operators if o.name == "matmul"] == [LoweringKind.KERNEL] * 3
    assert [o.how for o in operators if o.name in ("permute_dims", "nn.relu")] == [LoweringKind.FOLDED] * 6
    assert [o.how for o in operators if o.name == "tanh"] == [LoweringKind.DEFAULT] * 3
    products = [o.functions for o in operators if o.name == "matmul"]
    assert len(set(products)) == 1


@pytest.mark.parametrize("target", GPUS)
def test_the_rule_is_named_with_loops_on_gpus(target: str) -> None:
    (alone,) = on(target, module_of(lambda x: op.abs(x), [(64, 1024)]))
    assert (alone.how, schedules(alone)) == (LoweringKind.DEFAULT, ["Fallback"])


# Metal every night: the tests above trace its pipeline, and the command is the same.
@pytest.mark.parametrize("target", ["cuda", pytest.param("metal", marks=pytest.mark.wide)])
def test_the_command_explains_gpus(target: str, tmp_path: Path) -> None:
    file = tmp_path / "scoring_head.json"
    done = run("--component", "scoring_head", "--target", target, "--json", str(file))
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(file.read_text())["cases"]
    assert (case["target"], case["totals"]["kernel"] > 0) == (target, True)
    kernels = [operator for operator in case["operators"] if operator["how"] == "kernel"]
    assert all(info["kind"] == "kernel" for operator in kernels for info in operator["facts"])
