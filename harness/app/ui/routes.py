"""Defines the routes that the page's script calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from harness.app.results.objects import decode_mask
from harness.app.results.overlay import color_of, mask_png
from harness.app.segment.job import ANNOTATIONS
from harness.app.ui.encodings import Announce, Masks
from harness.app.ui.photographs import Photograph
from harness.app.ui.questions import KindsFields, ObjectFields, Text
from harness.app.ui.sessions import Answer, Page, Session
from harness.core.errors import HarnessError
from harness.core.files import json_text

router = APIRouter(prefix="/api")


def page_of(request: Request) -> Page:
    """Returns the state of the page that a request is for."""
    page: Page = request.app.state.page
    return page


ThePage = Annotated[Page, Depends(page_of)]


def session_of(session: str, page: ThePage) -> Session:
    """Returns the session that a URL names.

    Raises:
        UnknownSessionError: There is none.
    """
    return page.sessions.get(session)


TheSession = Annotated[Session, Depends(session_of)]


class ObjectQuestion(ObjectFields):
    """A prompt for one object of a photograph.

    Attributes:
        photograph: Key of the photograph.
        refines: Number of the answer whose mask is refined; None for none.
    """

    photograph: str
    refines: int | None = None


class KindsQuestion(KindsFields):
    """A prompt for all objects of one or several kinds on a photograph.

    Attributes:
        photograph: Key of the photograph.
    """

    photograph: str


class KeepRequest(BaseModel):
    """Objects of the last answer to keep.

    Attributes:
        answer: Number of the answer.
        indices: Indices of the objects.
        category: Their category; None for that of the prompt.
    """

    answer: int
    indices: list[int]
    category: Text | None = None


@router.get("/model")
async def get_model(page: ThePage) -> Mapping[str, Any]:
    """Returns the abilities of the page."""
    return page.abilities


@router.get("/images")
async def get_images(page: ThePage) -> dict[str, Any]:
    """Returns the images of the folder, and how many were not checked yet."""
    if page.folder is None:
        return {"images": [], "unchecked": 0}
    return page.folder.state()


@router.get("/photographs/{key}")
def get_photograph(key: str, page: ThePage) -> Response:
    """Returns a photograph as the model sees it."""
    content, media_type = page.photographs.preview(page.photographs.get(key))
    return Response(content, media_type=media_type, headers={"Cache-Control": "private, max-age=31536000, immutable"})


@router.post("/sessions", status_code=201)
async def start_session(page: ThePage) -> dict[str, Any]:
    """Starts a session."""
    return _state(page.sessions.start())


@router.get("/sessions/{session}")
async def get_session(session: TheSession) -> dict[str, Any]:
    """Returns the photograph and the kept objects of a session."""
    return _state(session)


@router.get("/sessions/{session}/doing")
async def get_doing(session: TheSession, page: ThePage) -> dict[str, Any]:
    """Returns the status of a session's call."""
    return page.queue.status(session.key) | {"expected": page.encodings.expected_seconds}


@router.put("/sessions/{session}/photograph", dependencies=[Depends(session_of)])
async def upload(page: ThePage, request: Request, name: str = "") -> dict[str, Any]:
    """Stores a photograph, whose file is the body of the request."""
    content = await request.body()
    if not content:
        raise HarnessError("The file is empty; choose an image.")
    return _described(await run_in_threadpool(page.photographs.add, content, name))


@router.put("/sessions/{session}/image", dependencies=[Depends(session_of)])
async def choose(page: ThePage, name: str) -> dict[str, Any]:
    """Stores an image of the folder as a photograph."""
    if page.folder is None:
        raise HarnessError("There is no folder of images; start the command with --images, or upload one.")
    content = await run_in_threadpool(page.folder.read, name)
    return _described(await run_in_threadpool(page.photographs.add, content, name))


@router.post("/sessions/{session}/encode")
async def encode(session: TheSession, page: ThePage, photograph: str) -> dict[str, Any]:
    """Shows a photograph, and encodes it if it is not encoded.

    The photograph is named here and in each question, and not shown by its upload, because the first of two uploads may
    take longer.
    """
    selected = session.choose(page.photographs.get(photograph))
    await page.queue.run(session.key, lambda announce: page.encodings.encode(selected, announce))
    return {"expected": page.encodings.expected_seconds}


@router.post("/sessions/{session}/object")
async def ask_object(session: TheSession, page: ThePage, question: ObjectQuestion) -> dict[str, Any]:
    """Predicts the best mask of one object."""
    photograph = session.choose(page.photographs.get(question.photograph))
    refined = None if question.refines is None else session.logits(question.refines)
    prompt = question.prompt(refined)
    page.model.encode_object_prompt(prompt, photograph.size)
    masks = await page.queue.run(session.key, partial(page.encodings.predict, photograph, prompt))
    return _answered(session.add_answer(photograph, masks))


@router.post("/sessions/{session}/kinds")
async def ask_kinds(session: TheSession, page: ThePage, question: KindsQuestion) -> dict[str, Any]:
    """Finds all objects of one or several kinds."""
    photograph = session.choose(page.photographs.get(question.photograph))
    prompts = question.prompts()
    for prompt in prompts:
        page.model.encode_prompt(prompt, photograph.size)

    keys = [(photograph, repr(prompt), question.threshold) for prompt in prompts]
    known_results = session.results

    def find(announce: Announce) -> list[Masks]:
        return [
            known_results.get(key) or page.encodings.find(photograph, prompt, question.threshold, announce)
            for key, prompt in zip(keys, prompts, strict=True)
        ]

    results = await page.queue.run(session.key, find)
    session.results = dict(zip(keys, results, strict=True))
    masks = Masks(
        tuple(entry for result in results for entry in result.annotations),
        tuple(dict.fromkeys(note for result in results for note in result.notes)),
    )
    return _answered(session.add_answer(photograph, masks))


@router.get("/sessions/{session}/answers/{answer}/{index}.png")
async def get_mask(session: TheSession, answer: int, index: int) -> Response:
    """Returns a mask of the last answer."""
    annotation = session.object_annotation(answer, index)
    return await _mask(annotation, f"{_stem(session.photograph)}_{index:03}.png")


@router.post("/sessions/{session}/kept", status_code=201)
async def keep(session: TheSession, body: KeepRequest) -> dict[str, Any]:
    """Keeps objects of the last answer."""
    session.keep(body.answer, body.indices, body.category)
    return _state(session)


@router.delete("/sessions/{session}/kept/{number}")
async def drop(session: TheSession, number: int) -> dict[str, Any]:
    """Removes a kept object."""
    session.drop(number)
    return _state(session)


@router.get("/sessions/{session}/kept/{number}.png")
async def get_kept_mask(session: TheSession, number: int) -> Response:
    """Returns the mask of a kept object."""
    item = session.find_kept(number)
    return await _mask(item.annotation, f"{_stem(item.photograph)}_kept_{number:03}.png")


@router.get("/sessions/{session}/annotations.json")
async def get_coco(session: TheSession) -> Response:
    """Returns the data set of all kept objects, in COCO's format."""
    text = json_text(session.coco_data_set())
    content = text.encode("utf-8", "backslashreplace")
    return Response(content, media_type="application/json", headers=_download(ANNOTATIONS))


def _state(session: Session) -> dict[str, Any]:
    photograph = session.photograph
    return {
        "session": session.key,
        "photograph": None if photograph is None else _described(photograph),
        "kept": [
            _object(item.annotation, item.color)
            | {"number": item.number, "photograph": item.photograph.key, "name": item.photograph.name}
            for item in session.kept_objects
        ],
    }


def _described(photograph: Photograph) -> dict[str, Any]:
    width, height = photograph.size
    return {"key": photograph.key, "name": photograph.name, "width": width, "height": height}


def _answered(answer: Answer) -> dict[str, Any]:
    annotations: Sequence[dict[str, Any]] = answer.masks.annotations
    return {
        "answer": answer.number,
        "photograph": answer.photograph.key,
        "objects": [_object(entry, answer.first_color + index) for index, entry in enumerate(annotations)],
        "notes": list(answer.masks.notes),
    }


def _object(annotation: dict[str, Any], color: int) -> dict[str, Any]:
    return annotation | {"color": "#{:02x}{:02x}{:02x}".format(*color_of(color))}


async def _mask(annotation: dict[str, Any], name: str) -> Response:
    content = await run_in_threadpool(lambda: mask_png(decode_mask(annotation["segmentation"])))
    return Response(content, media_type="image/png", headers=_download(name))


def _stem(photograph: Photograph | None) -> str:
    return "mask" if photograph is None else PurePath(photograph.name).stem


def _download(name: str) -> dict[str, str]:
    """Returns the headers of a file that a browser saves under a name (RFC 6266)."""
    return {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name.encode('utf-8', 'replace'))}",
        "Cache-Control": "no-store",
    }
