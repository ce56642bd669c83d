"""Compiles an imported module to a library on disk, and examines the kernels of a GPU target meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, relax

from harness.compiler.schedules import UNTUNED, Schedules
from harness.compiler.schedules.common.code_generation import generate
from harness.compiler.schedules.common.kernel_info import lost_schedules
from harness.compiler.targets import HOST, TARGETS, parallel
from harness.compiler.targets.linking import link
from harness.compiler.targets.llvm import required_cpu
from harness.compiler.targets.objects import compiled_source, with_objects
from harness.compiler.targets.serialized import EMBEDDED, with_modules
from harness.compiler.targets.target import DeviceCode, Target
from harness.core.files import temporary_folder
from harness.core.outcome import Kernel
from harness.core.processors import THIS_MACHINE, Processors
from harness.runtime.cpu import Platform, normalized, this_platform
from harness.runtime.loading import REQUIRED_CPU


@contextmanager
def examine_kernels(target: tvm.target.Target) -> Iterator[list[Kernel]]:
    """Collects the kernels that are built for the target inside the context; empty for targets without own source.

    TVM's code generator is wrapped, because it alone sees both the kernels' TensorIR, which has their launches, and
    their source.

    Raises:
        RuntimeError: A kernel exceeds the limits of the target's devices.
    """
    kind = str(target.kind.name)
    registered = TARGETS.get(kind)
    kernels: list[Kernel] = []
    if registered is None or registered.examine is None:
        yield kernels
        return
    examine = registered.examine
    generator = f"target.build.{kind}"
    original = tvm_ffi.get_global_func(generator)

    def build(module: tvm.IRModule, device_target: tvm.target.Target) -> Any:
        generated = original(module, device_target)
        kernels.extend(examine(generated.inspect_source(kind), launched_threads(module), device_target))
        return generated

    tvm_ffi.register_global_func(generator, build, override=True)
    try:
        yield kernels
    finally:
        tvm_ffi.register_global_func(generator, original, override=True)


def launched_threads(module: tvm.IRModule) -> dict[str, int]:
    """Returns the threads per block by kernel, for kernels whose launch does not depend on a shape.

    Args:
        module: Kernels as the code generator takes them, with `thread_extent` around their bodies.
    """
    threads: dict[str, int] = {}
    for _, function in module.functions_items():
        extents: dict[str, Any] = {}

        def collect(node: Any, extents: dict[str, Any] = extents) -> None:
            if isinstance(node, tvm.tirx.AttrStmt) and node.attr_key == "thread_extent":
                extents[str(node.node.thread_tag)] = node.value

        tvm_ffi.structural_walk(function.body, collect)
        count = 1
        for tag, extent in extents.items():
            if tag.startswith("threadIdx."):
                count *= int(extent) if isinstance(extent, int | tvm.tirx.IntImm) else 0
        if count:
            threads[str(function.attrs["global_symbol"])] = count
    return threads


LIBRARY_SUFFIX = ".so"


@dataclass(frozen=True)
class Compiled:
    """The result of compiling a module.

    Attributes:
        kernels: Kernels of a GPU target.
        lost_schedules: A sentence for each schedule that could not be applied.
    """

    kernels: tuple[Kernel, ...]
    lost_schedules: tuple[str, ...]


def compile_module(
    module: tvm.IRModule,
    target: Target,
    library: Path,
    schedules: Schedules = UNTUNED,
    *,
    processors: Processors = THIS_MACHINE,
    for_emulation: bool = False,
) -> Compiled:
    """Compiles an imported module with the target's pipeline and writes the library.

    Args:
        module: Module of `torch_export.import_program`.
        target: The target.
        library: Path of the library; ends in `LIBRARY_SUFFIX`.
        schedules: Schedules that tuning found for the target.
        processors: The processors to compile for.
        for_emulation: Whether the CPU of this machine runs a GPU's kernels, see `target_for`.

    Returns:
        The result; the code is in the library.

    Raises:
        HarnessError: The processors have an unknown name.
        RuntimeError: A kernel exceeds the limits of the target's devices, or there is no linker, which the target's
            `compile_problem` reports beforehand.
    """
    tvm_target = target_for(target, processors, for_emulation=for_emulation)
    lowered = lower_module(module, target, tvm_target, schedules)
    kernels = build_library(lowered, tvm_target, library, keep_source=for_emulation)
    return Compiled(kernels, lost_schedules(lowered))


def target_for(target: Target, processors: Processors, *, for_emulation: bool = False) -> tvm.target.Target:
    """Returns TVM's target for processors.

    Args:
        target: The target.
        processors: The processors to compile for.
        for_emulation: Whether the CPU of this machine runs a GPU's kernels: the kernels are the target's, but the host
            code is for this machine.

    Raises:
        HarnessError: The processors have an unknown name.
    """
    tvm_target = target.tvm_target(processors)
    if not for_emulation:
        return tvm_target
    cpu = str(HOST.tvm_target(processors).attrs["mcpu"])
    return tvm.target.Target(tvm_target, tvm.target.Target({"kind": "llvm", "mcpu": cpu}))


def lower_module(
    module: tvm.IRModule,
    target: Target,
    tvm_target: tvm.target.Target,
    schedules: Schedules = UNTUNED,
    instruments: Sequence[Any] = (),
) -> tvm.IRModule:
    """Runs the target's pipeline with tuned schedules over an imported module; TVM's instruments see each pass."""
    with tvm_target, tvm.transform.PassContext(opt_level=3, instruments=list(instruments)):
        return target.pipeline(tvm_target, schedules)(module)


def build_library(
    lowered: tvm.IRModule, tvm_target: tvm.target.Target, library: Path, *, keep_source: bool = False
) -> tuple[Kernel, ...]:
    """Generates code for a lowered module and writes the library, with the name of its required processor.

    Args:
        lowered: Module of `lower_module`, or functions of its result.
        tvm_target: TVM's target of the code.
        library: Path of the library; ends in `LIBRARY_SUFFIX`.
        keep_source: Whether the library carries the source of a GPU's kernels, for emulation.

    Returns:
        The kernels of a GPU target.

    Raises:
        RuntimeError: A kernel exceeds the limits of the target's devices, or there is no linker.
    """
    host = tvm_target.host or tvm_target
    marked = _with_required_cpu(lowered, host)
    with temporary_folder("compile") as folder:
        sources: list[str] = []
        if str(tvm_target.kind.name) == "llvm":
            objects = with_objects(marked, tvm_target, Path(folder))
            marked = objects.module
            (Path(folder) / "kernels.c").write_text(objects.source())
            launcher = compiled_source(parallel.SOURCE, platform_of(tvm_target), Path(folder))
            sources = [str(Path(folder) / "kernels.c"), str(launcher)]
        with tvm_target, tvm.transform.PassContext(opt_level=3), examine_kernels(tvm_target) as kernels:
            executable = generate(lambda code_target: relax.build(marked, code_target, relax_pipeline=None), tvm_target)
        export_library(executable, tvm_target, library, keep_source=keep_source, sources=sources)
    return tuple(kernels)


def export_library(
    compiled: Any,
    tvm_target: tvm.target.Target,
    library: Path,
    *,
    keep_source: bool = False,
    sources: Sequence[str] = (),
) -> None:
    """Links an executable or module that TVM compiled into a shared library.

    Args:
        compiled: The executable or module.
        tvm_target: TVM's target of the code.
        library: Path of the library; ends in `LIBRARY_SUFFIX`.
        keep_source: Whether the library carries the source of a GPU's kernels, for emulation.
        sources: Further C source files and object files of the library.

    Raises:
        RuntimeError: There is no linker.
    """
    host = tvm_target.host or tvm_target
    target = TARGETS.get(str(tvm_target.kind.name))
    options = {}
    if target is not None and target.device_code is not None and not keep_source:
        options["fpack_imports"] = partial(_packed_modules, tvm_target, target.device_code)
    elif sources:
        options["fpack_imports"] = partial(_embedded_modules, tvm_target)
    link_for_platform = partial(link, platform=platform_of(host))
    compiled.export_library(str(library), fcompile=link_for_platform, addons=list(sources), **options)


def _embedded_modules(tvm_target: tvm.target.Target, module: Any, system: bool, prefix: str, folder: str) -> str:
    """Writes an object file of the library's embedded modules, and returns its path.

    TVM does the same where it finds a module of LLVM, which names the target; here all kernels may be object files. The
    arguments from the module on are those of `export_library`'s `fpack_imports`.
    """
    packed = tvm_ffi.get_global_func("runtime.ModulePackImportsToLLVM")(module, system, str(tvm_target), prefix)
    path = Path(folder) / "modules.o"
    packed.write_to_file(str(path))
    return str(path)


def _packed_modules(
    tvm_target: tvm.target.Target, device_code: DeviceCode, module: Any, _system: bool, _prefix: str, folder: str
) -> str:
    """Writes an assembler file of the library's embedded modules, with the target's own code, and returns its path.

    The arguments from the module on are those of `export_library`'s `fpack_imports`.
    """
    kind = str(tvm_target.kind.name)
    embedded = tvm_ffi.get_global_func("runtime.ModulePackImportsToTensor")(module).numpy().tobytes()
    changed = with_modules(
        embedded, lambda module_kind, saved: device_code(saved, tvm_target) if module_kind == kind else saved
    )
    content, assembler = Path(folder) / "modules.bin", Path(folder) / "modules.s"
    content.write_bytes(changed)
    assembler.write_text(_EMBEDDING.format(symbol=EMBEDDED, content=content))
    return str(assembler)


_EMBEDDING = """\
.section .rodata
.global {symbol}
.p2align 6
{symbol}:
.incbin "{content}"
.section .note.GNU-stack,"",%progbits
"""
"""Assembler source for ELF; the last line marks the stack as not executable."""


def platform_of(host: tvm.target.Target) -> Platform:
    """Returns the system and architecture of host code."""
    if "mtriple" not in host.attrs:
        return this_platform()
    machine, _, triple_rest = str(host.attrs["mtriple"]).partition("-")
    return "macOS" if "macos" in triple_rest or "darwin" in triple_rest else "Linux", normalized(machine)


def _with_required_cpu(lowered: tvm.IRModule, host: tvm.target.Target) -> tvm.IRModule:
    """Adds the function from which `harness.runtime.loading` reads the library's required processor."""
    name, features = required_cpu(host)
    text = ir.StringImm(" ".join([name, *features]))
    function = relax.Function([], text, relax.AnyType()).with_attr("global_symbol", REQUIRED_CPU)
    marked = lowered.clone()
    marked[REQUIRED_CPU] = function
    return marked
