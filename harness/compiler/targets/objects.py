"""Caches object files of CPU kernels on disk, so that a kernel is compiled once for all libraries, cases and runs.

The key of a kernel is the content of its `PrimFunc` without its name, which is the last result of this project. All
later steps are TVM's and LLVM's, so that the key also has the target and TVM's compiler library. TVM's structural hash
is no substitute: it has 64 bits that mix badly, and A·0.5 + 3 has the hash of A·2 + 0.125. An object defines the kernel
under a name made of the key; a C function with the name that the virtual machine calls forwards to it.
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
from typing import Any

import tvm
import tvm_ffi
from tvm.runtime import load_static_library
from tvm_ffi import StructuralKey

from harness.compiler.schedules.common import code_generation
from harness.compiler.schedules.common.code_generation import generate
from harness.compiler.targets.linking import compile_source, linker
from harness.compiler.targets.system_cpu import tvm_build
from harness.core.errors import HarnessError
from harness.core.files import cache_root, explain_write_errors, prune_files, remove_temporary_files, write_bytes
from harness.runtime.cpu import Platform

_log = logging.getLogger(__name__)

ADVICE = "free some space, or set SAM3_TVM_CACHE to a folder that can be written"
LIMIT_BYTES = 2 << 30
"""Size above which the least recently used objects are deleted; an object takes some 30 KB."""
_DIGEST_BYTES = 32
_EXPORTED = "__tvm_ffi_"
"""TVM's prefix of the names of exported functions."""


@dataclass(frozen=True)
class Objects:
    """The kernels of a module as object files.

    Attributes:
        module: The module without these kernels, which it imports.
        symbols: For each kernel, the symbol that its object defines.
        compiled_count: Number of newly compiled kernels; the other kernels came from the disk.
    """

    module: tvm.IRModule
    symbols: Mapping[str, str]
    compiled_count: int

    def source(self) -> str:
        """Returns C functions that have the kernels' names and forward to them."""
        return "".join(
            _FORWARDING_FUNCTION.format(name=_EXPORTED + name, symbol=_EXPORTED + symbol)
            for name, symbol in self.symbols.items()
        )


_FORWARDING_FUNCTION = """\
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
    """Reads kernels from the disk, and compiles missing kernels.

    A function that calls another function of the module stays in the module.

    Args:
        module: Lowered module with scheduled kernels.
        target: The CPU.
        folder: Folder for objects that TVM reads again.
    """
    object_cache = ObjectCache(cache_root() / "kernels")
    libraries: list[Any] = []
    symbol_of_structure: dict[Any, str] = {}
    symbols: dict[str, str] = {}
    remaining_functions: dict[Any, Any] = {}
    compiled_count = 0
    for variable, function in module.functions.items():
        name = variable.name_hint
        if not _is_self_contained(function):
            remaining_functions[variable] = function
            continue
        structure = StructuralKey(function.without_attr("global_symbol"))
        if structure not in symbol_of_structure:
            key = kernel_key(function, target)
            symbol_of_structure[structure] = symbol = f"kernel_{key[:32]}"
            content = object_cache.get(key)
            path = folder / f"{symbol}.o"
            if content is None:
                _compile(function, symbol, target, path)
                object_cache.put(key, path.read_bytes())
                compiled_count += 1
            else:
                path.write_bytes(content)
            libraries.append(load_static_library(str(path), [name]))
            path.unlink()
        symbols[name] = symbol_of_structure[structure]
    if compiled_count:
        object_cache.trim()
    remaining = tvm.IRModule(remaining_functions, attrs=module.attrs, global_infos=module.global_infos)
    return Objects(remaining.with_attr("external_mods", libraries), symbols, compiled_count)


def kernel_key(function: tvm.tirx.PrimFunc, target: tvm.target.Target) -> str:
    """Returns the SHA-256, in hexadecimal, of everything that a kernel's object depends on, without the kernel's name.

    It covers the names of variables, so that a kernel whose variables have other names is compiled again.
    """
    content = tvm.ir.save_json(function.without_attr("global_symbol"))
    return hashlib.sha256(json.dumps([content, str(target), *_compiler()]).encode()).hexdigest()


def compiled_source(source: str, platform: Platform, folder: Path) -> Path:
    """Writes an object file of C source that every library has, compiled unless it is on the disk; returns its path.

    Raises:
        RuntimeError: There is no compiler, or it fails.
    """
    content = json.dumps([source, platform, linker(platform)])
    key = hashlib.sha256(content.encode()).hexdigest()
    path, object_cache = folder / f"source_{key[:32]}.o", ObjectCache(cache_root() / "kernels")
    known = object_cache.get(key)
    if known is not None:
        path.write_bytes(known)
        return path
    (folder / "source.c").write_text(source)
    compile_source(str(path), str(folder / "source.c"), platform)
    object_cache.put(key, path.read_bytes())
    return path


class ObjectCache:
    """A cache of files `<root>/<2 digits>/<key>`: the SHA-256 of an object, and the object. Processes may share it."""

    def __init__(self, root: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        """Takes the folder `root`, which need not exist yet; it is created at the first write."""
        self.root = root
        self.limit_bytes = limit_bytes

    def get(self, key: str) -> bytes | None:
        """Returns an object; None if there is none, or if it is damaged."""
        path = self._path(key)
        try:
            content = path.read_bytes()
            os.utime(path)  # the date of the last use, which `trim` reads
        except OSError:
            return None
        digest, stored = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return stored if hashlib.sha256(stored).digest() == digest else None

    def put(self, key: str, content: bytes) -> None:
        """Stores an object; if that fails, a warning is logged and nothing else changes."""
        path = self._path(key)
        try:
            with explain_write_errors(path, ADVICE):
                path.parent.mkdir(parents=True, exist_ok=True)
                # Of killed processes; another that writes the same object just now may warn, and it is stored here.
                remove_temporary_files([path])
            write_bytes(path, hashlib.sha256(content).digest() + content, advice=ADVICE)
        except HarnessError as error:
            _log.warning("compiled kernels are not kept: %s", error)

    def trim(self) -> None:
        """Deletes the least recently used objects until the others are within the limit."""
        prune_files(self.limit_bytes, self.root.glob("??/*"))

    def _path(self, key: str) -> Path:
        return self.root / key[:2] / key


def _is_self_contained(function: Any) -> bool:
    """Returns whether a function is a kernel that calls no other function of its module."""
    if not isinstance(function, tvm.tirx.PrimFunc):
        return False
    called: list[Any] = []
    tvm_ffi.structural_walk(function.body, (tvm.ir.GlobalVar, called.append))
    return not called


def _compile(function: Any, symbol: str, target: tvm.target.Target, path: Path) -> None:
    kernel = tvm.IRModule({symbol: function.with_attr("global_symbol", symbol)})
    with target, tvm.transform.PassContext(opt_level=3):
        generate(lambda code_target: tvm.tirx.build(kernel, code_target), target).write_to_file(str(path))


@cache
def _compiler() -> tuple[str, ...]:
    """Returns what identifies TVM's compiler, its build and this project's use of it."""
    source_digests = [
        hashlib.sha256(Path(module).read_bytes()).hexdigest() for module in (__file__, code_generation.__file__)
    ]
    return (tvm.__version__, *tvm_build(), *source_digests)
