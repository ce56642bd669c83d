"""What a device keeps: whole files of the right content, those that were used last; and the words on the wire."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.errors import HarnessError
from harness.core.remote import Remote, chosen_remote
from harness.execution.remote import wire
from harness.execution.remote.store import Store
from harness.runtime.errors import Sam3Error


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def put(store: Store, content: bytes, age: float = 0.0) -> Path:
    store.receive(digest(content), len(content), 0, content)
    path = store.path(digest(content))
    os.utime(path, (time.time() - age,) * 2)
    return path


@given(parts=st.lists(st.binary(max_size=40), min_size=1, max_size=6))
def test_a_file_is_there_with_its_last_part(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    content = b"".join(parts)
    name, size, offset = digest(content), len(content), 0
    for part in parts:
        if offset == size and offset:  # only empty parts are left
            break
        if offset + len(part) < size:
            assert store.missing({name: size}) == [name]
        store.receive(name, size, offset, part)
        offset += len(part)
    assert store.missing({name: size}) == []
    assert store.path(name).read_bytes() == content
    assert [path.name for path in store.folder.iterdir()] == [name]


def test_other_content_and_missing_parts_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    name = digest(b"right")
    with pytest.raises(Sam3Error, match="arrived as"):
        store.receive(name, 5, 0, b"wrong")
    assert list(store.folder.iterdir()) == []
    store.receive(name, 5, 0, b"ri")
    with pytest.raises(Sam3Error, match="goes on at byte 3, 2 have arrived"):
        store.receive(name, 5, 3, b"ht")
    store.receive(name, 5, 0, b"ri")  # begun again
    store.receive(name, 5, 2, b"ght")
    assert store.missing({name: 5}) == []
    # What was cut off since is sent again.
    store.path(name).write_bytes(b"rig")
    assert store.missing({name: 5}) == [name]


@pytest.mark.parametrize("name", ["", "../" * 21 + "x", "A" * 64, "0" * 63])
def test_only_digests_name_files(tmp_path: Path, name: str) -> None:
    with pytest.raises(Sam3Error, match="is no SHA-256"):
        Store(tmp_path).receive(name, 1, 0, b"x")
    assert list(tmp_path.iterdir()) == []


def test_what_was_not_used_for_the_longest_time_goes_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, b"b" * 100, 9000)
    old = put(store, b"a" * 100, 8000)
    used, recent = put(store, b"c" * 100, 9500), put(store, b"d" * 100, 60)
    assert store.missing({used.name: 100}) == []  # which counts as use
    assert store.trim(400) == 0
    assert store.trim(350) == 100
    assert {path.name for path in tmp_path.iterdir()} == {old.name, used.name, recent.name}
    assert store.trim(0) == 100  # what was used within the hour may be in use
    assert {path.name for path in tmp_path.iterdir()} == {used.name, recent.name}


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Sam3Error, match="give another folder with --store"):
        Store(tmp_path / "file" / "store")


def test_the_words_on_the_wire_are_tvms() -> None:
    from tvm.rpc import base

    assert wire.MAGIC == base.RPC_MAGIC == base.RPC_CODE_SUCCESS
    assert wire.TRACKER_MAGIC == base.RPC_TRACKER_MAGIC
    assert wire.MISMATCH == base.RPC_CODE_MISMATCH
    assert {code.name: code.value for code in wire.Code}.items() <= vars(base.TrackerCode).items()


@pytest.mark.parametrize("key", ["", "a key", "a:key", " "])
def test_a_key_is_a_word(key: str) -> None:
    with pytest.raises(HarnessError, match="a word without spaces or colons"):
        Remote("127.0.0.1:9190", key)


def test_options() -> None:
    assert chosen_remote(None, "") is None
    remote = chosen_remote("host:9190", "rack")
    assert remote == Remote("host:9190", "rack")
    assert remote.flags == ("--remote", "host:9190", "--key", "rack")
    with pytest.raises(HarnessError, match="--key rack says nothing without --remote"):
        chosen_remote(None, "rack")
    named = chosen_remote("host:9190", "rack", Path("secret"))
    assert named is not None
    assert named.flags[4:] == ("--secret-file", "secret")
    with pytest.raises(HarnessError, match="--secret-file says nothing without --remote"):
        chosen_remote(None, "", Path("secret"))
