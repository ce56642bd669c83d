"""Object files of CPU kernels, kept on disk: a kernel is compiled once, whatever libraries, cases and runs it is in.

A kernel is known by the content of its `PrimFunc` without its name, which is the last thing that the project makes; the
rest is TVM's and LLVM's work, so that the key also has the target and TVM's compiler library. TVM's structural hash is
no substitute: it has 64 bits that mix badly, and A·0.5 + 3 has that of A·2 + 0.125. An object defines the kernel under
a name made of the key; a C function with the name that the virtual machine calls leads to it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.errors import HarnessError
from harness.files import cache_root, explain_write_errors, prune_files, write_bytes
from harness.schedules.common.code_generation import generate
from harness.targets.tvm_build import tvm_build

if TYPE_CHECKING:
    import tvm

_log = logging.getLogger(__name__)

ADVICE = "free some space, or set SAM3_TVM_CACHE to a folder that can be written"
LIMIT_BYTES = 2 << 30
"""Above this size the objects that were not used for longest are deleted; one takes some 30 KB."""
_DIGEST_BYTES = 32
_EXPORTED = "__tvm_ffi_"
"""What TVM puts before the name of a function that a library exports."""


@dataclass(frozen=True)
class Objects:
    """The kernels of a module as object files.

    Attributes:
        rest: The module without these kernels, which imports them.
        symbols: For each kernel the name that its object defines.
        made: How many of them were compiled now; the others were on the disk.
    """

    rest: tvm.IRModule
    symbols: Mapping[str, str]
    made: int

    def source(self) -> str:
        """Returns C functions that have the kernels' names and lead to them."""
        return "".join(
            _LEADING.format(name=_EXPORTED + name, symbol=_EXPORTED + symbol) for name, symbol in self.symbols.items()
        )


_LEADING = """\
#ifdef __cplusplus
extern "C"
#endif
int {symbol}(void *, const void *, int, void *);
#ifdef __cplusplus
extern "C"
#endif
int {name}(void *self, const void *arguments, int number, void *result) {{
  return {symbol}(self, arguments, number, result);
}}
"""
"""The signature is `TVMFFISafeCallType` of tvm/ffi/c_api.h."""


def with_objects(module: tvm.IRModule, target: tvm.target.Target, folder: Path) -> Objects:
    """Takes kernels from the disk, compiling those that are not there.

    A function that calls another one of the module stays in it.

    Args:
        module: Lowered; its kernels are scheduled.
        target: The CPU.
        folder: Where objects may be written that TVM reads again.
    """
    import tvm
    from tvm.runtime import load_static_library
    from tvm_ffi import StructuralKey

    kept = ObjectCache(cache_root() / "kernels")
    libraries: list[Any] = []
    known: dict[Any, str] = {}
    symbols: dict[str, str] = {}
    rest: dict[Any, Any] = {}
    made = 0
    for variable, function in module.functions.items():
        name = variable.name_hint
        if not _stands_alone(function):
            rest[variable] = function
            continue
        structure = StructuralKey(function.without_attr("global_symbol"))
        if structure not in known:
            key = kernel_key(function, target)
            known[structure] = symbol = f"kernel_{key[:32]}"
            content = kept.get(key)
            path = folder / f"{symbol}.o"
            if content is None:
                _compile(function, symbol, target, path)
                kept.put(key, path.read_bytes())
                made += 1
            else:
                path.write_bytes(content)
            libraries.append(load_static_library(str(path), [name]))
            path.unlink()
        symbols[name] = known[structure]
    if made:
        kept.trim()
    remaining = tvm.IRModule(rest, attrs=module.attrs, global_infos=module.global_infos)
    return Objects(remaining.with_attr("external_mods", libraries), symbols, made)


def kernel_key(function: tvm.tirx.PrimFunc, target: tvm.target.Target) -> str:
    """Returns the SHA-256 of all that a kernel's object depends on, in hexadecimal; the kernel's name is no part of it.

    Names of its variables are, so that a kernel whose variables have other names is compiled anew.
    """
    import tvm

    content = tvm.ir.save_json(function.without_attr("global_symbol"))
    return hashlib.sha256(json.dumps([content, str(target), *_compiler()]).encode()).hexdigest()


class ObjectCache:
    """Files `<root>/<2 digits>/<key>`: the SHA-256 of an object, and the object. Processes may share it."""

    def __init__(self, root: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        """Uses the folder `root`, which need not exist yet; nothing is touched before the first use."""
        self.root = root
        self.limit_bytes = limit_bytes

    def get(self, key: str) -> bytes | None:
        """Returns an object; None if there is none, or one that was damaged."""
        path = self._path(key)
        try:
            content = path.read_bytes()
            os.utime(path)  # the date of the last use, which `trim` goes by
        except OSError:
            return None
        digest, found = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return found if hashlib.sha256(found).digest() == digest else None

    def put(self, key: str, content: bytes) -> None:
        """Keeps an object; where that is not possible, a warning says so and nothing else changes."""
        path = self._path(key)
        try:
            with explain_write_errors(path, ADVICE):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, hashlib.sha256(content).digest() + content, advice=ADVICE)
        except HarnessError as error:
            _log.warning("compiled kernels are not kept: %s", error)

    def trim(self) -> None:
        """Deletes the objects that were not used for longest until the rest is within the limit."""
        prune_files(self.limit_bytes, self.root.glob("??/*"))

    def _path(self, key: str) -> Path:
        return self.root / key[:2] / key


def _stands_alone(function: Any) -> bool:
    """Whether a function is a kernel that calls no other function of its module."""
    import tvm
    import tvm_ffi

    if not isinstance(function, tvm.tirx.PrimFunc):
        return False
    called: list[Any] = []
    tvm_ffi.structural_walk(function.body, (tvm.ir.GlobalVar, called.append))
    return not called


def _compile(function: Any, symbol: str, target: tvm.target.Target, path: Path) -> None:
    import tvm

    kernel = tvm.IRModule({symbol: function.with_attr("global_symbol", symbol)})
    with target, tvm.transform.PassContext(opt_level=3):
        generate(lambda chosen: tvm.tirx.build(kernel, chosen), target).write_to_file(str(path))


@cache
def _compiler() -> tuple[str, ...]:
    """Returns what tells TVM's compiler, its build and this project's use of it from others."""
    import tvm

    from harness.schedules.common import code_generation

    own = [hashlib.sha256(Path(module).read_bytes()).hexdigest() for module in (__file__, code_generation.__file__)]
    return (tvm.__version__, *tvm_build(), *own)
