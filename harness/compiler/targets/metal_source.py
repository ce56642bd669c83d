"""Splits generated Metal source into kernels, parses it with clang, and holds it to the limits of every Apple GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from harness.compiler.targets.linking import run_clang
from harness.core.files import temporary_folder
from harness.core.outcome import Kernel

MAX_THREADGROUP_BYTES = 32 * 1024
MAX_THREADS = 1024
MAX_BUFFERS = 31
"""Limits of every family from Apple 4 and Mac 2 on (Metal Feature Set Tables: maximum total threadgroup memory
allocation, threads per threadgroup, entries in the buffer argument table)."""

_SIZES = {"char": 1, "uchar": 1, "bool": 1, "short": 2, "ushort": 2, "half": 2, "bfloat": 2, "int": 4, "uint": 4}
_SIZES |= {"float": 4, "long": 8, "ulong": 8}
"""Bytes of Metal's scalar types (Metal Shading Language Specification 2.1)."""

_THREADGROUP_ARRAY = re.compile(r"\bthreadgroup (\w+) (\w+)\[(\d+)\];")
_CONSTRUCTOR = re.compile(r"\b((?:u?char|u?short|u?int|u?long|half|float)[234])\(")
_WIDE_ATOMIC = re.compile(r"\batomic(?:_u?long|\s*<\s*(?:u?long|u?int64_t)\s*>)")


def split_kernels(source: str) -> dict[str, str]:
    """Splits the source by kernel; TVM writes each kernel as its own file."""
    parts = re.split(r"^// Function: (\S+)$", source, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def as_cpp(kernel: str) -> str:
    """Translates a kernel to C++ over `headers/metal_stdlib`.

    In C++ the constructor of a vector type is a function, and arrays that outlive the function are static.
    """
    static = _THREADGROUP_ARRAY.sub(r"static threadgroup \1 \2[\3];", kernel)
    return _CONSTRUCTOR.sub(r"make_\1(", static)


def one_file(kernels: Mapping[str, str]) -> str:
    """Joins all kernels in one C++ file, whose messages name the kernel as the file."""
    parts = (
        f'#define __TVMArgUnion ArgUnionOf_{name}\n#line 1 "{name}"\n{as_cpp(text)}\n#undef __TVMArgUnion\n'
        for name, text in kernels.items()
    )
    return "#include <metal_stdlib>\n" + "".join(parts)


WIDE_SHUFFLES = "\n".join(
    (
        "#ifndef SAM3_TVM_WIDE_SHUFFLES",
        "#define SAM3_TVM_WIDE_SHUFFLES",
        *(
            f"inline long {name}(long x, ushort n) {{ return as_type<long>(metal::{name}(as_type<int2>(x), n)); }}"
            for name in ("simd_shuffle", "simd_shuffle_down", "simd_shuffle_up", "simd_shuffle_xor")
        ),
        "#endif",
    )
)
"""Shuffles of 64 bits, which Metal lacks and TVM's reductions of int64 call (Metal Shading Language Specification
6.9.2; KhronosGroup/SPIRV-Cross#2538)."""


_REDUCTION_BUFFER = re.compile(r"^(\s*thread \w+ red_buf\d+\w*\[\d+\]);$", re.MULTILINE)
"""The declaration of a thread's value in TVM's reductions."""


def complete_source(source: str) -> str:
    """Returns the source for the device: TVM's source with wide shuffles and initialized reductions."""
    return initialize_reductions(with_wide_shuffles(source))


def initialize_reductions(source: str) -> str:
    """Initializes every thread's value in a reduction.

    In the second step, over the first step's results, TVM gives a value to as many threads as there are results, but
    all threads shuffle. Shuffling an undefined value is undefined behaviour in C++ and so in Metal: clang drops the
    branch, and every thread behaves as a thread with a value.
    """
    return _REDUCTION_BUFFER.sub(r"\1 = {};", source)


def with_wide_shuffles(source: str) -> str:
    """Adds `WIDE_SHUFFLES` to kernels that shuffle, because Metal's compiler finds the calls ambiguous without them."""
    start = "using namespace metal;\n"
    preamble, *kernels = source.split(start)
    return preamble + "".join(
        start + (f"{WIDE_SHUFFLES}\n{text}" if "simd_shuffle" in text else text) for text in kernels
    )


def check_metal(source: str, threads: Mapping[str, int]) -> tuple[Kernel, ...]:
    """Returns the resources of the kernels of generated source.

    Args:
        source: Source of all kernels, from TVM's Metal module.
        threads: Threads per threadgroup, by kernel.

    Raises:
        RuntimeError: A kernel does not parse, or exceeds an Apple GPU; the message names the first such kernel.
    """
    kernels = split_kernels(source)
    for name, text in kernels.items():
        if re.search(r"\bdouble\b", text):
            raise RuntimeError(f"Metal kernel {name}: it computes in double, which Apple GPUs do not have")
        if _WIDE_ATOMIC.search(text):
            raise RuntimeError(f"Metal kernel {name}: it has 64-bit atomics, which not every Apple GPU has")
    with temporary_folder("metal") as folder:
        file = Path(folder) / "kernels.cpp"
        file.write_text(one_file(kernels))
        messages = run_clang(["-fsyntax-only", str(file)])
    if messages:
        raise RuntimeError(f"Metal kernel {_first_error(messages)}")
    return tuple(_kernel_of(name, text, threads.get(name)) for name, text in kernels.items())


def _first_error(messages: str) -> str:
    """Returns the first error with its kernel and line, from clang's messages."""
    error = re.search(r"(?m)^(?P<kernel>[^:\n]+):(?P<line>\d+):\d+: (?:fatal )?error: (?P<what>.*)$", messages)
    return f"{error['kernel']}, line {error['line']}: {error['what']}" if error else f"source: {messages[:2000]}"


def _kernel_of(name: str, text: str, threads: int | None) -> Kernel:
    """Returns the resources of a kernel, from its source and the threads of its launch.

    Raises:
        RuntimeError: It exceeds a limit of Apple GPUs, or has an array of unknown type.
    """
    shared = sum(int(count) * _element_bytes(element) for element, _, count in _THREADGROUP_ARRAY.findall(text))
    buffers = len(re.findall(r"\[\[ buffer\(\d+\) \]\]", text))
    limits = (
        (shared, MAX_THREADGROUP_BYTES, "bytes of threadgroup memory"),
        (threads or 0, MAX_THREADS, "threads in a threadgroup"),
        (buffers, MAX_BUFFERS, "buffers"),
    )
    for used, limit, resource in limits:
        if used > limit:
            raise RuntimeError(f"Metal kernel {name}: {used} {resource}, at most {limit}")
    return Kernel(name, "metal", threads, shared, buffers)


def _element_bytes(element: str) -> int:
    """Returns the bytes of a Metal type, such as `half4`; a vector of three takes four (Metal Specification 2.2).

    Raises:
        RuntimeError: The type is unknown.
    """
    match = re.fullmatch(r"([a-z]+)([234])?", element)
    if match is None or match[1] not in _SIZES:
        raise RuntimeError(f"{element}: not a type of Metal that is known here")
    return _SIZES[match[1]] * {None: 1, "2": 2, "3": 4, "4": 4}[match[2]]
