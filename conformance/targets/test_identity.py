"""Kernels are known by their content: those that TVM's structural hash cannot tell apart have code of their own."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tvm
import tvm_ffi
from hypothesis import assume, given
from hypothesis import strategies as st
from tvm import te, tirx

from conformance.support.examples import examples
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import build_library
from harness.compiler.targets.objects import kernel_key, with_objects

TARGET = TARGETS["llvm"].tvm_target()
N = 8
Factors = tuple[float, ...]


def products(*terms: Factors) -> tirx.PrimFunc:
    """x [8], y [8] → Σ (a·x + b·y)·(c·x + d·y), over terms of four factors."""
    x, y = (te.placeholder((N,), name=name) for name in "xy")

    def value(i: tirx.Var) -> tirx.PrimExpr:
        total = None
        for factors in terms:
            a, b, c, d = (tirx.const(factor, "float32") for factor in factors)
            product = (x[i] * a + y[i] * b) * (x[i] * c + y[i] * d)
            total = product if total is None else total + product
        return total

    return te.create_prim_func([x, y, te.compute((N,), value, name="z")])


def affine(a: float, b: float) -> tirx.PrimFunc:
    """x [128, 1024] → a·x + b."""
    x, (slope, offset) = te.placeholder((128, 1024), name="x"), (tirx.const(value, "float32") for value in (a, b))
    return te.create_prim_func([x, te.compute((128, 1024), lambda i, j: x[i, j] * slope + offset, name="z")])


def places(a: int, b: int, c: int) -> tirx.PrimFunc:
    """→ int32 [8, 8]: a·i + b·j + c at [i, j]."""
    return te.create_prim_func([te.compute((N, N), lambda i, j: i * a + j * b + c, name="z")])


def structure(kernel: tirx.PrimFunc) -> int:
    return int(tvm_ffi.structural_hash(kernel.without_attr("global_symbol")))


def alike(magnitudes: Sequence[float]) -> Iterator[tuple[Factors, Factors]]:
    """Yields factors whose products have one structural hash and differ in signs alone."""
    found = defaultdict(list)
    for signs in itertools.product((1.0, -1.0), repeat=len(magnitudes)):
        factors = tuple(magnitude * sign for magnitude, sign in zip(magnitudes, signs, strict=True))
        found[structure(products(factors))].append(factors)
    for same in found.values():
        yield from itertools.combinations(same, 2)


def some_alike(drawn: random.Random, count: int) -> list[tuple[Factors, Factors]]:
    found: list[tuple[Factors, Factors]] = []
    while len(found) < count:
        found += itertools.islice(alike([drawn.uniform(0.5, 4) for _ in range(4)]), 1)
    return found


@examples(30, deadline=None)
@given(st.lists(st.floats(0.015625, 64, width=32), min_size=4, max_size=4))
def test_identity_is_content_where_structural_hashes_are_equal(magnitudes: list[float]) -> None:
    pairs = list(alike(magnitudes))
    assume(pairs)
    for one, other in pairs:
        assert kernel_key(products(one), TARGET) != kernel_key(products(other), TARGET)


def test_each_of_ten_thousand_pairs_with_one_hash_has_an_identity_of_its_own() -> None:
    drawn = random.Random(0)
    sums = drawn.sample(list(itertools.product(*some_alike(drawn, 8))), 142)
    kernels = [products(*terms) for terms in sums]
    assert len({structure(kernel) for kernel in kernels}) == 1
    assert len(list(itertools.combinations(kernels, 2))) > 10_000
    assert len({kernel_key(kernel, TARGET) for kernel in kernels}) == len(kernels)


def named(kernels: dict[str, tirx.PrimFunc]) -> tvm.IRModule:
    return tvm.IRModule({name: kernel.with_attr("global_symbol", name) for name, kernel in kernels.items()})


X, Y = np.random.default_rng(0).standard_normal((2, N)).astype(np.float32)
IMAGE = np.random.default_rng(1).standard_normal((128, 1024)).astype(np.float32)
ROWS, COLUMNS = np.indices((N, N), np.int32)


def product(a: float, b: float, c: float, d: float) -> npt.NDArray[np.float64]:
    return (X * float(a) + Y * float(b)) * (X * float(c) + Y * float(d))


def test_kernels_with_one_hash_keep_their_identity_in_one_library_and_through_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAM3_TVM_CACHE", str(tmp_path / "cache"))
    cases = [
        *((affine(*factors), [IMAGE], IMAGE * factors[0] + factors[1]) for factors in ((0.5, 3.0), (2.0, 0.125))),
        *((places(*f), [], f[0] * ROWS + f[1] * COLUMNS + f[2]) for f in ((3, 21, 13), (6, 21, 1))),
        *((products(f), [X, Y], product(*f)) for pair in some_alike(random.Random(1), 6) for f in pair),
    ]
    for (one, *_), (other, *_) in zip(cases[::2], cases[1::2], strict=True):
        assert structure(one) == structure(other)
        assert not tvm_ffi.structural_equal(one, other)
    for number, part in enumerate((cases[::2], cases, cases[::-1])):  # half of them, the others beside them, all known
        module = named({f"kernel{n}": kernel for n, (kernel, *_) in enumerate(part)})
        assert with_objects(module, TARGET, tmp_path).compiled_count == (len(cases) // 2 if number < 2 else 0)
        build_library(module, TARGET, tmp_path / f"{number}.so")
        library = tvm_ffi.load_module(str(tmp_path / f"{number}.so"))
        for n, (_, inputs, expected) in enumerate(part):
            result = tvm.runtime.tensor(np.zeros(expected.shape, np.float32 if inputs else np.int32))
            library.get_function(f"kernel{n}", query_imports=True)(*map(tvm.runtime.tensor, inputs), result)
            np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-5)


def keys_under(name: str) -> list[str]:
    """Returns the keys of kernels of each kind with a name."""
    kernels = (affine(0.5, 3.0), places(5, 7, 1), products((1.0, 2.0, 3.0, 4.0)))
    return [kernel_key(kernel.with_attr("global_symbol", name), TARGET) for kernel in kernels]


def test_equal_kernels_have_one_identity_whatever_their_names_and_the_process() -> None:
    found = keys_under("one")
    assert len(set(found)) == len(found) and found == keys_under("other")
    code = "from conformance.targets.test_identity import keys_under; print(*keys_under('another'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-len(found) :] == found
