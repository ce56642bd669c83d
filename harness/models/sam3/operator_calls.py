"""Lists the components' distinct operator calls in fixtures/operators.json, when run as a program."""

from __future__ import annotations

from contextlib import nullcontext

from harness.compiler.lowering.frontends.torch_export.operators import OPERATORS_FILE, Call, calls_of, dump_calls
from harness.core.files import write_text


def collect() -> set[Call]:
    """Exports every component for each of its samples at shallow scale, and returns all operator calls."""
    from harness.compiler.lowering.frontends.exporting import export_program
    from harness.compiler.lowering.rope import STRATEGIES
    from harness.core.case import Case, Scale
    from harness.core.settings import SEEDED
    from harness.models.sam3.build import build_model
    from harness.models.sam3.components import COMPONENTS
    from harness.models.sam3.source import UpstreamModel
    from harness.models.sam3.upstream import upstream

    calls: set[Call] = set()
    with upstream():
        for interactive in (False, True):
            model = build_model(Scale.SHALLOW, interactive=interactive)
            for component in COMPONENTS.values():
                if component.interactive is not interactive:
                    continue
                module = component.build(model)
                case = Case(component.name, "real", "llvm")
                activations = UpstreamModel(case, SEEDED).captured(component.captured_by)
                strategy = STRATEGIES["real"].apply(module) if component.uses_rope else nullcontext()
                with strategy:
                    for arguments in component.samples(activations).values():
                        calls |= calls_of(export_program(module, tuple(arguments.values())))
                print(component.name, len(calls), flush=True)
    return calls


if __name__ == "__main__":
    write_text(OPERATORS_FILE, dump_calls(collect()))
