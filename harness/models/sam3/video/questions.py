"""Defines questions about videos and users' sessions: `fixtures/video.toml` and `fixtures/video_sessions.toml`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from harness.core.case import Case, Scale
from harness.core.program import Arrays
from harness.core.settings import FIXTURES
from harness.models.sam3.fixtures import AnyQuestion, Fixture
from harness.models.sam3.tracker.clip import load_clip
from harness.models.sam3.tracker.scene import SCENE
from harness.parity.references import add_prefix
from harness.runtime.arrays import Masks, Pixels
from harness.runtime.sam3.video.frames import open_frames

QUESTIONS = FIXTURES / "video.toml"
SESSIONS = FIXTURES / "video_sessions.toml"
REQUESTS = ("add_prompt", "propagate_in_video", "remove_object")
_SCENE = "scene"

Box = tuple[float, float, float, float]


class VideoQuestion(AnyQuestion, frozen=True, kw_only=True):
    """A question about the first frames of a video.

    Attributes:
        image: Path of a file of frames or of the description of a clip, named `video` in TOML; `scene` for the scene of
            this project.
        length: Number of frames of the video; a longer file is cut.
        full: Whether the question is also asked at full scale.
    """

    image: Path = msgspec.field(name="video")
    length: int
    full: bool = False

    def is_asked(self, case: Case) -> bool:
        """Returns whether the question is asked at the scale of a case."""
        return self.full or case.scale != Scale.FULL

    def digest(self) -> str:
        """Returns the SHA-256 of the frames."""
        from harness.parity.arrays import arrays_digest

        return arrays_digest({str(number): frame for number, frame in enumerate(frames_of(self))})


class Question(VideoQuestion, frozen=True):
    """A video and a prompt on one of its frames.

    Attributes:
        text: A noun phrase, or None.
        box: (x0, y0, x1, y1) around an example, normalized to [0, 1], or None.
        frame: The frame of the prompt.
        steps: The frames whose steps are computed from PyTorch's own state.
        float64: Whether the tracking also runs in float64.
    """

    text: str | None = None
    box: Box | None = None
    frame: int = 0
    steps: tuple[int, ...] = ()
    float64: bool = False

    def __post_init__(self) -> None:
        """Checks that the question asks for something, on frames that the video has.

        Raises:
            ValueError: It does not.
        """
        if self.text is None and self.box is None:
            raise ValueError(f"question {self.name!r} asks for nothing")
        if not 0 <= self.frame < self.length:
            raise ValueError(f"question {self.name!r} asks in frame {self.frame} of {self.length}")
        if not all(self.frame < step < self.length for step in self.steps):
            raise ValueError(f"question {self.name!r} has steps outside of the frames that are tracked")

    @property
    def finds_once(self) -> bool:
        """Returns whether the detector runs on the frame of the prompt alone, as it does for a box without a text."""
        return self.text is None


class Request(Fixture, frozen=True):
    """A request to a session, named as in upstream's `Sam3VideoPredictor`; positions are shares of width and height.

    Attributes:
        type: Kind of the request, one of `REQUESTS`.
        frame: The frame of a prompt, or the first frame of a propagation.
        reverse: Whether the propagation goes backwards.
        text: A noun phrase, whose objects are found in every frame.
        object: The id of the prompted or removed object.
        points: (x, y) of each point.
        labels: For each point 1 on the object, 0 outside; all 1 if empty.
        box: (x0, y0, x1, y1) around the object.
        mask: (x0, y0, x1, y1), the rectangle whose pixels are the object.
    """

    type: str
    frame: int = 0
    reverse: bool = False
    text: str | None = None
    object: int | None = None
    points: tuple[tuple[float, float], ...] = ()
    labels: tuple[int, ...] = ()
    box: Box | None = None
    mask: Box | None = None

    def __post_init__(self) -> None:
        """Checks that the request has what its kind needs.

        Raises:
            ValueError: It does not.
        """
        if self.type not in REQUESTS:
            raise ValueError(f"{self.type!r} is none of {', '.join(REQUESTS)}")
        prompts = [bool(self.points), self.box is not None, self.mask is not None]
        if self.type != "add_prompt":
            removes = self.type == "remove_object"
            valid = self.text is None and not any(prompts) and (self.object is not None) == removes
        elif self.text is None:
            valid = self.object is not None and sum(prompts) == 1
        else:
            valid = self.object is None and not any(prompts)
        if not valid:
            raise ValueError(
                f"{self.type} needs a text, or an object with points, a box or a mask; or an object to remove"
            )
        if self.labels and len(self.labels) != len(self.points):
            raise ValueError(f"{self.type} has {len(self.labels)} labels of {len(self.points)} points")

    def send(self, session: Any, size: tuple[int, int]) -> Iterable[Any]:
        """Sends the request to a session, of the compiled model or of upstream's; returns the frames that it gives out.

        Args:
            session: The runtime's `Session`, or one with its methods.
            size: Height and width of the frames.
        """
        if self.type == "propagate_in_video":
            return session.propagate(start=self.frame, reverse=self.reverse)  # type: ignore[no-any-return]
        if self.type == "remove_object":
            session.remove_object(self.object)
            return ()
        if self.text is not None:
            return (session.add_prompt(self.frame, self.text),)
        prompts = {
            "points": pixels_of(self.points, size).tolist() if self.points else None,
            "labels": list(self.labels) or None,
            "box": None if self.box is None else pixels_of(self.box, size).ravel().tolist(),
            "mask": None if self.mask is None else mask_of(self.mask, size),
        }
        prompts = {name: value for name, value in prompts.items() if value is not None}
        return (session.add_prompt(self.frame, object_id=self.object, **prompts),)


class SessionQuestion(VideoQuestion, frozen=True):
    """A video and the requests of one session with it.

    Attributes:
        requests: The requests, in order.
    """

    requests: tuple[Request, ...]

    def __post_init__(self) -> None:
        """Checks that the requests are about frames of the video.

        Raises:
            ValueError: One is not.
        """
        for request in self.requests:
            if not 0 <= request.frame < self.length:
                raise ValueError(f"{request.type} in {self.name!r} is about frame {request.frame} of {self.length}")

    def send(self, session: Any, size: tuple[int, int]) -> Iterator[tuple[int, Any]]:
        """Sends the requests to a session; yields each frame that it gives out, and the position of its request."""
        for position, request in enumerate(self.requests):
            for frame in request.send(session, size):
                yield position, frame


def frames_of(question: VideoQuestion) -> tuple[Pixels, ...]:
    """Returns the frames of a question's video, uint8 [h, w, 3].

    Raises:
        HarnessError, ModelError: The video cannot be read.
    """
    if question.image.name == _SCENE:
        return tuple(SCENE.picture(number) for number in range(question.length))
    if question.image.suffix == ".toml":
        clip = load_clip(path=question.image)
        return tuple(np.asarray(clip.picture(number)) for number in range(question.length))
    return tuple(islice(open_frames(question.image), question.length))


def pixels_of(places: Any, size: tuple[int, int]) -> npt.NDArray[np.float64]:
    """Converts shares of width and height to whole pixels.

    Args:
        places: Pairs (x, y) one after another, in any shape.
        size: Height and width of the frames.

    Returns:
        float64 [n, 2].
    """
    return np.rint(np.array(places, np.float64).reshape(-1, 2) * size[::-1])


def mask_of(rectangle: Box, size: tuple[int, int]) -> Masks:
    """Returns the mask bool [h, w] of a rectangle."""
    (left, top), (right, bottom) = pixels_of(rectangle, size).astype(int)
    mask = np.zeros(size, bool)
    mask[top:bottom, left:right] = True
    return mask


def number_frames(answers: Iterable[tuple[int, Arrays]]) -> Arrays:
    """Returns the arrays of all frames that a session returned, in order.

    Args:
        answers: For each frame, the position of the request that it answers, and its arrays by name.

    Returns:
        The arrays by name; the first frame has `0/request`, int64 [1], `0/ids` and so on.
    """
    arrays: Arrays = {}
    for number, (position, answer) in enumerate(answers):
        arrays |= {f"{number}/request": np.array([position])} | add_prefix(str(number), answer)
    return arrays
