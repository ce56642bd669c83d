"""What each tab of a browser has chosen, asked and kept."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from harness.core.errors import HarnessError
from harness.segment.coco import AnnotatedImage, data_set
from harness.ui.encodings import Logits, Masks
from harness.ui.photographs import Photograph

MOST_LOGITS = 64
"""Masks of a session that can still be refined, the last ones; each takes 332 KB."""
MOST_KEPT = 1000
"""Masks that a session keeps."""
MOST_SESSIONS = 64
"""Sessions that a server knows, those that were used last."""
LONGEST_CATEGORY = 100


class UnknownSessionError(HarnessError):
    """A session that this server does not know."""


@dataclass(frozen=True, eq=False)
class Answer:
    """What was found last, and where its colours begin.

    Attributes:
        number: Counted from 1 in each session.
        photograph: In what.
        masks: What.
        first_color: Number of the first object's colour; those after it follow.
    """

    number: int
    photograph: Photograph
    masks: Masks
    first_color: int


@dataclass(frozen=True, eq=False)
class Kept:
    """An object that the user kept.

    Attributes:
        number: Counted from 1 in each session.
        photograph: In what it is.
        annotation: An entry of `harness.segment.coco.coco_annotations`; `category` is what the user calls it.
        color: Number of its colour.
    """

    number: int
    photograph: Photograph
    annotation: dict[str, Any]
    color: int


@dataclass(frozen=True)
class KindsPrompt:
    """A prompt for all of a kind as a key: two that are equal find the same.

    Attributes:
        photograph: In what.
        prompt: The prompt, as text.
        threshold: What scores above it is kept.
    """

    photograph: Photograph
    prompt: str
    threshold: float


@dataclass
class Session:
    """A tab. Only the thread of the event loop changes it.

    Attributes:
        key: What the page calls it.
        photograph: The one that is shown.
        answer: To the last question about it.
        kept: In the order in which they were kept, of all photographs.
        found: What each prompt of the last question for kinds found.
    """

    key: str
    photograph: Photograph | None = None
    answer: Answer | None = None
    kept: list[Kept] = field(default_factory=list)
    found: dict[KindsPrompt, Masks] = field(default_factory=dict)
    _logits: OrderedDict[int, Logits] = field(default_factory=OrderedDict)
    _answers: int = 0
    _numbers: int = 0

    def choose(self, photograph: Photograph) -> Photograph:
        """Shows a photograph, and returns it; what was kept of others stays."""
        if self.photograph != photograph:
            self.photograph, self.answer = photograph, None
            self._logits.clear()
        return photograph

    def add_answer(self, photograph: Photograph, masks: Masks) -> Answer:
        """Notes what was found."""
        self._answers += 1
        first_color = max((kept.color + 1 for kept in self.kept), default=0)
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
            HarnessError: There is none of that number, or it was too long ago.
        """
        if answer not in self._logits:
            raise HarnessError(f"There is no mask {answer} to refine any more; clear the clicks and begin again.")
        return self._logits[answer]

    def answered(self, answer: int, index: int) -> dict[str, Any]:
        """Returns an object of the last answer.

        Raises:
            HarnessError: That was not the last answer, or it has no such object.
        """
        if self.answer is None or self.answer.number != answer:
            raise HarnessError("These masks are not the last ones any more; ask again.")
        if not 0 <= index < len(self.answer.masks.annotations):
            raise HarnessError(f"There is no mask {index}; the last answer has {len(self.answer.masks.annotations)}.")
        return self.answer.masks.annotations[index]

    def keep(self, answer: int, indices: Sequence[int], category: str | None) -> None:
        """Keeps objects of the last answer, all or none.

        Args:
            answer: Number of the answer.
            indices: Numbers of the objects in it.
            category: What to call them; None for what the prompt asked for.

        Raises:
            HarnessError: There is no such object, the name is empty or too long, or too many would be kept.
        """
        annotations = [self.answered(answer, index) for index in indices]
        if len(self.kept) + len(indices) > MOST_KEPT:
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
            self.kept.append(Kept(self._numbers, self.answer.photograph, annotation, color))

    def kept_object(self, number: int) -> Kept:
        """Returns what was kept under a number.

        Raises:
            HarnessError: Nothing was.
        """
        for kept in self.kept:
            if kept.number == number:
                return kept
        raise HarnessError(f"There is no kept mask {number}; it was removed.")

    def drop(self, number: int) -> None:
        """Removes what was kept under a number.

        Raises:
            HarnessError: Nothing was.
        """
        self.kept.remove(self.kept_object(number))

    def coco(self) -> dict[str, Any]:
        """Returns the data set of all that was kept, in COCO's format.

        Raises:
            HarnessError: Nothing was.
        """
        if not self.kept:
            raise HarnessError("Nothing was kept yet; keep a mask first.")
        photographs = list(dict.fromkeys(kept.photograph for kept in self.kept))
        images = [
            AnnotatedImage(name, photograph.size, [k.annotation for k in self.kept if k.photograph == photograph])
            for photograph, name in zip(photographs, file_names(photographs), strict=True)
        ]
        return data_set(images, [kept.annotation["category"] for kept in self.kept])


def file_names(photographs: Sequence[Photograph]) -> list[str]:
    """The names of photographs, with a number where an earlier one has the same."""
    taken: set[str] = set()
    names = []
    for photograph in photographs:
        path, name, number = PurePath(photograph.name), photograph.name, 1
        while name.casefold() in taken:
            number += 1
            name = f"{path.stem}_{number}{path.suffix}"
        taken.add(name.casefold())
        names.append(name)
    return names


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
                f"This page is not known here, the server was started again or has served {MOST_SESSIONS} other tabs "
                "since; reload the page."
            )
        self._sessions.move_to_end(key)
        return session
