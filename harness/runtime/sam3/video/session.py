"""A session: a video, what is asked of it, and its objects.

VI is upstream's model/sam3_video_inference.py, with the lines of sam3 0.1.4.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.runtime.errors import Sam3Error
from harness.runtime.sam3.coordinates import abbreviate
from harness.runtime.sam3.interactive import Box, ObjectLabels, ObjectPrompt
from harness.runtime.sam3.prompts import Coordinates, Prompt
from harness.runtime.sam3.video.frames import Frames, open_frames
from harness.runtime.sam3.video.kept import KeptFrame
from harness.runtime.sam3.video.processor import VideoProcessor
from harness.runtime.sam3.video.progress import Underway
from harness.runtime.sam3.video.propagation import Action, next_propagation, processing_order
from harness.runtime.sam3.video.rules import DISAMBIGUATED, Rules
from harness.runtime.sam3.video.tracked_frame import TrackedFrame, tracked_frame
from harness.runtime.sam3.video.tracker import Tracker

if TYPE_CHECKING:
    from harness.runtime.sam3.image_model import ImageModel

Masks = npt.NDArray[np.bool_]
Pixels = npt.NDArray[np.uint8]
Texts = str | Sequence[str] | None

__all__ = ["Session", "TrackedFrame"]

_ENDLESS = sys.maxsize
"""More frames than any video has: a propagation ends where the video does, whatever its source states."""


class Session:
    """A video and what is asked of it; `Sam3.start_session` makes one. One thread uses it at a time.

    Frames are processed forwards and then forgotten, so that what stays in memory does not grow with the video, unless
    the session was told to keep everything.

    Attributes:
        frames: The video.
        processor: What processes the frames, and knows how far it is.
    """

    def __init__(
        self, model: ImageModel, tracker: Tracker, source: Any, rules: Rules = DISAMBIGUATED, *, keep: bool = False
    ) -> None:
        """Takes a model, its tracker, and a video as `harness.runtime.sam3.video.frames.open_frames` takes it.

        Args:
            model: The model.
            tracker: What it tracks objects with.
            source: The video.
            rules: The thresholds.
            keep: See `Sam3.start_session`.

        Raises:
            Sam3Error: The video cannot be opened, or is a stream of which everything cannot be kept.
        """
        self.frames: Frames = open_frames(source)
        if keep and self.frames.is_stream:
            raise Sam3Error(
                f"{self.frames.name.capitalize()} is read only once, and cannot be tracked again or backwards; give a "
                "file, a folder or a list of frames, or leave out keep=True."
            )
        self.processor = VideoProcessor(model, tracker, self.frames, rules, keep)

    @property
    def objects(self) -> tuple[int, ...]:
        """The ids of the objects that are tracked now."""
        return tuple(each for group in self.processor.progress.groups for each in group.state.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of what is remembered of the objects, and of their masks on frames that are held back or kept."""
        progress = self.processor.progress
        waiting = () if progress.underway is None else (*progress.underway.held, *progress.underway.ready)
        frames = {kept.index: kept.nbytes for kept in (*(kept for kept, _ in waiting), *progress.kept.values())}
        return sum(frames.values()) + sum(group.nbytes for group in progress.groups)

    @property
    def position(self) -> int | None:
        """The frame that the propagation that is under way gives out next; None if there is none."""
        underway = self.processor.progress.underway
        if underway is None:
            return None
        waiting = [kept.index for kept, _ in (*underway.ready, *underway.held)]
        return next(iter((*waiting, *underway.order[:1])), None)

    @property
    def next_frame(self) -> int | None:
        """The frame that the propagation that is under way processes next; None if there is none."""
        underway = self.processor.progress.underway
        return None if underway is None else next(iter(underway.order), None)

    def add_prompt(
        self,
        frame: int = 0,
        text: Texts = None,
        box: Box = None,
        *,
        object_id: int | None = None,
        points: Coordinates = None,
        labels: ObjectLabels = None,
        mask: Masks | None = None,
    ) -> TrackedFrame:
        """Asks for all that texts or an example mean, or adds or corrects one object.

        With a text, or a box alone, objects are found in one frame, and what was tracked before is forgotten, as
        upstream forgets it. With an `object_id`, points, a box or a mask say where this object is; a number that no
        object has adds one. Points replace those that were given of the object in this frame before.

        Args:
            frame: Where to begin; or the frame of the points, the box and the mask.
            text: A noun phrase, or several; new objects that it means are found on every later frame, too. Several
                find what as many sessions would, and encode each frame once.
            box: (x0, y0, x1, y1) in pixels around an example in this frame, or around the object. Without a text,
                objects are found in this frame alone.
            object_id: The object.
            points: (x, y) each, in pixels.
            labels: For each point, whether it is on the object (1) or not (0); all 1 by default.
            mask: bool [h, w], the object's pixels.

        Returns:
            The frame with what was found, or with the object as the next propagation tracks it.

        Raises:
            Sam3Error: Nothing is asked, the prompt makes no sense, there is no such frame, or the session does not
                keep what is needed.
        """
        frame = _integer("frame", frame)
        if object_id is None:
            if points is not None or labels is not None or mask is not None:
                free = self.processor.progress.next_id
                raise Sam3Error(f"Points and a mask are of one object; give its object_id, or {free} for a new object.")
            return self._search(frame, text, box)
        if text is not None:
            raise Sam3Error("A text finds objects of its own; leave out the text, or the object_id.")
        if mask is not None and not (points is None and labels is None and box is None):
            raise Sam3Error("A mask says all of an object; leave out the mask, or the points and the box.")
        return self._correct(frame, _integer("object id", object_id), ObjectPrompt(points, labels, box), mask)

    def propagate(
        self,
        *,
        start: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
        after_frame: Callable[[], None] | None = None,
    ) -> Iterator[TrackedFrame]:
        """Tracks the objects through the video.

        The first propagation finds and tracks everything; a frame of it is given out when 14 more have been processed,
        since objects that are found by mistake are removed in that time (`Rules.hotstart_frames`), or when the video
        ends. One after prompts of single objects tracks these alone, and one after removals computes nothing (see
        `next_propagation`); but on frames that were never computed everything is. Whoever stops in between goes on with
        another call that asks the same.

        Args:
            start: The frame to start from; None for the first one that was processed before. Backwards, the frame
                before it is the first.
            limit: How many frames to go on after the first; None for all.
            reverse: Whether to go backwards.
            after_frame: Is called after each frame that was processed, when the session can be saved.

        Raises:
            Sam3Error: Nothing is asked yet, there is no such frame, the session does not keep what is needed, or
                something else was asked after this iterator was made; or a frame cannot be read, after those before it
                were given out. What an iterator of frames raises is raised there, too.
        """
        progress = self.processor.progress
        asked = (
            None if start is None else _integer("frame to start from", start),
            None if limit is None else _integer("number of frames to process", limit),
            bool(reverse),
        )
        if progress.underway is None or progress.underway.asked != asked:
            progress.underway = self._departed(*asked)
        underway = progress.underway
        while underway.ready or underway.failure is not None or underway.order:
            if self.processor.progress.underway is not underway:
                raise Sam3Error("Something else was asked meanwhile; call propagate again.")
            if underway.ready:
                first, *others = underway.ready
                shown_frame = self._shown(*first)
                underway.ready = tuple(others)
                yield shown_frame
            elif underway.failure is not None:
                failure, underway.failure = underway.failure, None
                raise failure
            else:
                self.processor.advance(underway)
                if after_frame is not None:
                    after_frame()
        # What is kept can be propagated again; a stream has ended.
        if self.processor.keeps and progress.underway is underway:
            progress.underway = None

    def remove_object(self, object_id: int) -> None:
        """Tracks an object no longer, and shows it no longer.

        Raises:
            Sam3Error: No such object is tracked.
        """
        progress, object_id = self.processor.progress, _integer("object id", object_id)
        if object_id not in self.objects:
            listed = ", ".join(map(str, self.objects)) or "none"
            raise Sam3Error(f"Object {object_id} is not tracked; tracked are: {listed}.")
        gone = frozenset({object_id})
        with progress.all_or_nothing():
            progress.group_of(object_id).remove(object_id)
            if self.processor.keeps:
                progress.history += (Action("remove", gone),)  # where nothing is kept, nothing can be fetched
            progress.kept = {index: kept.without(gone) for index, kept in progress.kept.items()}
            if progress.underway is not None:
                progress.underway.without(gone)

    def save(self, path: str | Path) -> None:
        """Writes all that is known to a file, from which `Sam3.resume_session` goes on, in another process as well.

        The file has no pixels of the video and no weights.

        Raises:
            Sam3Error: It cannot be written; what was there before still is.
        """
        from harness.runtime.sam3.video.saving import save_session

        save_session(self.processor, Path(path))

    def _search(self, frame: int, text: Texts, box: Box) -> TrackedFrame:
        texts = tuple(text) if isinstance(text, list | tuple) else (text,)
        boxes = None if box is None else np.asarray(box, object).reshape(1, -1).tolist()
        prompts = tuple(Prompt(each, boxes=boxes) for each in texts or (None,))
        for prompt in prompts:
            self.processor.model.check_prompt(prompt)
        if len(set(texts)) < len(texts):
            raise Sam3Error(f"The texts {abbreviate(list(texts))} are not all different; give each one once.")
        pixels = self.processor.pixels(frame)
        for prompt in prompts:
            self.processor.model.encode_prompt(prompt, pixels.shape[1::-1])
        before, self.processor.progress = self.processor.progress, self.processor.begun(prompts, frame)
        try:
            # A propagation processes this frame once more, as upstream's does (VI:241).
            return self._shown(self.processor.process(frame, reverse=False), pixels)
        except BaseException:
            self.processor.progress = before
            raise

    def _correct(self, frame: int, object_id: int, prompt: ObjectPrompt, mask: Masks | None) -> TrackedFrame:
        progress = self.processor.progress
        if not self.processor.keeps and (progress.underway is not None or progress.first not in (None, frame)):
            raise self._forgetful(f"Object {object_id} cannot be prompted on frame {frame}")
        pixels = self.processor.pixels(frame)
        if mask is None:
            self.processor.model.encode_object_prompt(prompt, pixels.shape[1::-1])
        else:
            _check_mask(mask, pixels)
        encoded = self.processor.encoded(frame)
        group, is_new = progress.group_of(object_id), object_id not in self.objects
        with progress.all_or_nothing():
            answer = group.click(encoded, object_id, prompt) if mask is None else group.give(encoded, object_id, mask)
            progress.added |= {object_id} if is_new else frozenset()
            progress.history += (Action("add" if is_new else "refine", frozenset({object_id})),)
            progress.underway = None
            return self._shown(self.processor.keep_refined(encoded, {object_id: answer}), pixels)

    def _departed(self, start: int | None, limit: int | None, reverse: bool) -> Underway:
        """A propagation begins."""
        progress = self.processor.progress
        if not progress.detector.prompts and not progress.history:
            raise Sam3Error("Nothing is asked of this video; add a text, a box or points first.")
        first = progress.first or 0
        if not self.processor.keeps:
            if reverse:
                raise self._forgetful("The video cannot be tracked backwards")
            if progress.underway is not None or (start is not None and start < first):
                raise self._forgetful("The video cannot be tracked again")
        first = first if start is None else start
        self.processor.pixels(first)
        order = processing_order(first, limit, _ENDLESS, reverse, ())
        what = next_propagation(progress.history, self.frames.length or _ENDLESS)
        progress.history += (Action(what.kind, what.objects, start),)
        return Underway((start, limit, reverse), what, order)

    def _forgetful(self, what: str) -> Sam3Error:
        if self.frames.is_stream:
            return Sam3Error(f"{what}, because {self.frames.name} is read only once, from the first prompt on.")
        return Sam3Error(
            f"{what}, because this session keeps only what is needed to go on once; start it with keep=True."
        )

    def _shown(self, kept: KeptFrame, pixels: Pixels) -> TrackedFrame:
        progress = self.processor.progress
        return tracked_frame(kept, pixels, progress.groups, progress.added)


def _integer(what: str, given: Any) -> int:
    try:
        return int(operator.index(given))
    except TypeError:
        raise Sam3Error(f"The {what} is {abbreviate(given)}; give a whole number.") from None


def _check_mask(mask: Any, pixels: Pixels) -> None:
    height, width = pixels.shape[:2]
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (height, width):
        found = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray) else abbreviate(mask)
        raise Sam3Error(f"The mask is {found}; give bool [{height}, {width}], as the frames are.")
    if not mask.any():
        raise Sam3Error("The mask has no pixels; mark the object, or remove it.")
