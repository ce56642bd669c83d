"""Exports a PyTorch module as an ONNX model in memory, whose weights remain PyTorch's tensors."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from harness.core.errors import HarnessError

if TYPE_CHECKING:
    import onnx_ir
    import torch

OPSET = 23
"""First version whose attention is one operator, as exact GELU is since 20 and layer normalization since 17."""

PACKAGES = ("onnx", "onnxscript")
"""Further packages that PyTorch's exporter and TVM's importer need."""

_LOGGERS = ("onnxscript", "onnx_ir")
"""Loggers that report each constant that was not folded."""


@dataclass(frozen=True)
class Exported:
    """An ONNX model and the names of its inputs.

    Attributes:
        model: One graph in operators of version `OPSET`; its first inputs are the module's, in order, and its
            initializers share memory with the module's tensors that they equal.
        inputs: Parameter names of the module's forward, in order.
    """

    model: onnx_ir.Model
    inputs: tuple[str, ...]


def check_packages() -> None:
    """Raises HarnessError if a package of this frontend is missing, with the packages to install."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise HarnessError(
            f"the frontend onnx needs {' and '.join(missing)}, not installed here: pip install 'sam3-tvm[verify]'"
        )


def export_module(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Exported:
    """Exports `module` for the shapes and dtypes of `args`, without gradients, through torch.export.

    Args:
        module: Takes tensors and returns a tensor or a tuple of tensors; in evaluation mode.
        args: Its positional inputs.

    Raises:
        HarnessError: A package of this frontend is missing.
        NotImplementedError: PyTorch's exporter cannot translate an operator; the message names its line.
    """
    check_packages()
    import torch

    from harness.compiler.lowering.frontends.exporting import export_program
    from harness.compiler.lowering.frontends.onnx.defects import DEFECTS

    translations = {operator: function for defect in DEFECTS for operator, function in defect.translations.items()}
    program = export_program(module, args)
    for defect in DEFECTS:
        for program_pass in defect.passes:
            program_pass(program.graph_module)
    with torch.no_grad(), silence_exporter():
        try:
            exported = torch.onnx.export(
                program, dynamo=True, opset_version=OPSET, custom_translation_table=translations, verbose=False
            )
        except torch.onnx.OnnxExporterError as error:
            if (sentence := _sentence_of(error)) is None:
                raise
            raise NotImplementedError(sentence) from error
    assert exported is not None
    return Exported(exported.model, tuple(program.graph_signature.user_inputs))


def _sentence_of(error: BaseException) -> str | None:
    """Returns the sentence about the node that the exporter was at when an error was raised; None if there was none."""
    from torch.fx import Node

    from harness.compiler.lowering.frontends.rewriting import source_line

    node, cause = None, error.__cause__
    while cause is not None:
        values = [frame.f_locals.get("node") for frame, _ in traceback.walk_tb(cause.__traceback__)]
        node = next((value for value in reversed(values) if isinstance(value, Node)), node)
        cause = cause.__cause__
    if node is None:
        return None
    return f"{node.target} is not known to PyTorch's ONNX exporter, called at {source_line(node)}."


@contextmanager
def silence_exporter() -> Iterator[None]:
    """Silences the exporter's reports about folded constants for the duration of the context."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
