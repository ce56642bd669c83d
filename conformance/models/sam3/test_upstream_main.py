"""sam3 as upstream's repository has it: imports that the package lacks, its faults repaired or not, new ones lifted.

The tree is the installed package with edits of the kinds that separate upstream's main from it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.support.sentences import sentence
from harness.core.settings import REPOSITORY
from harness.models.sam3.vocabulary import package_folder, vocabulary_path

ABSENT = "absent_codec", "absent_tables", "absent_kernels", "absent_data"
"""Packages that the tree imports, each in another way, and that nobody has."""

DECORATED = """
import absent_codec
import absent_tables.frames as frames
from absent_kernels import language, njit
from absent_data.sets import Videos

absent_codec.bridge.set_bridge("torch")
SIZES: frames.Sizes[int] = frames.sizes(288)

@njit(parallel=True)
def launched(values: language.pointer) -> None: ...

class Clips(Videos):
    def __init__(self):
        super().__init__()

try:
    import absent_guarded
except ImportError:
    absent_guarded = None
"""

IN_BFLOAT16 = """
import torch

def addmm_act(activation, linear, tokens):
    return activation()(torch.nn.functional.linear(
        tokens.to(torch.bfloat16), linear.weight.to(torch.bfloat16), linear.bias.to(torch.bfloat16)
    ))
"""

WITH_ADDMM = """
from sam3.perflib.fused import addmm_act

class Mlp(Mlp):
    def forward(self, x):
        return self.fc2(addmm_act(type(self.act), self.fc1, x))
"""


def edit(path: Path, pattern: str, replacement: str) -> None:
    """Replaces a pattern in a file; upstream's main, which may be what is installed, has the replacement already."""
    text, count = re.subn(pattern, lambda _: replacement, path.read_text(encoding="utf-8"))
    assert count or replacement in text, (path, pattern)
    path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package sam3 like upstream's main."""
    installed = package_folder()
    assert installed is not None
    root = tmp_path_factory.mktemp("main")
    package = root / "sam3"
    shutil.copytree(installed, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "assets").mkdir(exist_ok=True)
    shutil.copy(vocabulary_path(), package / "assets")
    model = package / "model"
    edit(package / "__init__.py", r'__version__ = ".*"', '__version__ = "0.1.0"')
    edit(package / "model_builder.py", r"\nimport torch\n", "\nimport pkg_resources\nimport torch\n")
    edit(
        package / "model_builder.py",
        r"os\.path\.join\(\s*os\.path\.dirname\(__file__\)[^)]*\)",
        'pkg_resources.resource_filename(\n            "sam3", "assets/bpe_simple_vocab_16e6.txt.gz"\n        )',
    )
    edit(model / "decoder.py", r"\nimport torch\n", f"\nimport torch\n{DECORATED}\n")
    if not (package / "perflib" / "fused.py").exists():
        (package / "perflib" / "fused.py").write_text(IN_BFLOAT16, encoding="utf-8")
        edit(model / "vitdet.py", r"\nfrom torch import Tensor\n", f"\nfrom torch import Tensor\n{WITH_ADDMM}")
    edit(model / "memory.py", r"\nimport torch\n", "\nfrom timm.models.layers import DropPath\nimport torch\n")
    predictor = model / "sam3_tracking_predictor.py"
    predictor.write_text(
        re.sub(r"\s*(gt_masks=None|frames_to_add_correction_pt=\[\]),", "", predictor.read_text(encoding="utf-8")),
        encoding="utf-8",
    )
    return root


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(tree), str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


LOOK = """
import json, sys
sys.modules["pkg_resources"] = None
from harness.core.errors import HarnessError
from harness.models.sam3.patches import IMPORT_PATCHES, RUN_PATCHES
from harness.models.sam3.upstream import import_sam3, source_digest, upstream
from harness.models.sam3.vocabulary import vocabulary_path

import_sam3()
import sam3.model.decoder as decoder, sam3.model_builder, torch
from harness.models.sam3.build import build_architecture

layer = build_architecture("tiny").backbone.vision_backbone.trunk.blocks[0].mlp
for parameter in layer.parameters():
    torch.nn.init.normal_(parameter)
tokens = torch.randn(3, layer.fc1.in_features)
with upstream(), torch.no_grad():
    computed, in_float32 = layer(tokens), layer.fc2(layer.act(layer.fc1(tokens)))

def refusal(call):
    try:
        call()
    except HarnessError as error:
        return str(error)

print(json.dumps({
    "file": sam3.__file__,
    "digest": source_digest(),
    "vocabulary": str(vocabulary_path()),
    "needed": [patch.name for patch in (*IMPORT_PATCHES, *RUN_PATCHES) if patch.needed()],
    "guarded": decoder.absent_guarded is None,
    "imported": [name for name in sys.modules if name.startswith("absent_")],
    "launched": refusal(lambda: decoder.launched(1)),
    "indexed": refusal(lambda: decoder.SIZES[0]),
    "derived": refusal(decoder.Clips),
    "trunk in float32": torch.equal(computed, in_float32),
    "builder": refusal(sam3.model_builder.build_sam3_image_model),
}))
"""


def test_upstream_main_is_imported_and_what_is_absent_is_named_when_it_is_used(tree: Path) -> None:
    done = run(tree, "-c", LOOK)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert Path(seen["file"]).is_relative_to(tree)
    assert Path(seen["vocabulary"]).is_relative_to(tree)
    assert seen["guarded"]
    for name, package in (("launched", "absent_kernels"), ("indexed", "absent_tables"), ("derived", "absent_data")):
        assert re.search(sentence("not-installed", package=package), seen[name])
    assert seen["imported"] == []
    assert "sam3 used pkg_resources.resource_filename" in seen["builder"]
    assert "trunk_stays_float32" in seen["needed"]
    assert seen["trunk in float32"]


def test_upstream_main_is_known_by_its_content(tree: Path) -> None:
    from harness.models.sam3.upstream import source_digest

    script = "from harness.models.sam3.upstream import source_digest; print(source_digest())"
    assert run(tree, "-c", script).stdout.strip() not in ("", source_digest())


# Every night: by day the layer that main computes in bfloat16 is float32 above, and the vocabulary is the tree's.
@pytest.mark.wide
def test_components_of_upstream_main_are_strict(tree: Path, tmp_path: Path) -> None:
    """The trunk, whose feed-forward layers main computes in bfloat16, the vocabulary's user, and a head."""
    components = [word for name in ("vit", "text_encoder", "box_head") for word in ("--component", name)]
    done = run(
        *(tree, "-m", "harness", "verify", *components, "--strategy", "real", "--target", "llvm"),
        *("--report", str(tmp_path / "report")),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads((tmp_path / "report" / "verification_report.json").read_text(encoding="utf-8"))["cases"]
    assert len(cases) == 3


@pytest.mark.parametrize(
    ("file", "pattern", "replacement"),
    [
        ("decoder.py", "_get_rpb_matrix", "_another_name"),
        ("vitdet.py", r"class ViT\(", "class AnotherName("),
        ("encoder.py", r"\nimport torch\n", "\nimport torch\nfrom torch import another_name\n"),
    ],
    ids=["a method has another name", "a class has another name", "an import fails"],
)
def test_upstream_of_an_unknown_version_is_refused_in_a_sentence(
    tree: Path, tmp_path: Path, file: str, pattern: str, replacement: str
) -> None:
    shutil.copytree(tree / "sam3", tmp_path / "sam3")
    edit(tmp_path / "sam3" / "model" / file, pattern, replacement)
    done = run(tmp_path, "-m", "harness", "compile", "--scale", "tiny", "--out", str(tmp_path / "folder"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.match("error: " + sentence("unknown-sam3"), done.stderr)
    assert len(done.stderr.splitlines()) == 1
