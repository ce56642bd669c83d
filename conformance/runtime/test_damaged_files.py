"""Whatever is wrong with a file ends in one sentence, and takes no memory without bound."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from conformance.support.damaged import STRANGE_EXIF, animations, encoded, videos
from conformance.support.fuzz import KINDS, outcomes
from conformance.support.sentences import sentence
from harness.app.results.journal import JOURNAL, Journal
from harness.core.budget import read_budget
from harness.core.errors import HarnessError
from harness.runtime.errors import ModelError
from harness.runtime.manifest import MANIFEST, read_manifest
from harness.runtime.sam3.description import Capacity, Sam3Description, read_sam3_description
from harness.runtime.sam3.images import load_image
from harness.runtime.sam3.video.frames import open_frames
from harness.runtime.sam3.video.saving import SessionFile

NO_MODEL: Any = None
MUTATIONS = 200
"""Of each kind of file; `python -m conformance.support.fuzz` reads more."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_file_is_read_or_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    for name, content in KINDS[kind].samples().items():
        (tmp_path / "whole").mkdir(exist_ok=True)
        KINDS[kind].prepare(tmp_path / "whole")
        (tmp_path / "whole" / name).write_bytes(content)
        KINDS[kind].read(tmp_path / "whole" / name)
    (tmp_path / "damaged").mkdir()
    found = [outcome for _, outcome in outcomes(kind, range(MUTATIONS), 51, tmp_path / "damaged")]
    assert set(found) == {"read", "refused"}, "mutations are neither harmless nor told at the first byte"


def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("[" * 100_000)
    for read, code in (
        (read_manifest, "unreadable-manifest"),
        (lambda folder: read_budget(folder / MANIFEST), "no-budget"),
    ):
        with pytest.raises((ModelError, HarnessError), match=sentence(code)):
            read(tmp_path)
    save_file({}, tmp_path / "session", {"session": "[" * 100_000, "sha256": ""})
    with pytest.raises(ModelError, match=sentence("not-a-session", path="session")):
        SessionFile(tmp_path / "session", NO_MODEL)


@pytest.mark.law
def test_a_manifest_whose_values_have_other_types_is_damaged(tmp_path: Path) -> None:
    manifest = json.loads(KINDS["manifests"].samples()[MANIFEST])
    for change, problem in (
        ({"target": ["llvm"]}, "`target`"),
        ({"trained": 1}, "`trained`"),
        ({"files": {"model.so": {"bytes": "7", "sha256": ""}}}, "`files[...].bytes`"),
    ):
        (tmp_path / MANIFEST).write_text(json.dumps(manifest | change))
        with pytest.raises(ModelError, match=sentence("damaged-manifest", path=MANIFEST, error=problem)):
            read_manifest(tmp_path)


@pytest.mark.parametrize(
    "change", [{"capacity": {"points": "1"}}, {"capacity": {"taps": 1}}, {"capacity": None}, {"vocabulary": 3}]
)
def test_a_manifest_whose_part_of_sam3_is_damaged_is_a_sentence(change: dict[str, object], tmp_path: Path) -> None:
    manifest = json.loads(KINDS["manifests"].samples()[MANIFEST])
    (tmp_path / MANIFEST).write_text(json.dumps(manifest | change))
    with pytest.raises(ModelError, match=sentence("damaged-manifest", path="manifest.json")):
        read_sam3_description(tmp_path, read_manifest(tmp_path))


@pytest.mark.law
def test_an_older_manifest_is_read(tmp_path: Path) -> None:
    manifest = json.loads(KINDS["manifests"].samples()[MANIFEST])
    del manifest["point_prompts"], manifest["model"]
    (tmp_path / MANIFEST).write_text(json.dumps(manifest | {"capacity": {"points": 1, "boxes": 2}}))
    expected = Sam3Description(Capacity(points=1, boxes=2, clicks=0, video=False), "", point_prompts=True)
    assert read_sam3_description(tmp_path, read_manifest(tmp_path)) == expected


def test_a_damaged_line_of_a_journal_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {})
    for seconds in range(3):
        journal.add({"seconds": seconds})
    path = tmp_path / JOURNAL
    path.write_bytes(path.read_bytes().replace(b'"seconds": 1', b'"seconds": 7'))
    assert [entry["seconds"] for entry in Journal(tmp_path, {})] == [0, 2]


def test_an_image_is_turned_although_its_exif_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(encoded("JPEG", exif=STRANGE_EXIF))
    (tmp_path / "plain.jpg").write_bytes(encoded("JPEG"))
    turned, plain = load_image(tmp_path / "photo.jpg"), load_image(tmp_path / "plain.jpg")
    assert turned.size == (18, 24)
    np.testing.assert_array_equal(np.asarray(turned), np.rot90(np.asarray(plain), -1))


def test_what_no_decoder_expects_is_one_sentence(tmp_path: Path) -> None:
    """Pillow raises a `RuntimeError` here, for 127 bits a channel."""
    (tmp_path / "photo.avif").write_bytes(encoded("AVIF").replace(b"\x03\x08\x08\x08", b"\x03\x08\x7f\x08"))
    with pytest.raises(ModelError, match=sentence("damaged", name="photo.avif", advice="save it anew")):
        load_image(tmp_path / "photo.avif")


def test_too_little_memory_is_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*_arguments: object, **_settings: object) -> None:
        raise MemoryError

    (tmp_path / "photo.png").write_bytes(encoded("PNG"))
    monkeypatch.setattr(Image.Image, "convert", without_memory)
    with pytest.raises(MemoryError):
        load_image(tmp_path / "photo.png")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("side", [12_000, 30_000, 60_000])
@pytest.mark.parametrize("name", ["moving.gif", "moving.png"])
def test_a_bomb_is_no_video(name: str, side: int, tmp_path: Path) -> None:
    content = bytearray(animations()[name])
    if name.endswith("gif"):
        content[6:10] = struct.pack("<HH", side, side)
    else:
        content[16:24] = struct.pack(">II", side, side)
        content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=sentence("too-large", name=name, pixels=89478485)):
        list(open_frames(tmp_path / name))


def test_frames_of_a_video_are_held_to_the_limit_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "video.mp4").write_bytes(videos()["video.mp4"])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 32 * 16)
    assert len(list(open_frames(tmp_path / "video.mp4"))) == 5
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 32 * 16 - 1)
    with pytest.raises(ModelError, match=sentence("too-large", name="video.mp4", pixels=511)):
        list(open_frames(tmp_path / "video.mp4"))
