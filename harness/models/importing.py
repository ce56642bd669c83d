"""Imports the main program of a case into Relax, for commands that inspect the module and do not run it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from harness.compiler.lowering.frontends.exporting import save_program
from harness.compiler.lowering.route import Route
from harness.core.budget import NO_GROUPS, Groups, check_groups
from harness.core.case import Case
from harness.core.files import write_text
from harness.core.outcome import Stage
from harness.core.settings import SEEDED
from harness.models.registry import models, subjects

if TYPE_CHECKING:
    import tvm


def imported_module(
    case: Case, on_stage: Callable[[str], None], float32: Groups = NO_GROUPS, save: Path | None = None
) -> tvm.IRModule:
    """Builds a subject with seeded weights, exports the main program and imports it into Relax.

    Args:
        case: The subject and its scale, strategy, seed, precision and frontend.
        on_stage: Called with the name of each stage as it begins.
        float32: Groups of products that stay float32 in half precision.
        save: Folder for the exported program with its weights (`CASE.pt2`, of the frontend `torch` alone) and for the
            text of the Relax module (`CASE.relax.py`).

    Raises:
        HarnessError: The program lacks one of the groups, or a file cannot be written.
    """
    subject = subjects()[case.component]
    with models()[subject.model].context():
        on_stage(Stage.BUILD)
        program = next(iter(subject.open(case, SEEDED).programs.values()))
        route = Route.from_case(case, float32)
        on_stage(Stage.EXPORT)
        exported = route.export(program.module, tuple(program.example.values()), program.axes)
        on_stage(Stage.IMPORT)
        lowered = route.lower(exported, program.module)
        check_groups(float32, [lowered.float32], case.component)
        if save is not None:
            save_program(exported, save / f"{case.id}.pt2")
            write_text(save / f"{case.id}.relax.py", lowered.module.script())
        return lowered.module
