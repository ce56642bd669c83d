"""Half precision: operands of products are half, sums and all else float32; and the oracle's verdict on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from tvm import relax

from conformance.support.examples import examples
from conformance.support.half import lowered, run
from conformance.support.sentences import sentence
from harness.compiler.deployment.compiling import compile_model
from harness.compiler.deployment.deployable import ArtifactSpec
from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.torch_export.frontend import TORCH
from harness.compiler.lowering.frontends.torch_export.importing import import_program
from harness.compiler.lowering.precision import lower_precision, parameters_for
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.lowering.rope.operators.rotate_pairs import rotate
from harness.compiler.targets import TARGETS
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.expectations import check, load_expectations
from harness.core.outcome import Outcome, Stage, Status, VerdictKind
from harness.core.precision import HALF_DTYPES, PRECISIONS
from harness.core.processors import Processors
from harness.core.settings import SEEDED, Settings
from harness.models.registry import models, subjects
from harness.models.sam3.deployed.deployable import DEPLOYABLE
from harness.models.selection import select
from harness.parity.autocast import half_reference
from harness.parity.oracle import oracle, reference
from harness.parity.references import Reference
from harness.parity.verdict import judge
from harness.verify.report import Result, repro_command
from harness.verify.report.verification.document import build_report
from harness.verify.report.verification.pages import render_report
from harness.verify.runner import verify_case

HALVES = ("fp16", "bf16")
WHOLE = 527_313_704
"""Bytes of the shallow model's parameters in fp32: of the four entry points for texts and boxes, as imported."""
DTYPES = {"fp16": np.dtype("float16"), "bf16": np.dtype(ml_dtypes.bfloat16)}

half = pytest.mark.parametrize("precision", HALVES)


def calls(module: tvm.IRModule) -> list[tuple[str, set[str], str]]:
    """Operators of `main` with the floating types that they read, and the type of what they give."""
    found = []
    for binding in module["main"].body.blocks[0].bindings:
        if isinstance(binding.value, relax.Call):
            read = {str(arg.ty.dtype) for arg in binding.value.args if isinstance(arg.ty, relax.TensorType)}
            gives = str(getattr(binding.var.ty, "dtype", "tuple"))
            found.append((binding.value.op.name, {name for name in read if "float" in name}, gives))
    return found


# --- what is half, and what is not ---


class Block(nn.Module):
    """A layer of everything: coordinates, a residual stream, attention, GELU, boxes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.place, self.norm = nn.Linear(2, 64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.wide, self.narrow, self.box = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.place(points) + torch.sin(points[..., :1] * 100)
        q, k, v = self.qkv(self.norm(x)).reshape(1, 24, 3, 2, 32).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, 24, 64))
        x = x + self.narrow(nn.functional.gelu(self.wide(x)))
        return x, torch.sigmoid(self.box(x) + torch.logit(points.repeat(1, 1, 2)))


ARGS = (torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(1)), torch.rand(1, 24, 2) * 0.8 + 0.1)


@half
def test_products_read_half_and_give_float32(precision):
    dtype = DTYPES[precision].name
    module, parameters = lowered(Block().eval(), ARGS, precision)
    products = [(read, gives) for name, read, gives in calls(module) if name == "relax.matmul"]
    assert products.count(({dtype}, "float32")) == 5
    assert products.count(({"float32"}, "float32")) == 1, "the product over two coordinates"
    assert [read for name, read, _ in calls(module) if name == "relax.nn.attention"] == [{dtype}]
    main = module["main"]
    assert {str(parameter.ty.dtype) for parameter in main.params[:2]} == {"float32"}
    assert {str(field.dtype) for field in main.ret_ty.fields} == {"float32"}
    assert [array.dtype for array in parameters if array.ndim == 2].count(DTYPES[precision]) == 5
    assert {array.dtype.name for array in parameters if array.ndim == 1} == {"float32"}


@half
def test_everything_else_is_float32(precision):
    module, _ = lowered(Block().eval(), ARGS, precision)
    moves = ("relax.reshape", "relax.permute_dims", "relax.strided_slice", "relax.squeeze", "relax.split")
    for name, read, gives in calls(module):
        if name not in ("relax.matmul", "relax.nn.attention", "relax.astype", *moves):
            assert read <= {"float32"} and gives not in HALF_DTYPES, name


def test_fp32_leaves_everything_as_it_is():
    imported, parameters = import_program(export_program(Block().eval(), ARGS))
    assert lower_precision(imported, PRECISIONS["fp32"]) is imported
    values = list(parameters.values())
    assert all(a is b for a, b in zip(parameters_for(imported, values), values, strict=True))


@half
def test_the_block_is_as_accurate_as_upstream_under_autocast(precision):
    block = Block().eval()
    module, parameters = lowered(block, ARGS, precision)
    actual = dict(zip(("x", "boxes"), run(module, [arg.numpy() for arg in ARGS], parameters), strict=True))
    ours = half_reference(block, ARGS, ("x", "boxes"), PRECISIONS[precision])
    verdicts = judge(actual, Reference.from_run(ours, oracle(block, ARGS, ("x", "boxes"))), by_oracle=True)
    assert {verdict.kind for verdict in verdicts} == {VerdictKind.ORACLE}, verdicts
    assert max(verdict.r_rms for verdict in verdicts) < 1.2


class Rotated(nn.Module):
    """Attention whose queries and keys come out of one operator."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        q, k = rotate(q, k, (angles.cos(), angles.sin()))
        return nn.functional.scaled_dot_product_attention(q, k, v)


@half
def test_an_operator_with_several_results_gives_float32(precision):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, 12, 16, generator=generator) for _ in range(3))
    args = (q, k, v, torch.rand(12, 8, generator=generator) * 6)
    imported, _ = TORCH.import_exported(export_program(Rotated().eval(), args), STRATEGIES["tensorir"])
    module = lower_precision(imported, PRECISIONS[precision])
    assert [read for name, read, _ in calls(module) if name == "relax.nn.attention"] == [{DTYPES[precision].name}]
    (actual,) = run(module, [arg.numpy() for arg in args], [])
    expected = Rotated()(*(arg.double() for arg in args)).numpy()
    np.testing.assert_allclose(actual, expected, atol=4 * float(ml_dtypes.finfo(DTYPES[precision]).eps))


# --- sums ---


@half
@pytest.mark.parametrize(
    ("value", "terms", "why"),
    [(1.0, 5000, "float16 stops counting at 2048, bfloat16 at 256"), (16.0, 512, "131072 is beyond float16's 65504")],
)
def test_sums_are_float32_sums(precision, value, terms, why):
    linear = nn.Linear(terms, 64, bias=False)
    nn.init.constant_(linear.weight, value)
    args = (torch.full((3, terms), value),)
    module, parameters = lowered(linear, args, precision)
    (result,) = run(module, [args[0].numpy()], parameters)
    np.testing.assert_array_equal(result, np.full((3, 64), value * value * terms, np.float32), why)


@half
def test_convolutions_sum_in_float32(precision):
    conv = nn.Conv2d(64, 4, 3, bias=False)
    nn.init.ones_(conv.weight)
    args = (torch.full((1, 64, 4, 4), 128.0),)
    module, parameters = lowered(conv, args, precision)
    (result,) = run(module, [args[0].numpy()], parameters)
    np.testing.assert_array_equal(result, np.full((1, 4, 2, 2), 128.0 * 576, np.float32))


small = st.integers(-2, 2)


@half
@examples(3)
@given(data=st.data())
def test_what_is_exact_in_half_precision_is_computed_exactly(precision, data):
    """Small integers: moved, rectified and multiplied twice, they are what float32 makes of them, bit for bit."""
    first, second = nn.Linear(16, 16), nn.Linear(16, 5)
    for parameter in (*first.parameters(), *second.parameters()):
        values = data.draw(st.lists(small, min_size=parameter.numel(), max_size=parameter.numel()))
        parameter.data = torch.tensor(values, dtype=torch.float32).reshape(parameter.shape)
    module = nn.Sequential(first, nn.ReLU(), nn.Unflatten(1, (4, 4)), nn.Flatten(1), second)
    x = torch.tensor(data.draw(st.lists(small, min_size=48, max_size=48)), dtype=torch.float32).reshape(3, 16)
    program, parameters = lowered(module, (x,), precision)
    (result,) = run(program, [x.numpy()], parameters)
    np.testing.assert_array_equal(result, module(x).detach().numpy())


# --- weights ---


@half
def test_weights_are_rounded_to_nearest_and_have_half_the_size(precision):
    linear = nn.Linear(64, 64, bias=False)
    _, (weight,) = lowered(linear, (torch.zeros(2, 64),), precision)
    assert weight.nbytes == 64 * 64 * 2
    np.testing.assert_array_equal(weight, linear.weight.detach().numpy().astype(DTYPES[precision]))


def test_a_weight_beyond_the_type_is_an_error_with_its_name():
    linear = nn.Linear(64, 64, bias=False)
    linear.weight.data[3, 4] = 70000.0
    with pytest.raises(HarnessError, match=sentence("beyond-half", name2="float16")):
        lowered(linear, (torch.zeros(2, 64),), "fp16")
    lowered(linear, (torch.zeros(2, 64),), "bf16")


class Words(nn.Module):
    """Rows of a large and of a small table; with `tied`, the large one is multiplied, too."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places, self.tied = nn.Embedding(1 << 14, 64), nn.Embedding(24, 64), tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(24))
        return x @ self.words.weight.T if self.tied else x


TOKENS = torch.arange(24)[None] * 677


@half
def test_rows_of_a_large_table_are_half_until_they_are_read(precision):
    words = Words(tied=False).eval()
    module, parameters = lowered(words, (TOKENS,), precision)
    assert {array.shape: array.dtype for array in parameters} == {
        (1 << 14, 64): DTYPES[precision],
        (24, 64): np.float32,
    }
    table = words.words.weight.detach().numpy().astype(DTYPES[precision]).astype(np.float32)
    expected = table[TOKENS.numpy()] + words.places.weight.detach().numpy()
    np.testing.assert_array_equal(run(module, [TOKENS.numpy()], parameters)[0], expected)


@half
def test_a_table_that_is_multiplied_too_is_not_half(precision):
    _, parameters = lowered(Words(tied=True).eval(), (TOKENS,), precision)
    assert {array.dtype for array in parameters} == {np.dtype(np.float32)}


# --- what it is judged against ---


@half
def test_the_reference_sums_in_float32_and_rounds_once(precision):
    dtype = getattr(torch, PRECISIONS[precision].dtype)
    torch.manual_seed(0)
    linear, x = nn.Linear(700, 80), torch.randn(9, 700)
    result = half_reference(linear, (x,), ("y",), PRECISIONS[precision])["y"]
    exact = x.to(dtype).double() @ linear.weight.to(dtype).double().T + linear.bias.to(dtype).double()
    expected = exact.to(dtype).float().detach().numpy()
    assert result.dtype == np.float32
    spacing = np.abs(np.spacing(expected.astype(DTYPES[precision])).astype(np.float32))
    assert (np.abs(result - expected) <= spacing).all()
    assert (result == expected).mean() > 0.98, "a sum close to the middle of two values may fall to either side"


@half
def test_the_reference_normalizes_and_exponentiates_in_float32(precision):
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = self.linear(x)
            return self.norm(x), torch.softmax(x, -1), torch.exp(x), torch.relu(x)

    outputs = half_reference(Head(), (torch.randn(5, 64),), ("norm", "softmax", "exp", "relu"), PRECISIONS[precision])
    rounded = {name: array.astype(DTYPES[precision]).astype(np.float32) for name, array in outputs.items()}
    assert [name for name in outputs if (outputs[name] == rounded[name]).all()] == ["relu"]


FAULTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "one element": lambda y: np.where(np.arange(y.size).reshape(y.shape) == 77, y + 0.5, y),
    "one column": lambda y: np.where(np.arange(y.shape[-1]) == 5, np.roll(y, 1, -1), y),
    "a stale row": lambda y: np.concatenate([y[:1], y[:1], y[2:]]),
    "offset": lambda y: y + np.float32(0.05),
    "scale": lambda y: y * np.float32(1.05),
    "NaN": lambda y: np.where(np.arange(y.size).reshape(y.shape) == 3, np.float32(np.nan), y),
    "half the dtype": lambda y: y.astype(np.float16),
}


@cache
def judged(precision: str) -> tuple[Reference, np.ndarray]:
    """Two layers: their reference, and what the compiled code gives."""
    layers = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).eval()
    args = (torch.randn(24, 64, generator=torch.Generator().manual_seed(0)),)
    wanted = half_reference(layers, args, ("y",), PRECISIONS[precision])
    exact = oracle(layers, args, ("y",))
    module, parameters = lowered(layers, args, precision)
    (right,) = run(module, [args[0].numpy()], parameters)
    return Reference.from_run(wanted, exact), right


@half
@pytest.mark.parametrize("fault", FAULTS)
def test_the_judge_sees_a_fault_in_half_precision(precision, fault):
    wanted, right = judged(precision)
    (verdict,) = judge({"y": right}, wanted, by_oracle=True)
    assert verdict.kind is VerdictKind.ORACLE
    (verdict,) = judge({"y": FAULTS[fault](right)}, wanted, by_oracle=True)
    assert verdict.kind is VerdictKind.FAILED


@half
def test_the_judge_sees_outputs_that_are_swapped(precision):
    torch.manual_seed(0)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    two, args = Two(), (torch.randn(24, 64),)
    wanted = half_reference(two, args, ("a", "b"), PRECISIONS[precision])
    swapped = {"a": wanted["b"], "b": wanted["a"]}
    verdicts = judge(swapped, Reference.from_run(wanted, oracle(two, args, ("a", "b"))), by_oracle=True)
    assert {verdict.kind for verdict in verdicts} == {VerdictKind.FAILED}


def test_fp32_is_still_held_to_the_strict_gate():
    linear, args = nn.Linear(64, 64), (torch.randn(24, 64),)
    wanted = half_reference(linear, args, ("y",), PRECISIONS["bf16"])
    (verdict,) = judge(wanted, Reference.from_run(*(run(linear, args, ("y",)) for run in (reference, oracle))))
    assert verdict.kind is VerdictKind.FAILED


# --- cases ---


def test_a_precision_other_than_fp32_is_in_the_id_and_in_the_command():
    case = Case("box_head", "real", "cuda", precision="bf16")
    assert case.id == "box_head-real-cuda-shallow-bf16"
    assert replace(case, precision="fp32").id == "box_head-real-cuda-shallow"
    assert "--precision bf16" in repro_command(case)
    assert "--precision" not in repro_command(replace(case, precision="fp32"))


def test_precisions_are_selected_where_the_target_has_them():
    assert {case.precision for case in select()} == {"fp32"}
    every = select(["box_head"], precisions=tuple(PRECISIONS))
    assert {(case.target, case.precision) for case in every} == {
        (name, precision) for name, target in TARGETS.items() for precision in target.precisions
    }
    whole = select(["end_to_end"], ["real"], precisions=tuple(PRECISIONS))
    assert {(case.target, case.precision) for case in whole} == {(case.target, case.precision) for case in every}


NO_FP16_ON_CPUS = sentence(
    "unsupported-precision",
    target="llvm",
    supported="fp32, bf16",
    precisions="fp16",
    alternatives="cuda or metal",
)


@pytest.mark.parametrize(
    ("targets", "components", "precisions", "expected"),
    [
        (
            ["llvm"],
            (),
            ["fp16"],
            NO_FP16_ON_CPUS,
        ),
        (
            ["metal"],
            (),
            ["bf16"],
            sentence(
                "unsupported-precision",
                target="metal",
                supported="fp32, fp16",
                precisions="bf16",
                alternatives="llvm or cuda",
            ),
        ),
        ([], (), ["fp17"], sentence("unknown-name", kind="precision", name="fp17", hint="fp16")),
        (
            ["llvm"],
            ["end_to_end"],
            ["fp16"],
            NO_FP16_ON_CPUS,
        ),
    ],
)
def test_a_precision_that_is_not_there_is_one_sentence(targets, components, precisions, expected):
    with pytest.raises(HarnessError, match=expected):
        select(components, targets=targets, precisions=precisions)


@pytest.mark.parametrize(("target", "precision"), [("llvm", "fp16"), ("metal", "bf16")])
def test_a_model_is_not_compiled_in_a_precision_that_the_target_has_not(tmp_path, target, precision):
    known = ", ".join(TARGETS[target].precisions)
    case = Case("sam3", "real", target, precision=precision)
    with pytest.raises(
        HarnessError, match=sentence("unsupported-precision", target=target, supported=known, precisions=precision)
    ):
        compile_model(ArtifactSpec(DEPLOYABLE, case, SEEDED, DEPLOYABLE.options()), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


EXPECTED = """
[[expect]]
component = "vit"
strategy = "real"
target = "cuda"
scale = "*"
{}status = "timed_out"
stage = "run"
why = "slow"
"""


@pytest.mark.parametrize(("line", "named"), [("", {"fp32"}), ('precision = ["fp16", "bf16"]\n', set(HALVES))])
def test_an_expectation_names_precisions(tmp_path, line, named):
    path = tmp_path / "expectations.toml"
    path.write_text(EXPECTED.format(line))
    (expectation,) = load_expectations(path, {"precision": PRECISIONS})
    cases = (Case("vit", "real", "cuda", precision=precision) for precision in PRECISIONS)
    assert {case.precision for case in cases if expectation.matches(case)} == named


def test_an_oracle_verdict_is_expected_in_half_precision_only():
    two = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    verdicts = judge(
        {"y": two}, Reference.from_run({"y": two * np.float32(1.001)}, {"y": two.astype(np.float64)}), by_oracle=True
    )
    outcome = Outcome(Stage.JUDGE, Status.PASSED, verdicts=verdicts)
    expected = {
        precision: check(Case("vit", "real", "cuda", precision=precision), outcome, None).expected
        for precision in PRECISIONS
    }
    assert expected == {"fp32": False, "fp16": True, "bf16": True}


# --- a component, from export to judgement ---


ONE_ARCHITECTURE = Settings(processors=Processors(cuda="sm_90"))
"""Machine code for one is enough here."""


@pytest.mark.parametrize(
    ("target", "component", "precision"),
    [
        pytest.param("cuda", "box_head", "fp16", marks=pytest.mark.cuda),
        pytest.param("cuda", "box_head", "bf16", marks=pytest.mark.cuda),
        pytest.param("llvm", "box_head", "bf16", marks=pytest.mark.llvm),
    ],
)
@pytest.mark.usefixtures("forked_processes")
def test_a_component_in_half_precision(target, component, precision):
    problem = TARGETS[target].compile_problem()
    if problem:
        pytest.skip(problem)
    case = Case(component, "real", target, precision=precision)
    result = verify_case(case, ONE_ARCHITECTURE)
    assert result.expected, result.problem
    assert {verdict.kind for verdict in result.outcome.verdicts} <= {VerdictKind.ORACLE, VerdictKind.STRICT}
    assert VerdictKind.ORACLE in {verdict.kind for verdict in result.outcome.verdicts}
    assert {verdict.dtype for verdict in result.outcome.verdicts} == {"float32"}
    assert result.outcome.sizes["parameters"] < 0.51 * 530448, "of what they are in fp32"
    report = build_report([Result.from_outcome(case, result.outcome, None)], {}, {})
    assert report["cases"][0]["precision"] == precision and report["summary"]["elements_outside"] == 0
    page = render_report(report)
    assert f"real · {target} · shallow · {precision}" in page and "judged by the oracle" in page


def test_the_trunk_runs_under_autocast_too():
    """What is kept of it for other references is fp32, and must not stand in for it."""
    subject = subjects()["vit"]
    with models()[subject.model].context():
        workload = subject.open(Case("vit", "real", "llvm", precision="bf16"), SEEDED)
        reference = workload.reference()
    rounded, exact = reference.first["features"], reference.exact["features"]
    error = np.sqrt(np.mean((rounded - exact) ** 2) / np.mean(exact**2))
    assert 2.0**-12 < error < 2.0**-6, "that of rounding to 8 bits in several layers"


@pytest.mark.parametrize(
    ("target", "precision"),
    [pytest.param("cuda", "bf16", marks=pytest.mark.cuda), pytest.param("metal", "fp16", marks=pytest.mark.metal)],
)
def test_the_whole_model_in_half_precision(target, precision):
    problem = TARGETS[target].compile_problem()
    if problem:
        pytest.skip(problem)
    result = verify_case(Case("end_to_end", "real", target, precision=precision), ONE_ARCHITECTURE)
    outcome = result.outcome
    assert result.expected is not False, result.problem
    assert outcome.compiled and outcome.kernels
    assert outcome.sizes["parameters"] < 0.52 * WHOLE
    if outcome.status is Status.UNAVAILABLE:
        assert outcome.error.type == "CannotRun"
    else:
        kinds = {verdict.name: verdict.kind for verdict in outcome.verdicts}
        assert kinds["text/masks"] is VerdictKind.ORACLE and kinds["text/found/masks"] is VerdictKind.STRICT
