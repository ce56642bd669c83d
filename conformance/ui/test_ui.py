"""`sam3-tvm ui` as a user meets it: a real server, a real browser, and one sentence for every mistake."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image
from pycocotools.coco import COCO

from conformance.cli.test_installation import run_without
from conformance.support.examples import examples
from conformance.support.pages import ROOT, Served, chromium, lacking, run, served
from conformance.support.sentences import sentence
from harness.app.results.objects import decode_mask, run_lengths
from harness.app.ui.guard import hosts_of, refusal
from harness.app.ui.photographs import LONGEST_NAME, Photograph, plain_name
from harness.app.ui.sessions import file_names
from harness.runtime.sam3.image_model import GROUNDING, INTERACTIVE

FIXTURES = ROOT / "fixtures" / "images"
CAT, COFFEE = FIXTURES / "cat.png", FIXTURES / "coffee.png"
SIZE = (451, 300)
PATIENCE = 120_000
"""Milliseconds for whatever the model does."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a photograph, a broken one, and a text."""
    folder = tmp_path_factory.mktemp("images")
    shutil.copy(CAT, folder / "cat.png")
    (folder / "broken.jpg").write_bytes(CAT.read_bytes()[:9000])
    (folder / "notes.txt").write_text("not an image")
    return folder


@pytest.fixture(scope="module")
def server(tiny_artifact: Path, images: Path) -> Iterator[Served]:
    with served(tiny_artifact, "--images", images, "--keep", "2") as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    opened = browser.new_context(viewport={"width": 1100, "height": 800}, accept_downloads=True)
    opened.set_default_timeout(PATIENCE)
    yield opened
    opened.close()


class Tab:
    """A tab with the page, and what a user does there."""

    def __init__(self, context: Any, url: str) -> None:
        self.page = context.new_page()
        self.faults: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self._console)
        self.page.goto(url)
        self.page.wait_for_function("() => !document.querySelector('.choose').disabled")

    def _console(self, message: Any) -> None:
        # The browser itself tells of every request that is refused, and those are shown as sentences.
        if message.type == "error" and "status of 422" not in message.text:
            self.faults.append(message.text)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector).strip()

    def wait(self, selector: str, pattern: str) -> None:
        """Waits until an element's text has a pattern."""
        self.page.wait_for_function(
            "([selector, pattern]) => new RegExp(pattern).test(document.querySelector(selector).innerText)",
            arg=[selector, pattern],
        )

    def upload(self, photograph: Path) -> None:
        self.page.set_input_files("#file", str(photograph))

    def open(self, photograph: Path) -> None:
        self.upload(photograph)
        self.wait("#name", re.escape(photograph.name))
        self.wait("#status", "Ready")

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a pixel of the photograph is on the screen."""
        frame = self.page.evaluate(
            "() => { const marks = document.getElementById('marks'), frame = marks.getBoundingClientRect();"
            " return [frame.left, frame.top, frame.width, frame.height, ...marks.getAttribute('viewBox').split(' ')] }"
        )
        left, top, width, height, _, _, columns, rows = map(float, frame)
        return left + x / columns * width, top + y / rows * height

    def click(self, x: float, y: float, **how: Any) -> None:
        self.page.mouse.click(*self.place(x, y), **how)

    def drag(self, x0: float, y0: float, x1: float, y1: float) -> None:
        self.page.mouse.move(*self.place(x0, y0))
        self.page.mouse.down()
        self.page.mouse.move(*self.place(x1, y1), steps=3)
        self.page.mouse.up()

    @property
    def parts(self) -> list[str]:
        return [item.inner_text().replace("×", "").strip() for item in self.page.query_selector_all("#parts li")]

    @property
    def score(self) -> str:
        return self.text("#found-list .score")

    def answered(self, do: Any) -> dict[str, Any]:
        """Does something, and gives the last answer that the server gives to it."""
        with self.page.expect_response(lambda response: re.search(r"/(object|kinds)$", response.url)) as waited:
            do()
        response = waited.value
        told = response.json()
        if response.ok:
            self.wait("#found-count", rf"^{len(told['objects'])}$")
            self.page.wait_for_function(
                "answer => !document.querySelector('#found-list a') ||"
                " document.querySelector('#found-list a').href.includes(`/answers/${answer}/`)",
                arg=told["answer"],
            )
        return dict(told)

    def downloaded(self, selector: str) -> tuple[str, bytes]:
        """Name and contents of a file that a link downloads."""
        with self.page.expect_download() as waited:
            self.page.click(selector)
        return waited.value.suggested_filename, Path(waited.value.path()).read_bytes()

    def painted(self) -> int:
        """How many pixels of the overlay have a colour."""
        return int(
            self.page.evaluate(
                "() => { const canvas = document.getElementById('overlay');"
                " const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
                " return data.filter((value, place) => place % 4 === 3 && value > 0).length }"
            )
        )


@pytest.fixture
def tab(context: Any, server: Served) -> Iterator[Tab]:
    opened = Tab(context, server.address)
    yield opened
    assert opened.faults == []


def segmented(tiny_artifact: Path, out: Path, *arguments: str) -> Path:
    """What `sam3-tvm segment` writes for the photograph."""
    done = run("segment", CAT, *arguments, "--model", tiny_artifact, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def numbers(part: str) -> str:
    """The coordinates of a part of the prompt, as the command takes them."""
    return ",".join(re.findall(r"[\d.]+", part))


def test_masks_of_clicks_are_those_of_the_command(tab: Tab, tiny_artifact: Path, tmp_path: Path) -> None:
    tab.open(CAT)
    assert "meaningless" in tab.text("#untrained")
    one = tab.answered(lambda: tab.click(200, 150))
    (point,) = tab.parts
    x, y = map(float, numbers(point).split(","))
    assert abs(x - 200) < 1 and abs(y - 150) < 1
    expected = segmented(tiny_artifact, tmp_path / "one", "--click", numbers(point))
    name, mask = tab.downloaded("#found-list a")
    assert name == "cat_000.png"
    assert mask == (expected / "cat_masks" / "000.png").read_bytes()
    assert tab.score == f"{one['objects'][0]['score']:.3f}"
    with Image.open(expected / "cat_masks" / "000.png") as file:
        assert tab.painted() == np.asarray(file).sum()
    tab.page.click("#keep")
    tab.wait("#kept-count", "1")
    assert tab.parts == [], "the next object is clicked from the beginning"
    name, data_set = tab.downloaded("#coco")
    assert name == "annotations.json"
    assert data_set == (expected / "annotations.json").read_bytes()
    _, kept = tab.downloaded("#kept-list a")
    assert kept == mask

    tab.answered(lambda: tab.click(300, 100))
    tab.answered(lambda: tab.click(40, 30, button="right"))
    several = tab.answered(lambda: tab.drag(60, 20, 400, 290))
    box, positive, negative = tab.parts
    assert (positive[0], negative[0]) == ("+", "−")
    corners = ",".join(
        str(value) for value in json.loads(tab.page.evaluate("sessionStorage.prompt"))["states"][-1]["box"]
    )
    expected = segmented(
        tiny_artifact, tmp_path / "several",
        "--click", numbers(positive), "--click-out", numbers(negative), "--click-box", corners,
    )  # fmt: skip
    _, mask = tab.downloaded("#found-list a")
    assert mask == (expected / "cat_masks" / "000.png").read_bytes()
    entry = COCO(str(expected / "annotations.json")).dataset["annotations"][0]
    assert several["objects"][0]["score"] == entry["score"]
    assert box.startswith("Box 60, 20, 400, 29")


def test_all_of_a_kind_is_what_the_command_finds(tab: Tab, tiny_artifact: Path, tmp_path: Path) -> None:
    tab.open(CAT)
    tab.page.check("input[value=kinds]", force=True)
    tab.page.fill("#text", "cat")
    tab.answered(lambda: tab.page.press("#text", "Enter"))
    tab.page.fill("#text", "dog")
    both = tab.answered(lambda: tab.page.press("#text", "Enter"))
    assert tab.parts == ["cat", "dog"]
    assert {entry["category"] for entry in both["objects"]} == {"cat", "dog"}
    tab.page.click("#keep")
    tab.wait("#kept-count", f"^{len(both['objects'])}$")
    expected = segmented(tiny_artifact, tmp_path / "out", "--text", "cat", "--text", "dog")
    _, data_set = tab.downloaded("#coco")
    assert data_set == (expected / "annotations.json").read_bytes()
    (tmp_path / "page.json").write_bytes(data_set)
    loaded = COCO(str(tmp_path / "page.json"))
    first = loaded.loadAnns(1)[0]
    np.testing.assert_array_equal(loaded.annToMask(first), decode_mask(both["objects"][0]["segmentation"]))
    _, mask = tab.downloaded("#found-list li:nth-child(2) a")
    assert mask == (expected / "cat_masks" / "001.png").read_bytes()

    tab.page.evaluate("scrollTo(0, 0)")
    tab.answered(lambda: tab.drag(100, 100, 300, 200))
    tab.wait("#error-text", sentence("several-texts", distinct=2))
    assert tab.parts == ["cat", "dog"], "what is refused is taken back"
    assert tab.text("#kept-count") == tab.text("#found-count"), "and nothing is lost"
    tab.answered(lambda: tab.page.click("#parts li:nth-child(2) button"))
    boxed = tab.answered(lambda: tab.drag(100, 100, 300, 200))
    assert boxed["objects"] and tab.parts[0] == "cat" and tab.parts[1].startswith("+ box 100, 100, 300, 200")
    assert tab.page.is_hidden("#error")


def test_points_come_and_go(tab: Tab) -> None:
    tab.open(CAT)
    first = tab.answered(lambda: tab.click(200, 150))
    before, painted = tab.score, tab.painted()
    tab.page.keyboard.down("Shift")
    second = tab.answered(lambda: tab.click(30, 30))
    tab.page.keyboard.up("Shift")
    assert [part[0] for part in tab.parts] == ["+", "−"]
    assert second["objects"] != first["objects"]
    tab.answered(lambda: tab.click(31, 31))
    assert [part[0] for part in tab.parts] == ["+"], "a click on a point removes it"
    assert (tab.score, tab.painted()) == (before, painted)
    tab.answered(lambda: tab.page.click("#undo"))
    assert [part[0] for part in tab.parts] == ["+", "−"]
    tab.page.check("input[name=sign][value='0']", force=True)
    tab.answered(lambda: tab.click(60, 250))
    assert [part[0] for part in tab.parts] == ["+", "−", "−"]
    tab.page.click("#clear")
    tab.wait("#found-count", "^$")
    assert (tab.parts, tab.painted()) == ([], 0)
    tab.answered(lambda: tab.page.keyboard.press("Control+z"))
    assert len(tab.parts) == 3


def test_a_mask_is_refined_and_undone(tab: Tab) -> None:
    tab.open(CAT)
    tab.answered(lambda: tab.click(200, 150))
    fresh = tab.answered(lambda: tab.click(300, 100))
    tab.answered(lambda: tab.page.click("#undo"))
    tab.page.check("#refine")
    refined = tab.answered(lambda: tab.click(300, 100))
    assert refined["objects"][0]["score"] != fresh["objects"][0]["score"]
    tab.answered(lambda: tab.click(100, 100))
    again = tab.answered(lambda: tab.page.click("#undo"))
    assert again["objects"] == refined["objects"], "the same mask is refined again"


def test_more_clicks_than_were_compiled(tab: Tab, client: httpx.Client) -> None:
    tab.open(CAT)
    most = client.get("/api/model").json()["clicks"]
    for number in range(most):
        tab.answered(lambda number=number: tab.click(20 + 50 * (number % 8), 60 + 80 * (number // 8)))
    last = tab.score
    tab.answered(lambda: tab.click(225, 260))
    tab.wait("#error-text", sentence("too-many", points=most + 1, clicks=most))
    assert len(tab.parts) == most
    assert tab.score == last
    tab.page.click("#dismiss")
    assert tab.page.is_hidden("#error")


def test_whatever_the_zoom(context: Any, server: Served) -> None:
    """A click means the same pixel on a phone, and where a part of the enlarged photograph is shown."""
    tab = Tab(context, server.address)
    tab.page.set_viewport_size({"width": 390, "height": 780})
    tab.open(CAT)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
    tab.page.fill("#zoom", "5")
    tab.page.evaluate(
        "() => { const all = document.getElementById('scroll'); all.scrollLeft = 700; all.scrollTop = 200 }"
    )
    tab.page.evaluate("document.getElementById('scroll').scrollIntoView()")
    tab.answered(lambda: tab.click(200, 100))
    x, y = map(float, numbers(tab.parts[0]).split(","))
    assert abs(x - 200) < 0.5 and abs(y - 100) < 0.5
    assert tab.faults == []


def test_by_keyboard(tab: Tab) -> None:
    tab.open(CAT)
    tab.page.focus("#marks")
    for _ in range(3):
        tab.page.keyboard.press("ArrowRight")
    tab.answered(lambda: tab.page.keyboard.press("Enter"))
    tab.page.keyboard.press("Shift+ArrowUp")
    tab.answered(lambda: tab.page.keyboard.press("Shift+Enter"))
    assert [part[0] for part in tab.parts] == ["+", "−"]
    tab.page.keyboard.press("b")
    tab.page.keyboard.press("Shift+ArrowDown")
    tab.page.keyboard.press("Shift+ArrowLeft")
    tab.answered(lambda: tab.page.keyboard.press("b"))
    assert tab.parts[0].startswith("Box")
    tab.page.keyboard.press("Shift+ArrowRight")
    tab.answered(lambda: tab.page.keyboard.press("Enter"))
    assert len(tab.parts) == 2, "Enter at a point removes it, as a click does"


def test_two_tabs_at_once(context: Any, server: Served) -> None:
    """Each waits for its turn and says so; none sees or loses what is the other's; a reload loses nothing.

    The server keeps two encoded photographs: the first of three is encoded again when it is asked again.
    """
    one, other = Tab(context, server.address), Tab(context, server.address)
    one.open(CAT)
    cat = one.answered(lambda: one.click(200, 150))
    one.upload(COFFEE)
    one.wait("#status", "Encoding")
    other.upload(FIXTURES / "coffee_tall.png")
    other.wait("#status", "Waiting for another tab: 1 request first")
    other.wait("#name", "coffee_tall.png")
    one.answered(lambda: one.click(300, 200))
    other.answered(lambda: other.click(60, 200))
    assert one.text("#name") == "coffee.png, 600 × 400"
    other.page.fill("#category", "cup")
    other.page.click("#keep")
    other.wait("#kept-list", "cup")
    assert one.text("#kept-count") == ""
    answer = one.text("#found-list")
    one.page.reload()
    one.wait("#name", "coffee.png")
    one.wait("#found-count", "1")
    assert one.text("#found-list") == answer
    other.page.reload()
    other.wait("#kept-list", "cup")
    _, data_set = other.downloaded("#coco")
    entry = json.loads(data_set)
    assert [image["file_name"] for image in entry["images"]] == ["coffee_tall.png"]
    assert [category["name"] for category in entry["categories"]] == ["cup"]
    other.page.click("#kept-list button")
    other.wait("#kept-empty", "Nothing yet")
    one.upload(CAT)
    one.wait("#status", "Encoding")
    one.wait("#status", "Ready")
    assert one.answered(lambda: one.click(200, 150))["objects"] == cat["objects"]
    assert one.faults + other.faults == []


def test_of_two_photographs_chosen_quickly_the_last_is_asked(tab: Tab, tmp_path: Path) -> None:
    pixels = np.random.default_rng(7).integers(0, 256, (3000, 4000, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "large.png")
    with tab.page.expect_response(lambda response: "name=large.png" in response.url) as large:
        tab.upload(tmp_path / "large.png")
        tab.open(CAT)
        first = tab.answered(lambda: tab.click(200, 150))
    assert large.value.ok
    assert tab.text("#name") == "cat.png, 451 × 300"
    tab.page.check("#refine")
    refined = tab.answered(lambda: tab.click(300, 100))
    assert refined["photograph"] == first["photograph"] and tab.page.is_hidden("#error")
    tab.page.click("#keep")
    tab.wait("#kept-list", "cat.png")


def test_without_locks_a_reload_loses_nothing_and_a_copied_tab_has_a_session_of_its_own(
    context: Any, server: Served
) -> None:
    """Browsers have locks on this machine and by HTTPS alone, not at an address of the network."""
    context.add_init_script("Object.defineProperty(navigator, 'locks', { value: undefined })")
    tab = Tab(context, server.address)
    tab.open(CAT)
    tab.answered(lambda: tab.click(200, 150))
    tab.page.click("#keep")
    tab.wait("#kept-count", "1")
    key = tab.page.evaluate("sessionStorage.session")
    for _ in range(2):
        tab.page.reload()
        tab.wait("#name", "cat.png")
        tab.wait("#kept-count", "1")
        assert tab.page.evaluate("sessionStorage.session") == key
    copied = Tab(context, server.url)
    copied.page.evaluate(f"sessionStorage.session = '{key}'")
    copied.page.reload()
    copied.wait("#kept-empty", "Nothing yet")
    assert copied.page.evaluate("sessionStorage.session") != key
    assert tab.faults + copied.faults == []


def test_the_address_without_its_token_is_refused(server: Served, browser: Any) -> None:
    token = server.address.rpartition("=")[2]
    for path in (
        "/",
        "/api/images",
        "/static/main.js",
        "/?token=",
        f"/?token={token[:-1]}",
        f"/?token={token}x",
        "/?token=é",
    ):
        for how in ({}, {"Cookie": "sam3-tvm=1"}, {"Cookie": f"token={token}"}):
            told = httpx.get(f"{server.url.rstrip('/')}{path}", headers=how)
            assert (told.status_code, "set-cookie" in told.headers) == (403, False), path
            assert told.text == "Refused: open the page by the address that `sam3-tvm ui` printed, which has a token.\n"
    refused = httpx.post(f"{server.url}api/sessions")
    assert refused.status_code == 403
    with server.client() as client:
        assert client.get("/api/images").status_code == 200
        assert client.post("/api/sessions").status_code == 201
    first = httpx.get(server.address).headers["set-cookie"]
    assert "HttpOnly" in first and "SameSite=Strict" in first
    context = browser.new_context()
    tab = Tab(context, server.address)
    assert tab.page.url == server.url, "the token is not left in the browser's history"
    tab.page.reload()
    tab.wait("#model", "tiny scale")
    context.close()


def test_a_folder_with_a_broken_file(tab: Tab) -> None:
    tab.wait("#image-list", sentence("damaged", name="broken.jpg"))
    assert "notes.txt" not in tab.text("#image-list")
    tab.page.click("#image-list button:has-text('cat.png')")
    tab.wait("#name", "cat.png, 451 × 300")
    tab.wait("#status", "Ready")
    tab.answered(lambda: tab.click(200, 150))
    marks = tab.parts
    tab.page.set_input_files("#file", {"name": "broken.png", "mimeType": "image/png", "buffer": b"no image at all"})
    tab.wait("#error-text", sentence("unknown-format", name="The image broken.png"))
    assert tab.text("#name") == "cat.png, 451 × 300"
    assert tab.parts == marks and tab.score


@pytest.mark.parametrize(
    ("entries", "shown", "path", "body", "code"),
    [
        (INTERACTIVE, "kinds", "object", {"points": [[1, 1]]}, "no-clicks"),
        (GROUNDING, "object", "kinds", {"texts": ["cat"]}, "no-grounding"),
    ],
    ids=["without clicks", "without grounding"],
)
def test_half_a_folder(
    tiny_artifact: Path, tmp_path: Path, browser: Any, entries: Any, shown: str, path: str, body: Any, code: str
) -> None:
    folder = lacking(tiny_artifact, tmp_path / "half", entries)
    with served(folder) as started, started.client() as client:
        context = browser.new_context()
        tab = Tab(context, started.address)
        tab.wait("#model", "half: tiny scale")
        tab.wait("#hint", "Click on" if shown == "object" else "Type what")
        assert tab.page.is_hidden("#mode")
        assert tab.page.is_visible("#text") == (shown == "kinds")
        assert tab.page.is_visible("#refine") == (shown == "object")
        root, key = session(client)
        refused = client.post(f"{root}/{path}", json={"photograph": key, **body})
        assert refused.status_code == 422 and re.search(sentence(code), refused.json()["error"]), refused.text
        assert tab.faults == []
        context.close()


def session(client: httpx.Client) -> tuple[str, str]:
    """The URL of a new session that shows the photograph, and the photograph's key."""
    root = f"/api/sessions/{client.post('/api/sessions').json()['session']}"
    shown = client.put(f"{root}/photograph", params={"name": "cat.png"}, content=CAT.read_bytes()).json()
    return root, shown["key"]


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[httpx.Client]:
    with server.client() as opened:
        yield opened


@pytest.fixture(scope="module")
def asked(client: httpx.Client) -> tuple[str, str]:
    return session(client)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("object", '{"points": [[452, 1]]}', sentence("outside", index=1, x=452, y=1, width=451, height=300)),
        ("object", '{"points": [[NaN, 1]]}', sentence("not-finite", index=1, row="nan, 1")),
        ("object", '{"points": [[1e999, 1]]}', sentence("not-finite", index=1, row="inf, 1")),
        ("object", '{"points": [[1, 2]], "labels": [2]}', sentence("wrong-labels", singular="point", raw="[2]")),
        ("object", '{"points": [[1, 2]], "labels": [0.5]}', "labels.0: Input should be a valid integer"),
        (
            "object",
            '{"points": [[1, 2]], "labels": []}',
            sentence("number-of-labels", singular="point", labels=0, count=1),
        ),
        ("object", json.dumps({"points": [[1, 2]] * 17}), sentence("too-many", points=17, clicks=16)),
        ("object", '{"points": [[1, 2], [3]]}', sentence("no-numbers", coordinates="x, y")),
        ("object", '{"points": "here"}', "points: Input should be a valid list"),
        ("object", '{"box": [9, 9, 5, 20]}', sentence("no-area", index=1, box="9, 9, 5, 20", fault="reversed")),
        ("object", '{"box": [500, 9, 600, 20]}', sentence("outside", index=1, box="500, 9, 600, 20")),
        ("object", "{}", sentence("nothing-asked")),
        ("object", '{"points": [[1, 2]], "refines": 9}', sentence("nothing-to-refine", answer=9)),
        ("object", '{"photograph": "other", "points": [[1, 2]]}', sentence("unknown-photograph")),
        ("object", "{", "it is not JSON"),
        ("kinds", "{}", sentence("nothing-asked")),
        ("kinds", '{"texts": [" "]}', sentence("empty-text")),
        ("kinds", r'{"texts": ["\ud800"]}', "half of a surrogate pair is no letter"),
        ("kinds", '{"texts": ["cat"], "threshold": NaN}', sentence("bad-threshold", threshold="nan")),
        ("kinds", '{"texts": ["cat", "dog"], "boxes": [[1, 2, 30, 40]]}', sentence("several-texts")),
        ("kinds", '{"boxes": [[1, 2, 30, 40]], "box_labels": [2]}', "box_labels.0: Input should be a valid boolean"),
        (
            "kinds",
            json.dumps({"boxes": [[1, 2, 30, 40]] * 49}),
            sentence("too-many", count=49, plural="boxes", limit=48),
        ),
        ("kept", '{"answer": 5, "indices": [0]}', sentence("outdated-masks")),
    ],
)
def test_a_bad_question_is_one_sentence(
    client: httpx.Client, asked: tuple[str, str], path: str, body: str, expected: str
) -> None:
    root, key = asked
    content = body if "photograph" in body else body.replace("{", f'{{"photograph": "{key}", ', 1).replace(", }", "}")
    told = client.post(f"{root}/{path}", content=content, headers={"Content-Type": "application/json"})
    assert told.status_code == 422, told.text
    assert re.search(expected, told.json()["error"])
    assert "\n" not in told.json()["error"]


def test_a_bad_request_is_one_sentence(client: httpx.Client, asked: tuple[str, str]) -> None:
    root, key = asked
    assert client.post(f"{root}/object", json={"photograph": key}).status_code == 422
    for told, status, expected in (
        (client.put(f"{root}/photograph"), 422, sentence("empty-file")),
        (
            client.put(f"{root}/photograph", content=b"text"),
            422,
            sentence("unknown-format", name="The image photograph"),
        ),
        (client.put(f"{root}/image", params={"name": "../cat.png"}), 422, sentence("no-such-image", name="../cat.png")),
        (
            client.put(f"{root}/image", params={"name": "broken.jpg"}),
            422,
            sentence("damaged", name="The image broken.jpg"),
        ),
        (client.get(f"{root}/annotations.json"), 422, sentence("nothing-kept")),
        (client.get(f"{root}/answers/1/0.png"), 422, sentence("outdated-masks")),
        (client.delete(f"{root}/kept/3"), 422, sentence("no-kept-mask", number=3)),
        (client.get("/api/photographs/none"), 422, sentence("unknown-photograph")),
        (client.get("/api/sessions/none"), 404, sentence("unknown-page")),
        (client.post("/api/sessions/none/encode?photograph=none"), 404, sentence("unknown-page")),
        (client.get("/nowhere"), 404, "Not Found"),
    ):
        assert told.status_code == status, told.text
        assert re.search(expected, told.json()["error"])
    state = client.get(root).json()
    assert state["photograph"]["name"] == "cat.png", "what was shown before still is"


@pytest.mark.parametrize(
    ("headers", "sentence"),
    [
        ({"Host": "evil.example"}, "'evil.example' is no name of this server"),
        ({"Host": "192.0.2.1:8363"}, "'192.0.2.1:8363' is no name of this server"),
        ({"Host": ""}, "is no name of this server"),
        ({"Origin": "http://evil.example"}, "comes from another page, 'http://evil.example'"),
        ({"Origin": "null"}, "comes from another page"),
    ],
)
def test_foreign_pages_are_refused(client: httpx.Client, headers: dict[str, str], sentence: str) -> None:
    for told in (client.get("/", headers=headers), client.post("/api/sessions", headers=headers)):
        assert told.status_code == 403
        assert sentence in told.text
        assert told.text.count("\n") == 1


@pytest.mark.law
@pytest.mark.parametrize(
    ("address", "host", "origin", "is_refused"),
    [
        ("127.0.0.1", "127.0.0.1:8363", "http://127.0.0.1:8363", False),
        ("127.0.0.1", "localhost:9000", "http://localhost:9000", False),
        ("127.0.0.1", "LOCALHOST", None, False),
        ("127.0.0.1", "[::1]:8363", None, False),
        ("127.0.0.1", "10.0.0.7:8363", None, True),
        ("127.0.0.1", "localhost.evil.example", None, True),
        ("127.0.0.1", "127.0.0.1.evil.example", None, True),
        ("127.0.0.1", "[::1", None, True),
        ("127.0.0.1", None, None, True),
        ("127.0.0.1", "127.0.0.1:8363", "http://127.0.0.1:8364", True),
        ("0.0.0.0", "10.0.0.7:8363", "http://10.0.0.7:8363", False),
        ("0.0.0.0", socket.gethostname(), None, False),
        ("0.0.0.0", "evil.example", None, True),
        ("gpu-box", "gpu-box:8363", None, False),
    ],
)
def test_who_is_refused(address: str, host: str | None, origin: str | None, is_refused: bool) -> None:
    assert (refusal(hosts_of(address), host, origin) is not None) == is_refused


def test_the_page_is_complete_by_itself(client: httpx.Client) -> None:
    """Nothing is loaded from elsewhere, and nobody may put the page into a frame."""
    static = ROOT / "harness" / "app" / "ui" / "static"
    for path in static.iterdir():
        told = client.get(f"/static/{path.name}")
        assert told.content == path.read_bytes()
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import", text), path
    policy = client.get("/").headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy


@examples(30, deadline=None)
@given(mask=arrays(bool, array_shapes(min_dims=2, max_dims=2, max_side=40)))
def test_the_page_decodes_cocos_run_lengths(decoder: Any, mask: np.ndarray) -> None:
    decoded = decoder.evaluate(
        "async (encoded) => Array.from((await import('/static/masks.js')).decode(encoded))", run_lengths(mask)
    )
    np.testing.assert_array_equal(np.array(decoded, bool).reshape(mask.shape[::-1]).T, mask)


@pytest.fixture(scope="module")
def decoder(browser: Any, server: Served) -> Any:
    page = browser.new_page()
    page.goto(server.address)
    return page


@given(name=st.text(max_size=300))
def test_names_of_uploads_are_file_names(name: str) -> None:
    plain = plain_name(name)
    assert plain and plain.isprintable() and not set(plain) & {"/", "\\"}
    assert len(plain) <= LONGEST_NAME + 11
    assert plain_name(f"C:\\photos/{'x' * 9}.png") == "xxxxxxxxx.png"


@given(names=st.lists(st.sampled_from(["a.png", "A.png", "a_2.png", "b.jpg", "c"]), max_size=6))
def test_images_of_a_data_set_have_different_names(names: list[str]) -> None:
    photographs = [Photograph(str(index), name, Path(), (1, 1)) for index, name in enumerate(names)]
    given_names = file_names(photographs)
    assert len({name.casefold() for name in given_names}) == len(names)
    assert given_names[:1] == names[:1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "nowhere"], sentence("no-model-folder", folder="nowhere")),
        (["--images", "nowhere"], sentence("no-such-path", path="nowhere")),
        (["--images", CAT], sentence("images-is-a-file", folder="cat.png")),
        (["--images", ROOT / "harness"], sentence("no-images", path="harness")),
        (["--port", "{taken}"], "Port {taken} of 127.0.0.1 is in use; give another with --port"),
        (["--host", "192.0.2.1"], "Cannot listen at 192.0.2.1"),
        (["--host", "no such host"], sentence("no-such-host", host="no such host")),
        (["--port", "70000"], "--port"),
        (["--threads", "0"], sentence("thread-count", count=0)),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[Any], expected: str, tiny_artifact: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = str(other.getsockname()[1])
        given_arguments = [taken if part == "{taken}" else part for part in arguments]
        model = () if "--model" in arguments else ("--model", tiny_artifact)
        done = run("ui", *model, *given_arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(expected.replace("{taken}", taken), done.stderr)
    assert "Traceback" not in done.stderr


def test_without_the_extra() -> None:
    done = run_without(("fastapi", "uvicorn"), "ui")
    assert done.returncode == 2
    assert re.fullmatch("error: " + sentence("not-installed", modules="fastapi and uvicorn"), done.stderr.strip())


def test_ctrl_c_leaves_nothing(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a photograph is encoded, the server ends quietly (see `served`) and removes what was uploaded."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with served(tiny_artifact) as started:
        assert "meaningless" in started.told
        with started.client() as client:
            root, key = session(client)
            assert [path.stat().st_size for path in tmp_path.glob("sam3-tvm-ui-*/*")] == [CAT.stat().st_size]
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{root}/encode", params={"photograph": key}, timeout=0.3)
            assert client.get(f"{root}/doing").json()["doing"] == "encoding"
    assert list(tmp_path.glob("sam3-tvm-ui-*")) == []
