"""The process on an AArch64 machine that loads libraries and calls their functions.

Requests come on stdin, answers go to stdout, pickled, one after the other. Tensors are NumPy's arrays on the way. A
request is one of

    ("machine", library) → number of TVM's virtual machine with the library
    ("module", library) → number of the library, whose functions write into their last arguments
    ("call", number, function, arguments) → the result, and the arguments as they are afterwards

and an answer is ("value", that) or ("error", the traceback). What the libraries print goes to stderr.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from typing import Any


def main() -> None:
    requests, answers = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import ml_dtypes  # noqa: F401  (bfloat16, for NumPy)
    import tvm

    from harness.runtime.loading import check_header

    loaded: list[Any] = []

    def load(kind: str, library: str) -> int:
        from pathlib import Path

        check_header(Path(library))
        module = tvm.runtime.load_module(library)
        loaded.append(tvm.relax.VirtualMachine(module, tvm.cpu()) if kind == "machine" else module)
        return len(loaded) - 1

    def call(number: int, function: str, arguments: list[Any]) -> tuple[Any, list[Any]]:
        given = [sent(argument) for argument in arguments]
        result = loaded[number][function](*given)
        return back(result), [back(argument) for argument in given]

    while True:
        try:
            kind, *rest = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = "value", call(*rest) if kind == "call" else load(kind, *rest)
        except Exception:
            answer = "error", traceback.format_exc()
        pickle.dump(answer, answers, protocol=5)
        answers.flush()


def sent(value: Any) -> Any:
    """What TVM takes of what was sent."""
    import numpy as np
    import tvm

    if isinstance(value, list):
        return [sent(part) for part in value]
    return tvm.runtime.tensor(value) if isinstance(value, np.ndarray) else value


def back(value: Any) -> Any:
    """What is sent of what TVM gives, or takes."""
    import tvm_ffi

    if hasattr(value, "numpy"):
        return value.numpy()
    return [back(part) for part in value] if isinstance(value, (list, tuple, tvm_ffi.Array)) else value


if __name__ == "__main__":
    sys.exit(main())
