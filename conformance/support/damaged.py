"""Writes small files of every format of images, animations and videos, for tests that damage them."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

STRANGE_EXIF = bytes.fromhex(
    "457869660000 4d4d002a00000008 0003 010a00020000000600000032 011200030000000100060000 876900040000000100000038"
    "00000000 68656c6c6f00 0001 9003000200000005 0000004a 00000000 323032300000"
)
"""Of a photograph that is to be turned; Pillow reads it and cannot write it."""


def photograph() -> Image.Image:
    """Draws 24 x 18 pixels of noise, which no format compresses to nothing."""
    pixels = np.random.default_rng(5).integers(0, 256, (18, 24, 3), np.uint8)
    return Image.fromarray(pixels)


def encoded(kind: str, image: Image.Image | None = None, **settings: object) -> bytes:
    buffer = io.BytesIO()
    (image or photograph()).save(buffer, kind, **settings)
    return buffer.getvalue()


def images() -> dict[str, bytes]:
    """Writes a file for each format, and for each other decoder."""
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
