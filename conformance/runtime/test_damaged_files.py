"""Whatever is wrong with an image, an animation or a video ends in one sentence, and takes no memory without bound."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conformance.support.mutations import mutated
from harness.runtime.errors import Sam3Error
from harness.runtime.sam3.images import load_image
from harness.runtime.sam3.video.frames import open_frames

MUTATIONS = 40
"""Of each sample."""
ENOUGH = 50
"""Frames of a damaged video that are read: one may state that it has billions."""
STRANGE_EXIF = bytes.fromhex(
    "457869660000 4d4d002a00000008 0003 010a00020000000600000032 011200030000000100060000 876900040000000100000038"
    "00000000 68656c6c6f00 0001 9003000200000005 0000004a 00000000 323032300000"
)
"""Of a photograph that is to be turned; Pillow reads it and cannot write it."""


def photograph() -> Image.Image:
    """24 x 18 pixels of noise, which no format compresses to nothing."""
    pixels = np.random.default_rng(5).integers(0, 256, (18, 24, 3), np.uint8)
    return Image.fromarray(pixels)


def encoded(kind: str, image: Image.Image | None = None, **settings: object) -> bytes:
    buffer = io.BytesIO()
    (image or photograph()).save(buffer, kind, **settings)
    return buffer.getvalue()


def images() -> dict[str, bytes]:
    """A file for each format, and for what else has a decoder of its own."""
    several = {"save_all": True, "append_images": [photograph(), photograph().rotate(180)]}
    return {
        "exif.jpg": encoded("JPEG", exif=STRANGE_EXIF),
        "progressive.jpg": encoded("JPEG", progressive=True),
        "two.mpo": encoded("MPO", **several),
        "rgb.png": encoded("PNG"),
        "deep.png": encoded("PNG", Image.fromarray(np.arange(432, dtype=np.uint16).reshape(18, 24) * 150)),
        "palette.png": encoded("PNG", photograph().convert("P"), transparency=3),
        "lossy.webp": encoded("WEBP"),
        "lossless.webp": encoded("WEBP", lossless=True, exif=STRANGE_EXIF),
        "still.gif": encoded("GIF"),
        "rgb.bmp": encoded("BMP"),
        "plain.tif": encoded("TIFF"),
        "lzw.tif": encoded("TIFF", compression="tiff_lzw"),
        "jpeg.tif": encoded("TIFF", compression="jpeg"),
        "float.tif": encoded("TIFF", Image.fromarray(np.linspace(0, 1, 432, dtype=np.float32).reshape(18, 24))),
        "still.avif": encoded("AVIF"),
        "still.jp2": encoded("JPEG2000"),
        "rgb.ppm": encoded("PPM"),
    }


def animations() -> dict[str, bytes]:
    rest = [photograph().rotate(90 * turns) for turns in (2, 0, 2)]
    several = {"save_all": True, "append_images": rest, "duration": 80}
    return {
        "moving.gif": encoded("GIF", **several),
        "moving.png": encoded("PNG", **several),
        "moving.webp": encoded("WEBP", **several),
    }


def videos() -> dict[str, bytes]:
    import av

    made = {}
    for name, codec, pixel_format in (
        ("video.mp4", "mpeg4", "yuv420p"),
        ("video.mkv", "ffv1", "yuv444p"),
        ("video.avi", "mjpeg", "yuvj420p"),
        ("video.webm", "libvpx", "yuv420p"),
        ("h264.mp4", "libx264", "yuv420p"),
    ):
        if codec not in av.codec.codecs_available:
            continue
        buffer = io.BytesIO()
        container_format = "matroska" if name.endswith(".mkv") else name.rpartition(".")[2]
        with av.open(buffer, "w", format=container_format) as container:
            stream = container.add_stream(codec, 10, width=32, height=16, pix_fmt=pixel_format)
            for index in range(5):
                pixels = np.asarray(photograph().rotate(40 * index).resize((32, 16)))
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode(None))
        made[name] = buffer.getvalue()
    return made


def damaged(samples: dict[str, bytes], count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Names and contents of damaged files, the same for the same seed."""
    draw = random.Random(seed)
    for name, content in samples.items():
        for _ in range(count):
            yield name, mutated(content, draw)


def read_image_file(path: Path) -> bool:
    """Whether an image can be read; if not, its sentence is one."""
    return _ends_well(path, lambda: np.asarray(load_image(path)))


def read_video_file(path: Path) -> bool:
    return _ends_well(path, lambda: [frame.sum() for frame, _ in zip(open_frames(path), range(ENOUGH), strict=False)])


def _ends_well(path: Path, read: object) -> bool:
    try:
        assert callable(read)
        read()
    except Sam3Error as error:
        sentence = str(error)
        assert "\n" not in sentence and sentence.endswith(".") and path.name in sentence, sentence
        return False
    return True


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("samples", "read"),
    [(images, read_image_file), (animations, read_video_file), (videos, read_video_file)],
    ids=["images", "animations", "videos"],
)
def test_a_mutated_file_is_read_or_ends_in_one_sentence(
    samples: object, read: object, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert callable(samples) and callable(read)
    outcomes = []
    for name, content in samples().items():
        (tmp_path / name).write_bytes(content)
        assert read(tmp_path / name), name
    for name, content in damaged(samples(), MUTATIONS, seed=51):
        (tmp_path / name).write_bytes(content)
        outcomes.append(read(tmp_path / name))
    assert 0.1 < np.mean(outcomes) < 0.9, "mutations are neither harmless nor told at the first byte"


def test_an_image_is_turned_although_its_exif_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(encoded("JPEG", exif=STRANGE_EXIF))
    (tmp_path / "plain.jpg").write_bytes(encoded("JPEG"))
    turned, plain = load_image(tmp_path / "photo.jpg"), load_image(tmp_path / "plain.jpg")
    assert turned.size == (18, 24)
    np.testing.assert_array_equal(np.asarray(turned), np.rot90(np.asarray(plain), -1))


def test_what_no_decoder_expects_is_one_sentence(tmp_path: Path) -> None:
    """Pillow raises a `RuntimeError` here, for 127 bits a channel."""
    (tmp_path / "photo.avif").write_bytes(encoded("AVIF").replace(b"\x03\x08\x08\x08", b"\x03\x08\x7f\x08"))
    with pytest.raises(
        Sam3Error, match=r"photo\.avif cannot be read, it is damaged or truncated \(.+\); save it anew\."
    ):
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
    with pytest.raises(Sam3Error, match=rf"{name}.* is larger than 89478485 pixels; scale it down first\."):
        list(open_frames(tmp_path / name))


def test_frames_of_a_video_are_held_to_the_limit_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "video.mp4").write_bytes(videos()["video.mp4"])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 32 * 16)
    assert len(list(open_frames(tmp_path / "video.mp4"))) == 5
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 32 * 16 - 1)
    with pytest.raises(Sam3Error, match=r"The video .*video\.mp4 is larger than 511 pixels; scale it down first\."):
        list(open_frames(tmp_path / "video.mp4"))
