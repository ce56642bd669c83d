"""The array files and the cache: what was written comes back, and whatever was harmed is noticed and made again."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.sentences import sentence
from harness.core.errors import HarnessError
from harness.core.files import cache_root
from harness.parity.arrays import CorruptFile, arrays_digest, read_arrays, write_arrays
from harness.parity.cache import ArrayCache, load_outputs, save_outputs, saved_root, versions

REPOSITORY = Path(__file__).parents[2]
KEY = {"kind": "oracle", "scale": "shallow", "seed": 0}


def some_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "zeta": rng.normal(size=(3, 4)).astype(np.float32).T,
        "empty/x": np.zeros((0, 4), np.float32),
        "scalar": np.array(2.5),
        "complex": rng.normal(size=(2, 3)) * (1 + 2j),
        "complex64": np.array(1 + 1j, np.complex64),
        "mask": np.array([[True], [False]]),
        "ids": np.arange(5, dtype=np.int64),
        "big endian": np.arange(5, dtype=">i4"),
        "half": np.ones(3, np.float16),
        "bf16": np.ones(3, ml_dtypes.bfloat16),
        "every second": np.arange(10.0)[::2],
        "special": np.array([np.nan, np.inf, -0.0], np.float32),
    }


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert list(a) == list(b)
    for name in a:
        assert a[name].shape == b[name].shape
        assert a[name].dtype.newbyteorder("=") == b[name].dtype.newbyteorder("=")
        assert np.ascontiguousarray(a[name]).astype(b[name].dtype).tobytes() == b[name].tobytes()


def count_calls(arrays: dict[str, np.ndarray], calls: list[int]):
    def make() -> dict[str, np.ndarray]:
        calls.append(1)
        return arrays

    return make


def never() -> dict[str, np.ndarray]:
    raise AssertionError("made although it is there")


def test_every_kind_of_array_comes_back(tmp_path):
    write_arrays(tmp_path / "a.safetensors", some_arrays(), "tag")
    assert_same(some_arrays(), read_arrays(tmp_path / "a.safetensors", "tag"))


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int64, np.bool_, np.complex64, np.complex128, np.uint8]),
        hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
    )
)
def test_any_array_comes_back(tmp_path_factory, array):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    write_arrays(path, {"x": array, "t": array.T})
    assert_same({"x": array, "t": array.T}, read_arrays(path))


@pytest.mark.parametrize("value", [np.array(["text"]), np.array([object()]), [1.0, 2.0]])
def test_what_is_no_array_of_numbers_is_refused(tmp_path, value):
    with pytest.raises(TypeError, match="x is not an array of numbers"):
        write_arrays(tmp_path / "a.safetensors", {"x": value})
    assert list(tmp_path.iterdir()) == []


def test_no_flipped_byte_goes_unnoticed(tmp_path):
    """Every single byte of a file, header included: a flip is noticed or has changed nothing that is read."""
    path = tmp_path / "a.safetensors"
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "m": np.array([True, False, True])}
    write_arrays(path, arrays, "tag")
    good = path.read_bytes()
    noticed = 0
    for position in range(len(good)):
        for flip in (0x01, 0x80):
            path.write_bytes(good[:position] + bytes([good[position] ^ flip]) + good[position + 1 :])
            try:
                found = read_arrays(path, "tag")
            except CorruptFile:
                noticed += 1
            else:
                assert_same(arrays, found)
    assert noticed > 1.9 * len(good)


def test_no_truncation_goes_unnoticed(tmp_path):
    path = tmp_path / "a.safetensors"
    write_arrays(path, {"x": np.arange(6, dtype=np.float32)}, "tag")
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(CorruptFile):
            read_arrays(path, "tag")
    path.write_bytes(good + b"\0")
    with pytest.raises(CorruptFile):
        read_arrays(path, "tag")


def test_a_digest_depends_on_names_order_types_shapes_and_values():
    x = np.arange(4, dtype=np.float32)
    digests = {
        arrays_digest({"x": x}),
        arrays_digest({"y": x}),
        arrays_digest({"x": x.reshape(2, 2)}),
        arrays_digest({"x": x.astype(np.float64)}),
        arrays_digest({"x": x.view(np.int32)}),
        arrays_digest({"x": x + 1}),
        arrays_digest({"x": x, "y": x}),
    }
    assert len(digests) == 7
    assert arrays_digest({"x": np.arange(8, dtype=np.float32)[::2] / 2}) == arrays_digest({"x": x})


# --- the cache ---


def test_an_entry_is_made_once_and_the_order_of_the_key_does_not_matter(tmp_path):
    calls: list[int] = []
    cache = ArrayCache(tmp_path / "cache")
    assert_same(cache.get_or_make(KEY, count_calls(some_arrays(), calls)), some_arrays())
    reordered = dict(reversed(KEY.items()))
    assert_same(some_arrays(), ArrayCache(tmp_path / "cache").get_or_make(reordered, never))
    assert calls == [1]


def test_every_part_of_the_key_matters(tmp_path):
    cache = ArrayCache(tmp_path)
    for value in range(3):
        made = cache.get_or_make({**KEY, "seed": value}, lambda value=value: {"x": np.array([value])})
        assert made["x"] == [value]
    assert len(list(tmp_path.glob("??/*.safetensors"))) == 3


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-3]),
        lambda path: path.write_bytes(path.read_bytes()[:-3] + b"abc"),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff" * 4096),
        lambda path: path.write_text("not a cache entry at all, but a letter to the editor"),
    ],
    ids=["truncated", "changed", "empty", "noise", "text"],
)
def test_a_corrupted_entry_is_noticed_thrown_away_and_made_again(tmp_path, caplog, harm):
    cache = ArrayCache(tmp_path)
    cache.get_or_make(KEY, some_arrays)
    harm(cache.path(KEY))
    calls: list[int] = []
    with caplog.at_level(logging.WARNING):
        assert_same(cache.get_or_make(KEY, count_calls(some_arrays(), calls)), some_arrays())
    assert calls == [1]
    assert "thrown away and made again" in caplog.text
    assert_same(some_arrays(), cache.get_or_make(KEY, never))


def test_an_entry_of_another_key_is_not_taken_for_this_one(tmp_path, caplog):
    cache = ArrayCache(tmp_path)
    cache.get_or_make({"other": 1}, lambda: {"x": np.zeros(3)})
    cache.path(KEY).parent.mkdir(exist_ok=True)
    cache.path({"other": 1}).rename(cache.path(KEY))
    assert_same(cache.get_or_make(KEY, some_arrays), some_arrays())
    assert "another key" in caplog.text


def test_a_failure_to_make_leaves_nothing_behind(tmp_path):
    cache = ArrayCache(tmp_path)

    def fail() -> dict[str, np.ndarray]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.get_or_make(KEY, fail)
    assert list(tmp_path.glob("??/*.safetensors*")) == []
    assert_same(cache.get_or_make(KEY, some_arrays), some_arrays())


def test_a_key_that_is_not_json_is_refused(tmp_path):
    for value in ({1, 2}, float("nan"), object()):
        with pytest.raises((TypeError, ValueError)):
            ArrayCache(tmp_path).get_or_make({"bad": value}, never)


def test_the_entries_that_were_not_used_for_longest_are_pruned(tmp_path):
    cache = ArrayCache(tmp_path, limit_bytes=30_000)

    def big() -> dict[str, np.ndarray]:
        return {"x": np.zeros(1000)}

    for age, name in enumerate(("old", "used", "young")):
        cache.get_or_make({"name": name}, big)
        os.utime(cache.path({"name": name}), (1000 + age, 1000 + age))
    cache.get_or_make({"name": "old"}, never)  # used again: now `used` is the one that waited longest
    cache.get_or_make({"name": "new"}, big)
    assert not cache.path({"name": "used"}).exists()
    assert all(cache.path({"name": name}).exists() for name in ("old", "young", "new"))


WORKER = """
import json, sys, time
from pathlib import Path
import numpy as np
from harness.parity.cache import ArrayCache
root, log, delay = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
def make():
    with log.open("a") as file:
        file.write("made\\n")
    time.sleep(delay)
    return {"x": np.arange(50_000, dtype=np.float64)}
print(float(ArrayCache(root).get_or_make({"kind": "shared"}, make)["x"].sum()))
"""


def start(*arguments: object, code: str = WORKER) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_that_want_the_same_entry_make_it_once(tmp_path):
    workers = [start(tmp_path / "cache", tmp_path / "log", 0.5) for _ in range(4)]
    results = [worker.communicate(timeout=240) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0, 0], results
    assert {out.strip() for out, _ in results} == {"1249975000.0"}
    assert (tmp_path / "log").read_text() == "made\n"


def test_a_killed_process_blocks_nobody(tmp_path):
    killed = start(tmp_path / "cache", tmp_path / "log", 60)
    deadline = time.monotonic() + 120
    while not (tmp_path / "log").exists():
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    survivor = start(tmp_path / "cache", tmp_path / "log", 0)
    out, err = survivor.communicate(timeout=120)
    assert (survivor.returncode, out.strip()) == (0, "1249975000.0"), err


FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy as np
from harness.core.errors import HarnessError
from harness.parity.cache import ArrayCache
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    ArrayCache(Path(sys.argv[1])).get_or_make({"kind": "big"}, lambda: {"x": np.zeros(100_000)})
except HarnessError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_a_file_that_does_not_fit_ends_in_one_sentence_and_leaves_nothing(tmp_path):
    worker = start(tmp_path, code=FULL_DISK)
    out, err = worker.communicate(timeout=120)
    assert worker.returncode == 0, err
    assert out.startswith("cannot write ") and "free some space" in out and out.count("\n") == 1
    assert list(tmp_path.glob("??/*.safetensors*")) == []


def test_a_root_that_cannot_be_a_folder_ends_in_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match=sentence("no-cache", root=tmp_path / "file" / "cache")):
        ArrayCache(tmp_path / "file" / "cache").get_or_make(KEY, some_arrays)


def test_the_root_is_where_the_user_wants_it(monkeypatch, tmp_path):
    monkeypatch.setenv("SAM3_TVM_CACHE", str(tmp_path / "here"))
    assert cache_root() == tmp_path / "here"
    monkeypatch.delenv("SAM3_TVM_CACHE")
    assert cache_root().name == "sam3-tvm" or "sam3-tvm" in cache_root().parts


# --- what a key is made of ---


def test_versions_name_what_a_result_depends_on():
    found = versions()
    assert {"torch", "torchvision", "sam3", "numpy", "cpu_capability", "threads"} <= set(found)
    assert found["numpy"] == np.__version__
    assert json.loads(json.dumps(found)) == found


# --- saved outputs ---


def test_saved_outputs_can_be_judged_again(tmp_path):
    save_outputs(tmp_path / "run", some_arrays())
    assert_same(some_arrays(), load_outputs(tmp_path / "run"))


def test_the_saved_outputs_that_were_not_used_for_longest_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setenv("SAM3_TVM_CACHE", str(tmp_path))
    saved = {name: saved_root() / name / "answer" for name in ("old", "used", "young", "new")}
    *before, new = saved.values()
    big = {"x": np.zeros(1000)}
    for age, folder in enumerate(before):
        os.utime(save_outputs(folder, big), (1000 + age, 1000 + age))
    ArrayCache(tmp_path).get_or_make(KEY, lambda: big)
    load_outputs(saved["old"])  # used again: now `used` is the one that waited longest
    save_outputs(new, big, limit_bytes=30_000)
    for folder in (saved["old"], saved["young"], new):
        assert_same(big, load_outputs(folder))
    with pytest.raises(HarnessError, match=sentence("nothing-saved")):
        load_outputs(saved["used"])
    assert_same(big, ArrayCache(tmp_path).get_or_make(KEY, never))
    assert_same(big, load_outputs(save_outputs(new, big, limit_bytes=0).parent))


def test_saved_outputs_that_are_missing_or_damaged_end_in_one_sentence(tmp_path):
    with pytest.raises(HarnessError, match=sentence("nothing-saved")):
        load_outputs(tmp_path)
    path = save_outputs(tmp_path, some_arrays())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(HarnessError, match=sentence("damaged-outputs")):
        load_outputs(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match=sentence("cannot-write")):
        save_outputs(tmp_path / "file", some_arrays())
