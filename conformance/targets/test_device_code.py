"""What a library carries for its GPU: machine code of every architecture and no source, in TVM's own format."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st

from conformance.execution.test_emulation import LAUNCHES, saved
from conformance.support.gpu_programs import skip_unless_emulated
from conformance.support.product import product_module
from harness.compiler.execution.emulation.device import DeviceModule, read_device_module
from harness.compiler.targets import TARGETS, cuda
from harness.compiler.targets.compiling import compile_module
from harness.compiler.targets.serialized import EMBEDDED, HOST_CODE, sized, with_code, with_modules
from harness.core.processors import Processors

KINDS = st.sampled_from(["relax.VMExecutable", "cuda", "metal"])


def embedded(modules: list[tuple[str, bytes]]) -> bytes:
    """What a library embeds: module n imports module n + 1, and the library itself is the second."""
    count = len(modules) + 1
    parts = [struct.pack("<Q", count + 1), *(struct.pack("<Q", min(n, count - 1)) for n in range(count + 1))]
    parts += [struct.pack("<Q", count - 1), *(struct.pack("<Q", n) for n in range(1, count))]
    saved_modules = [sized(kind.encode()) + sized(data) for kind, data in modules]
    return sized(b"".join([*parts, *saved_modules[:1], sized(HOST_CODE.encode()), *saved_modules[1:]]))


@pytest.mark.law
@given(st.lists(st.tuples(KINDS, st.binary(max_size=20)), min_size=1, max_size=4), st.binary(max_size=30))
def test_only_what_is_changed_differs(modules, other):
    given = embedded(modules)
    seen = []

    def unchanged(kind: str, data: bytes) -> bytes:
        seen.append((kind, data))
        return data

    assert with_modules(given, unchanged) == given
    assert seen == modules
    changed = with_modules(given, lambda kind, data: other if kind == "cuda" else data)
    assert changed == embedded([(kind, other if kind == "cuda" else data) for kind, data in modules])
    with pytest.raises(RuntimeError, match="ends too early"):
        with_modules(given[:-1], unchanged)


@pytest.mark.law
@given(st.lists(LAUNCHES, max_size=4, unique_by=lambda launch: launch.name), st.text(max_size=20))
def test_code_is_exchanged_and_launches_stay(launches, source):
    module = saved("cuda", DeviceModule(source, tuple(launches)))
    assert with_code(module, lambda form, code: (form, code)) == module
    compiled = with_code(module, lambda form, code: ("fatbin", code[::-1]))
    assert (
        compiled
        == module.replace(sized(b"cuda"), sized(b"fatbin"), 1)[: -len(source.encode()) or None]
        + (source.encode()[::-1])
    )
    with pytest.raises(RuntimeError, match="the library holds fatbin for cuda, and only source can be emulated"):
        read_device_module("cuda", compiled)


def modules_of(library: Path) -> dict[str, bytes]:
    """What a library embeds, by kind."""
    loaded = ctypes.CDLL(str(library))
    length = ctypes.c_uint64.in_dll(loaded, EMBEDDED).value
    content = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(loaded, EMBEDDED)), 8 + length)
    found: dict[str, bytes] = {}

    def keep(kind: str, data: bytes) -> bytes:
        found[kind] = data
        return data

    with_modules(content, keep)
    return found


def code_of(saved_module: bytes) -> tuple[str, bytes]:
    """Format and code of a CUDA module."""
    found = []

    def keep(form: str, code: bytes) -> tuple[str, bytes]:
        found.append((form, code))
        return form, code

    with_code(saved_module, keep)
    return found[0]


def images_of(fatbin: bytes) -> list[tuple[str, int]]:
    """The images in a fatbin: `elf` or `ptx`, and the number of the architecture."""
    magic, _, header, length = struct.unpack_from("<IHHQ", fatbin)
    assert (magic, header + length) == (0xBA55ED50, len(fatbin))
    images = []
    at = header
    while at < len(fatbin):
        kind, _, size, length = struct.unpack_from("<HHIQ", fatbin, at)
        images.append(({1: "ptx", 2: "elf"}[kind], struct.unpack_from("<I", fatbin, at + 28)[0]))
        at += size + length
    return images


@pytest.mark.cuda
def test_a_library_carries_machine_code_of_every_architecture(nvcc, tmp_path):
    if tvm.get_global_func("ffi.Module.create.cuda", allow_missing=True):
        pytest.skip("with a driver TVM asks for the machine code of the device that is there")
    kernels = compile_module(product_module(), TARGETS["cuda"], tmp_path / "model.so").kernels
    form, code = code_of(modules_of(tmp_path / "model.so")["cuda"])
    assert form == "fatbin"
    numbers = [int(name.removeprefix("sm_")) for name in cuda.ARCHITECTURES]
    assert sorted(images_of(code)) == [*(("elf", number) for number in numbers), ("ptx", numbers[0])]
    assert [kernel.architecture for kernel in kernels] == list(cuda.ARCHITECTURES)
    assert b"__global__" not in (tmp_path / "model.so").read_bytes()


@pytest.mark.cuda
def test_a_named_architecture_is_the_only_one(nvcc, tmp_path):
    processors = Processors(cuda="sm_89")
    compile_module(product_module(), TARGETS["cuda"], tmp_path / "model.so", processors=processors)
    form, code = code_of(modules_of(tmp_path / "model.so")["cuda"])
    assert (form, code[:4]) == ("cubin", b"\x7fELF")
    assert b"__global__" not in (tmp_path / "model.so").read_bytes()


@pytest.mark.cuda
def test_source_is_kept_for_emulation(nvcc, tmp_path):
    skip_unless_emulated("cuda")
    compile_module(product_module(), TARGETS["cuda"], tmp_path / "model.so", for_emulation=True)
    module = read_device_module("cuda", modules_of(tmp_path / "model.so")["cuda"])
    assert [launch.name for launch in module.launches] == ["matmul_kernel"]
    assert "__global__" in module.source
