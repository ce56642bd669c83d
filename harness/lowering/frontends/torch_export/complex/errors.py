"""The error for what has no real form here."""

from __future__ import annotations

from torch.fx import Node

from harness.lowering.frontends.torch_export.rewriting import source_line


class ComplexOperatorError(NotImplementedError):
    """A complex tensor meets an operator, a dtype or a structure that the pass does not know.

    It is the outcome of a case, at its import, like an operator that TVM's importer does not know; not a mistake of the
    user, so no HarnessError.
    """


def unknown(node: Node, problem: str = "has no rule for complex tensors") -> ComplexOperatorError:
    """Returns the error for a node, with the line of the model that it comes from.

    Args:
        node: The call that cannot be lowered.
        problem: What is wrong with it; follows the operator's name.
    """
    name = str(node.target).removeprefix("torch.ops.")
    return ComplexOperatorError(
        f"{name} {problem}, called at {source_line(node)}: "
        "write that line with real tensors, or add a rule in harness/lowering/frontends/torch_export/complex."
    )
