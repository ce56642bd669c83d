"""Names of files that are unusual, and a user who has none."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest
from rich.text import Text
from typer.testing import CliRunner

from conformance.support.known_answers import KnownSegmenter, write_pictures
from conformance.support.sentences import sentence
from harness.app.segment.job import Job, SegmentedImage, run, unique_names
from harness.cli import segment_display
from harness.cli.console import console, stages
from harness.cli.main import app
from harness.core.errors import HarnessError
from harness.core.files import cache_root, user_folder
from harness.runtime import Prompt

pytestmark = pytest.mark.law

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["out[draft]", "[/x]", "[bold]"])
def test_brackets_in_names_are_printed_as_they_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = SegmentedImage(Path(f"{name}.jpg".replace("/", "")), (4, 3), [], (), 1.0)
    segment_display._print_results([result, result], 1.0, Path(name))
    with stages(f"Packing into {name}") as on_stage:
        on_stage(name)
    console.print(Text(name))
    printed = capsys.readouterr().out
    assert f"results in {name}" in printed
    assert printed.count(result.image.name) == 2 and printed.count(name) >= 3


def test_a_name_in_no_encoding_is_printed_with_what_it_has_spelled_out() -> None:
    script = (
        "import os, sys; from harness.cli import main\n"
        "main.app = lambda standalone_mode: main.console.print(os.fsdecode(b'caf\\xe9.jpg'))\n"
        "main.main()"
    )
    env = {**os.environ, "PYTHONIOENCODING": "utf-8:strict", "PYTHONUTF8": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=ROOT, env=env, check=False)
    assert (done.returncode, done.stdout) == (0, b"caf\\udce9.jpg\n"), done.stderr


@pytest.mark.parametrize("stem", ["あ" * 83, "é" * 125, "a" * 251])
def test_the_longest_names_of_images_have_results(stem: str, tmp_path: Path) -> None:
    """Also two of them that differ at their ends alone, which is cut off."""
    pictures = write_pictures(tmp_path, 2)
    longest = [pictures[0].rename(tmp_path / f"{stem}.png"), pictures[1].rename(tmp_path / f"{stem[:-1]}b.png")]
    names = unique_names(longest)
    assert len({name.casefold() for name in names}) == 2
    results = run(KnownSegmenter(), Job(longest, [Prompt("cat")], tmp_path / "out", 0.5))  # type: ignore[arg-type]
    assert all(isinstance(result, SegmentedImage) for result in results)
    assert len(list((tmp_path / "out").glob("*_overlay.png"))) == 2


def test_a_user_without_a_name_and_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is a mere number."""

    def nobody(_uid: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "SAM3_TVM_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    for find in (cache_root, lambda: user_folder(platformdirs.user_cache_dir)):
        with pytest.raises(HarnessError, match=sentence("no-home", variables="HOME")):
            find()
    monkeypatch.setenv("SAM3_TVM_CACHE", "~/cache")
    with pytest.raises(HarnessError, match=sentence("no-home", variables="SAM3_TVM_CACHE")):
        cache_root()
    monkeypatch.setenv("SAM3_TVM_CACHE", "cache")
    assert cache_root() == Path("cache")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("segment", "photo.jpg", "--out", "out", "--text", "cat", "--threshold", "nan"), "less than or equal to 1"),
        (("verify", "--timeout", "nan"), "greater than or equal to 1"),
        (("tune", "--minutes", "nan"), "nan is no number"),
        (("budget", "--component", "vit", "--fp32-rate", "nan"), "nan is no number"),
    ],
)
def test_nan_is_no_number_of_an_option(arguments: tuple[str, ...], sentence: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert sentence in done.output
