"""Defines a model from outside the package, in whose process an activation is lost when it is folded into a product."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from harness.core.case import Case
from harness.core.program import Call
from harness.core.settings import Settings
from harness.models.model import Model
from harness.models.subject import Subject, Workload
from harness.models.traced import open_trace

NAME = "faulty"


@contextmanager
def without_relu() -> Iterator[None]:
    from harness.compiler.schedules.cpu import epilogue

    right = epilogue.UNARY["relax.nn.relu"]
    epilogue.UNARY["relax.nn.relu"] = lambda x: x
    try:
        yield
    finally:
        epilogue.UNARY["relax.nn.relu"] = right


def open_block(case: Case, _settings: Settings) -> Workload:
    from conformance.support.diagnosed import block_program

    program = block_program()
    return open_trace(case, {program.name: program}, [Call("main", program.name, tuple(program.example.values()), "")])


SUBJECT = Subject("faulty_block", "a block whose activation is lost", ("x",), ("mixed", "weights"), open_block, NAME)
MODEL = Model(NAME, {SUBJECT.name: SUBJECT}, context=without_relu)
