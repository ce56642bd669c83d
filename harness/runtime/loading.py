"""Loads a compiled library, or says in one sentence why this machine cannot run it.

A processor that meets an unknown instruction kills the process with SIGILL. The dynamic loader reports a library of
another architecture as a missing file, and dies of SIGBUS where a file is truncated. Therefore the file's header is
read before the file is loaded. The library also states the CPU that its code needs:
`harness.compiler.targets.compiling` adds a function to it that only returns text.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any

from harness.runtime.cpu import MATRIX_UNIT, common_cpu, cpu_features, cpu_model, matrix_unit_problem, this_platform
from harness.runtime.errors import ModelError
from harness.runtime.manifest import ArtifactError, read_manifest
from harness.runtime.threads import use_default_threads

if TYPE_CHECKING:
    import tvm_ffi

REQUIRED_CPU = "required_cpu"
"""The function of a library that returns the CPU that it was compiled for and the features that its code may use.

The text is one line, separated by spaces, in LLVM's spelling. The function runs in TVM's virtual machine, without
compiled code.
"""

HAND_OUT_PARTS = "hand_out_parts"
"""The function of a library by which threads fetch its parallel loops part by part."""

_ELF_MACHINES = {3: "x86", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
"""`e_machine` of the ELF header (System V ABI)."""
_MACH_O_CPUS = {0x01000007: "x86_64", 0x0100000C: "aarch64"}
"""`cputype` of a 64-bit Mach-O header (mach/machine.h)."""
_HEADER_BYTES = 64
"""Bytes of an ELF header; a Mach-O header is shorter."""


_PACKAGE = "apache-tvm"
"""The distribution that installs TVM's libraries."""


class LoadError(ModelError):
    """A library that this machine cannot run; the sentence says which, why, and what to do."""


class VirtualMachine:
    """TVM's virtual machine with a loaded library; its functions by name.

    `tvm.relax.VirtualMachine` does the same, but importing it loads TVM's compiler.
    """

    _CPU, _POOLED = 1, 2
    """`kDLCPU` of DLPack, `AllocatorType::kPooled` of TVM's memory manager."""

    def __init__(self, module: Any, device: tvm_ffi.Device) -> None:
        self._library, self._device = module, device
        self._module = module["vm_load_executable"]()
        devices = [(device.dlpack_device_type(), device.index)]
        if devices[0][0] != self._CPU:
            devices.append((self._CPU, 0))  # where shapes are computed
        self._module["vm_initialization"](*(value for kind, index in devices for value in (kind, index, self._POOLED)))

    def __getitem__(self, name: str) -> Any:
        return self._module[name]

    def __contains__(self, name: str) -> bool:
        return bool(self._module.implements_function(name))

    def instrumented(self, instrument: Callable[..., None]) -> VirtualMachine:
        """Returns another machine with the same library, which calls an instrument before and after each kernel.

        Args:
            instrument: Takes the kernel, its name, whether the kernel is about to run or has run, its result, and its
                arguments.
        """
        machine = VirtualMachine(self._library, self._device)
        machine["set_instrument"](instrument)
        return machine

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a function.

        TVM's machine holds its last result until it returns another one, so that a result that the caller dropped would
        take memory while the next one is computed. Therefore another function is called afterwards, which returns text.
        """
        result = self._module[name](*arguments)
        if REQUIRED_CPU in self:
            self._module[REQUIRED_CPU]()
        return result


def load_runtime(folder: Path | None = None) -> None:
    """Loads TVM's runtime library, unless it is loaded, with its symbols visible to compiled libraries.

    `import tvm` would also do this, but loads the compiler as well, which takes 0.3 GB of memory.

    Args:
        folder: Where to look for the library if TVM is not installed; an artifact has a copy.

    Raises:
        LoadError: The library is missing or broken.
    """
    use_default_threads()
    with _without_torch():
        import tvm_ffi

    # Two copies of the library in one process would register all functions twice.
    if tvm_ffi.get_global_func("vm.builtin.memory_manager.clear", allow_missing=True) is None:
        library = runtime_library(folder)
        try:
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        except OSError as error:
            reason = str(error).removeprefix(f"{library}: ")
            raise LoadError(f"TVM's runtime library {library} cannot be loaded ({reason}): install it again") from error


@contextmanager
def _without_torch() -> Iterator[None]:
    """Makes imports of PyTorch fail in this thread, unless it is imported already.

    `tvm_ffi` imports it wherever it is installed, which takes 1.5 s and 0.6 GB of memory on a Zen 5.
    """
    finder = _NoTorch()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _NoTorch:
    """Finds no PyTorch for the thread that made it."""

    def __init__(self) -> None:
        self._thread = get_ident()

    def find_spec(self, name: str, *_: Any) -> None:
        """Raises ModuleNotFoundError if this thread imports PyTorch."""
        if name == "torch" and get_ident() == self._thread:
            raise ModuleNotFoundError("PyTorch is not needed here", name=name)


def runtime_library(folder: Path | None = None) -> Path:
    """Returns TVM's runtime library; see `find_library`.

    Raises:
        LoadError: The library is neither installed nor in the folder.
    """
    name = library_name("tvm_runtime")
    library = find_library(name, folder)
    if library is None:
        raise LoadError(
            f"TVM's runtime library {name} is neither installed nor beside the model: install apache-tvm 0.27"
        )
    return library


def library_name(stem: str) -> str:
    """Returns the file name of a library on this system."""
    return f"lib{stem}.{'dylib' if platform.system() == 'Darwin' else 'so'}"


def find_library(name: str, folder: Path | None = None) -> Path | None:
    """Returns a library of TVM: the installed one, otherwise the one in the folder, otherwise None.

    The library in the folder comes first if the folder was made with another version than the installed one.
    """
    package = find_spec("tvm")
    installed = (package.submodule_search_locations or ()) if package else ()
    roots = [*(Path(root) / "lib" for root in installed), *([folder] if folder else [])]
    if folder is not None and _has_another_version(folder):
        roots.reverse()
    return next((root / name for root in roots if (root / name).is_file()), None)


def _has_another_version(folder: Path) -> bool:
    """Returns whether a folder was compiled with another version of TVM than the installed one."""
    try:
        compiled_with = read_manifest(folder).made.get(_PACKAGE)
        return compiled_with is not None and compiled_with != version(_PACKAGE)
    except (ArtifactError, PackageNotFoundError):
        return False


def load_library(library: Path, device: tvm_ffi.Device) -> VirtualMachine:
    """Loads a library into TVM's virtual machine after checking that this machine can run it.

    Args:
        library: A library that `harness.compiler.targets.compiling.compile_module` wrote.
        device: The device to run on.

    Raises:
        LoadError: There is no such library, or its code is not for this machine.
    """
    check_header(library)
    load_runtime(library.parent)
    try:
        module = open_library(library)
    except Exception as error:
        reason = str(error).splitlines()[0].rpartition(f"{library}: ")[2]
        raise LoadError(f"{library} cannot be loaded ({reason}): compile it again") from error
    machine = VirtualMachine(module, device)
    if REQUIRED_CPU in machine:
        compiled_for, *required = str(machine[REQUIRED_CPU]()).split()
        problem = cpu_problem(compiled_for, required)
        if problem:
            cpu = common_cpu(cpu_features() or frozenset())
            raise LoadError(f"{library} was {problem}: compile it on this machine, or with --cpu {cpu}")
        if MATRIX_UNIT[0] in required and (refusal := matrix_unit_problem()):
            raise LoadError(
                f"{library} uses the processor's matrix unit (AMX), which the system refuses this process ({refusal}): "
                f"allow the system call arch_prctl, or compile without it, with --cpu {compiled_for}"
            )
    return machine


def open_library(library: Path) -> tvm_ffi.Module:
    """Opens a library with TVM's runtime, which must be loaded, and lets threads fetch its loops part by part."""
    import tvm_ffi

    module = tvm_ffi.load_module(str(library))
    if module.implements_function(HAND_OUT_PARTS, query_imports=True):
        module.get_function(HAND_OUT_PARTS, query_imports=True)()
    return module


def cpu_problem(compiled_for: str, required: list[str]) -> str | None:
    """Returns why this machine's processor cannot run code that was compiled for a CPU; None if it can or may.

    Args:
        compiled_for: LLVM's name of that CPU.
        required: The features that the code may use, in LLVM's spelling.
    """
    present = cpu_features()
    missing = [] if present is None else [feature for feature in required if feature not in present]
    if present is None or not missing:
        return None
    return f"compiled for {compiled_for}, whose {', '.join(missing)} this machine's {cpu_model()} lacks"


def check_header(library: Path) -> None:
    """Checks the first bytes of a library.

    Raises:
        LoadError: There is no such library, or it is for another system or kind of processor.
    """
    try:
        with library.open("rb") as file:
            header = file.read(_HEADER_BYTES)
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise LoadError(f"{library} cannot be read ({error.strerror}): give the library that was compiled") from error
    origin, host = _origin(header), this_platform()
    if origin is None:
        raise LoadError(f"{library} is not a compiled library: give the file that was compiled for this machine")
    if size < _minimum_size(header):
        raise LoadError(f"{library} is cut off: compile it again")
    if origin != host:
        raise LoadError(
            f"{library} was compiled for {origin[0]} on {origin[1]}, this is {host[0]} on {host[1]}: "
            "compile it on this machine"
        )


def _origin(header: bytes) -> tuple[str, str] | None:
    """Returns the system and architecture of a shared library; None for another file."""
    if len(header) < _HEADER_BYTES:
        return None
    if header[:4] == b"\x7fELF":
        (machine,) = struct.unpack_from("<H" if header[5] == 1 else ">H", header, 18)
        return "Linux", _ELF_MACHINES.get(machine, f"architecture {machine}")
    if header[:4] == b"\xcf\xfa\xed\xfe":
        (cpu,) = struct.unpack_from("<I", header, 4)
        return "macOS", _MACH_O_CPUS.get(cpu, f"architecture {cpu:#x}")
    return None


def _minimum_size(header: bytes) -> int:
    """Returns the end of the section table, which linkers write last; 0 if the header does not state it."""
    if header[:6] != b"\x7fELF\2\1":
        return 0
    (table,) = struct.unpack_from("<Q", header, 40)
    size, count = struct.unpack_from("<HH", header, 58)
    return int(table + size * count)
