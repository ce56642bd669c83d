"""The compiled `preprocess`, held bit by bit to what upstream's processor does with torchvision."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
import tvm
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2
from tvm import relax

from conformance.support.examples import examples
from harness.compiler.schedules.common.vm import lower_to_vm
from harness.compiler.targets import TARGETS
from harness.models.sam3.deployed import data_parallel
from harness.models.sam3.deployed.preprocessing import preprocess_module
from harness.models.sam3.images import preprocess
from harness.runtime.sam3.images import RESOLUTION

Pixels = npt.NDArray[np.uint8]


@cache
def compiled(form: Callable[[], tvm.IRModule] = preprocess_module) -> Callable[[Pixels], npt.NDArray[np.float32]]:
    target = TARGETS["llvm"].tvm_target()
    with target:
        executable = relax.build(lower_to_vm()(form()), target, relax_pipeline=None)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return lambda image: machine["preprocess"](tvm.runtime.tensor(image)).numpy()


def check(image: Pixels) -> None:
    got = compiled()(image)
    assert got.shape == (1, 3, RESOLUTION, RESOLUTION)
    np.testing.assert_array_equal(got, preprocess(Image.fromarray(image)).numpy())


CONTENTS: dict[str, Callable[[np.random.Generator, tuple[int, int, int]], npt.NDArray[np.integer]]] = {
    "noise": lambda rng, shape: rng.integers(0, 256, shape),
    "black and white": lambda rng, shape: rng.integers(0, 2, shape) * 255,
    "white": lambda rng, shape: np.full(shape, 255),
    "nearly white": lambda rng, shape: rng.integers(254, 256, shape),
    "stripes": lambda rng, shape: np.broadcast_to(np.arange(shape[1])[:, None] % 2 * 255, shape),
    "gradient": lambda rng, shape: np.broadcast_to(np.linspace(0, 255, shape[0]).astype(int)[:, None, None], shape),
}

SIZES = st.one_of(
    st.integers(1, 40),
    st.integers(1, 2500),
    st.sampled_from([63, 126, 504, 1007, RESOLUTION, 1009, 2015, 2016, 2017, 3024]),
)


@examples(120)
@given(height=SIZES, width=SIZES, content=st.sampled_from(sorted(CONTENTS)), seed=st.integers(0, 1000))
def test_any_size_and_content(height: int, width: int, content: str, seed: int) -> None:
    pixels = CONTENTS[content](np.random.default_rng(seed), (height, width, 3))
    check(np.ascontiguousarray(pixels, dtype=np.uint8))


@pytest.mark.parametrize(
    ("height", "width"),
    [(1, 1), (1, 5000), (5000, 1), (RESOLUTION, RESOLUTION), (3000, 4000), (6000, 8000), (21, 20000)],
    ids=lambda size: str(size),
)
def test_extreme_sizes(height: int, width: int) -> None:
    check(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_every_value() -> None:
    values = np.arange(RESOLUTION * RESOLUTION * 3) % 256
    check(values.reshape(RESOLUTION, RESOLUTION, 3).astype(np.uint8))


@pytest.mark.parametrize("content", ["noise", "black and white"])
def test_a_tensor_of_planes_resizes_alike(content: str) -> None:
    """Upstream's users may also pass a contiguous [3, h, w]; torchvision's kernel differs, its result does not."""
    image = CONTENTS[content](np.random.default_rng(1), (700, 1300, 3)).astype(np.uint8)
    planes = torch.from_numpy(image).permute(2, 0, 1).contiguous()
    transform = v2.Compose(
        [
            v2.Resize(size=(RESOLUTION, RESOLUTION)),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5]),
        ]
    )
    np.testing.assert_array_equal(compiled()(image)[0], transform(planes).numpy())


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 1500), (RESOLUTION, RESOLUTION), (1200, 700)], ids=str)
def test_the_form_for_gpus_is_the_same_function(height: int, width: int) -> None:
    image = np.random.default_rng(2).integers(0, 256, (height, width, 3), dtype=np.uint8)
    np.testing.assert_array_equal(compiled(form_for_gpus)(image), compiled()(image))


def form_for_gpus() -> tvm.IRModule:
    return data_parallel.preprocess_module("llvm")


@pytest.mark.parametrize("target", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("cuda", "metal")])
@pytest.mark.parametrize("form", [data_parallel.preprocess_module, data_parallel.resize_masks_module])
def test_gpus_compile_it(target: str, form: Callable[[str], tvm.IRModule]) -> None:
    """Also `resize_masks`: loops that nothing puts on the GPU would be compiled for the CPU, and die there."""
    if problem := TARGETS[target].compile_problem():
        pytest.skip(problem)
    tvm_target = TARGETS[target].tvm_target()
    lowered = TARGETS[target].pipeline(tvm_target)(form(target))
    with tvm_target:
        executable = relax.build(lowered, tvm_target, relax_pipeline=None)
    (device,) = [module for module in executable.mod.imports[0].imports if module.kind == target]
    assert "fma" in device.inspect_source()
