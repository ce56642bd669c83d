"""Artifacts for GPUs: what is in them, that they run on a device, and what machines say that have none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import ml_dtypes  # noqa: F401  # NumPy knows bfloat16 by it
import numpy as np
import pytest
import torch
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from conformance.models.sam3.test_mask_resizing import NORMAL, upstream
from conformance.support.sentences import sentence
from conformance.support.shallow import shallow_model
from harness.compiler.deployment.compiling import CompiledModel, compile_into
from harness.compiler.deployment.deployable import ArtifactSpec
from harness.compiler.targets import TARGETS, cuda
from harness.core.case import Case
from harness.core.outcome import VerdictKind
from harness.core.precision import PRECISIONS
from harness.core.processes.call import WorkerEnd, run_isolated
from harness.core.settings import SEEDED
from harness.models.sam3.components import COMPONENTS
from harness.models.sam3.deployed.deployable import DEPLOYABLE
from harness.models.sam3.deployed.entry_points import encode_text
from harness.models.sam3.deployed.options import GROUNDING_ALONE
from harness.models.sam3.images import preprocess
from harness.models.sam3.upstream import upstream as upstreams_model
from harness.parity.autocast import half_reference
from harness.parity.oracle import oracle
from harness.parity.references import Reference
from harness.parity.verdict import judge
from harness.runtime.artifact import Artifact
from harness.runtime.devices import architecture_problem, device_problem, to_device, to_numpy
from harness.runtime.loading import LoadError
from harness.runtime.manifest import CUDART, MANIFEST, RUNTIME_LIBRARIES, read_manifest
from harness.runtime.weights import MappedWeights, write_weights

TOKENS = np.array([[49406, 2368, 49407, *[0] * 29]], np.int64)
GPUS = [pytest.param((name, "fp32"), marks=getattr(pytest.mark, name), id=name) for name in ("cuda", "metal")]
HALVES = [
    pytest.param((name, precision), marks=getattr(pytest.mark, name), id=f"{name}-{precision}")
    for name in ("cuda", "metal")
    for precision in TARGETS[name].precisions[1:]
]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompiledModel]:
    """The text encoder and what is done to images, compiled for a GPU, with source."""
    target, precision = request.param
    problem = TARGETS[target].compile_problem()
    if problem:
        pytest.skip(problem)
    folder, case = tmp_path_factory.mktemp(target), Case("sam3", "real", target, precision=precision)
    spec = ArtifactSpec(DEPLOYABLE, case, SEEDED, GROUNDING_ALONE, ("encode_text",))
    return folder, compile_into(spec, folder, for_emulation=target == "cuda")


for_gpus = pytest.mark.parametrize("compiled", GPUS, indirect=True)
in_half = pytest.mark.parametrize("compiled", HALVES, indirect=True)
for_cuda = pytest.mark.parametrize("compiled", GPUS[:1], indirect=True)
for_cuda_in_half = pytest.mark.parametrize("compiled", HALVES[:2], indirect=True)


@for_gpus
def test_the_folder_is_what_the_manifest_says(
    compiled: tuple[Path, CompiledModel], request: pytest.FixtureRequest
) -> None:
    folder, result = compiled
    manifest = read_manifest(folder)
    assert manifest == result.manifest
    assert {path.name for path in folder.iterdir()} == {*manifest.files, MANIFEST}
    assert manifest.entries.keys() == {"encode_text", "preprocess", "resize_masks"}
    if manifest.target == "cuda":
        found = {kernel.architecture for kernel in result.kernels}
        assert found == {name for name in manifest.architectures if name.startswith("sm_")}
        assert {"libtvm_runtime.so", "libtvm_runtime_cuda.so"} <= manifest.files.keys()
    else:
        assert (manifest.system, manifest.architecture, manifest.architectures) == ("macOS", "aarch64", ())


def called(folder: Path, calls: list[tuple[str, dict[str, np.ndarray]]]) -> dict[str, np.ndarray]:
    """What a folder's entry points give, on the device or, where there is none, emulated."""
    if TARGETS["cuda"].run_problem() is None:
        artifact = Artifact.load(folder)
        results = (artifact.call(entry, **given) for entry, given in calls)
        return {name: artifact.fetch(value) for result in results for name, value in result.items()}
    ended = run_isolated("conformance.support.emulated:call", ("cuda", folder, calls), timeout=600)
    assert ended.kind is WorkerEnd.OK, ended.error
    found, where = ended.value
    assert where == {"cuda"}
    return dict(found)


@for_cuda
def test_it_computes_what_pytorch_does(compiled: tuple[Path, CompiledModel]) -> None:
    """On the device where there is one, otherwise emulated: weights and inputs go there, results come back."""
    folder, _ = compiled
    image = np.random.default_rng(0).integers(0, 256, (301, 451, 3), dtype=np.uint8)
    kept = np.array([3, 0, 199], np.int64)
    calls = [
        ("preprocess", {"image": image}),
        ("encode_text", {"tokens": TOKENS, "starts": np.zeros_like(TOKENS)}),
        ("resize_masks", {"masks": NORMAL, "kept": kept, "like": image}),
    ]
    found = called(folder, calls)
    np.testing.assert_array_equal(found["pixels"], preprocess(Image.fromarray(image)).numpy())
    np.testing.assert_array_equal(found["masks"], upstream(NORMAL, kept.tolist(), 301, 451)[0])
    with upstreams_model(), torch.no_grad():
        features, mask = COMPONENTS["text_encoder"].build(shallow_model()).eval()(torch.from_numpy(TOKENS))[:2]
    np.testing.assert_allclose(found["text_features"], features.numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found["text_mask"], mask.numpy())


@for_cuda_in_half
def test_it_is_as_accurate_as_upstream_under_autocast(compiled: tuple[Path, CompiledModel]) -> None:
    folder, result = compiled
    precision = PRECISIONS[result.manifest.precision]
    found = called(folder, [("encode_text", {"tokens": TOKENS, "starts": np.zeros_like(TOKENS)})])
    with upstreams_model():
        names = encode_text(shallow_model()).outputs
        module, args = COMPONENTS["text_encoder"].build(shallow_model()).eval(), (torch.from_numpy(TOKENS),)
        reference = Reference.from_run(half_reference(module, args, names, precision), oracle(module, args, names))
        verdicts = judge(found, reference, by_oracle=True)
    assert [verdict.kind for verdict in verdicts] == [VerdictKind.ORACLE, VerdictKind.STRICT], verdicts
    assert [verdict.dtype for verdict in verdicts] == ["float32", "bool"]


@in_half
def test_weights_of_products_are_half_on_disk(compiled: tuple[Path, CompiledModel]) -> None:
    folder, result = compiled
    manifest, dtype = result.manifest, PRECISIONS[result.manifest.precision].dtype
    assert read_manifest(folder).precision == manifest.precision
    weights = MappedWeights(folder / "encode_text.safetensors")
    half = {name for name, found in weights.dtypes.items() if found == dtype}
    # Positions and the mask, which have 32 rows, are float32; layers and the table of embeddings have more. So is the
    # layer that projects the words to the decoder's 256 channels (`harness.models.sam3.groups.FLOAT32`).
    matrices = {name: array.shape for name, array in weights.tensors.items() if array.ndim == 2}
    assert half == {name for name, shape in matrices.items() if shape[0] > 32 and shape != (256, 1024)}
    assert {found for name, found in weights.dtypes.items() if name not in half} == {"float32"}
    assert set(weights.dtypes) == set(manifest.entries["encode_text"].weights)
    specs = (spec for entry in manifest.entries.values() for spec in (*entry.inputs, *entry.outputs))
    assert {spec.dtype for spec in specs} == {"float32", "int64", "uint8", "bool"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_weights_come_back_from_the_file_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    values = np.random.default_rng(0).standard_normal((33, 5)).astype(np.dtype(dtype))
    path = tmp_path / "weights.safetensors"
    described = write_weights(path, {"odd": values, "alone": values[0, 0].reshape(())})
    assert described.bytes == path.stat().st_size
    mapped, expected = MappedWeights(path), load_file(path)
    assert mapped.dtypes == {"odd": dtype, "alone": dtype}
    for name, array in (("odd", values), ("alone", values[0, 0])):
        np.testing.assert_array_equal(mapped.tensors[name].view(np.uint16), array.view(np.uint16))
        assert str(expected[name].dtype) == f"torch.{dtype}"
        np.testing.assert_array_equal(expected[name].float().numpy(), array.astype(np.float32))


@for_gpus
def test_a_machine_without_the_device_says_so(compiled: tuple[Path, CompiledModel]) -> None:
    folder, result = compiled
    target = result.manifest.target
    if TARGETS[target].run_problem() is None:
        pytest.skip(f"{target} runs on this machine")
    said = {
        "cuda": sentence("no-device", target="cuda", problem="NVIDIA"),
        "metal": sentence("foreign-library", library="model.so", origin="macOS", origin2="aarch64", host="Linux"),
    }[target]
    with pytest.raises(LoadError, match=said) as raised:
        Artifact.load(folder)
    assert "\n" not in str(raised.value)


@for_cuda
def test_a_folder_without_its_runtime_libraries_is_complete(
    compiled: tuple[Path, CompiledModel], tmp_path: Path
) -> None:
    folder, _ = compiled
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, copy_function=os.link, ignore=shutil.ignore_patterns(*RUNTIME_LIBRARIES))
    assert CUDART not in {path.name for path in copy.iterdir()}
    if TARGETS["cuda"].run_problem() is not None:
        with pytest.raises(LoadError, match=sentence("no-device", target="cuda")):
            Artifact.load(copy)


def test_every_target_without_a_device_has_a_reason() -> None:
    for name in TARGETS:
        assert (device_problem(name) is None) == (TARGETS[name].run_problem() is None)


ARRAYS = [np.arange(6, dtype=np.int64).reshape(2, 3)[:, ::2], np.float32(3.5).reshape(()), np.zeros((0, 4), bool)]


@pytest.mark.parametrize("array", ARRAYS, ids=["strided", "scalar", "empty"])
def test_arrays_come_back(array: np.ndarray) -> None:
    back = to_numpy(to_device(array, tvm_ffi.device("cpu", 0)))
    np.testing.assert_array_equal(back, array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)


CAPABILITIES = st.tuples(st.integers(7, 12), st.integers(0, 9))


@given(CAPABILITIES)
def test_a_fatbin_runs_on_what_is_not_older_than_its_ptx(found: tuple[int, int]) -> None:
    problem = architecture_problem(cuda.code_of(cuda.ARCHITECTURES), found)
    assert (problem is None) == (found >= (8, 0))
    if problem:
        assert problem.endswith(f"compute_80, and this GPU is sm_{found[0]}{found[1]}")


@given(CAPABILITIES, CAPABILITIES)
def test_machine_code_runs_on_its_family_from_its_minor_number_on(compiled_for, found) -> None:
    name = f"sm_{compiled_for[0]}{compiled_for[1]}"
    fits = compiled_for[0] == found[0] and compiled_for[1] <= found[1]
    assert (architecture_problem([name], found) is None) == fits
    assert (architecture_problem([f"{name}a"], found) is None) == (compiled_for == found)
