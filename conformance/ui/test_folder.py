"""The folder of the page: a file that cannot be read keeps no other one from being checked."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
from PIL import Image

from conformance.support.sentences import sentence
from harness.app.ui import photographs as under_test
from harness.app.ui.photographs import ImageFolder

pytestmark = pytest.mark.law


def test_every_file_is_checked_whatever_reading_one_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.png", "b.png", "c.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    (tmp_path / "d.png").write_bytes(b"no image")
    read = under_test.read_image

    def without_memory(path: Path, name: str) -> Image.Image:
        if name == "b.png":
            raise MemoryError
        return read(path, name)

    monkeypatch.setattr(under_test, "read_image", without_memory)
    folder = ImageFolder(tmp_path)
    folder.check()
    deadline = time.monotonic() + 30
    while folder.state()["unchecked"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert folder.state()["unchecked"] == 0
    problems = {each["name"]: each["problem"] for each in folder.state()["images"]}
    assert problems["a.png"] is None and problems["c.png"] is None
    assert re.match(sentence("unreadable-image", name="b.png", error="MemoryError"), problems["b.png"])
    assert re.match(sentence("unknown-format", name="The image d.png"), problems["d.png"])
    assert "check images" not in {thread.name for thread in threading.enumerate()}
