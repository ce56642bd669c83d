"""From a component to its Relax module, for everything that looks at the module and neither compiles nor runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.core.case import Case
from harness.core.outcome import Stage
from harness.core.settings import Settings
from harness.lowering.rope import STRATEGIES

if TYPE_CHECKING:
    import tvm


def imported_module(case: Case, announce: Callable[[str], None]) -> tvm.IRModule:
    """Builds a component with seeded weights, exports it on its main sample and imports that.

    Args:
        case: The component, at which scale, with which strategy and seed.
        announce: Called with the name of each stage as it begins.
    """
    from harness.lowering.frontends.torch_export import export_program
    from harness.models.sam3.source import Source
    from harness.models.sam3.upstream import upstream

    strategy = STRATEGIES[case.strategy]
    with upstream():
        announce(Stage.BUILD)
        source = Source(case, Settings())
        inputs = tuple(next(iter(source.samples.values())).values())
        announce(Stage.EXPORT)
        with strategy.apply(source.module):
            program = export_program(source.module, inputs)
        announce(Stage.IMPORT)
        module, _ = strategy.import_program(program)
    return module
