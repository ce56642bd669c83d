"""The sides of videos: upstream's video model and compiled folders, each in a `perf.processes.BenchmarkProcess`.

Every call of `FRAME` processes the next frame of a clip that goes to and fro, with a text and `OBJECTS` tracked
objects. The first call fills the memories before. So that there are always as many objects, none is removed and no
other one is added, by rules that both sides have: there is no hotstart, and a video has at most so many objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.core.case import Case
from harness.core.settings import SEEDED
from harness.models.sam3.tracker.clip import load_clip
from harness.runtime.sam3.video.rules import DISAMBIGUATED
from perf.processes import Calls, Load

if TYPE_CHECKING:
    from harness.runtime import Sam3

OBJECTS = 3
TEXT = "dog"
FILLED = 8
"""The frame from which on seven memories are read."""
LENGTH = FILLED + 60
"""Frames of the video: as many as a run can ask for."""
RULES = replace(
    DISAMBIGUATED, hotstart_frames=0, hotstart_unmatched=0, hotstart_duplicates=0, max_objects=OBJECTS, new_score=0.999
)
"""Upstream's rules, but for what adds and removes objects."""

ENCODE = "begin"
"""Another function of every side: it does nothing, since a frame is encoded whenever one is processed."""
(FRAME,) = QUESTIONS = ("frame with three objects",)


@dataclass(frozen=True)
class Answer:
    """What a side finds on a frame: ids int64 [n], scores fp32 [n], masks bool [n, h, w]."""

    ids: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    masks: npt.NDArray[np.bool_]


def folder_calls() -> Callable[[Sam3], Calls]:
    """Returns the function that takes a loaded folder and returns the questions that it answers."""
    from harness.runtime.sam3.video.session import Session
    from harness.runtime.sam3.video.tracker import Tracker

    pictures = clip_frames()

    def calls(model: Sam3) -> Calls:
        @cache
        def begun() -> Iterator[Answer]:
            session = Session(model, Tracker(model.artifact), pictures, RULES)
            session.add_prompt(0, TEXT)
            return (Answer(frame.ids, frame.scores, frame.masks) for frame in _filled(session.propagate()))

        return {FRAME: lambda: next(begun()), ENCODE: lambda: None}

    return calls


@contextmanager
def torch_side(case: Case) -> Iterator[Load]:
    """Runs upstream's video model; masks are handled at once where it goes through them one by one (`quick_masks`)."""
    import torch
    from PIL import Image

    from harness.models.sam3.build import build_case, build_video_model
    from harness.models.sam3.images import preprocess
    from harness.models.sam3.upstream import upstream
    from harness.models.sam3.video.upstream import quick_masks

    pictures = [Image.fromarray(picture) for picture in clip_frames()]
    with upstream(), quick_masks():

        def load() -> Calls:
            model = build_video_model(build_case(case, SEEDED, interactive=True), case.scale)
            model.hotstart_delay, model.max_num_objects, model.new_det_thresh = 0, OBJECTS, RULES.new_score

            @cache
            def begun() -> Iterator[Any]:
                # Each distinct picture is prepared once, before anything is timed.
                distinct = {picture.tobytes(): preprocess(picture) for picture in pictures}
                state = model.init_state(pictures, offload_video_to_cpu=True)
                state["input_batch"].img_batch = torch.cat([distinct[picture.tobytes()] for picture in pictures])
                model.add_prompt(state, 0, text_str=TEXT)
                return iter(_filled(model.propagate_in_video(state, 0, None, False)))

            def frame() -> Answer:
                _, out = next(begun())
                return Answer(out["out_obj_ids"], out["out_probs"], out["out_binary_masks"])

            return {FRAME: frame, ENCODE: lambda: None}

        yield load


def clip_frames() -> list[npt.NDArray[np.uint8]]:
    """The frames of fixtures/clip.toml, uint8 [h, w, 3]."""
    clip = load_clip()
    return [np.asarray(clip.picture(number)) for number in range(LENGTH)]


def _filled(frames: Iterator[Any]) -> Iterator[Any]:
    """The frames from `FILLED` on."""
    for _ in range(FILLED):
        next(frames)
    return frames
