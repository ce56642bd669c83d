"""What the page's server bounds, and what it shows, whoever asks; without a model, for none of it needs one."""

from __future__ import annotations

import asyncio
import io
import json
import random
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image

from conformance.support.mutations import mutated
from conformance.support.sentences import sentence
from harness.app.results.objects import run_lengths
from harness.app.ui import photographs, sessions
from harness.app.ui.app import make_app
from harness.app.ui.encodings import Encodings, Masks, ModelQueue
from harness.app.ui.guard import hosts_of
from harness.app.ui.photographs import ImageFolder, Photographs
from harness.app.ui.sessions import Page, Session, Sessions
from harness.core.errors import HarnessError
from harness.runtime import ObjectPrompt, Prompt
from harness.runtime.sam3.prompts import parse_boxes, parse_numbers

pytestmark = pytest.mark.law

ADDRESS, SECRET = "http://127.0.0.1:8363", "0123456789abcdef"


def png(width: int, height: int, level: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (level, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


class CoordinatesAlone:
    """In place of a model: checks coordinates as it does, and encodes nothing."""

    def set_image(self, pixels: np.ndarray) -> np.ndarray:
        return pixels

    def encode_object_prompt(self, prompt: ObjectPrompt, _size: tuple[int, int]) -> None:
        parse_numbers(prompt.points, "point", "points", "x, y")
        raise HarnessError("Nothing is predicted.")

    def encode_prompt(self, prompt: Prompt, _size: tuple[int, int]) -> None:
        parse_boxes(prompt.boxes)
        raise HarnessError("Nothing is found.")


@pytest.fixture
def page(tmp_path: Path) -> Page:
    (tmp_path / "files").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "large.png").write_bytes(png(64, 64))
    (tmp_path / "images" / "small.png").write_bytes(png(8, 8))
    model: Any = CoordinatesAlone()
    kept = Photographs(tmp_path / "files")
    abilities = {"name": "model", "clicks": 16, "boxes": 48, "threshold": 0.5, "folder": True}
    return Page(
        model, abilities, ImageFolder(tmp_path / "images"), kept, Encodings(model, kept, 4), ModelQueue(), Sessions()
    )


def asked(page: Page, questions: Callable[[httpx.AsyncClient, str], Awaitable[None]]) -> None:
    """Asks the page's server: a client, and the URL of a session."""

    async def ask() -> None:
        transport = httpx.ASGITransport(app=app_of(page), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=ADDRESS) as client:
            await client.get("/", params={"token": SECRET})
            session = (await client.post("/api/sessions")).json()["session"]
            await questions(client, f"/api/sessions/{session}")

    asyncio.run(ask())


def app_of(page: Page) -> FastAPI:
    return make_app(page, hosts_of("127.0.0.1"), SECRET)


def test_the_photograph_that_a_question_names_is_asked_whichever_upload_ends_first(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Photographs.add

    def slower_if_large(self: Photographs, content: bytes, name: str) -> Any:
        time.sleep(0.3 if name == "large.png" else 0)
        return add(self, content, name)

    monkeypatch.setattr(Photographs, "add", slower_if_large)

    async def questions(client: httpx.AsyncClient, root: str) -> None:
        first = asyncio.create_task(client.put(f"{root}/image", params={"name": "large.png"}))
        await asyncio.sleep(0.05)
        small = (await client.put(f"{root}/image", params={"name": "small.png"})).json()["key"]
        encoded = await client.post(f"{root}/encode", params={"photograph": small})
        assert encoded.status_code == 200 and encoded.json()["expected"] > 0
        assert (await first).status_code == 200
        assert (await client.get(root)).json()["photograph"]["name"] == "small.png"
        told = await client.post(f"{root}/object", json={"photograph": small, "points": [[1, 1]]})
        assert told.json()["error"] == "Nothing is predicted."
        told = await client.post(f"{root}/encode", params={"photograph": "none"})
        assert told.status_code == 422 and re.fullmatch(sentence("unknown-photograph"), told.json()["error"])

    asked(page, questions)


def test_a_question_has_no_more_than_a_megabyte(page: Page) -> None:
    async def questions(client: httpx.AsyncClient, root: str) -> None:
        for path, content in (("object", b"[" * (2**20 + 1)), ("kinds", b"x" * 30_000_000), ("kept", b" " * 2**21)):
            start = time.perf_counter()
            told = await client.post(f"{root}/{path}", content=content, headers={"Content-Type": "application/json"})
            assert (told.status_code, told.json()["error"]) == (413, "The request has more than 1 MB; send less.")
            assert time.perf_counter() - start < 1

        async def chunks() -> Any:
            for _ in range(40):
                yield b" " * 2**16

        told = await client.post(f"{root}/kinds", content=chunks(), headers={"Content-Type": "application/json"})
        assert told.status_code == 413
        small = (await client.put(f"{root}/image", params={"name": "small.png"})).json()["key"]
        points = [[1.5, 2]] * 80_000
        start = time.perf_counter()
        told = await client.post(f"{root}/object", json={"photograph": small, "points": points})
        assert told.json()["error"] == "Nothing is predicted."
        assert time.perf_counter() - start < 3

    asked(page, questions)


def test_an_upload_has_no_more_than_its_limit(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.app.ui.guard.LARGEST_UPLOAD", 2**21)

    async def questions(client: httpx.AsyncClient, root: str) -> None:
        told = await client.put(f"{root}/photograph", content=bytes(2**21 + 1))
        assert (told.status_code, told.json()["error"]) == (413, "The request has more than 2 MB; send less.")
        told = await client.put(f"{root}/photograph", params={"name": "a.png"}, content=png(900, 600))
        assert told.status_code == 200

    asked(page, questions)


def test_uploads_are_kept_up_to_a_total_those_that_were_used_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = [png(8, 8, level) for level in range(5)]
    monkeypatch.setattr(photographs, "MOST_BYTES", 3 * max(map(len, content)))
    kept = Photographs(tmp_path)
    first, *_ = [kept.add(each, f"{index}.png") for index, each in enumerate(content[:3])]
    assert kept.get(first.key) == first
    kept.add(content[3], "3.png")
    kept.add(content[3], "3.png")
    kept.add(content[4], "4.png")
    assert {Path(file).name for file in tmp_path.iterdir()} == set(kept._known)
    assert [each.name for each in kept._known.values()] == ["0.png", "3.png", "4.png"]
    monkeypatch.setattr(photographs, "MOST_BYTES", 1)
    last = kept.add(png(9, 9), "last.png")
    assert [file.name for file in tmp_path.iterdir()] == [last.key]
    assert kept.pixels(last).shape == (9, 9, 3)


def test_sessions_are_kept_up_to_a_number_those_that_were_used_last() -> None:
    known = Sessions()
    first, second = known.start(), known.start()
    for _ in range(sessions.MOST_SESSIONS - 1):
        known.get(first.key)
        known.start()
    assert known.get(first.key) is first
    with pytest.raises(HarnessError, match=sentence("unknown-page")):
        known.get(second.key)


def test_masks_are_kept_up_to_a_number_all_of_a_request_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MOST_KEPT", 5)
    session = Session("key")
    photograph = session.choose(Photographs(tmp_path).add(png(4, 4), "a.png"))
    entry = {"category": "cat", "score": 0.5, "segmentation": run_lengths(np.ones((4, 4), bool))}
    answer = session.add_answer(photograph, Masks((entry,) * 3, ()))
    session.keep(answer.number, [0, 1, 2], None)
    with pytest.raises(HarnessError, match=sentence("too-many-kept", most_kept=5)):
        session.keep(answer.number, [0, 1, 2], None)
    assert [kept.number for kept in session.kept_objects] == [1, 2, 3]
    session.keep(answer.number, [1, 2], "dog")
    assert [(kept.number, kept.annotation["category"], kept.color) for kept in session.kept_objects[3:]] == [
        (4, "dog", 1),
        (5, "dog", 2),
    ]


def test_a_thousand_kept_masks_are_told_at_once(page: Page) -> None:
    async def questions(client: httpx.AsyncClient, root: str) -> None:
        session = page.sessions.get(root.rpartition("/")[2])
        photograph = page.photographs.add(png(4, 4), "a.png")
        entry = {"category": "cat", "score": 0.5, "segmentation": run_lengths(np.ones((4, 4), bool))}
        session.choose(photograph)
        for _ in range(sessions.MOST_KEPT):
            session.keep(session.add_answer(photograph, Masks((entry,), ())).number, [0], None)
        start = time.perf_counter()
        told = (await client.get(root)).json()
        assert time.perf_counter() - start < 0.3
        assert len({kept["color"] for kept in told["kept"]}) > 300

    asked(page, questions)


def test_a_panorama_is_shown(page: Page) -> None:
    async def questions(client: httpx.AsyncClient, root: str) -> None:
        for width, media_type in ((65_500, "image/jpeg"), (65_501, "image/png"), (70_000, "image/png")):
            told = await client.put(f"{root}/photograph", params={"name": "wide.png"}, content=png(width, 2))
            shown = await client.get(f"/api/photographs/{told.json()['key']}")
            assert (shown.status_code, shown.headers["Content-Type"]) == (200, media_type)
            with Image.open(io.BytesIO(shown.content)) as picture:
                assert picture.size == (width, 2)

    asked(page, questions)


def test_an_origin_that_is_no_url_is_refused(page: Page) -> None:
    async def questions(client: httpx.AsyncClient, _root: str) -> None:
        for origin in ("http://[", "http://]", "://", "", "null", "evil://http://127.0.0.1:8363"):
            told = await client.get("/api/model", headers={"Origin": origin})
            assert (told.status_code, told.text.count("\n")) == (403, 1), origin
        assert (await client.get("/api/model", headers={"Origin": ADDRESS})).status_code == 200

    asked(page, questions)


@pytest.mark.parametrize(("method", "path"), [("PUT", "photograph"), ("POST", "object")])
def test_a_request_that_is_given_up_prints_nothing(
    method: str, path: str, page: Page, capfd: pytest.CaptureFixture[str]
) -> None:
    async def questions(client: httpx.AsyncClient, root: str) -> None:
        messages = [{"type": "http.request", "body": b"x" * 10, "more_body": True}, {"type": "http.disconnect"}]
        headers = {b"host": b"127.0.0.1:8363", b"cookie": "; ".join(f"{k}={v}" for k, v in client.cookies.items())}

        async def receive() -> Any:
            return messages.pop(0)

        async def send(_message: Any) -> None:
            pass

        scope = {
            "type": "http", "method": method, "path": f"{root}/{path}", "raw_path": b"", "query_string": b"name=a",
            "headers": [(name, value.encode() if isinstance(value, str) else value) for name, value in headers.items()],
            "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 8363), "client": ("1", 1), "root_path": "",
        }  # fmt: skip
        await app_of(page)(scope, receive, send)

    asked(page, questions)
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


QUESTIONS = {
    "object": {"photograph": "KEY", "points": [[1, 2.5], [3, 1]], "labels": [1, 0], "box": [1, 2, 3, 4]},
    "kinds": {
        "photograph": "KEY", "texts": ["dög"], "boxes": [[1, 2, 5, 6.5]], "box_labels": [True], "threshold": 0.5,
    },
    "kept": {"answer": 1, "indices": [0, 1, 2], "category": "cat"},
}  # fmt: skip


def test_mutated_questions_are_answered_in_one_sentence(page: Page, capfd: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(51)

    async def questions(client: httpx.AsyncClient, root: str) -> None:
        key = (await client.put(f"{root}/image", params={"name": "small.png"})).json()["key"]
        statuses = []
        for path, question in QUESTIONS.items():
            text, headers = json.dumps(question).replace("KEY", key).encode(), {"Content-Type": "application/json"}
            told = await client.post(f"{root}/{path}", content=text, headers=headers)
            assert ("Nothing is" in told.json()["error"]) == (path != "kept"), told.text
            for _ in range(150):
                told = await client.post(f"{root}/{path}", content=mutated(text, draw), headers=headers)
                sentence = told.json()["error"]
                assert told.status_code in (400, 422) and sentence.endswith(".") and "\n" not in sentence, told.text
                statuses.append("Nothing is" in sentence)
        assert 0.02 < np.mean(statuses) < 0.9

    asked(page, questions)
    assert capfd.readouterr().err == ""
