"""`sam3-tvm diagnose`: faults are put into each layer, and the kernel that has one is named."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from torch import nn
from tvm import ir, relax, te, tirx, topi
from tvm.relax.frontend.torch.base_fx_graph_translator import BaseFXGraphImporter
from tvm.script.ir_builder import tirx as T

from conformance.calibration.mutation import mutated
from conformance.support.commands import run_command
from conformance.support.diagnosed import (
    CASE,
    SQUARE,
    WIDTH,
    after_softmax,
    block,
    block_in_bf16,
    by_chance,
    cause_of,
)
from conformance.support.sentences import sentence
from harness.compiler.lowering.frontends.running import run_module
from harness.compiler.lowering.route import Lowered
from harness.compiler.schedules.common.kernel import Argument, fp32, prim_func
from harness.compiler.schedules.cpu import elementwise, epilogue, normalization, rewrite
from harness.compiler.schedules.cpu.arena import Value
from harness.compiler.schedules.cpu.lowering import Context, Lowering
from harness.compiler.schedules.cpu.pipeline import LEGALIZE
from harness.compiler.targets import HOST
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.processes.threads import run_on_tvm_threads
from harness.core.processors import Processors
from harness.core.program import Axis, Program
from harness.core.settings import SEEDED
from harness.parity.monte_carlo import SMALL_SIZE
from harness.verify.diagnose import runner
from harness.verify.diagnose.comparison import WrongCalls
from harness.verify.diagnose.diagnosis import Boundary, Cause, Confidence, Diagnosis, Rerun, budget
from harness.verify.diagnose.flow import KernelCall
from harness.verify.diagnose.report import summary
from harness.verify.diagnose.runner import diagnose_program
from harness.verify.runner import diagnose_case


def rows_after_each_other() -> tirx.PrimFunc:
    """Returns a function that copies rows, each after the one before it as long as one thread has both."""

    def body(x: tirx.Buffer, out: tirx.Buffer) -> None:
        done = T.alloc_buffer((WIDTH + 1,), "float32")
        T.buffer_store(done, fp32(1), [0])
        with T.serial(0, WIDTH) as row:
            T.buffer_store(done, fp32(0), [row + 1])
        with T.parallel(0, WIDTH) as row:
            with T.serial(0, WAITING) as step:
                nothing = T.sin(done[row + 1] + T.Cast("float32", step)) * fp32(1e-30)
                T.buffer_store(done, nothing + done[row], [row + 1])
            with T.serial(0, WIDTH) as column:
                T.buffer_store(out, x[row, column] * done[row + 1], [row, column])

    return prim_func("rows_after_each_other", [Argument("x", SQUARE), Argument("out", SQUARE)], body)


class WithoutNaN(nn.Module):
    """Numbers in the place of those that are none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.isnan(x), torch.ones_like(x), x)

    @staticmethod
    def program() -> Program:
        x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
        x[::3, ::5] = math.nan
        return Program("without_nan", WithoutNaN().eval(), {"x": x}, ("out",))


WAITING = 200_000
"""Steps of a row that waits: its task takes much longer than the start of another one."""


@cache
def right_block() -> Diagnosis:
    return block()


def first_of(diagnosis: Diagnosis) -> Boundary:
    assert diagnosis.faulty
    assert diagnosis.first is not None
    assert diagnosis.first.confidence is Confidence.CERTAIN
    return diagnosis.first.boundary


def test_a_right_program_rounds_like_pytorch_at_every_kernel() -> None:
    found = right_block()
    assert not found.faulty
    assert found.first is None
    assert found.changed == ()
    assert found.coverage.skipped == {}
    operators = {name for boundary in found.boundaries for name in boundary.operators}
    assert {"addmm", "relu", "_softmax", "mm", "sigmoid", "native_layer_norm"} <= operators
    assert all(0 <= boundary.local.r_rms < 1.5 for boundary in found.boundaries)
    assert math.isclose(sum(budget(found).values()), 1)
    assert all("diagnosed.py" in boundary.source for boundary in found.boundaries if not boundary.at_load)


def test_calls_that_an_output_does_not_need_are_not_told() -> None:
    assert right_block().coverage.unnamed == {"pack": 3, "pack1": 1}
    assert block("mixed").coverage.unnamed == {"pack": 3, "pack1": 1}
    assert block("weights").coverage.unnamed == {"pack": 1}


def test_an_error_is_local_where_it_is_made_and_accumulates_from_there() -> None:
    first, *_, last = (boundary for boundary in right_block().boundaries if "addmm" in boundary.operators)
    assert first.accumulated == first.local
    assert last.accumulated.error > last.local.error > 0
    assert 0 < last.own_share < 1


def test_a_converter_with_a_wrong_axis_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def softmax(self: Any, node: torch.fx.Node) -> relax.Var:
        return self.block_builder.emit(relax.op.nn.softmax(self.env[node.args[0]], 0))

    monkeypatch.setattr(BaseFXGraphImporter, "_softmax", softmax)
    found = block()
    assert "_softmax" in first_of(found).operators
    assert cause_of(found) is Cause.IMPORTER


@pytest.mark.smoke
def test_an_epilogue_that_is_dropped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(epilogue.UNARY, "relax.nn.relu", lambda x: x)
    found = block()
    first = first_of(found)
    assert cause_of(found) is Cause.FUSION
    assert "relu" in first.operators
    assert "addmm" in first.operators
    assert "torch.relu(self.first(x))" in first.source


def test_a_wrong_constant_is_found_and_not_blamed_on_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = epilogue.UNARY["relax.sigmoid"]
    monkeypatch.setitem(epilogue.UNARY, "relax.sigmoid", lambda x: right(x) * fp32(1.0001))
    found = block()
    assert "sigmoid" in first_of(found).operators
    assert cause_of(found) is Cause.FUSION
    assert found.first is not None
    assert found.first.others == ()
    later = found.boundaries[-1]
    assert later.accumulated.excess > 1 > later.local.excess


def test_a_legalization_that_is_wrong_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LEGALIZE["relax.nn.softmax"]

    def twice(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        return right(builder, relax.op.nn.softmax(builder.emit(right(builder, call)), -1))

    monkeypatch.setitem(LEGALIZE, "relax.nn.softmax", twice)
    found = block()
    assert "_softmax" in first_of(found).operators
    assert cause_of(found) is Cause.LEGALIZATION


def test_tasks_that_disturb_each_other_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    after_softmax(monkeypatch, rows_after_each_other())
    found = run_on_tvm_threads(2, block)
    assert cause_of(found) is Cause.LEGALIZATION
    assert found.ablation is not None
    assert found.ablation.fixed_by is Rerun.ONE_THREAD
    assert "right on one thread: tasks of a parallel loop" in found.ablation.reason


@pytest.mark.smoke
def test_a_kernel_that_makes_other_bits_each_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert right_block().unsteady == ()
    after_softmax(monkeypatch, by_chance())
    found = block()
    assert "_softmax" in first_of(found).operators
    assert found.unsteady == (first_of(found).function,)
    assert "makes other bits: tasks of a parallel loop disturb each other" in summary(found)


def test_a_fault_of_llvms_optimizations_is_code_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    host = runner.TARGETS[HOST.name]

    def without_nan(processors: Processors) -> tvm.target.Target:
        return tvm.target.Target({**host.tvm_target(processors).export(), "fast-math-nnan": True})

    monkeypatch.setitem(runner.TARGETS, HOST.name, replace(host, tvm_target=without_nan))
    found = diagnose_program(WithoutNaN.program(), CASE, SEEDED, reproduce=True)
    assert found.ablation is not None
    assert found.ablation.cause is Cause.CODE_GENERATION
    assert [again.way for again in found.ablation.reruns] == [Rerun.ONE_THREAD, Rerun.UNOPTIMIZED]
    assert "right without LLVM's optimizations" in summary(found)
    assert found.reproduction is not None
    assert b"fast-math-nnan" in found.reproduction.files["reproduce.py"]


def test_a_kernel_that_is_wrong_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rewrite.KERNELS["relax.matmul"]

    def scaled(context: Context, call: ir.Call) -> Lowering | None:
        lowering = right(context, call)
        step = epilogue.Step("relax.multiply", constant=1.01)
        if lowering is None:
            return None

        def build(builder: relax.BlockBuilder, inputs: Any, after: epilogue.Epilogue) -> relax.Expr:
            return lowering.build(builder, inputs, replace(after, steps=(step, *after.steps)))

        return replace(lowering, build=build)

    monkeypatch.setitem(rewrite.KERNELS, "relax.matmul", scaled)
    found = block()
    assert "addmm" in first_of(found).operators
    assert cause_of(found) is Cause.SCHEDULE
    assert found.first is not None
    assert len(found.first.others) == 3


def test_memory_that_is_given_away_too_early_is_no_kernels_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Value, "meets", lambda value, other: False)
    found = block()
    assert found.first is None
    assert found.changed
    assert found.faulty
    assert "memory is given away too early" in summary(found)


def test_a_weight_of_another_layer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Lowered.parameters
    monkeypatch.setattr(Lowered, "parameters", lambda own: (v := right(own)) | {"second.bias": v["last.bias"]})
    found = block()
    assert found.first is None
    assert found.changed == ()
    assert found.altered == ("p_second_bias",)
    assert found.faulty
    assert "Another weight or input than PyTorch's is in the place of p_second_bias." in summary(found)


def test_an_output_beyond_the_limits_without_a_divergent_kernel_is_told() -> None:
    found = right_block()
    far = replace(found.outputs["mixed"], r_rms=100.0)
    told = summary(replace(found, outputs=found.outputs | {"mixed": far}))
    assert told.startswith("No kernel diverges by itself, but errors of mixed are beyond the limits"), told
    assert summary(found).startswith("No kernel diverges: each rounds like PyTorch")


class Halves(nn.Module):
    """A call with two results, one of which is read through a view, by two others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = torch.split(x, WIDTH // 2, dim=1)
        seen = first.reshape(-1, WIDTH)
        return torch.softmax(seen, -1) * seen.sum() + second.reshape(-1, WIDTH).cos()


def halves() -> Diagnosis:
    x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    return diagnose_program(Program("halves", Halves(), {"x": x}, ("result",)), CASE, SEEDED)


def test_a_call_with_several_results_is_judged_with_what_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    right = halves()
    assert not right.faulty
    assert right.coverage.skipped == {}

    def wrong(x: te.Tensor) -> list[te.Tensor]:
        first, second = topi.split(x, 2, 1)
        return [topi.negative(first), second]

    def legalized(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        return builder.call_te(wrong, call.args[0], primfunc_name_hint="split")

    monkeypatch.setitem(LEGALIZE, "relax.split", legalized)
    first = first_of(halves())
    assert first.function.startswith("softmax")
    assert first.between == ("split",)


def test_calls_with_several_results_are_cut_out_whole() -> None:
    x = te.placeholder((2, 6), name="x")
    left, right = (te.placeholder((2, 3), name=name) for name in ("left", "right"))
    difference = topi.subtract(left, topi.multiply(right, te.const(2, "float32")))
    functions = {"split": [x, *topi.split(x, 2, 1)], "difference": [left, right, difference]}
    code = tvm.IRModule(
        {name: te.create_prim_func(tensors).with_attr("global_symbol", name) for name, tensors in functions.items()}
    )
    half = relax.TensorType((2, 3), "float32")
    calls = [KernelCall("split", False, (0,), (1, 2)), KernelCall("difference", False, (1, 2), (3,))]
    values = np.arange(12, dtype=np.float32).reshape(2, 6)
    expected = values[:, :3] - 2 * values[:, 3:]
    wrong = WrongCalls(calls, True, {0: values}, dict.fromkeys((1, 2, 3), half), expected, expected.astype(np.float64))
    subgraph = wrong.subgraph(code, {0: "x"}, frozenset({"x"}))
    assert subgraph is not None
    (output,) = run_module(subgraph.module, subgraph.arguments)
    assert subgraph.names == ("x",)
    np.testing.assert_array_equal(output, expected)


class Fixed(nn.Module):
    """A product of weights alone, which is computed when the model is loaded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.relu(self.left @ self.right)


def test_the_cause_is_found_of_what_depends_on_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(epilogue.UNARY, "relax.nn.relu", lambda x: x)
    program = Program("fixed", Fixed().eval(), {"x": torch.randn(WIDTH, WIDTH)}, ("y",))
    found = diagnose_program(program, CASE, SEEDED)
    assert first_of(found).at_load
    assert cause_of(found) is Cause.FUSION


class Rows(nn.Module):
    """A linear layer of any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.layer(x))


def test_the_cause_is_found_where_an_extent_is_symbolic(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LEGALIZE["relax.sigmoid"]

    def mirrored(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        return right(builder, relax.op.negative(call.args[0]))

    monkeypatch.setitem(LEGALIZE, "relax.sigmoid", mirrored)
    program = Program("rows", Rows().eval(), {"x": torch.randn(7, WIDTH)}, ("y",), symbolic={"x": {0: Axis("n", 1, 9)}})
    found = diagnose_program(program, CASE, SEEDED)
    assert cause_of(found) is Cause.LEGALIZATION


class Shared(nn.Module):
    """A value without a symbolic extent, which is repeated as often as one says."""

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(x), torch.sigmoid(shared).expand(x.shape[0], WIDTH)


def test_the_cause_is_found_where_no_value_of_the_kernel_has_the_symbolic_extent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = LEGALIZE["relax.sigmoid"]

    def twice(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        return right(builder, relax.op.sigmoid(builder.emit(right(builder, call))))

    monkeypatch.setitem(LEGALIZE, "relax.sigmoid", twice)
    example = {"x": torch.randn(7, WIDTH), "shared": torch.randn(WIDTH)}
    program = Program("shared", Shared(), example, ("rows", "repeated"), symbolic={"x": {0: Axis("n", 1, 9)}})
    found = diagnose_program(program, CASE, SEEDED)
    assert {"sigmoid", "expand"} <= set(first_of(found).operators)
    assert cause_of(found) is Cause.LEGALIZATION


class Normed(nn.Module):
    """A normalization, which has several results in PyTorch and one in the imported module, before a product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(self.norm(x)))


def test_the_cause_is_found_of_what_reads_one_of_several_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(epilogue.UNARY, "relax.nn.relu", lambda x: x)
    program = Program("normed", Normed().eval(), {"x": torch.randn(7, WIDTH)}, ("y",))
    assert cause_of(diagnose_program(program, CASE, SEEDED)) is Cause.FUSION


class OffsetGroups(nn.Module):
    """A normalization of groups far from zero, which TVM alone computes less accurately than PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Conv2d(16, 16, 1), nn.GroupNorm(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.layer(x)))


def test_tvm_is_not_blamed_for_a_fault_of_this_project_where_it_is_only_less_accurate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = normalization.group_moments_kernel
    monkeypatch.setattr(normalization, "group_moments_kernel", lambda lines, count, e: right(lines, count, 10 * e))
    x = torch.randn(1, 16, 24, 24, generator=torch.Generator().manual_seed(1)) + 6
    found = diagnose_program(Program("groups", OffsetGroups().eval(), {"x": x}, ("y",)), CASE, SEEDED)
    assert found.ablation is not None
    by_tvm, by_legalization = found.ablation.experiments
    assert by_tvm.result is not None and by_tvm.result.excess > 1
    assert by_tvm.otherwise and not by_legalization.otherwise
    assert found.ablation.cause is Cause.LEGALIZATION
    assert "wrong in another way with TVM's own legalizations and loops" in summary(found)


def test_what_is_wrong_only_together_with_the_operators_before_it_is_fused_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = elementwise.schedule_remaining

    @tvm.transform.module_pass(opt_level=0, name="ScheduleRemaining")
    def wrong(module: tvm.IRModule, _context: Any) -> tvm.IRModule:
        module = right(module).clone()
        functions = {variable.name_hint: variable for variable in module.get_global_vars()}
        softmax = next((name for name in functions if name.startswith("softmax")), None)
        if softmax is not None and any(name.startswith("matmul") for name in functions):
            module[functions[softmax]] = mutated(module[softmax], "factor 1 + 1e-2", 0.99)
        return module

    monkeypatch.setattr(elementwise, "schedule_remaining", wrong)
    found = block()
    assert "_softmax" in first_of(found).operators
    assert cause_of(found) is Cause.FUSION
    assert found.ablation is not None
    assert [made.with_before for made in found.ablation.experiments] == [False, False, False, False, True]
    assert found.ablation.passes == ("ScheduleRemaining",)
    assert "together with those before it" in summary(found)


class Column(nn.Module):
    """A value that loses one of two axes of extent 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x).squeeze(0)


def test_an_output_of_a_wrong_shape_is_a_fault_though_its_values_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def squeeze(self: Any, node: torch.fx.Node) -> relax.Var:
        return self.block_builder.emit(relax.op.squeeze(self.env[node.args[0]], 2))

    monkeypatch.setattr(BaseFXGraphImporter, "_squeeze", squeeze)
    program = Program("column", Column(), {"x": torch.randn(1, 7, 1, WIDTH)}, ("y",))
    found = diagnose_program(program, CASE, SEEDED)
    assert found.faulty
    assert found.first is None
    (wrong,) = found.misshapen
    assert (wrong.output, wrong.shape, wrong.expected, wrong.node) == ("y", (1, 7, WIDTH), (7, 1, WIDTH), "squeeze")
    assert "y has the shape 1 × 7 × 64 instead of 7 × 1 × 64: squeeze of" in summary(found)


@pytest.mark.parametrize(
    "name",
    ["scoring_head", *(pytest.param(name, marks=pytest.mark.wide) for name in ("prompt_encoder", "object_pointers"))],
)
def test_components_are_right_at_every_kernel_and_nothing_is_left_out(name: str) -> None:
    found = diagnose_case(Case(name, "real", "llvm"), SEEDED)
    assert not found.faulty
    assert found.coverage.skipped == {}
    assert found.coverage.compared > 0


def without_instruction(function: str) -> str:
    """The name of a kernel without what this machine multiplies bfloat16 with."""
    return function.replace("_vpmaddwd", "")


def test_in_half_precision_errors_are_held_to_those_of_autocast() -> None:
    """Each layer rounds its operands, as autocast does: of PyTorch fp32's errors that is some ten thousand times."""
    found = block_in_bf16()
    assert not found.faulty
    assert found.coverage.skipped == {}
    names = {without_instruction(boundary.function) for boundary in found.boundaries}
    assert {"matmul_bf16_add_relu", "matmul_bf16_add"} <= names
    assert all(boundary.local.r_rms < 1.5 for boundary in found.boundaries)
    half, single = found.boundaries[0].local, right_block().boundaries[0].local
    assert half.error > 1000 * single.error and half.torch_error > 1000 * single.torch_error


def test_what_a_kernel_stores_in_half_precision_is_held_to_what_autocast_rounds() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    program = Program("layers", layers.eval(), {"x": torch.randn(WIDTH, WIDTH)}, ("y",))
    found = diagnose_program(program, replace(CASE, precision="bf16"), SEEDED)
    assert not found.faulty
    first, last = found.boundaries
    names = tuple(without_instruction(boundary.function) for boundary in (first, last))
    assert names == ("matmul_bf16_add_relu_astype", "matmul_bf16_add")
    assert 0.5 < first.local.r_rms < 1.5
    # It was given what is rounded already. Integers have an error of their own.
    assert last.local.r_rms < (1e-3 if last.function == names[1] else 0.4)
    assert last.accumulated.r_rms < 1.5


def test_a_fault_in_half_precision_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = epilogue.UNARY["relax.sigmoid"]
    monkeypatch.setitem(epilogue.UNARY, "relax.sigmoid", lambda x: right(x) * fp32(1.05))
    found = block_in_bf16()
    assert "sigmoid" in first_of(found).operators
    assert found.ablation is None
    assert "see whether it diverges in fp32 too" in summary(found)


@pytest.mark.wide
def test_few_numbers_beside_one_run_of_autocast_are_luck() -> None:
    found = diagnose_case(Case("transformer_decoder", "real", "llvm", precision="bf16"), SEEDED)
    assert not found.faulty
    shapes = {boundary.node: boundary.shape for boundary in found.boundaries}
    assert all(math.prod(shapes[name]) < SMALL_SIZE for name in found.luck)
    assert found.coverage.skipped == {}


def test_what_is_named_in_half_precision_is_not_cut_out() -> None:
    with pytest.raises(HarnessError, match=sentence("half-not-cut-out")):
        diagnose_case(Case("box_head", "real", "llvm", precision="bf16"), SEEDED, reproduce=True)


def test_the_command_names_the_kernel_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "diagnosis.json"
    done = run_command("diagnose", "--component", "box_head", "--output", "boxes", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "No kernel diverges" in done.stdout
    (case,) = json.loads(file.read_text())["cases"]
    assert list(case["outputs"]) == ["boxes"]
    assert [boundary["node"] for boundary in case["boundaries"]][-1] == "sigmoid"
    assert math.isclose(sum(case["budget"].values()), 1)


@pytest.mark.parametrize(
    ("asked", "output", "message"),
    [
        (Case("end_to_end", "real", "llvm"), None, sentence("not-a-component", name="end_to_end")),
        (Case("box_head", "real", "cuda"), None, sentence("target-not-followed", name="llvm")),
        (Case("box_head", "real", "llvm"), "masks", sentence("no-such-output", output="masks")),
        (
            Case("box_head", "real", "llvm", frontend="onnx"),
            None,
            sentence("frontend-without-nodes", alternatives="torch"),
        ),
    ],
)
def test_what_cannot_be_diagnosed_is_told_in_a_sentence(asked: Case, output: str | None, message: str) -> None:
    with pytest.raises(HarnessError, match=message):
        diagnose_case(asked, SEEDED, output)
