"""Finds the images of a job, in files, folders, lists, shards and at addresses, and reads them.

A shard is a file of many images: a tar of WebDataset, or a Parquet file. Its images are read one after another, so that
memory holds one of them. fsspec reads addresses and pyarrow reads Parquet; a base install has neither.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Self

from harness.app.results.coco import DistinctNames
from harness.core.errors import HarnessError
from harness.runtime.errors import ModelError, reason
from harness.runtime.sam3.images import image_errors, image_suffixes, load_image, open_image

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_LIST, _TAR, _PARQUET = ".txt", ".tar", ".parquet"
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_LOCAL = "file://"
_WEB = ("http://", "https://")
_LARGEST = 512 << 20
"""Most bytes of an image's file in a shard or at an address: 48 bits for each pixel that Pillow allows."""
_BLOCK = 1 << 20
"""Bytes that are read at once."""
_SAMPLE = 16
"""Rows of a Parquet file that are searched for images where several columns have bytes."""
_ENDS = (tarfile.EOFHeaderError, tarfile.EmptyHeaderError)  # type: ignore[attr-defined]  # typeshed lacks them
"""Errors of `tarfile` at the end of a tar; it passes over other errors of headers as if the tar ended there."""
_REQUESTS = 32
"""Number of addresses that are looked up at the same time."""


@dataclass(frozen=True)
class Address:
    """An address that fsspec reads, with what a job needs of a `Path`.

    Attributes:
        address: The address, such as `s3://photos/cat.jpg`; of an image in a shard, that of the shard with its name.
        version: Facts of which one is another after the file was changed.
    """

    address: str
    version: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.address

    def __truediv__(self, name: str) -> Self:
        path = self._path if self._path.endswith("/") else f"{self._path}/"
        return replace(self, address=f"{path}{name}")

    def resolve(self) -> Self:
        """Returns the address itself: it is not relative."""
        return self

    @property
    def parent(self) -> Self:
        """The address of its folder."""
        return replace(self, address=self._path[: self._path.rindex("/") + 1])

    @property
    def name(self) -> str:
        """The last part of the address, without the query of a web server's."""
        return self._path.rstrip("/").rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """The suffix of the name."""
        return PurePosixPath(self.name).suffix

    @property
    def _path(self) -> str:
        return self.address.partition("?")[0] if self.address.startswith(_WEB) else self.address


Image = Path | Address
"""A file or an address; of an image in a shard, that of the shard as if it were a folder."""


def find_images(sources: Iterable[str | Path], *, has_shards: bool = True) -> list[Image]:
    """Returns the images and shards among the sources and in the folders and lists among them; each one once.

    A file is taken whatever its suffix, but a file `.txt` is a list: an image, a shard or an address a line, relative
    to the list's folder. Of a folder the images are taken, or the shards where it has no image, sorted by name and
    without subfolders.

    Args:
        sources: Paths and addresses.
        has_shards: Whether shards are taken from folders.

    Raises:
        HarnessError: A source does not exist, cannot be read, or has no image; or what reads it is not installed.
    """
    unique: dict[Image, Image] = {}
    for source, is_folder in _look_up(sources):
        if is_folder:
            kind, images = "folder", _in_folder(source, has_shards)
        else:
            kind, images = "list", _in_list(source) if source.suffix == _LIST else [source]
        if not images:
            raise HarnessError(f"The {kind} {source} has no images; give one that has.")
        for image in images:
            unique.setdefault(image.resolve(), image)
    if any(image.suffix == _PARQUET for image in unique) and find_spec("pyarrow") is None:
        raise HarnessError("pyarrow, which reads Parquet, is not installed; pip install 'sam3-tvm[data]'.")
    return list(unique.values())


def is_shard(image: Image) -> bool:
    """Returns whether a file is a shard, by its suffix."""
    return image.suffix in (_TAR, _PARQUET)


def is_location(text: str) -> bool:
    """Returns whether a text is an absolute path or an address."""
    return Path(text).is_absolute() or _ADDRESS.match(text) is not None


def version(image: Image) -> list[Any]:
    """Returns facts of a file, of which one is another after it was changed; they can be written as JSON.

    Raises:
        OSError: The file cannot be read.
    """
    if isinstance(image, Address):
        return [image.version]
    status = image.stat()
    return [status.st_size, status.st_mtime_ns]


def read_image(image: Image, content: bytes | None = None) -> Picture:
    """Reads an image as `load_image` does.

    Args:
        image: The image.
        content: The contents of its file; by default they are read.

    Raises:
        HarnessError: Its address cannot be read.
        ModelError: It is not an image, damaged, or too large.
    """
    if content is None and isinstance(image, Path):
        return load_image(image)
    if content is None:
        with _open(image) as file:
            content = _read(image, file)
    return load_image(BytesIO(content), str(image))


def images_of(shard: Image) -> Iterator[tuple[Image, Callable[[], bytes]]]:
    """Yields the images of a shard in its order, with functions that read their files until the next image is yielded.

    Raises:
        HarnessError: The shard's address cannot be read.
        ModelError: The shard has no images, or cannot be read to its end.
    """
    names, image = DistinctNames(), None
    members = _in_tar if shard.suffix == _TAR else _in_parquet
    try:
        with _open(shard, in_order=shard.suffix == _TAR) as file:
            for name, read in members(shard, file):
                path = _path_of(name)
                image = shard / names.take(str(path.with_suffix("")), path.suffix)
                yield image, partial(_read_member, image, read)
    except (HarnessError, ModelError, MemoryError):
        raise
    except Exception as error:
        raise ModelError(f"The shard {shard} cannot be read to its end ({reason(error)}); make it anew.") from error
    if image is None:
        raise ModelError(f"The shard {shard} has no images; give one that has.")


def _look_up(sources: Iterable[str | Path]) -> list[tuple[Image, bool]]:
    """Returns the paths and addresses, and whether they are folders.

    Raises:
        HarnessError: One does not exist, or cannot be read.
    """
    with ThreadPoolExecutor(_REQUESTS) as pool:
        return list(pool.map(_look_up_one, map(str, sources)))


def _look_up_one(source: str) -> tuple[Image, bool]:
    if _ADDRESS.match(source) is None or source.startswith(_LOCAL):
        path = Path(source.removeprefix(_LOCAL))
        if not path.exists():
            raise HarnessError(f"{path} does not exist; give images or folders of images.")
        return path, path.is_dir()
    with _address_errors(source):
        system, path_there = _file_system(source)
        facts = system.info(path_there)
    return Address(source, _version(facts)), facts["type"] == "directory"


def _file_system(address: str) -> tuple[Any, str]:
    """Returns fsspec's file system of an address, and the path there.

    Raises:
        HarnessError: Something that reads the address is not installed.
    """
    if find_spec("fsspec") is None:
        raise HarnessError(f"fsspec, which reads {address}, is not installed; pip install 'sam3-tvm[data]'.")
    import fsspec

    try:
        system, path = fsspec.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise HarnessError(f"{address} cannot be opened ({reason(error)}); install that, or copy the data.") from error
    return system, path


@contextmanager
def _address_errors(address: object) -> Iterator[None]:
    try:
        yield
    except (HarnessError, ModelError, MemoryError):
        raise
    except Exception as error:
        cause = error.__cause__ or error  # fsspec calls much of the web a file that is not found
        if isinstance(cause, FileNotFoundError):
            raise HarnessError(f"{address} does not exist; give images or folders of images.") from error
        raise HarnessError(f"{address} cannot be read ({reason(cause)}); check it, and your permissions.") from error


def _version(facts: dict[str, Any]) -> str:
    return str(sorted((name, str(value)) for name, value in facts.items()))


def _in_folder(folder: Image, has_shards: bool) -> list[Image]:
    files: list[Image]
    if isinstance(folder, Path):
        files = [path for path in folder.iterdir() if path.is_file()]
    else:
        with _address_errors(folder):
            system, path = _file_system(folder.address)
            entries = [entry for entry in system.ls(path, detail=True) if entry["type"] == "file"]
        files = [replace(folder / PurePosixPath(entry["name"]).name, version=_version(entry)) for entry in entries]
    suffixes = image_suffixes()
    visible = sorted((file for file in files if not file.name.startswith(".")), key=str)
    images = [file for file in visible if file.suffix.lower() in suffixes]
    return images or [file for file in visible if has_shards and is_shard(file)]


def _in_list(file: Image) -> list[Image]:
    try:
        with _open(file) as opened:
            lines = _read(file, opened).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HarnessError(f"{file} cannot be read as text in UTF-8 ({error}); give a list of images.") from error
    images = [line.strip() for line in lines if line.strip()]
    images = [image if is_location(image) else str(file.parent / image) for image in images]
    for image in images:
        if not (_ADDRESS.match(image) or Path(image).is_file()):
            raise HarnessError(f"{image} of the list {file} does not exist; correct the list.")
    return [image for image, _ in _look_up(images)]


def _open(image: Image, *, in_order: bool = True) -> Any:
    """Opens a file for reading; one that is read in order needs no server that gives parts of it."""
    if isinstance(image, Path):
        return image.open("rb")
    settings = {"block_size": 0} if in_order and image.address.startswith(_WEB) else {}
    with _address_errors(image):
        system, path = _file_system(image.address)
        return system.open(path, "rb", **settings)


def _read(image: Image, file: Any) -> bytes:
    content = bytearray()
    with _address_errors(image) if isinstance(image, Address) else nullcontext():
        while block := file.read(_BLOCK):  # shorter ones come from the web
            content += block
            _check_size(image, len(content))
    return bytes(content)


def _check_size(image: Image, size: int) -> None:
    if size > _LARGEST:
        raise ModelError(f"The file of the image {image} has more than {_LARGEST >> 20} MiB; save it as JPEG or PNG.")


def _path_of(name: str) -> PurePosixPath:
    """Returns the name of an image in a shard as a path below it that can be printed."""
    printable = "".join(letter if letter.isprintable() else "_" for letter in name)
    return PurePosixPath(*(part for part in PurePosixPath(printable).parts if part not in ("/", "//", "..")))


def _read_member(image: Image, read: Callable[[Image], bytes]) -> bytes:
    """Reads the file of an image in a shard.

    Raises:
        ModelError: It is too large, or cannot be read.
    """
    with image_errors(f"The image {image}"):
        return read(image)


def _in_tar(shard: Image, file: Any) -> Iterator[tuple[str, Callable[[Image], bytes]]]:
    """Yields the members of a tar that are images by what follows the first dot of their names, as in WebDataset."""
    suffixes = image_suffixes()

    def read(member: tarfile.TarInfo, image: Image) -> bytes:
        _check_size(image, member.size)
        content = archive.extractfile(member)
        assert content is not None
        return content.read()

    mode: Any = "r:" if isinstance(shard, Path) else "r|"
    with tarfile.open(fileobj=file, mode=mode, bufsize=_BLOCK, tarinfo=_Member) as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # they would stay in memory
            key, dot, extension = PurePosixPath(member.name).name.partition(".")
            if key and member.isreg() and f"{dot}{extension}".lower() in suffixes:
                yield member.name, partial(read, member)


class _Member(tarfile.TarInfo):
    """A member of a tar; a damaged header is an error."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except _ENDS:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from error


def _in_parquet(shard: Image, file: Any) -> Iterator[tuple[str, Callable[[Image], bytes]]]:
    """Yields the images of the column that has them, by their paths or else their rows.

    A column of bytes has them, or one of Hugging Face's `Image`, which has `bytes` and `path`.
    """
    from pyarrow import parquet

    def read(content: bytes | None, image: Image) -> bytes:
        if content is None:
            raise ModelError(f"The image {image} is empty in its shard; leave its row out.")
        _check_size(image, len(content))
        return content

    with parquet.ParquetFile(file, buffer_size=_BLOCK) as table:
        column = _image_column(shard, table)
        for number, row in enumerate(_rows(table, [column])):
            content, path = _cell(row[column])
            name = PurePosixPath((path or "").replace("\\", "/")).name
            yield name if name.strip(".") else str(number), partial(read, content)


def _image_column(shard: Image, table: Any) -> str:
    """Returns the name of the column of images.

    Raises:
        ModelError: There is none, or several.
    """
    from pyarrow import types

    def has_bytes(kind: Any) -> bool:
        if types.is_struct(kind):
            return kind.get_field_index("bytes") >= 0 and has_bytes(kind.field("bytes").type)
        return any(is_kind(kind) for is_kind in (types.is_binary, types.is_large_binary, types.is_binary_view))

    names = [column.name for column in table.schema_arrow if has_bytes(column.type)]
    if len(names) > 1:
        rows = [*islice(_rows(table, names), _SAMPLE)]
        names = [name for name in names if any(_is_image(_cell(row[name])[0]) for row in rows)]
    if len(names) > 1:
        raise ModelError(f"The shard {shard} has images in the columns {', '.join(names)}; keep one of them.")
    if not names:
        raise ModelError(f"The shard {shard} has no column of images; give one with their bytes.")
    return str(names[0])


def _rows(table: Any, columns: list[str]) -> Iterator[dict[str, Any]]:
    for batch in table.iter_batches(1, columns=columns, use_threads=False):
        yield from batch.to_pylist()


def _cell(value: Any) -> tuple[bytes | None, str | None]:
    """Returns the bytes and the path in a cell of a column of images."""
    return (value["bytes"], value.get("path")) if isinstance(value, dict) else (value, None)


def _is_image(content: bytes | None) -> bool:
    try:
        open_image(BytesIO(content or b"")).close()
    except Exception:
        return False
    return True
