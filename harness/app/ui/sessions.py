"""Stores the state of a running page and of each browser tab: its photograph, its answers and its kept objects."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from harness.app.results.coco import AnnotatedImage, data_set, distinct_names
from harness.app.ui.encodings import Encodings, Logits, Masks, ModelQueue
from harness.app.ui.errors import UnknownSessionError
from harness.app.ui.photographs import ImageFolder, Photograph, Photographs
from harness.core.errors import HarnessError
from harness.runtime import Sam3
from harness.runtime.sam3.image_model import GROUNDING, INTERACTIVE, THRESHOLD

MOST_LOGITS = 64
"""Maximum number of a session's masks that can still be refined, the last ones; each takes 332 KB."""
MOST_KEPT = 1000
"""Maximum number of masks that a session keeps."""
MOST_SESSIONS = 64
"""Maximum number of sessions of a server, those that were used last."""
LONGEST_CATEGORY = 100


@dataclass(frozen=True, eq=False)
class Answer:
    """The last answer to a question, with its colours.

    Attributes:
        number: Number of the answer, from 1 in each session.
        photograph: The photograph.
        masks: The masks.
        first_color: Index of the first object's colour; the next objects have the next colours.
    """

    number: int
    photograph: Photograph
    masks: Masks
    first_color: int


@dataclass(frozen=True, eq=False)
class KeptObject:
    """An object that the user kept.

    Attributes:
        number: Number of the object, from 1 in each session.
        photograph: Its photograph.
        annotation: An entry of `harness.app.results.coco.coco_annotations`; `category` is the user's.
        color: Index of its colour.
    """

    number: int
    photograph: Photograph
    annotation: dict[str, Any]
    color: int


@dataclass
class Session:
    """The session of a tab. Only the thread of the event loop changes it.

    Attributes:
        key: Its key on the page.
        photograph: The photograph that is shown.
        answer: The answer to the last question about it.
        kept_objects: The kept objects of all photographs, in the order in which they were kept.
        results: The masks of each prompt of the last question for kinds, by photograph, prompt as text and threshold.
    """

    key: str
    photograph: Photograph | None = None
    answer: Answer | None = None
    kept_objects: list[KeptObject] = field(default_factory=list)
    results: dict[tuple[Photograph, str, float], Masks] = field(default_factory=dict)
    _logits: OrderedDict[int, Logits] = field(default_factory=OrderedDict)
    _answers: int = 0
    _numbers: int = 0

    def choose(self, photograph: Photograph) -> Photograph:
        """Shows a photograph, and returns it; kept objects of others stay."""
        if self.photograph != photograph:
            self.photograph, self.answer = photograph, None
            self._logits.clear()
        return photograph

    def add_answer(self, photograph: Photograph, masks: Masks) -> Answer:
        """Stores an answer."""
        self._answers += 1
        first_color = max((item.color + 1 for item in self.kept_objects), default=0)
        answer = Answer(self._answers, photograph, masks, first_color)
        if photograph == self.photograph:
            self.answer = answer
            if masks.logits is not None:
                self._logits[answer.number] = masks.logits
                if len(self._logits) > MOST_LOGITS:
                    self._logits.popitem(last=False)
        return answer

    def logits(self, answer: int) -> Logits:
        """Returns the mask of an earlier answer, to refine it.

        Raises:
            HarnessError: There is no answer of that number, or it is too old.
        """
        if answer not in self._logits:
            raise HarnessError(f"There is no mask {answer} to refine; clear the clicks and begin again.")
        return self._logits[answer]

    def object_annotation(self, answer: int, index: int) -> dict[str, Any]:
        """Returns an object of the last answer.

        Raises:
            HarnessError: The number is not that of the last answer, or the answer has no such object.
        """
        if self.answer is None or self.answer.number != answer:
            raise HarnessError("These masks are out of date; ask again.")
        if not 0 <= index < len(self.answer.masks.annotations):
            raise HarnessError(f"There is no mask {index}; the last answer has {len(self.answer.masks.annotations)}.")
        return self.answer.masks.annotations[index]

    def keep(self, answer: int, indices: Sequence[int], category: str | None) -> None:
        """Keeps objects of the last answer, all or none.

        Args:
            answer: Number of the answer.
            indices: Indices of the objects in it.
            category: Their category; None for that of the prompt.

        Raises:
            HarnessError: There is no such object, the category is empty or too long, or too many would be kept.
        """
        annotations = [self.object_annotation(answer, index) for index in indices]
        if len(self.kept_objects) + len(indices) > MOST_KEPT:
            raise HarnessError(f"A tab keeps at most {MOST_KEPT} masks; download annotations.json, and remove some.")
        if category is not None:
            category = " ".join(category.split())
            if not category:
                raise HarnessError("The name of a mask is empty; give a noun phrase.")
            if len(category) > LONGEST_CATEGORY:
                raise HarnessError(f"The name of a mask has {len(category)} letters; give at most {LONGEST_CATEGORY}.")
            annotations = [annotation | {"category": category} for annotation in annotations]
        for index, annotation in zip(indices, annotations, strict=True):
            assert self.answer is not None
            self._numbers += 1
            color = self.answer.first_color + index
            self.kept_objects.append(KeptObject(self._numbers, self.answer.photograph, annotation, color))

    def find_kept(self, number: int) -> KeptObject:
        """Returns the kept object with a number.

        Raises:
            HarnessError: There is none.
        """
        for item in self.kept_objects:
            if item.number == number:
                return item
        raise HarnessError(f"There is no kept mask {number}; it was removed.")

    def drop(self, number: int) -> None:
        """Removes the kept object with a number.

        Raises:
            HarnessError: There is none.
        """
        self.kept_objects.remove(self.find_kept(number))

    def coco_data_set(self) -> dict[str, Any]:
        """Returns the data set of all kept objects, in COCO's format.

        Raises:
            HarnessError: There are none.
        """
        if not self.kept_objects:
            raise HarnessError("Nothing was kept yet; keep a mask first.")
        photographs = list(dict.fromkeys(item.photograph for item in self.kept_objects))
        images = [
            AnnotatedImage(
                name, photograph.size, [k.annotation for k in self.kept_objects if k.photograph == photograph]
            )
            for photograph, name in zip(photographs, file_names(photographs), strict=True)
        ]
        return data_set(images, [item.annotation["category"] for item in self.kept_objects])


def file_names(photographs: Sequence[Photograph]) -> list[str]:
    """Returns the names of photographs, with a number where an earlier one has the same name."""
    paths = [PurePath(photograph.name) for photograph in photographs]
    return distinct_names((path.stem, path.suffix) for path in paths)


class Sessions:
    """The sessions of a server that were used last."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def start(self) -> Session:
        """Returns a new session, whose key cannot be guessed."""
        session = Session(secrets.token_hex(16))
        self._sessions[session.key] = session
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def get(self, key: str) -> Session:
        """Returns a session.

        Raises:
            UnknownSessionError: There is none with this key.
        """
        session = self._sessions.get(key)
        if session is None:
            raise UnknownSessionError(
                f"The server does not know this page: it was restarted, or has served {MOST_SESSIONS} other tabs "
                "since; reload the page."
            )
        self._sessions.move_to_end(key)
        return session


@dataclass(frozen=True)
class Page:
    """The state of a page: a model, and its users in browsers.

    Attributes:
        model: The model; called in the queue's thread alone.
        abilities: Name, scale, target and precision of the model; `note`, the sentence that its weights are untrained,
            or None; `clicks`, the maximum number of points on one object, and `boxes`, that of boxes of a prompt for
            all of a kind, 0 where the model was compiled without such prompts; the default `threshold` of scores;
            `folder`, whether there is a folder of images to choose from.
        folder: The images of `--images`; None without this option.
        photographs: The uploaded photographs.
        encodings: The encoded photographs.
        queue: The calls that wait for the model.
        sessions: The state of each tab.
    """

    model: Sam3
    abilities: Mapping[str, Any]
    folder: ImageFolder | None
    photographs: Photographs
    encodings: Encodings
    queue: ModelQueue
    sessions: Sessions


def make_page(
    model: Sam3, name: str, folder: ImageFolder | None, files: Path, note: str | None, most_encoded: int
) -> Page:
    """Makes the state of a page that nobody has opened yet.

    Args:
        model: The model; called in the queue's thread alone.
        name: Name of the model on the page.
        folder: Images to choose from.
        files: Folder for uploads.
        note: The note about the weights for users.
        most_encoded: Maximum number of cached encoded photographs.
    """
    manifest = model.manifest
    answers_clicks = all(entry in manifest.entries for entry in INTERACTIVE)
    answers_kinds = all(entry in manifest.entries for entry in GROUNDING)
    abilities = {
        "name": name,
        "scale": manifest.scale,
        "target": manifest.target,
        "precision": manifest.precision,
        "note": note,
        "clicks": model.description.capacity.clicks if answers_clicks else 0,
        "boxes": model.description.capacity.boxes if answers_kinds else 0,
        "threshold": THRESHOLD,
        "folder": folder is not None,
    }
    photographs = Photographs(files)
    encodings = Encodings(model, photographs, most_encoded)
    return Page(model, abilities, folder, photographs, encodings, ModelQueue(), Sessions())
