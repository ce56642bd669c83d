"""Reads image files of any mode, and says in which size the model sees an image."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt

from harness.runtime.errors import ModelError, reason

if TYPE_CHECKING:
    from PIL import Image

RESOLUTION = 1008
"""Height and width of the image that the model sees."""
MASK_SIZE = 288
"""Height and width of a mask's logits."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")
"""Formats of image files that are read, by Pillow's names; for one of the others Pillow would start Ghostscript."""

_ORIENTATION = 0x0112
"""EXIF's tag of the orientation."""


def load_image(path: str | Path | BinaryIO, name: str | None = None) -> Image.Image:
    """Reads an image file of any mode as upright 8-bit RGB.

    The rotation in the EXIF data is applied. Alpha is dropped, not blended, as `Image.convert("RGB")` and upstream's
    users do. 16-bit grey values are scaled to 8 bits (upstream's users get them clipped at 255). Floating-point grey
    has the range 0…1 if no value is above 1, otherwise 0…255. Of an animation the first frame is read.

    Args:
        path: The file, or its open contents.
        name: Name of the file in sentences; the path by default.

    Raises:
        ModelError: If the file is missing, not an image of one of `FORMATS`, damaged, empty, or too large.
    """
    path, name = Path(path) if isinstance(path, str) else path, name or str(path)
    with image_errors(f"The image {name}"), open_image(path) as file:
        file.load()
        return _to_rgb(_upright(file), f"The image {name}")


def open_image(path: Path | BinaryIO) -> Image.Image:
    """Opens an image file of one of `FORMATS`, whatever its name; reads its header alone."""
    from PIL import Image

    Image.init()
    return Image.open(path, formats=[kind for kind in FORMATS if kind in Image.OPEN])


def image_suffixes() -> frozenset[str]:
    """Returns the suffixes, in lower case, of files that `load_image` reads."""
    from PIL import Image

    kinds = Image.registered_extensions()
    return frozenset(suffix for suffix, kind in kinds.items() if kind in FORMATS and kind in Image.OPEN)


@contextmanager
def image_errors(name: str, advice: str = "save it anew") -> Iterator[None]:
    """Turns Pillow's errors and warnings about an image into one sentence.

    Args:
        name: The beginning of the sentence: the image.
        advice: The end of the sentence, where the data are damaged.

    Raises:
        ModelError: The image cannot be read, or has more pixels than Pillow's limit.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except (ModelError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise ModelError(f"{name} does not exist; check the path.") from error
    except IsADirectoryError as error:
        raise ModelError(f"{name} is a folder; give one image file.") from error
    except PermissionError as error:
        raise ModelError(f"{name} may not be read; check its permissions.") from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise ModelError(f"{name} is larger than {Image.MAX_IMAGE_PIXELS} pixels; scale it down first.") from error
    except UnidentifiedImageError as error:
        raise ModelError(f"{name} is of no known format, or has no pixels; use PNG or JPEG.") from error
    except Exception as error:
        raise ModelError(f"{name} cannot be read, it is damaged or truncated ({reason(error)}); {advice}.") from error


def check_size(width: int, height: int, name: str) -> None:
    """Checks Pillow's limit on a picture that Pillow does not read.

    Raises:
        ModelError: The picture has more pixels; `name` is the beginning of the sentence.
    """
    from PIL import Image

    if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
        raise ModelError(f"{name} is larger than {Image.MAX_IMAGE_PIXELS} pixels; scale it down first.")


def _upright(image: Image.Image) -> Image.Image:
    """Turns an image by its EXIF data; unlike `ImageOps.exif_transpose` it works with damaged EXIF data."""
    from PIL import Image

    transpose = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }.get(image.getexif().get(_ORIENTATION, 1))
    return image if transpose is None else image.transpose(transpose)


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    """Converts an image to 8-bit RGB, and scales the range of wide grey modes."""
    from PIL import Image

    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ModelError(f"{name} has grey values outside 0…65535; convert it to 8 or 16 bits first.")
        # 65535 = 255·257, so this rounds to the nearest of the 256 levels.
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        floats = np.asarray(image).astype(np.float64)
        if not np.isfinite(floats).all() or floats.min() < 0 or floats.max() > 255:
            raise ModelError(f"{name} has grey values outside 0…255 or not finite; convert it first.")
        floats = floats * 255 if floats.max() <= 1 else floats
        return Image.fromarray(np.rint(floats).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image in memory to 8-bit RGB as `load_image` does, but ignores the rotation in its EXIF data.

    Raises:
        ModelError: If it has no pixels, grey values of no known range, or a file that cannot be read.
    """
    if min(image.size) < 1:
        raise ModelError(f"The image has no pixels ({image.width}x{image.height}); use another one.")
    with image_errors("The image"):
        return _to_rgb(image, "The image")


def to_pixels(image: str | Path | Image.Image | npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Returns a copy of the pixels of an image, uint8 [h, w, 3], RGB.

    Args:
        image: A file, read by `load_image`; an image of Pillow, converted by `to_rgb`; or the pixels themselves.

    Raises:
        ModelError: If it is none of these, or cannot be used.
    """
    from PIL import Image

    if isinstance(image, Image.Image):
        return np.array(to_rgb(image))
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            raise ModelError(
                f"The image is an array {image.dtype} {list(image.shape)}; give uint8 [height, width, 3], RGB."
            )
        return np.array(image, order="C")
    if not isinstance(image, str | Path):
        raise ModelError(f"The image is of type {type(image).__name__}; give a path, a Pillow image or a NumPy array.")
    return np.array(load_image(image))
