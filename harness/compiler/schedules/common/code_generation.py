"""Generates code with LLVM, and avoids a pass of LLVM's that breaks some modules."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import tvm

_log = logging.getLogger(__name__)

Built = TypeVar("Built")

_BROKEN = "LLVM module verification failed"
_WITHOUT_SLP = "-vectorize-slp:bool=0"


def generate(build: Callable[[tvm.target.Target], Built], target: tvm.target.Target) -> Built:
    """Calls `build`, TVM's `relax.build` or `tirx.build` of some module, for the target.

    LLVM 22's SLP vectorizer makes vectors of neighbouring scalars in an order in which some are used before they exist,
    mostly for AVX2; TVM's verification then refuses the module. It is built again without that pass, which gains little
    for loops that are vectorized already.

    Raises:
        tvm.error.InternalError: LLVM breaks the module without that pass as well.
    """
    import tvm

    try:
        return build(target)
    except tvm.error.InternalError as error:
        if _BROKEN not in str(error) or str(target.kind.name) != "llvm":
            raise
        _log.debug("built again without LLVM's SLP vectorizer: %s", error)
    options = [str(option) for option in target.attrs.get("cl-opt", [])]
    return build(tvm.target.Target({**target.export(), "cl-opt": [*options, _WITHOUT_SLP]}))
