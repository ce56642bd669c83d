"""The folder that `sam3-tvm compile` writes: what is in it, what is refused, and that its weights can be exchanged."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from safetensors.numpy import load_file
from safetensors.torch import save_file
from tvm import relax, te, topi

from conformance.support.commands import run_command
from conformance.support.folders import change_manifest, rewrite
from conformance.support.hugging_face import to_hugging_face
from conformance.support.sentences import sentence
from conformance.support.shallow import build_model, interactive_model, photograph, shallow_model
from harness.compiler.deployment.code import merge_modules
from harness.compiler.deployment.packing import pack_model
from harness.core.case import TINY
from harness.core.errors import HarnessError
from harness.core.processes.call import WorkerEnd, run_isolated
from harness.core.settings import REPOSITORY, Settings
from harness.models.sam3.components import COMPONENTS
from harness.models.sam3.deployed.deployable import DEPLOYABLE
from harness.models.sam3.deployed.modules import ImageEncoding
from harness.models.sam3.upstream import upstream
from harness.runtime.artifact import Artifact
from harness.runtime.devices import to_numpy
from harness.runtime.errors import ModelError
from harness.runtime.loading import LoadError, library_name
from harness.runtime.manifest import (
    FORMAT,
    LIBRARY,
    MANIFEST,
    PACKING_LIBRARY,
    ArtifactError,
    read_manifest,
    weights_file,
)
from harness.runtime.sam3.model import Sam3
from harness.runtime.sam3.prompts import Prompt
from harness.runtime.weights import ALIGNMENT, MappedWeights, write_weights

pytestmark = pytest.mark.usefixtures("forked_processes")

SITE = Path(np.__file__).parents[1]
PHOTOGRAPH = REPOSITORY / "fixtures" / "images" / "cat.png"
TOKENS = np.array([[49406, 2368, 49407, *[0] * 29]], np.int64)
"""Start, one word, end, padding."""
TEXT = {"tokens": TOKENS, "starts": np.zeros_like(TOKENS)}


@pytest.fixture(scope="module")
def artifact(shallow_artifact: Path) -> Artifact:
    return Artifact.load(shallow_artifact)


@pytest.fixture
def folder(tiny_artifact: Path, tmp_path: Path) -> Path:
    """A copy of a folder, for tests that judge no number of SAM 3; files are hard links, as those of `copy`."""
    return Path(shutil.copytree(tiny_artifact, tmp_path / "copy", copy_function=os.link))


def features(artifact: Artifact) -> np.ndarray:
    return to_numpy(artifact.call("encode_text", **TEXT)["text_features"]).copy()


def text_features_of(model: torch.nn.Module) -> np.ndarray:
    """What PyTorch says."""
    with upstream(), torch.no_grad():
        return COMPONENTS["text_encoder"].build(model).eval()(torch.from_numpy(TOKENS))[0].numpy()


def test_the_folder_is_what_the_manifest_says(shallow_artifact: Path) -> None:
    manifest = read_manifest(shallow_artifact)
    assert {path.name for path in shallow_artifact.iterdir()} == {*manifest.files, MANIFEST}
    assert all((shallow_artifact / name).stat().st_size == file.bytes for name, file in manifest.files.items())
    assert (manifest.format, manifest.scale, manifest.strategy, manifest.target) == (FORMAT, "shallow", "real", "llvm")
    assert (manifest.weights, manifest.trained) == ("seed 0", False)
    assert {"apache-tvm", "sam3-tvm", "compiled"} <= manifest.made.keys()
    assert manifest.made["schedules"].startswith("tuned: 1 from the database tuned")
    ground = manifest.entries["ground"]
    assert [spec.name for spec in ground.outputs][:5] == ["logits", "boxes", "presence", "scores", "boxes_xyxy"]
    assert [spec.name for spec in manifest.entries["embed_pixels"].outputs] == ["pixel_embed", "semantic"]
    assert [spec.shape for spec in manifest.entries["mask_predictor"].outputs] == [(1, 16, 288, 288)]
    assert {spec.name: spec.shape for spec in ground.inputs}["boxes"] == (manifest.extra["capacity"]["boxes"], 1, 4)
    assert manifest.to_json() == (shallow_artifact / MANIFEST).read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["compile", "--target", "cdua", "--out", "model"], sentence("unknown-name", name="cdua", hint="cuda")),
        (
            ["compile", "--scale", "half", "--out", "model"],
            sentence("unknown-name", name="half", hint="shallow, full, tiny"),
        ),
        (
            ["compile", "--strategy", "imaginary", "--out", "model"],
            sentence("unknown-name", kind="strategy", name="imaginary"),
        ),
        (
            ["compile", "--video", "--target", "cuda", "--out", "model"],
            sentence("symbolic-axes", support="the target llvm"),
        ),
        (
            ["compile", "--video", "--frontend", "onnx", "--out", "model"],
            sentence("symbolic-axes", support="the target llvm"),
        ),
        (["compile", "--video", "--clicks", "0", "--out", "model"], sentence("tracking-without-clicks")),
        (["compile", "--boxes", "0", "--out", "model"], "Invalid value for '--boxes'"),
        (["compile", "--db", ".", "--out", "model"], sentence("no-database", path=".")),
        (["compile", "--db", ".", "--untuned", "--out", "model"], sentence("db-or-untuned")),
        (
            ["compile", "--weights", "outliers", "--checkpoint", "zip", "--out", "model"],
            sentence("checkpoint-has-weights"),
        ),
        (["compile", "--out", "notes.txt"], sentence("not-a-folder", folder="notes.txt")),
        (["compile", "--out", "notes.txt/model"], sentence("cannot-write", path="notes.txt")),
        (["compile", "--out", "."], sentence("foreign-folder", kind="a compiled model")),
        (
            ["compile", "--scale", "tiny", "--checkpoint", "notes.txt", "--out", "model"],
            sentence("not-a-checkpoint", path="notes.txt"),
        ),
        (["compile", "--scale", "tiny", "--strategy", "none", "--out", "model"], "complex64 is not handled yet"),
        (["pack", "--into", "model"], sentence("no-model-folder", folder="model", folder2="model")),
    ],
)
def test_wrong_usage_is_a_sentence(tmp_path: Path, arguments: list[str], expected: str) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "zip").write_bytes(b"PK\x03\x04")
    done = run_command(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert re.search(expected, done.stderr)
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "zip"]


def test_nothing_else_is_left_beside_it(shallow_artifact: Path) -> None:
    assert [path.name for path in shallow_artifact.parent.iterdir()] == [shallow_artifact.name]


def test_weights_are_safetensors_that_need_no_copy(shallow_artifact: Path) -> None:
    for entry, signature in read_manifest(shallow_artifact).entries.items():
        if not signature.weights:
            continue
        path = shallow_artifact / weights_file(entry)
        expected, mapped = load_file(path), MappedWeights(path)
        assert expected.keys() == mapped.tensors.keys() == set(signature.weights)
        assert all(np.array_equal(mapped.tensors[name], value) for name, value in expected.items())
        copied = [array for array in mapped.tensors.values() if array.ctypes.data % ALIGNMENT or array.base is None]
        assert sum(array.nbytes for array in copied) <= 0.001 * path.stat().st_size


def test_encoders_are_the_models(artifact: Artifact) -> None:
    """The whole path is held to upstream's in test_end_to_end; here that the folder holds the right weights."""
    np.testing.assert_allclose(features(artifact), text_features_of(shallow_model()), rtol=1e-5, atol=1e-5)


def resident(file: str) -> int:
    """Bytes of a file that are in this process's memory, by way of all that have mapped it."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            found = bool(rest) and rest[-1].endswith(file)
        elif found and first == "Rss:":
            total += 1024 * int(rest[0])
    return total


def test_weights_that_are_read_once_are_read_again(artifact: Artifact) -> None:
    before = features(artifact)
    with artifact.reading_once("encode_text"):
        assert np.array_equal(features(artifact), before)
    assert np.array_equal(features(artifact), before)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not say what is in memory")
def test_weights_that_are_read_once_go_as_they_are_read(shallow_artifact: Path) -> None:
    artifact, file = Artifact.load(shallow_artifact, check=False), weights_file("encode_text")
    of_others = resident(file)
    before = features(artifact)
    of_layers = resident(file) - of_others
    with artifact.reading_once("encode_text"):
        assert np.array_equal(features(artifact), before)
        assert resident(file) - of_others < of_layers / 10
        assert np.array_equal(features(artifact), before)
    features(artifact)
    assert resident(file) - of_others > 0.9 * of_layers, "weights are kept as before"
    with artifact.reading_once("encode_text"):
        pass
    assert resident(file) <= of_others
    gone = weakref.ref(artifact)
    del artifact
    assert gone() is None, "nothing that observes its kernels holds it"


def test_threads_and_models_do_not_disturb_each_other(artifact: Artifact, shallow_artifact: Path) -> None:
    expected, other = features(artifact), Artifact.load(shallow_artifact, check=False)
    start = threading.Barrier(4)

    def run(loaded: Artifact) -> np.ndarray:
        start.wait()
        return features(loaded)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, [artifact, artifact, other, other]))
    assert all(np.array_equal(result, expected) for result in results)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, sentence("wrong-inputs", entry="encode_text", names="tokens, starts", inputs="no inputs")),
        ({"token": TOKENS}, sentence("wrong-inputs", names="tokens, starts", inputs="token")),
        (
            TEXT | {"tokens": TOKENS.astype(np.int32)},
            sentence("wrong-tensor", name="tokens", expected="int64 [1, 32]", dtype="int32"),
        ),
        (
            TEXT | {"tokens": TOKENS[:, :31]},
            sentence("wrong-tensor", name="tokens", expected="int64 [1, 32]", shape="[1, 31]"),
        ),
    ],
)
def test_wrong_inputs_are_a_sentence(artifact: Artifact, inputs: dict[str, np.ndarray], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        artifact.call("encode_text", **inputs)


def zeros(artifact: Artifact, entry: str) -> dict[str, np.ndarray]:
    """Inputs of an entry point, with four of whatever there may be any number of."""
    shaped = [
        (spec, [4 if isinstance(extent, str) else extent for extent in spec.shape])
        for spec in artifact.manifest.entries[entry].inputs
    ]
    return {spec.name: np.zeros(shape, spec.dtype) for spec, shape in shaped}


INDICES = {
    ("encode_text", "tokens"): 49408,
    ("encode_text", "starts"): 32,
    ("ground", "point_labels"): 2,
    ("ground", "box_labels"): 2,
    ("memory_attention", "ranks"): 7,
    ("resize_masks", "kept"): 4,
}
NO_INDICES = {("predict_masks", "labels")}
"""They are compared with what labels mean."""


def test_every_index_has_its_range_in_the_manifest(artifact: Artifact) -> None:
    specs = {(name, spec.name): spec for name, entry in artifact.manifest.entries.items() for spec in entry.inputs}
    integers = {place for place, spec in specs.items() if spec.dtype == "int64"}
    assert integers - NO_INDICES == set(INDICES)
    assert {place for place, spec in specs.items() if spec.below is not None} == set(INDICES)


@pytest.mark.parametrize(("entry", "name"), INDICES)
def test_an_index_out_of_range_is_a_sentence(artifact: Artifact, entry: str, name: str) -> None:
    below = INDICES[entry, name]
    for wrong in (-1, below, 50_000_000, -(1 << 63)):
        inputs = zeros(artifact, entry)
        inputs[name].flat[-1] = wrong
        expected = sentence("out-of-range", entry=entry, name=name, below=below - 1, wrong=wrong)
        with pytest.raises(ModelError, match=f"^{expected}$"):
            artifact.call(entry, **inputs)


def test_compiled_code_reads_nothing_outside_whatever_an_index_is(tiny_artifact: Path) -> None:
    """As it is called from C++, or in a folder without ranges: an index is the nearest that there is."""
    result = run_isolated("conformance.support.indices:outside", str(tiny_artifact), timeout=300)
    assert result.kind is WorkerEnd.OK, result.error
    assert result.value == []


def test_arrays_of_any_layout_are_taken(artifact: Artifact) -> None:
    expected = features(artifact)
    frozen = TOKENS.copy()
    frozen.flags.writeable = False
    strided = np.repeat(TOKENS, 2, axis=1)[:, ::2]
    shifted = np.frombuffer(b"\0" * 8 + TOKENS.tobytes(), np.int64, 32, 8).reshape(1, 32)
    for tokens in (frozen, strided, shifted):
        result = artifact.call("encode_text", **TEXT | {"tokens": tokens})["text_features"]
        assert np.array_equal(to_numpy(result), expected)


def test_weights_that_are_written_into_are_not_read(folder: Path) -> None:
    path = folder / weights_file("encode_text")
    content = path.read_bytes()
    rewrite(path, content)
    loaded = Artifact.load(folder)
    before = features(loaded)
    rewrite(path, bytes(len(content)))  # replaced, as `pack` does: what was loaded is still there
    assert np.array_equal(features(loaded), before)
    rewrite(path, content)
    loaded = Artifact.load(folder)
    with path.open("rb+") as file:
        file.seek(len(content) // 2)
        file.write(b"other")
    with pytest.raises(ArtifactError, match=sentence("changed-file", path="encode_text.safetensors")):
        features(loaded)


def test_a_flipped_bit_is_found(folder: Path) -> None:
    for name in read_manifest(folder).files:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        original = folder / f"{name}.original"
        (folder / name).rename(original)
        (folder / name).write_bytes(content)
        with pytest.raises(ArtifactError, match=sentence("wrong-checksum", folder=name)):
            Artifact.load(folder)
        original.replace(folder / name)


def of_another_machine(folder: Path) -> None:
    header = bytearray((folder / LIBRARY).read_bytes())
    header[18:20] = (243).to_bytes(2, "little")  # e_machine of ELF: RISC-V
    rewrite(folder / LIBRARY, bytes(header))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut off": (
        lambda folder: rewrite(folder / LIBRARY, (folder / LIBRARY).read_bytes()[:-1]),
        sentence("wrong-size", path=LIBRARY),
    ),
    "missing file": (
        lambda folder: (folder / weights_file("ground")).unlink(),
        sentence("missing-file", name="ground.safetensors"),
    ),
    "version": (
        lambda folder: change_manifest(folder, format=FORMAT + 1),
        sentence("format-version", version=FORMAT + 1, format=FORMAT),
    ),
    "target": (
        lambda folder: change_manifest(folder, target="vulkan"),
        sentence("foreign-target", target="vulkan", devices="llvm, cuda, metal"),
    ),
    "machine": (of_another_machine, sentence("foreign-library", origin="Linux", origin2="riscv64")),
    **{
        f"manifest {content!r}": (
            lambda folder, content=content: rewrite(folder / MANIFEST, content),  # type: ignore[misc]
            sentence("damaged-manifest", "unreadable-manifest", "format-version"),
        )
        for content in (b"", b"{", b"[]", b'{"format": 1}', b'{"format": 1, "entries": 3}', b"\xff")
    },
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_not_the_folder_that_was_written_is_a_sentence(
    damage: Callable[[Path], None], expected: str, folder: Path
) -> None:
    """Without reading the weights."""
    damage(folder)
    with pytest.raises((LoadError, ArtifactError), match=expected):
        Artifact.load(folder, check=False)


def test_what_only_packing_needs_may_be_left_out(folder: Path) -> None:
    (folder / PACKING_LIBRARY).unlink()
    assert Artifact.load(folder).manifest.files
    with pytest.raises(HarnessError, match=sentence("no-packing-library", packing_library=PACKING_LIBRARY)):
        pack_model(DEPLOYABLE, folder, seed=1)


def test_no_artifact_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=sentence("no-model-folder")):
        Artifact.load(tmp_path / "nothing")
    with pytest.raises(ArtifactError, match=sentence("no-manifest", name=MANIFEST)):
        Artifact.load(tmp_path)


def test_other_weights_are_packed_without_compiling(folder: Path) -> None:
    library = (folder / LIBRARY).read_bytes()
    manifest = pack_model(DEPLOYABLE, folder, seed=1)
    assert (manifest.weights, manifest.trained) == ("seed 1", False)
    assert (folder / LIBRARY).read_bytes() == library
    np.testing.assert_allclose(
        features(Artifact.load(folder)), text_features_of(build_model(TINY, 1)), rtol=1e-5, atol=1e-5
    )
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_folder_whose_code_takes_other_weights_is_not_packed_into(folder: Path) -> None:
    """As one that was compiled when other layers were in half precision."""
    change_manifest(folder, precision="bf16")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(HarnessError, match=sentence("other-version")):
        pack_model(DEPLOYABLE, folder, seed=1)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.wide
def test_weights_without_points_are_packed_and_refuse_points(copy: Path, tmp_path: Path) -> None:
    checkpoint = published_by_transformers(tmp_path, interactive_model())
    manifest = pack_model(DEPLOYABLE, copy, Settings(checkpoint=checkpoint))
    assert (manifest.trained, manifest.extra["point_prompts"]) == (True, False)
    model = Sam3.load(copy)
    with pytest.raises(ModelError, match=sentence("no-point-weights", weights="model.safetensors")):
        model.encode_prompt(Prompt(points=[(10, 10)]), (640, 480))
    assert model.encode_prompt(Prompt("cat", boxes=[(10, 10, 50, 50)]), (640, 480)).geometry


def published_by_transformers(folder: Path, model: Any) -> Path:
    path = folder / "model.safetensors"
    theirs = to_hugging_face(model.state_dict())
    # Transformers has one table under two names.
    save_file({name: tensor.clone().contiguous() for name, tensor in theirs.items()}, path)
    return path


def test_weights_without_clicks_are_refused_by_a_folder_that_answers_them(copy: Path, tmp_path: Path) -> None:
    checkpoint = published_by_transformers(tmp_path, shallow_model())
    before = (copy / MANIFEST).read_bytes()
    with pytest.raises(HarnessError, match=sentence("does-not-fit", fit="missing")):
        pack_model(DEPLOYABLE, copy, Settings(checkpoint=checkpoint))
    assert (copy / MANIFEST).read_bytes() == before


def test_packing_needs_an_artifact(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=sentence("no-manifest", folder=tmp_path)):
        pack_model(DEPLOYABLE, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int64", "int32", "uint8", "bool"])
def test_weights_of_any_shape_survive(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(0)
    shapes = {"scalar": (), "empty": (0, 3), "odd": (7, 3), "large": (64, 64), "after": (5,)}
    tensors = {name: (rng.random(shape) * 9).astype(dtype) for name, shape in shapes.items()}
    path = tmp_path / "weights.safetensors"
    described = write_weights(path, tensors)
    assert described.bytes == path.stat().st_size
    mapped, expected = MappedWeights(path).tensors, load_file(path)
    for name, tensor in tensors.items():
        assert np.array_equal(mapped[name], tensor)
        assert np.array_equal(expected[name], tensor)
        assert mapped[name].ctypes.data % ALIGNMENT == 0 or not mapped[name].size


def test_it_runs_where_neither_torch_nor_sam3_nor_the_compiler_can_be_imported(tiny_artifact: Path) -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys(["torch", "torchvision", "sam3"]))
import numpy as np
from harness.runtime.artifact import Artifact
from harness.runtime.devices import to_numpy
tokens = np.array({TOKENS.tolist()})
text = Artifact.load({str(tiny_artifact)!r}).call("encode_text", tokens=tokens, starts=np.zeros_like(tokens))
print(to_numpy(text["text_features"]).shape)
print("tvm" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "(32, 1, 256)\nFalse\n"), done.stderr


@pytest.fixture(scope="module")
def captured() -> dict[str, np.ndarray]:
    """What reaches upstream's grounding, and what it gives, for a text with one point and one box."""
    arrays = {name: tensor.numpy() for name, tensor in photograph().items()}
    fpn_2 = np.ascontiguousarray(arrays["img_feats"].transpose(1, 2, 0)).reshape(1, 256, 72, 72)
    with upstream(), torch.inference_mode():
        encoding = ImageEncoding(shallow_model()).eval()
        attended = encoding.attend_to_image(torch.from_numpy(arrays["img_feats"])).numpy()
        filter_1, filter_0 = encoding.filters
        fine, coarse = filter_0(torch.from_numpy(arrays["fpn_0"])), filter_1(torch.from_numpy(arrays["fpn_1"]))
    return arrays | {"fpn_2": fpn_2, "attended": attended, "filtered_0": fine.numpy(), "filtered_1": coarse.numpy()}


def grounded(artifact: Artifact, captured: dict[str, np.ndarray], seed: int | None) -> dict[str, np.ndarray]:
    """What the compiled model finds; what is padded is zero, or random numbers."""
    capacity = artifact.manifest.extra["capacity"]
    rng = None if seed is None else np.random.default_rng(seed)

    def padded(name: str, length: int, axis: int) -> np.ndarray:
        array = captured[name]
        widths = [(0, length - extent if n == axis else 0) for n, extent in enumerate(array.shape)]
        result = np.pad(array, widths, constant_values=array.dtype == bool)
        if rng is not None and array.dtype != bool:
            padding = np.swapaxes(result, 0, axis)[array.shape[axis] :]
            padding[...] = rng.random(padding.shape) if array.dtype == np.float32 else rng.integers(0, 2, padding.shape)
        return result

    names = ("fpn_2", "attended", "text_features", "text_mask")
    points = {name: padded(name, capacity["points"], name == "points_mask") for name in POINTS}
    boxes = {name: padded(name, capacity["boxes"], name == "boxes_mask") for name in BOXES}
    found = artifact.call("ground", **{name: captured[name] for name in names}, **points, **boxes)
    levels = {name: captured[name] for name in ("filtered_0", "filtered_1")}
    read = {name: found[name] for name in ("memory", "prompt", "prompt_mask")}
    found |= artifact.call("embed_pixels", **levels, **read)
    del found["prompt"]  # its tokens of what is padded are masked
    return {name: to_numpy(tensor) for name, tensor in found.items()}


POINTS, BOXES = ("points", "points_mask", "point_labels"), ("boxes", "boxes_mask", "box_labels")


def test_padding_a_prompt_changes_nothing(artifact: Artifact, captured: dict[str, np.ndarray]) -> None:
    """Upstream's prompt is not padded; test_end_to_end judges the masks as well, with an oracle."""
    found = grounded(artifact, captured, None)
    for name, expected in (
        ("logits", captured["pred_logits"]),
        ("boxes", captured["pred_boxes"]),
        ("boxes_xyxy", captured["pred_boxes_xyxy"]),
        ("semantic", captured["semantic_seg"]),
        ("presence", captured["presence_logits"][-1]),
    ):
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


def test_what_stands_in_the_padding_changes_not_one_bit(artifact: Artifact, captured: dict[str, np.ndarray]) -> None:
    expected, found = grounded(artifact, captured, None), grounded(artifact, captured, 0)
    assert [name for name in expected if not np.array_equal(expected[name], found[name])] == []


def without_packages(folder: Path, installed: str | None = None) -> list[str]:
    """A command that runs Python with what running a model needs, and a broken TVM of some version if it is named."""
    needed = ("tvm_ffi", "typing_extensions.py", "msgspec", "numpy", "PIL", "ftfy", "wcwidth", "regex")
    libraries = [path for name in ("numpy", "pillow") for path in SITE.glob(f"{name}.libs")]
    for path in (*(SITE / name for name in needed), *libraries):
        (folder / path.name).symlink_to(path)
    if installed is not None:
        described = folder / f"apache_tvm-{installed}.dist-info" / "METADATA"
        described.parent.mkdir()
        described.write_text(f"Metadata-Version: 2.1\nName: apache-tvm\nVersion: {installed}\n")
        library = folder / "tvm" / "lib" / library_name("tvm_runtime")
        library.parent.mkdir(parents=True)
        library.write_bytes(b"no library")
        (folder / "tvm" / "__init__.py").touch()
    code = f"""
import sys
sys.path = [{str(REPOSITORY)!r}, {str(folder)!r}, *(p for p in sys.path if "packages" not in p)]
from harness.runtime import Sam3
found = Sam3.load(sys.argv[1]).set_image({str(PHOTOGRAPH)!r}).segment(text="cat", threshold=0)
print(found.masks.shape, "tvm" in sys.modules)
"""
    return [sys.executable, "-S", "-c", code]


@pytest.mark.parametrize("installed", [None, "9.9"], ids=["none", "another version"])
def test_it_runs_without_tvms_package(tiny_artifact: Path, tmp_path: Path, installed: str | None) -> None:
    """The folder brings TVM's runtime library, which comes before one of another version."""
    command = [*without_packages(tmp_path, installed), str(tiny_artifact)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "(200, 300, 451) False\n"), done.stderr


def test_a_broken_runtime_library_is_a_sentence(tiny_artifact: Path, tmp_path: Path) -> None:
    installed = read_manifest(tiny_artifact).made["apache-tvm"]
    command = [*without_packages(tmp_path, installed), str(tiny_artifact)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr.splitlines()[-1].startswith("harness.runtime.loading.LoadError: TVM's runtime library ")
    assert done.stderr.splitlines()[-1].endswith("): install it again")


def test_private_functions_of_one_name_stay_apart() -> None:
    def scaled(factor: float) -> tvm.IRModule:
        x = te.placeholder((4,), name="x")
        function = te.create_prim_func([x, topi.multiply(x, te.const(factor, "float32"))])
        builder, ty = relax.BlockBuilder(), relax.TensorType((4,), "float32")
        parameter = relax.Var("x", ty)
        with builder.function("main", [parameter]):
            private = builder.add_func(function.without_attr("global_symbol"), "scaled")
            builder.emit_func_output(builder.emit(relax.call_tir(private, [parameter], out_ty=ty)))
        return builder.get()

    factors = {"one": 2.0, "two": 3.0, "scaled": 5.0}
    module = merge_modules({name: scaled(factor) for name, factor in factors.items()})
    machine = relax.VirtualMachine(relax.build(module, "llvm"), tvm.cpu())
    ones = tvm.runtime.tensor(np.ones(4, np.float32))
    assert {name: machine[name](ones).numpy().tolist() for name in factors} == {n: [f] * 4 for n, f in factors.items()}
