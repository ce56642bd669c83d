"""Imports TVM's tensor intrinsics, which MetaSchedule's TuneContext needs, in a third of the time."""

from __future__ import annotations

import importlib
import inspect


def import_tensor_intrinsics() -> None:
    """Imports the module that TVM imports with the first TuneContext.

    Its 528 intrinsics are parsed from TVMScript. For each, the parser requests the whole call stack with its source
    lines, which takes half a minute and more, growing with the number of loaded modules. A stack without source lines
    suffices here.
    """
    original = inspect.stack
    inspect.stack = _stack_without_source
    try:
        importlib.import_module("tvm.s_tir.tensor_intrin")
    finally:
        inspect.stack = original


def _stack_without_source(context: int = 1) -> list[inspect.FrameInfo]:
    frames = []
    frame = inspect.currentframe()
    while frame is not None and (frame := frame.f_back) is not None:
        code = frame.f_code
        frames.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
    return frames
