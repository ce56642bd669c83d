"""The error for what has no real form here."""

from __future__ import annotations

import re

from torch.fx import Node

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)\n\s*(?P<code>.+)')
_PYTORCH = "/torch/nn/"
"""Where PyTorch's modules are."""


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


def source_line(node: Node) -> str:
    """Returns the innermost line of Python that a node was traced from, as `file:line in function: code`.

    Lines of PyTorch's own modules count only where there are no others.
    """
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return "a line that torch.export did not record"
    frame = ([frame for frame in frames if _PYTORCH not in frame["file"]] or frames)[-1]
    return f"{frame['file']}:{frame['line']} in {frame['function']}: `{frame['code'].strip()}`"
