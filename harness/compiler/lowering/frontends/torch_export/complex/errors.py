"""Defines the error for programs that the pass cannot lower."""

from __future__ import annotations

from torch.fx import Node

from harness.compiler.lowering.frontends.rewriting import source_line


class ComplexOperatorError(NotImplementedError):
    """A complex tensor reaches an operator, a dtype or a structure that the pass does not know.

    It is the outcome of a case at import, like an operator that TVM's importer does not know. It is no HarnessError,
    because it is no mistake of the user.
    """


def unsupported(node: Node, problem: str = "has no rule for complex tensors") -> ComplexOperatorError:
    """Returns the error for a node, with the model's source line.

    Args:
        node: The call that cannot be lowered.
        problem: The problem, as a phrase that follows the operator's name.
    """
    name = str(node.target).removeprefix("torch.ops.")
    return ComplexOperatorError(
        f"{name} {problem}, called at {source_line(node)}: "
        "write that line with real tensors, or add a rule in harness/compiler/lowering/frontends/torch_export/complex."
    )
