"""Reads questions about videos, which are clips, footage and prompts, from `fixtures/video.toml`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from harness.core.case import Scale
from harness.core.settings import REPOSITORY
from harness.models.sam3.questions import check_keys, read_questions
from harness.models.sam3.tracker.clip import load_clip
from harness.models.sam3.tracker.scene import SCENE
from harness.runtime.sam3.video.frames import open_frames

QUESTIONS = REPOSITORY / "fixtures" / "video.toml"
_SCENE = "scene"

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Question:
    """A video and a prompt on one of its frames.

    Attributes:
        name: Name in reports.
        video: Path of a file of frames or of the description of a clip; `scene` for the scene of this project.
        length: Number of frames of the video; a longer file is cut.
        text: A noun phrase, or None.
        box: (x0, y0, x1, y1) around an example, normalized to [0, 1], or None.
        frame: The frame of the prompt.
        steps: The frames whose steps are computed from PyTorch's own state.
        float64: Whether the tracking also runs in float64.
        full: Whether the question is also asked at full scale.
    """

    name: str
    video: Path
    length: int
    text: str | None = None
    box: tuple[float, float, float, float] | None = None
    frame: int = 0
    steps: tuple[int, ...] = ()
    float64: bool = False
    full: bool = False

    @property
    def image(self) -> Path:
        """Returns the video, under the name that `harness.models.sam3.questions.ImageQuestion` requires."""
        return self.video

    @property
    def finds_once(self) -> bool:
        """Returns whether the detector runs on the frame of the prompt alone, as it does for a box without a text."""
        return self.text is None


def load_questions(scale: str = Scale.SHALLOW.value, path: Path = QUESTIONS) -> tuple[Question, ...]:
    """Reads the questions of a scale; questions about one video follow each other.

    Args:
        scale: Scale of the case.
        path: A TOML file of `[[question]]` tables; videos are relative to it.

    Raises:
        HarnessError: The file is missing or has no questions, or a question is incomplete or contradicts itself.
    """
    questions = read_questions(path, _question)
    return tuple(question for question in questions if question.full or scale != Scale.FULL)


class VideoQuestion(Protocol):
    """A question about the first frames of a video; `Question` describes the attributes."""

    @property
    def video(self) -> Path:
        """Returns the path of the video."""

    @property
    def length(self) -> int:
        """Returns the number of frames."""


def frames_of(question: VideoQuestion) -> tuple[Pixels, ...]:
    """Returns the frames of a question's video, uint8 [h, w, 3].

    Raises:
        HarnessError, ModelError: The video cannot be read.
    """
    if question.video.name == _SCENE:
        return tuple(SCENE.picture(number) for number in range(question.length))
    if question.video.suffix == ".toml":
        clip = load_clip(path=question.video)
        return tuple(np.asarray(clip.picture(number)) for number in range(question.length))
    return tuple(islice(open_frames(question.video), question.length))


def _question(table: dict[str, Any], path: Path) -> Question:
    check_keys(table, Question, f"question {table.get('name')!r}")
    box = table.get("box")
    question = Question(
        name=table["name"],
        video=path.parent / table["video"],
        length=int(table["length"]),
        text=table.get("text"),
        box=None if box is None else _box(box),
        frame=int(table.get("frame", 0)),
        steps=tuple(map(int, table.get("steps", ()))),
        float64=bool(table.get("float64", False)),
        full=bool(table.get("full", False)),
    )
    if question.text is None and question.box is None:
        raise ValueError(f"question {question.name!r} asks for nothing")
    if not 0 <= question.frame < question.length:
        raise ValueError(f"question {question.name!r} asks in frame {question.frame} of {question.length}")
    if not all(question.frame < step < question.length for step in question.steps):
        raise ValueError(f"question {question.name!r} has steps outside of the frames that are tracked")
    return question


def _box(coordinates: Any) -> tuple[float, float, float, float]:
    x0, y0, x1, y1 = map(float, coordinates)
    return x0, y0, x1, y1
