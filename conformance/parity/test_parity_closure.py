"""Keys of cached arrays: every file that made them counts, and no other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.support.sentences import sentence
from harness.core.errors import HarnessError
from harness.core.settings import REPOSITORY
from harness.models.sam3.captures import BUILDER, CLICKS, GROUNDING, PROPAGATION
from harness.models.sam3.source import ORACLE, SHARED
from harness.parity.closure import closure_digest, import_closure

MADE_BY = (
    CLICKS.module,
    GROUNDING.module,
    PROPAGATION.module,
    BUILDER,
    ORACLE,
    SHARED,
    "harness.models.sam3.end_to_end.upstream",
)

EVERY_FILE_COUNTS = """
import sys
from pathlib import Path
from harness.parity.closure import closure_digest, import_closure
root, names = Path(sys.argv[1]), sys.argv[2:]
before = closure_digest(*names)
inside = set(import_closure(*names))
texts = {path: path.read_text() for path in sorted((root / "harness").rglob("*.py"))}
for path, text in texts.items():
    if path not in inside:
        path.write_text(text + "\\n# one line more\\n")
assert closure_digest(*names) == before
for path in inside:
    path.write_text(texts[path] + "\\n# one line more\\n")
    assert closure_digest(*names) != before, path
    path.write_text(texts[path])
assert closure_digest(*names) == before
print(len(inside))
"""


def test_a_line_in_any_file_of_the_closure_is_a_miss_and_one_outside_it_a_hit(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "harness", tmp_path / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", EVERY_FILE_COUNTS, str(tmp_path), *MADE_BY]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 30 < int(done.stdout) < 80


def test_the_closure_has_what_runs_and_not_what_compiles() -> None:
    found = {path.relative_to(REPOSITORY).as_posix() for path in import_closure(*MADE_BY)}
    assert {
        "harness/models/sam3/capture.py",
        "harness/models/sam3/patches/exporting.py",
        "harness/runtime/sam3/images.py",
        "harness/runtime/sam3/tokenizer.py",
        "harness/models/sam3/detections.py",
        "harness/parity/oracle.py",
    } <= found
    for folder in ("compiler/schedules", "compiler/targets", "compiler/execution", "verify", "tuning", "cli"):
        assert not any(name.startswith(f"harness/{folder}/") for name in found), folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {
        "__init__.py": "",
        "made.py": "from __future__ import annotations\nfrom typing import TYPE_CHECKING\n"
        "import json\nfrom . import beside\nfrom studied.inner import deep\n"
        "if TYPE_CHECKING:\n    from studied.typed import Name\n"
        "def late():\n    import studied.late as module\n    return module\n",
        "beside.py": "",
        "typed.py": "Name = int\n",
        "late.py": "from studied.made import late\n",
        "unused.py": "",
        "inner/__init__.py": "from studied.inner.deep import value as deep\n",
        "inner/deep.py": "value = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / "studied" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "studied"


def test_imports_in_functions_count_and_those_for_type_checkers_do_not(package: Path) -> None:
    found = {path.relative_to(package).as_posix() for path in import_closure("studied.made")}
    assert found == {"__init__.py", "made.py", "beside.py", "late.py", "inner/__init__.py", "inner/deep.py"}


def test_a_new_import_and_a_new_name_are_misses(package: Path) -> None:
    before = closure_digest("studied.beside")
    (package / "beside.py").write_text("import studied.unused\n")
    with_import = closure_digest("studied.beside")
    (package / "unused.py").write_text("x = 1\n")
    assert len({before, with_import, closure_digest("studied.beside")}) == 3


def test_what_is_not_there_or_no_python_is_a_sentence(package: Path) -> None:
    with pytest.raises(HarnessError, match=sentence("no-such-module", name="studied.missing")):
        import_closure("studied.missing")
    (package / "beside.py").write_text("def\n")
    with pytest.raises(HarnessError, match=sentence("unreadable-source", path="beside.py")):
        import_closure("studied.made")
