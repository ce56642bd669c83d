"""What a compiled component hands out: results of their own, constants that cannot be spoiled."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.support.product import product_module
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import compile_module
from harness.runtime.executable import Executable

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def executable(tmp_path_factory: pytest.TempPathFactory) -> Executable:
    """x [6, 4], weight [4, 4], table [3] → x · weight, the table, x."""
    target = TARGETS["llvm"]
    library = tmp_path_factory.mktemp("library") / "component.so"
    compile_module(product_module(2, 0), target, library)
    return Executable(library, target.device(), [2 * np.eye(4, dtype=np.float32), np.arange(3, dtype=np.float32)])


def test_results_survive_the_next_run(executable: Executable) -> None:
    x = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    product, _, same = executable.run([x])
    for factor in (3, 5, 7):
        executable.run([factor * x])
    np.testing.assert_array_equal(product, 2 * x)
    np.testing.assert_array_equal(same, x)


def test_results_belong_to_the_caller(executable: Executable) -> None:
    x = np.ones((6, 4), np.float32)
    product, _, same = executable.run([x])
    product[:] = 0
    same[:] = 0
    assert (x == 1).all()
    np.testing.assert_array_equal(executable.run([x])[0], 2 * x)


def test_constants_of_the_model_are_read_only(executable: Executable) -> None:
    _, table, _ = executable.run([np.ones((6, 4), np.float32)])
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 5
    np.testing.assert_array_equal(executable.run([np.ones((6, 4), np.float32)])[1], [0, 1, 2])
