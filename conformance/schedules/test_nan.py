"""NaN stays NaN, and an infinity one, in what both pipelines leave to TVM, at no cost where a bound is a number."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tvm import relax, tirx

from conformance.support.function_module import FunctionModule
from conformance.support.gpu_programs import KINDS, Expression, emulated, skip_unless_emulated
from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.running import run_module, run_torch
from harness.compiler.lowering.frontends.torch_export.importing import import_program
from harness.compiler.schedules.common import resizing
from harness.compiler.schedules.common.nan import keep_nan
from harness.compiler.schedules.cpu.pipeline import cpu_pipeline
from harness.compiler.targets.llvm import llvm_target

NAN, INF = math.nan, math.inf
FINITE_LEAST = torch.finfo(torch.float32).min
ROWS = torch.tensor([[NAN, 1, NAN, 0], [2, NAN, -5, INF], [-1, -2, -3, -INF]])
OTHERS = torch.tensor([[1, NAN, NAN, -1], [NAN, 2, -5, 1], [-1, 2, NAN, 0]])


def several(x: torch.Tensor, y: torch.Tensor, least: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What loses NaN in TVM, alone, fused with what is before it, and reduced."""
    return (
        *(torch.relu(x), torch.relu(x + y), torch.maximum(x, y), torch.minimum(x, y) * 2),
        *(torch.nn.functional.hardtanh(x), torch.nn.functional.relu6(x), torch.clamp(x, min=y)),
        *(torch.nn.functional.elu(x), torch.nn.functional.max_pool2d(x[None], 2)),
        *(x.argmax(-1), x.argmax(0), x.argmin(-1, keepdim=True), x.argmin(), least.argmax(-1)),
        *(x.amax(-1), x.amin(0), *x.max(-1), *x.min(0, keepdim=True)),
        *(*x.sort(-1), *x.sort(0, descending=True), torch.argsort(x, dim=-1, stable=True)),
        *(y.topk(3).values, *y.topk(2, largest=False)),
        *(*x.half().sort(-1), x.double().argsort(0), *x.median(-1), *y.median(0, keepdim=True), y.median()),
        torch.nn.functional.interpolate(x[None, None], size=(1, 2), mode="bilinear", align_corners=True),
        *(least.amax(-1), (-least).amin(0), least.max(), least.half().amax(0), padding_alone(least)),
        *(torch.nn.functional.max_pool2d(least[None], 2, 1, padding=1), x.masked_fill(x > 0, FINITE_LEAST).amax(-1)),
    )


def padding_alone(x: torch.Tensor) -> torch.Tensor:
    """Returns the maximum of a window whose four elements lie in the padding."""
    return torch.nn.functional.max_pool2d(x[None, :1, :1], 2, stride=1, padding=1, dilation=2)


def test_the_cpu_pipeline_keeps_nan() -> None:
    args = ROWS, OTHERS, torch.full((2, 3), -INF)
    module, parameters = import_program(export_program(FunctionModule(several), args))
    target = llvm_target()
    arrays = [*(arg.numpy() for arg in args), *parameters.values()]
    actual = run_module(module, arrays, target, cpu_pipeline(target))
    for got, expected in zip(actual, run_torch(FunctionModule(several), args), strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("function", [torch.relu, lambda x: torch.nn.functional.hardtanh(x, -2.0, 3.0)])
def test_a_bound_costs_one_comparison(function: Callable[..., torch.Tensor]) -> None:
    """`bound > x ? bound : x` is one instruction of x86, as `x > bound ? x : bound` is, which loses NaN."""
    module, _ = import_program(export_program(FunctionModule(function), (ROWS,)))
    kept = keep_nan(relax.transform.LegalizeOps()(module))
    texts = [str(each) for each in kept.functions.values() if isinstance(each, tirx.PrimFunc)]
    assert any("T.Select(" in text for text in texts)
    assert not [text for text in texts if "T.max(" in text or "T.min(" in text or "isnan" in text]


LONG = torch.linspace(-3, 3, 6 * 300).sin().reshape(6, 300)
LONG[[0, 1, 2, 3, 3], [7, 299, 0, 100, 5]] = NAN
ON_GPUS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "amax": lambda x: x.amax(-1),
    "amin of columns": lambda x: x.amin(0),
    "largest half": lambda x: x.half().amax(-1),
    "max": lambda x: x.max(),
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(-1),
    "max_pool2d": lambda x: torch.nn.functional.max_pool2d(x[None], 2),
    "padding alone": padding_alone,
    "largest of -inf": lambda x: torch.full_like(x, -INF).amax(-1),
    "softmax": lambda x: x.softmax(-1),
    "sort": lambda x: x[:, :9].sort(-1).values,
    "topk": lambda x: x[:, :9].topk(2).values,
    "resized": lambda x: torch.nn.functional.interpolate(x[None, None], (1, 2), mode="bilinear", align_corners=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gpu_pipelines_keep_nan(kind: str, tmp_path: Path) -> None:
    skip_unless_emulated(kind)
    expressions = [Expression(name, function, (LONG,)) for name, function in ON_GPUS.items()]
    (results,) = emulated(expressions, kind, tmp_path)
    for expression, actual in zip(expressions, results, strict=True):
        expected = expression.function(LONG).numpy()
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), expression.name
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, err_msg=expression.name)


def test_resizing_takes_symbolic_extents() -> None:
    """Neither extents of the result nor the number of images need be known."""
    n = tirx.Var("n", "int64")
    for shape, size in (([1, 3, n, 8], [n * 2, 16]), ([n, 3, 8, 8], [1, 2]), ([1, 3, 8, n], [1, n * 2])):
        for mode in ("half_pixel", "align_corners"):
            builder = relax.BlockBuilder()
            image = relax.Var("image", relax.TensorType(shape, "float32"))
            with builder.function("main", [image]):
                resized = relax.op.image.resize2d(
                    image, size, layout="NCHW", method="linear", coordinate_transformation_mode=mode
                )
                builder.emit_func_output(builder.emit(resized))
            module = builder.get()
            legalized = relax.transform.LegalizeOps(resizing.LEGALIZE)(module)
            assert str(legalized["main"].body.ty) == str(module["main"].body.ty)
            assert any(isinstance(function, tirx.PrimFunc) for function in legalized.functions.values())
