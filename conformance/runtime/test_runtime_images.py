"""Images of any mode and orientation come in as upstream would see them; bad files end in one sentence."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from conformance.support.sentences import sentence
from harness.runtime.errors import ModelError
from harness.runtime.sam3.images import FORMATS, load_image, to_pixels
from harness.runtime.sam3.video.frames import open_frames

pytestmark = pytest.mark.smoke

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "images"
PHOTOGRAPHS = sorted(FIXTURES.glob("*.png"))


def test_photographs_are_described() -> None:
    text = (FIXTURES.parent / "README.md").read_text(encoding="utf-8")
    assert PHOTOGRAPHS
    for path in PHOTOGRAPHS:
        line = next(line for line in text.splitlines() if f"`images/{path.name}`" in line)
        assert "CC0" in line


GRADIENT = np.arange(64 * 48, dtype=np.int64).reshape(48, 64) * 65535 // (64 * 48 - 1)


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [
        ("1", "png"),
        ("L", "png"),
        ("LA", "png"),
        ("P", "png"),
        ("RGB", "png"),
        ("RGBA", "png"),
        ("RGB", "jpg"),
        ("CMYK", "jpg"),
        ("CMYK", "tif"),
        ("YCbCr", "tif"),
        ("LAB", "tif"),
        ("P", "gif"),
        ("RGB", "bmp"),
    ],
)
def test_modes_are_converted_as_pillow_does(mode: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"image.{suffix}"
    _photograph(mode).save(path)
    with Image.open(path) as file:
        assert file.mode == mode
        expected = file.convert("RGB")
    loaded = load_image(path)
    assert loaded.mode == "RGB"
    assert loaded.size == (45, 30)
    np.testing.assert_array_equal(np.asarray(loaded), np.asarray(expected))
    assert np.asarray(loaded).std() > 10


def _photograph(mode: str) -> Image.Image:
    with Image.open(FIXTURES / "cat.png") as file:
        image = file.convert("RGB").resize((45, 30))
    if mode != "LAB":
        return image.convert(mode)
    from PIL import ImageCms

    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    converted = ImageCms.profileToProfile(image, *profiles, outputMode="LAB")
    assert converted is not None
    return converted


def test_alpha_is_dropped_and_not_blended(tmp_path: Path) -> None:
    image = Image.new("RGBA", (4, 4), (200, 100, 50, 0))
    image.save(tmp_path / "clear.png")
    assert load_image(tmp_path / "clear.png").getpixel((0, 0)) == (200, 100, 50)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_are_scaled_and_not_clipped(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"deep.{suffix}"
    Image.fromarray(GRADIENT.astype(np.uint16)).save(path)
    pixels = np.asarray(load_image(path))
    expected = np.rint(GRADIENT * 255 / 65535)
    assert pixels.shape == (48, 64, 3)
    for channel in range(3):
        np.testing.assert_array_equal(pixels[..., channel], expected)


def test_thirty_two_bit_integers_that_fit_sixteen_are_scaled(tmp_path: Path) -> None:
    path = tmp_path / "deep.tif"
    Image.fromarray(GRADIENT.astype(np.int32)).save(path)
    np.testing.assert_array_equal(np.asarray(load_image(path))[..., 0], np.rint(GRADIENT * 255 / 65535))
    Image.fromarray((GRADIENT * 2).astype(np.int32)).save(path)
    with pytest.raises(ModelError, match=sentence("grey-values")):
        load_image(path)


@pytest.mark.parametrize(("top", "scale"), [(1.0, 255.0), (255.0, 1.0)])
def test_floats(top: float, scale: float, tmp_path: Path) -> None:
    path = tmp_path / "float.tif"
    values = (GRADIENT / 65535 * top).astype(np.float32)
    Image.fromarray(values).save(path)
    expected = np.rint(values.astype(np.float64) * scale)
    np.testing.assert_array_equal(np.asarray(load_image(path))[..., 0], expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 256.0])
def test_floats_outside_any_range(value: float, tmp_path: Path) -> None:
    path = tmp_path / "float.tif"
    values = np.zeros((4, 4), np.float32)
    values[1, 2] = value
    Image.fromarray(values).save(path)
    with pytest.raises(ModelError, match=sentence("grey-values", name="float.tif")):
        load_image(path)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int, tmp_path: Path) -> None:
    # As stored, for each of the eight orientations of the EXIF standard: the same upright picture.
    upright = _photograph("RGB")
    store = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(store[orientation]) if orientation in store else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "turned.png", exif=exif)
    np.testing.assert_array_equal(np.asarray(load_image(tmp_path / "turned.png")), np.asarray(upright))


def _jpeg() -> bytes:
    buffer = io.BytesIO()
    _photograph("RGB").save(buffer, "JPEG")
    return buffer.getvalue()


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png_of_size(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (_png_chunk(b"IHDR", header), _png_chunk(b"IDAT", zlib.compress(b"")), _png_chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


BAD_FILES = {
    "text.jpg": (b"This is a letter to my aunt, not a photograph.\n" * 20, "unknown-format"),
    "empty.png": (b"", "unknown-format"),
    "truncated.jpg": (_jpeg()[:700], "damaged"),
    "header_only.jpg": (_jpeg()[:20], "unknown-format"),
    "truncated.png": (PHOTOGRAPHS[0].read_bytes()[:100_000], "damaged"),
    "no_width.png": (_png_of_size(0, 5), "unknown-format"),
    "no_pixels.ppm": (b"P6\n0 0\n255\n", "unknown-format"),
    "no_pixels.bmp": (
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 0, 0, 1, 24, *[0] * 6),
        "unknown-format",
    ),
    "huge.png": (_png_of_size(60_000, 60_000), "too-large"),
    "large.png": (_png_of_size(12_000, 12_000), "too-large"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_one_sentence(name: str, tmp_path: Path) -> None:
    content, code = BAD_FILES[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ModelError, match=sentence(code, name=path)) as raised:
        load_image(path)
    message = str(raised.value)
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize("name", ["photo.jpg", "photo.png", "photo.gif"])
def test_postscript_starts_no_program_whatever_it_is_called(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, started = tmp_path / "gs", tmp_path / "started"
    program.write_text(f"#!/bin/sh\ntouch {started}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # not yet looked for
    path = tmp_path / name
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n")
    for read in (load_image, lambda path: list(open_frames(path))):
        with pytest.raises(ModelError, match=sentence("unknown-format")):
            read(path)
    assert not started.exists()


def test_each_format_is_read(tmp_path: Path) -> None:
    Image.init()
    for kind in FORMATS:
        if kind in Image.SAVE:
            _photograph("RGB").save(tmp_path / "image", kind)
            assert load_image(tmp_path / "image").size == (45, 30)
    # What many phones and cameras write: a JPEG with another picture after it.
    _photograph("RGB").save(tmp_path / "image", "MPO", save_all=True, append_images=[_photograph("RGB")])
    assert load_image(tmp_path / "image").size == (45, 30)


def test_path_without_an_image(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=sentence("no-such-file", name="nowhere.png")):
        load_image(tmp_path / "nowhere.png")
    with pytest.raises(ModelError, match=sentence("is-a-folder", name=tmp_path)):
        load_image(tmp_path)


def test_pixels_of_a_file_an_image_and_an_array_are_the_same() -> None:
    with Image.open(FIXTURES / "cat.png") as file:
        expected = np.array(file.convert("RGB"))
        transparent = file.convert("RGBA")
    for given in (FIXTURES / "cat.png", str(FIXTURES / "cat.png"), transparent, np.asfortranarray(expected)):
        pixels = to_pixels(given)
        np.testing.assert_array_equal(pixels, expected)
        assert pixels.flags.c_contiguous
        assert pixels.flags.writeable
        assert not np.shares_memory(pixels, expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.zeros((3, 20, 30), np.uint8), sentence("wrong-array", dtype="uint8", shape="[3, 20, 30]")),
        (np.zeros((20, 30, 3), np.float32), sentence("wrong-array", dtype="float32")),
        (np.zeros((20, 30), np.uint8), sentence("wrong-array", dtype="uint8")),
        (np.zeros((0, 30, 3), np.uint8), sentence("wrong-array", dtype="uint8")),
        (b"bytes", sentence("not-an-image", name="bytes")),
        (Image.new("RGB", (0, 5)), sentence("no-pixels")),
    ],
)
def test_pixels_of_what_is_no_image(given: Any, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        to_pixels(given)
