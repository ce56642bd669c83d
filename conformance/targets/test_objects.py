"""Object files of kernels: compiled once, never taken for another kernel's, made again where they are damaged."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tvm
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import tirx as T

from conformance.support.examples import examples
from conformance.support.product import product_module
from harness.compiler.targets import TARGETS, linking
from harness.compiler.targets.compiling import build_library, lower_module
from harness.compiler.targets.objects import ObjectCache, compiled_source, with_objects
from harness.runtime.cpu import this_platform
from harness.runtime.executable import Executable

TARGET = TARGETS["llvm"].tvm_target()
X = np.arange(24, dtype=np.float32).reshape(6, 4)


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAM3_TVM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def lowered(module: tvm.IRModule) -> tvm.IRModule:
    return lower_module(module, TARGETS["llvm"], TARGET)


def scaled(factor: float, rows: int = 6, name: str = "main") -> tvm.IRModule:
    """x [rows, 4] → x · factor + 1, in one kernel."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([rows, 4], "float32"))
    with builder.function(name, [x], attrs={"num_input": 1}):
        with builder.dataflow():
            shifted = op.add(op.multiply(x, relax.const(factor, "float32")), relax.const(1.0, "float32"))
            result = builder.emit_output(relax.Tuple([builder.emit(shifted)]))
        builder.emit_func_output(result)
    return builder.get()


def made(module: tvm.IRModule, folder: Path, target: tvm.target.Target = TARGET) -> int:
    return with_objects(lowered(module), target, folder).compiled_count


def run(module: tvm.IRModule, folder: Path, x: npt.NDArray[np.float32] = X) -> npt.NDArray[np.float32]:
    library = Path(tempfile.mkdtemp(dir=folder)) / "model.so"  # a library that is loaded must not be written again
    build_library(lowered(module), TARGET, library)
    return Executable(library, tvm.cpu(), []).run([x])[0]


def test_a_kernel_is_compiled_once(tmp_path: Path) -> None:
    assert made(scaled(2.0), tmp_path) == 1
    assert made(scaled(2.0), tmp_path) == 0
    np.testing.assert_array_equal(run(scaled(2.0), tmp_path), X * 2 + 1)


def test_another_process_finds_it(tmp_path: Path) -> None:
    assert made(scaled(2.0), tmp_path) == 1
    code = "from pathlib import Path; from conformance.targets.test_objects import made, scaled"
    code += f"; print(made(scaled(2.0), Path({str(tmp_path)!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "0"


@examples(12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from([2.0, 2.0000002, -2.0, 3.0]), st.integers(1, 3)), min_size=1, max_size=4))
def test_no_kernel_is_taken_for_another(tmp_path: Path, drawn: list[tuple[float, int]]) -> None:
    for factor, rows in drawn:
        np.testing.assert_array_equal(run(scaled(factor, rows), tmp_path, X[:rows]), X[:rows] * np.float32(factor) + 1)


def test_another_cpu_has_its_own(tmp_path: Path) -> None:
    assert made(scaled(2.0), tmp_path) == 1
    assert made(scaled(2.0), tmp_path, tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v2"})) == 1


def test_what_was_compiled_otherwise_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.compiler.targets import objects

    assert made(scaled(2.0), tmp_path) == 1
    monkeypatch.setattr(objects, "_compiler", lambda: ("another build of TVM",))
    assert made(scaled(2.0), tmp_path) == 1


def test_equal_kernels_of_a_module_are_one_object_under_two_names(tmp_path: Path) -> None:
    @I.ir_module(s_tir=True)
    class Twins:
        @T.prim_func(s_tir=True)
        def first(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")) -> None:
            for i in range(4):
                with T.sblock("y"):
                    j = T.axis.spatial(4, i)
                    y[j] = x[j] + T.float32(1)

        @T.prim_func(s_tir=True)
        def second(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")) -> None:
            for i in range(4):
                with T.sblock("b"):
                    j = T.axis.spatial(4, i)
                    b[j] = a[j] + T.float32(1)

    found = with_objects(Twins, TARGET, tmp_path)
    assert found.compiled_count == 1
    assert found.symbols["first"] == found.symbols["second"]
    assert found.source().count("return") == 2


def test_weights_are_packed_by_kernels_from_the_disk_too(tmp_path: Path) -> None:
    weight = np.arange(16, dtype=np.float32).reshape(4, 4)
    for number in range(2):
        library = tmp_path / f"model{number}.so"
        build_library(lowered(product_module(2)), TARGET, library)
        product, table = Executable(library, tvm.cpu(), [weight, np.ones(3, np.float32)]).run([X])
        np.testing.assert_allclose(product, X @ weight, rtol=1e-6)
        np.testing.assert_array_equal(table, np.ones(3, np.float32))


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-9], lambda content: content[:40] + b"?" + content[41:], lambda _: b""]
)
def test_a_damaged_object_is_made_again(tmp_path: Path, kernels: Path, damage: Callable[[bytes], bytes]) -> None:
    assert made(scaled(2.0), tmp_path) == 1
    [path] = kernels.glob("??/*")
    path.write_bytes(damage(path.read_bytes()))
    assert made(scaled(2.0), tmp_path) == 1
    assert made(scaled(2.0), tmp_path) == 0


def test_an_object_that_a_killed_process_was_writing_is_removed(tmp_path: Path, kernels: Path) -> None:
    assert made(scaled(2.0), tmp_path) == 1
    [path] = kernels.glob("??/*")
    path.rename(path.with_name(f".{path.name}.1.2.tmp"))
    assert made(scaled(2.0), tmp_path) == 1
    assert list(kernels.glob("??/*")) == [path]


def test_without_a_disk_everything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("SAM3_TVM_CACHE", str(tmp_path / "taken"))
    np.testing.assert_array_equal(run(scaled(2.0), tmp_path), X * 2 + 1)
    assert "SAM3_TVM_CACHE" in caplog.text


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "kernels", limit_bytes=2 * (32 + 100))
    for age, key in ((3, "aa1"), (1, "bb2"), (2, "cc3")):
        cache.put(key, key.encode() * 33 + b".")
        os.utime(tmp_path / "kernels" / key[:2] / key, (1000 - age, 1000 - age))
    assert cache.get("aa1") is not None  # and is the last one used
    cache.trim()
    assert [key for key in ("aa1", "bb2", "cc3") if cache.get(key)] == ["aa1", "bb2"]


def test_source_is_compiled_once_and_what_is_no_c_is_an_error(tmp_path: Path, kernels: Path) -> None:
    source, platform = "int one(void) { return 1; }", this_platform()
    first = compiled_source(source, platform, tmp_path).read_bytes()
    (kept,) = kernels.glob("??/*")
    written = kept.stat().st_ino
    assert compiled_source(source, platform, tmp_path).read_bytes() == first
    assert [path.stat().st_ino for path in kernels.glob("??/*")] == [written]
    kept.write_bytes(kept.read_bytes()[:-1])
    assert compiled_source(source, platform, tmp_path).read_bytes() == first
    compiled_source(source.replace("one", "two"), platform, tmp_path)
    with pytest.raises(RuntimeError, match="could not compile"):
        compiled_source("int one(", platform, tmp_path)
    assert len(list(kernels.glob("??/*"))) == 2


def test_zig_links_them_where_there_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(linking, "COMPILERS", ())
    assert "ziglang" in linking.linker()
    np.testing.assert_array_equal(run(scaled(2.0), tmp_path), X * 2 + 1)
