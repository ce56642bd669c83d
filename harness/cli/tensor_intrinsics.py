"""Imports TVM's tensor intrinsics, which a TuneContext of MetaSchedule needs, in a third of the time."""

from __future__ import annotations

import importlib
import inspect


def import_tensor_intrinsics() -> None:
    """Imports what TVM imports with the first TuneContext.

    Its 528 intrinsics are parsed from TVMScript, and for each the parser asks for the whole call stack with its source
    lines: half a minute and more, growing with the number of modules that are loaded. A stack without source lines is
    enough here.
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
