"""Photographs in shards and at addresses: the results of the same files in a folder, whatever cannot be read."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from conformance.support.known_answers import KnownSegmenter, write_pictures
from conformance.support.sentences import sentence
from conformance.support.shards import SENT, serve, write_parquet, write_tar
from harness.app.results.journal import JOURNAL
from harness.app.segment import job as segmenting
from harness.app.segment import sources
from harness.app.segment.sources import find_images
from harness.core.errors import HarnessError
from harness.runtime import Prompt

ROOT = Path(__file__).resolve().parents[2]
CAT = ROOT / "fixtures" / "images" / "cat.png"


def segment(given: Sequence[str | Path], out: Path, **settings: Any) -> tuple[int, list[str]]:
    """Does a job, and gives the number of pictures that were encoded and the sentences of those that failed."""
    model = KnownSegmenter()
    job = segmenting.Job(find_images(given), [Prompt("cat")], out, 0.5)
    done = segmenting.run(model, job, **settings)  # type: ignore[arg-type]
    return model.encoded, segmenting.failures(done)


def results(out: Path) -> dict[str, bytes]:
    paths = [path for path in out.rglob("*") if path.is_file() and path.name != JOURNAL]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in paths}


def data_set(out: Path) -> dict[str, list[dict[str, Any]]]:
    """The annotations of each picture, by its name in the data set."""
    read = json.loads((out / "annotations.json").read_text())
    ids = ("id", "image_id")
    return {
        image["file_name"]: [
            {name: value for name, value in entry.items() if name not in ids}
            for entry in read["annotations"]
            if entry["image_id"] == image["id"]
        ]
        for image in read["images"]
    }


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    return write_pictures(tmp_path / "pictures", 4)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Any]:
    """A file system at memory://, which forgets its files."""
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """The address of a server of the files in the test's folder."""
    with serve(tmp_path) as address:
        yield address


def stop(_result: object) -> None:
    raise KeyboardInterrupt


def test_shards_have_the_results_of_their_files(pictures: list[Path], tmp_path: Path) -> None:
    """Of WebDataset's samples the images alone; one name in two shards, in two folders and twice in one shard."""
    content = [picture.read_bytes() for picture in pictures]
    shards = tmp_path / "shards"
    shards.mkdir()
    first = [
        ("a.png", content[0]),
        ("a.json", b"{}"),
        ("a.seg.png", content[3]),
        ("._b.png", b""),
        ("b.PNG", content[1]),
    ]
    write_tar(shards / "0.tar", first)
    write_tar(shards / "1.tar", [("a.png", content[2]), ("below/../a.png", content[3]), ("a.png", content[0])])
    folder = tmp_path / "folder"
    expected = {"0.tar/a.png": 0, "0.tar/b.PNG": 1, "1.tar/a.png": 2, "1.tar/below/a.png": 3, "1.tar/a_2.png": 0}
    for name, number in expected.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content[number])
    out = tmp_path / "out"
    assert segment([shards], out) == (5, [])
    names = ["0_a", "0_b", "1_a", "1_a_2", "1_a_2_2"]
    assert {path.name for path in out.glob("*.png")} == {f"{name}_overlay.png" for name in names}
    assert segment([folder / name for name in expected], tmp_path / "files") == (5, [])
    assert data_set(out) == data_set(tmp_path / "files")
    assert segment([shards / "1.tar"], tmp_path / "one") == (3, [])
    assert list(data_set(tmp_path / "one")) == ["a.png", "below/a.png", "a_2.png"]


def test_a_job_of_shards_goes_on(pictures: list[Path], tmp_path: Path) -> None:
    """Nothing that was done is done again, unless its shard was changed, and another shard changes no name."""
    content = [picture.read_bytes() for picture in pictures]
    shard = write_tar(tmp_path / "0.tar", [(f"{number}.png", content[number]) for number in range(3)])
    alone, out = tmp_path / "alone", tmp_path / "out"
    assert segment([shard], alone) == (3, [])
    with pytest.raises(KeyboardInterrupt):
        segment([shard], out, on_done=stop)
    assert list(data_set(out)) == ["0.png"]
    assert segment([shard], out) == (2, [])
    assert results(out) == results(alone)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.png")}
    other = write_tar(tmp_path / "1.tar", [("0.png", content[3])])
    assert segment([shard, other], out) == (1, [])
    assert times.items() <= {path: path.stat().st_mtime_ns for path in out.rglob("*.png")}.items()
    os.utime(other, (0, 0))
    assert segment([other, shard], out) == (1, [])
    assert list(data_set(out)) == ["1.tar/0.png", "0.tar/0.png", "0.tar/1.png", "0.tar/2.png"]


def test_a_shard_replaces_no_file_that_the_command_did_not_write(pictures: list[Path], tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "0.tar", [("cat.png", pictures[0].read_bytes())])
    for name in ("0_cat_overlay.png", "0_cat_masks/000.png"):
        theirs = tmp_path / "out" / name
        theirs.parent.mkdir(parents=True, exist_ok=True)
        theirs.write_bytes(b"years of work")
        with pytest.raises(HarnessError, match=sentence("not-ours", path=name)):
            segment([shard], tmp_path / "out")
        theirs.unlink()
    overlay = pictures[0].rename(tmp_path / "out" / "0_dog_overlay.png")
    with pytest.raises(HarnessError, match=sentence("replaces-input", path=overlay.name)):
        segment([shard, overlay], tmp_path / "out")


def test_parquet(pictures: list[Path], tmp_path: Path) -> None:
    """Hugging Face's columns and those of bytes alone, by path or else by row."""
    content = [picture.read_bytes() for picture in pictures]
    paths = ["a/cat.png", None, r"b\cat.png", ".."]
    cells = [{"bytes": cell, "path": path} for cell, path in zip(content, paths, strict=True)]
    shard = write_parquet(tmp_path / "0.parquet", {"label": [1, 2, 3, 4], "image": cells}, row_group_size=3)
    plain = write_parquet(tmp_path / "1.parquet", {"label": ["a", "b"], "photo": content[:2]})
    audio = [{"bytes": b"RIFF", "path": "a.wav"}] * 2
    both = write_parquet(tmp_path / "2.parquet", {"audio": audio, "photo": [None, content[0]]})
    out = tmp_path / "out"
    encoded, failed = segment([shard, plain, both], out)
    assert encoded == 7 and len(failed) == 1
    assert re.fullmatch(sentence("empty-cell", image=both / "0"), failed[0])
    names = ["0.parquet/cat.png", "0.parquet/1", "0.parquet/cat_2.png", "0.parquet/3", "1.parquet/0", "1.parquet/1"]
    found, expected = data_set(out), tmp_path / "expected"
    assert list(found) == [*names, "2.parquet/1"]
    segment(pictures, expected)
    annotations = list(data_set(expected).values())
    assert list(found.values()) == [*annotations, *annotations[:2], annotations[0]]
    assert segment([shard, plain, both], out)[0] == 0
    for columns, code, facts in (
        ({"left": content, "right": cells}, "several-image-columns", {"names": "left, right"}),
        ({"text": ["a"]}, "no-image-column", {}),
        ({"image": [b"a"], "mask": [b"b"]}, "no-image-column", {}),
        ({"image": cells[:0]}, "no-image-column", {}),
    ):
        encoded, failed = segment([write_parquet(tmp_path / "3.parquet", columns), pictures[0]], tmp_path / "others")
        assert encoded <= 1 and len(failed) == 1
        assert re.fullmatch(sentence(code, shard="3.parquet", **facts), failed[0])


def test_what_cannot_be_read_is_listed_and_the_rest_goes_on(
    pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images: damaged, of another format, with too many pixels, in too large files. Shards: cut, damaged, none."""
    content = pictures[0].read_bytes()
    broken, many = CAT.read_bytes()[:9000], io.BytesIO()
    Image.new("1", (20_000, 10_000)).save(many, "PNG")
    monkeypatch.setattr(sources, "_LARGEST", 1 << 20)
    members = [("a.png", broken), ("b.png", b"%!PS-Adobe-3.0 EPSF-3.0"), ("c.png", many.getvalue())]
    members += [("d.png", bytes((1 << 20) + 1)), ("e.png", content)]
    whole = write_tar(tmp_path / "whole.tar", members)
    archive = write_tar(tmp_path / "damaged.tar", [("a.png", content), ("b.png", content)]).read_bytes()
    cut = tmp_path / "cut.tar"
    cut.write_bytes(archive[: 512 + len(content) // 2])
    second = archive.index(b"b.png")
    damaged = tmp_path / "damaged.tar"
    damaged.write_bytes(archive[:second] + b"\1" * 8 + archive[second + 8 :])
    none = tmp_path / "none.tar"
    none.write_bytes(b"no tar")
    empty = write_tar(tmp_path / "empty.tar", [("a.txt", b"")])
    encoded, failed = segment([whole, cut, damaged, none, empty, pictures[1]], tmp_path / "out")
    assert encoded == 3
    expected = [
        sentence("damaged", name=whole / "a.png"),
        sentence("unknown-format", name=whole / "b.png"),
        sentence("too-large", name=whole / "c.png"),
        sentence("large-file", image=whole / "d.png", size=1),
        sentence("damaged", name=cut / "a.png"),
        sentence("damaged-shard", shard=cut),
        sentence("damaged-shard", shard=damaged),
        sentence("damaged-shard", shard=none),
        sentence("no-images", path=empty),
    ]
    assert len(failed) == len(expected)
    assert all(re.fullmatch(*pair) for pair in zip(expected, failed, strict=True)), failed
    assert list(data_set(tmp_path / "out")) == ["whole.tar/e.png", "damaged.tar/a.png", "pictures/1.png"]


def test_addresses_have_the_results_of_their_files(pictures: list[Path], memory: Any, tmp_path: Path) -> None:
    """A folder, an image, a list, and shards, of which none leaves a file among the temporary ones."""
    for picture in pictures:
        memory.pipe(f"/photos/{picture.name}", picture.read_bytes())
    memory.pipe("/photos/below/5.png", b"")
    memory.pipe("/photos/notes.md", b"")
    files, out = tmp_path / "files", tmp_path / "out"
    segment(pictures, files)
    assert segment(["memory://photos"], out) == (4, [])
    assert results(out) == results(files)
    assert segment(["memory://photos/"], out) == (0, [])
    memory.pipe("/photos/2.png", pictures[0].read_bytes())
    assert segment(["memory://photos"], out) == (1, [])
    memory.pipe("/list.txt", f"photos/0.png\n{pictures[1]}\nmemory://photos/3.png\nfile://{pictures[2]}\n".encode())
    assert [str(image) for image in find_images(["memory://list.txt", "memory://photos/3.png"])] == [
        "memory://photos/0.png",
        str(pictures[1]),
        "memory://photos/3.png",
        str(pictures[2]),
    ]
    shard = write_tar(tmp_path / "0.tar", [("a.png", pictures[0].read_bytes()), ("b.png", pictures[1].read_bytes())])
    memory.pipe("/shards/0.tar", shard.read_bytes())
    memory.pipe("/shards/1.tar", shard.read_bytes()[: shard.read_bytes().index(b"b.png") + 600])
    encoded, failed = segment(["memory://shards"], tmp_path / "sharded")
    assert encoded == 3 and re.fullmatch(sentence("damaged-shard", shard="memory://shards/1.tar"), failed[-1])
    assert list(data_set(tmp_path / "sharded")) == ["0.tar/a.png", "0.tar/b.png", "1.tar/a.png"]


def test_a_parquet_at_an_address(pictures: list[Path], memory: Any, tmp_path: Path) -> None:
    shard = write_parquet(tmp_path / "0.parquet", {"image": [picture.read_bytes() for picture in pictures]})
    memory.pipe("/0.parquet", shard.read_bytes())
    segment([shard], tmp_path / "files")
    assert segment(["memory://0.parquet"], tmp_path / "out") == (4, [])
    assert results(tmp_path / "out") == results(tmp_path / "files")


def test_the_web_sends_each_file_once(
    pictures: list[Path], web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a server that gives no parts of files; nothing is left among the temporary files."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    write_tar(tmp_path / "0.tar", [(f"{picture.stem}.png", picture.read_bytes()) for picture in pictures] * 2)
    (tmp_path / "list.txt").write_text("pictures/1.png\n0.tar?key=a/b\n")
    given = [f"{web}/list.txt?key=a/b", f"{web}/pictures/0.png?size=large"]
    assert segment(given, tmp_path / "out") == (10, [])
    names = {"1", "0.png", *(f"0.tar_{number}" for number in range(4)), *(f"0.tar_{number}_2" for number in range(4))}
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {f"{name}_overlay.png" for name in names}
    paths = ("/list.txt?key=a/b", "/pictures/1.png", "/0.tar?key=a/b", "/pictures/0.png?size=large")
    assert {path: SENT[f"GET {path}"] for path in paths} == dict.fromkeys(paths, 1)
    assert segment(given, tmp_path / "out") == (0, [])
    assert not list(temporary.iterdir())


def test_an_address_that_fails_later_is_listed(pictures: list[Path], web: str, tmp_path: Path) -> None:
    job = segmenting.Job(
        find_images([f"{web}/pictures/{n}.png" for n in range(2)]), [Prompt("cat")], tmp_path / "out", 0
    )
    pictures[0].unlink()
    failed, done = segmenting.run(KnownSegmenter(), job)  # type: ignore[arg-type]
    assert isinstance(failed, segmenting.FailedImage) and isinstance(done, segmenting.SegmentedImage)
    assert re.fullmatch(sentence("address-unreadable", address=f"{web}/pictures/0.png", error=404), failed.reason)


@pytest.mark.parametrize(
    ("address", "code", "facts"),
    [
        ("nowhere://photos/", "no-address-driver", {"address": "nowhere://photos/", "error": "nowhere"}),
        ("memory://nothing/", "no-such-path", {"path": "memory://nothing/"}),
        ("file:///nothing/", "no-such-path", {"path": "/nothing"}),
        ("{web}/nothing.png", "address-unreadable", {"error": 404}),
        ("{web}/secret.png", "address-unreadable", {"error": 403}),
        ("{web}/list.txt", "address-unreadable", {"error": 403}),
    ],
)
def test_addresses_that_cannot_be_used(
    address: str, code: str, facts: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "list.txt").write_text("secret.png\n")
    web = request.getfixturevalue("web") if "{web}" in address else ""
    with pytest.raises(HarnessError, match=sentence(code, **facts)):
        find_images([address.format(web=web)])


@pytest.mark.parametrize(
    ("package", "source", "expected"),
    [
        ("fsspec", "s3://photos/cat.jpg", sentence("no-fsspec", address="s3://photos/cat.jpg")),
        ("s3fs", "s3://photos/cat.jpg", sentence("no-address-driver", address="s3://photos/cat.jpg", error="s3fs")),
        ("gcsfs", "gs://photos/cat.jpg", sentence("no-address-driver", address="gs://photos/cat.jpg", error="gcsfs")),
        ("pyarrow", "{folder}/0.parquet", sentence("no-pyarrow")),
    ],
)
def test_what_reads_a_source_is_not_installed(package: str, source: str, expected: str, tmp_path: Path) -> None:
    if package != "fsspec":
        pytest.importorskip("fsspec")
    (tmp_path / "0.parquet").touch()
    program = f"import sys; sys.modules[{package!r}] = None; from harness.cli.main import main; main()"
    arguments = ["segment", source.format(folder=tmp_path), "--text", "cat", "--out", str(tmp_path / "out")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=env, timeout=600, check=False
    )
    assert (finished.returncode, finished.stderr.count("\n")) == (2, 1), finished.stderr
    assert re.search(expected, finished.stderr)
    assert not (tmp_path / "out").exists()


def peak(given: Path, out: Path) -> int:
    """The most bytes that Python has at once while it does a job whose images are zeros."""
    tracemalloc.start()
    encoded, failed = segment([given], out)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert encoded == 0 and len(failed) == 20
    assert all(re.fullmatch(sentence("unknown-format"), reason) for reason in failed)
    return most


def test_of_a_tar_one_image_is_in_memory_at_a_time(tmp_path: Path) -> None:
    size = 1 << 20
    shard = write_tar(tmp_path / "0.tar", [(f"{number}.png", bytes(size)) for number in range(20)])
    assert peak(shard, tmp_path / "out") < 8 * size


def test_of_a_parquet_one_group_of_rows_is_in_memory_at_a_time(tmp_path: Path) -> None:
    size, count, group = 1 << 20, 32, 4
    cells = [os.urandom(size) for _ in range(count)]
    shard = write_parquet(tmp_path / "0.parquet", {"image": cells}, row_group_size=group)
    program = (
        "import sys, pyarrow; from pathlib import Path; from harness.app.segment.sources import images_of\n"
        "count = sum(len(read()) for _, read in images_of(Path(sys.argv[1])))\n"
        "print(count, pyarrow.default_memory_pool().max_memory())"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        [sys.executable, "-c", program, str(shard)], capture_output=True, text=True, env=env, check=True
    )
    read, most = map(int, finished.stdout.split())
    assert read == size * count
    assert most < 3 * group * size
    zeros = write_parquet(tmp_path / "1.parquet", {"image": [bytes(size)] * 20})
    assert peak(zeros, tmp_path / "out") < 8 * size
