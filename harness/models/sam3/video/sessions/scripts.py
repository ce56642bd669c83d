"""Reads the requests of users to a session from `fixtures/video_sessions.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from harness.core.case import Scale
from harness.core.settings import REPOSITORY
from harness.models.sam3.questions import check_keys, read_questions

SCRIPTS = REPOSITORY / "fixtures" / "video_sessions.toml"

Kind = Literal["add_prompt", "propagate_in_video", "remove_object"]
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Request:
    """A request to a session, named as in upstream's `Sam3VideoPredictor`; positions are shares of width and height.

    Attributes:
        type: Kind of the request.
        frame: The frame of a prompt, or the first frame of a propagation.
        reverse: Whether the propagation goes backwards.
        text: A noun phrase, whose objects are found in every frame.
        object: The id of the prompted or removed object.
        points: (x, y) of each point.
        labels: For each point 1 on the object, 0 outside; all 1 if empty.
        box: (x0, y0, x1, y1) around the object.
        mask: (x0, y0, x1, y1), the rectangle whose pixels are the object.
    """

    type: Kind
    frame: int = 0
    reverse: bool = False
    text: str | None = None
    object: int | None = None
    points: tuple[tuple[float, float], ...] = ()
    labels: tuple[int, ...] = ()
    box: Box | None = None
    mask: Box | None = None


@dataclass(frozen=True)
class Script:
    """A video and the requests of one session with it.

    Attributes:
        name: Name in reports.
        video: Path of a file of frames or of the description of a clip; `scene` for the scene of this project.
        length: Number of frames of the video; a longer one is cut.
        requests: The requests, in order.
        full: Whether the script also runs at full scale.
    """

    name: str
    video: Path
    length: int
    requests: tuple[Request, ...]
    full: bool = False

    @property
    def image(self) -> Path:
        """Returns the video, under the name that `harness.models.sam3.questions.ImageQuestion` requires."""
        return self.video


def load_scripts(scale: str = Scale.SHALLOW.value, path: Path = SCRIPTS) -> tuple[Script, ...]:
    """Reads the scripts of a scale; scripts about one video follow each other.

    Args:
        scale: Scale of the case.
        path: A TOML file of `[[question]]` tables with a list `requests`; videos are relative to it.

    Raises:
        HarnessError: The file is missing or has no scripts, or a script is incomplete or contradicts itself.
    """
    scripts = read_questions(path, _script)
    return tuple(script for script in scripts if script.full or scale != Scale.FULL)


def pixels_of(places: Any, size: tuple[int, int]) -> npt.NDArray[np.float64]:
    """Converts shares of width and height to whole pixels.

    Args:
        places: Pairs (x, y) one after another, in any shape.
        size: Height and width of the frames.

    Returns:
        float64 [n, 2].
    """
    return np.rint(np.array(places, np.float64).reshape(-1, 2) * size[::-1])


def mask_of(rectangle: Box, size: tuple[int, int]) -> npt.NDArray[np.bool_]:
    """Returns the mask bool [h, w] of a rectangle."""
    (left, top), (right, bottom) = pixels_of(rectangle, size).astype(int)
    mask = np.zeros(size, bool)
    mask[top:bottom, left:right] = True
    return mask


def _script(table: dict[str, Any], path: Path) -> Script:
    check_keys(table, Script, f"question {table.get('name')!r}")
    script = Script(
        name=table["name"],
        video=path.parent / table["video"],
        length=int(table["length"]),
        requests=tuple(_request(request, table["name"]) for request in table["requests"]),
        full=bool(table.get("full", False)),
    )
    for request in script.requests:
        _check_request(request, script)
    return script


def _request(table: Mapping[str, Any], name: str) -> Request:
    check_keys(table, Request, f"a request of {name!r}")
    fields = {key: _tuples(value) if isinstance(value, list) else value for key, value in table.items()}
    return Request(**fields)


def _check_request(request: Request, script: Script) -> None:
    description = f"{request.type} in {script.name!r}"
    if request.type not in get_args(Kind):
        raise ValueError(f"{description} is none of {', '.join(get_args(Kind))}")
    if not 0 <= request.frame < script.length:
        raise ValueError(f"{description} is about frame {request.frame} of {script.length}")
    prompts = [bool(request.points), request.box is not None, request.mask is not None]
    if request.type != "add_prompt":
        valid = (
            request.text is None
            and not any(prompts)
            and (request.object is not None) == (request.type == "remove_object")
        )
    elif request.text is None:
        valid = request.object is not None and sum(prompts) == 1
    else:
        valid = request.object is None and not any(prompts)
    if not valid:
        raise ValueError(
            f"{description} needs a text, or an object with points, a box or a mask; or an object to remove"
        )
    if request.labels and len(request.labels) != len(request.points):
        raise ValueError(f"{description} has {len(request.labels)} labels of {len(request.points)} points")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
