"""The C++ example builds with what the wheels carry, and finds what the Python runtime finds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from harness.compiler.targets.linking import COMPILERS
from harness.runtime import Sam3
from harness.runtime.artifact import Artifact
from harness.runtime.sam3.images import load_image
from harness.runtime.sam3.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
PHOTO = ROOT / "fixtures/images/cat.png"
KEPT = 17
"""How many masks are compared: more than are predicted at once."""


def compiler() -> str:
    """CXX if set, otherwise the system's C++ compiler, otherwise Zig's."""
    found = next(filter(None, (shutil.which(name) for name in COMPILERS if name.endswith("++"))), None)
    return os.environ.get("CXX") or found or f"{sys.executable} -m ziglang c++"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(ROOT / "examples/cpp", tmp_path_factory.mktemp("cpp") / "example")
    (folder / "segment").unlink(missing_ok=True)
    options = [f"CXX={compiler()}", f"PYTHON={sys.executable}", "CXXFLAGS=-O1 -Wall -Wextra -Werror"]
    done = subprocess.run(["make", "-C", folder, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "segment"


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    # No Python, no compiler: the variables that could lead there are gone.
    environment = {"PATH": "/usr/bin:/bin", "TVM_NUM_THREADS": os.environ.get("TVM_NUM_THREADS", "2")}
    command = [program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_finds_what_the_python_runtime_finds(program: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    image = load_image(PHOTO)
    pixels = np.asarray(image)
    image.save(tmp_path / "photo.ppm")

    artifact = Artifact.load(tiny_artifact)
    tokens = Tokenizer.read(tiny_artifact / artifact.manifest.extra["vocabulary"]).tokenize(["cat"]).ids
    (tmp_path / "tokens.txt").write_text(" ".join(str(token) for token in tokens[0] if token))
    encoded = Sam3(artifact).set_image(pixels)
    scores = encoded.segment("cat", threshold=1).outputs.scores[0]
    best = np.sort(scores)[::-1]
    threshold = (float(best[KEPT - 1]) + float(best[KEPT])) / 2
    found = encoded.segment("cat", threshold=threshold)

    done = run(
        program, tiny_artifact, tmp_path / "photo.ppm", tmp_path / "tokens.txt", tmp_path / "out", repr(threshold)
    )
    assert done.returncode == 0, done.stderr
    names = [path.name for path in sorted((tmp_path / "out").iterdir())]
    assert names == sorted(f"mask-{query}.pgm" for query in found.queries)
    assert len(found.queries) == KEPT
    for query, expected in zip(found.queries, found.masks, strict=True):
        mask = np.asarray(Image.open(tmp_path / "out" / f"mask-{query}.pgm"))
        np.testing.assert_array_equal(mask, np.where(expected, 255, 0))
        assert f"query {query:3}  score {scores[query]:.6f}" in done.stdout


def libraries(program: Path) -> dict[str, str]:
    """What the dynamic loader loads, by name, and from where."""
    lines = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout.splitlines()
    return dict((line.split() + [""] * 2)[:3:2] for line in lines)


def test_needs_neither_compiler_nor_python(program: Path) -> None:
    names = libraries(program)
    assert {"libtvm_runtime.so", "libtvm_ffi.so"} <= names.keys()
    assert not [name for name in names if "python" in name or "compiler" in name]


def test_two_libraries_beside_the_program_are_all_that_is_shipped(program: Path, tmp_path: Path) -> None:
    shutil.copy(program, tmp_path)
    for name in ("libtvm_runtime.so", "libtvm_ffi.so"):
        shutil.copy(libraries(program)[name], tmp_path)
    places = libraries(tmp_path / program.name)
    packages = sysconfig.get_path("platlib")
    assert Path(places["libtvm_runtime.so"]).parent == Path(places["libtvm_ffi.so"]).parent == tmp_path
    assert not [name for name, place in places.items() if place.startswith(packages)]


@pytest.mark.parametrize("missing", ["folder", "photo", "tokens"])
def test_what_is_missing_is_told_in_a_sentence(
    missing: str, program: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    load_image(PHOTO).save(tmp_path / "photo.ppm")
    (tmp_path / "tokens").write_text("49406 2368 49407")
    places = {"folder": tiny_artifact, "photo": tmp_path / "photo.ppm", "tokens": tmp_path / "tokens"}
    places[missing] = tmp_path / "nothing"
    done = run(program, *places.values(), tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert str(tmp_path / "nothing") in done.stderr
    assert not (tmp_path / "out").exists()


def test_usage(program: Path) -> None:
    done = run(program)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")
