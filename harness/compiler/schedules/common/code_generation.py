"""Code generation with LLVM, around a pass of LLVM's that breaks some modules."""

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
    """Calls `build`, which is TVM's `relax.build` or `tirx.build` of some module, for the target.

    LLVM 22 makes vectors of neighbouring scalars (its SLP vectorizer) in an order in which some are used before they
    exist, most of all for AVX2; TVM verifies the module afterwards and refuses it. Such a module is built again without
    that pass, which does little for loops that are vectorized already.

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
