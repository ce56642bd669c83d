"""Runs a session: a video, its prompts, its objects, and the frames that it returns.

VI is upstream's model/sam3_video_inference.py, with the lines of sam3 0.1.4.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.runtime.arrays import Floats, Masks, Pixels
from harness.runtime.errors import ModelError
from harness.runtime.sam3.interactive import Box, ObjectLabels, ObjectPrompt
from harness.runtime.sam3.prompts import Coordinates, Prompt, abbreviate
from harness.runtime.sam3.video.frames import Frames, open_frames
from harness.runtime.sam3.video.outputs import FrameResult, frame_output
from harness.runtime.sam3.video.processor import Action, Propagation, VideoProcessor, next_propagation, processing_order
from harness.runtime.sam3.video.rules import DISAMBIGUATED, Rules
from harness.runtime.sam3.video.tracker import Tracker

if TYPE_CHECKING:
    from harness.runtime.sam3.image_model import ImageModel

Texts = str | Sequence[str] | None
_ENDLESS = sys.maxsize
"""More frames than any video has: a propagation ends with the video, whatever its source states."""


@dataclass(frozen=True, eq=False)
class TrackedFrame:
    """A frame and its n visible objects, by rising id.

    Attributes:
        index: Number of the frame.
        pixels: uint8 [h, w, 3].
        ids: int64 [n].
        scores: fp32 [n], of the detections that the objects were found by; 1 for a clicked object.
        boxes: fp32 [n, 4], (x0, y0, x1, y1) in pixels.
        masks: bool [n, h, w]; no pixel belongs to several objects of one text.
        texts: The text that each object was found by; None for an object of a box or a click.
    """

    index: int
    pixels: Pixels
    ids: npt.NDArray[np.int64]
    scores: Floats
    boxes: Floats
    masks: Masks
    texts: tuple[str | None, ...]


class Session:
    """A video and its prompts; `Sam3.start_session` makes one. One thread uses it at a time.

    Frames are processed forwards and then dropped, so that memory does not grow with the video, unless the session
    keeps everything.

    Attributes:
        frames: The video.
        processor: Processes the frames and has the session's progress.
    """

    def __init__(
        self, model: ImageModel, tracker: Tracker, source: Any, rules: Rules = DISAMBIGUATED, *, keep: bool = False
    ) -> None:
        """Opens a video, which `harness.runtime.sam3.video.frames.open_frames` describes, for a model and its tracker.

        Args:
            model: The model.
            tracker: The model's tracker.
            source: The video.
            rules: The thresholds.
            keep: See `Sam3.start_session`.

        Raises:
            ModelError: The video cannot be opened, or is a stream, of which everything cannot be kept.
        """
        self.frames: Frames = open_frames(source)
        if keep and self.frames.is_stream:
            raise ModelError(
                f"{self.frames.name.capitalize()} is read only once, and cannot be tracked again or backwards; give a "
                "file, a folder or a list of frames, or leave out keep=True."
            )
        self.processor = VideoProcessor(model, tracker, self.frames, rules, keep)

    @property
    def objects(self) -> tuple[int, ...]:
        """The ids of the objects that are tracked now."""
        return tuple(object_id for group in self.processor.progress.groups for object_id in group.state.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the objects' memories, and of their masks on delayed or kept frames."""
        progress = self.processor.progress
        pending = () if progress.propagation is None else progress.propagation.pending
        results = (*(result for result, _ in pending), *progress.frame_results.values())
        frames = {result.index: result.nbytes for result in results}
        return sum(frames.values()) + sum(group.nbytes for group in progress.groups)

    @property
    def position(self) -> int | None:
        """The frame that the current propagation returns next; None if there is none."""
        propagation = self.processor.progress.propagation
        if propagation is None:
            return None
        pending = [result.index for result, _ in propagation.pending]
        return next(iter((*pending, *propagation.order[:1])), None)

    @property
    def next_frame(self) -> int | None:
        """The frame that the current propagation processes next; None if there is none."""
        propagation = self.processor.progress.propagation
        return None if propagation is None else next(iter(propagation.order), None)

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
        """Finds the objects of texts or of an example box, or adds or corrects one object.

        With a text, or a box alone, objects are found in one frame, and earlier objects are dropped, as upstream drops
        them. With an `object_id`, points, a box or a mask show this object; an id that no object has adds one. Points
        replace earlier points of the object in this frame.

        Args:
            frame: The frame to begin with; or the frame of the points, the box and the mask.
            text: A noun phrase, or several; new objects are found on every later frame, too. Several texts find what as
                many sessions would, and encode each frame once.
            box: (x0, y0, x1, y1) in pixels around an example in this frame, or around the object. Without a text,
                objects are found in this frame alone.
            object_id: The object.
            points: (x, y) each, in pixels.
            labels: For each point, whether it is on the object (1) or not (0); all 1 by default.
            mask: bool [h, w], the object's pixels.

        Returns:
            The frame with the found objects, or with the object as the next propagation tracks it.

        Raises:
            ModelError: The prompt is empty or invalid, there is no such frame, or the session has not kept what it
                needs.
        """
        frame = _integer("frame", frame)
        if object_id is None:
            if points is not None or labels is not None or mask is not None:
                next_id = self.processor.progress.next_id
                raise ModelError(
                    f"Points and a mask are of one object; give its object_id, or {next_id} for a new object."
                )
            return self._search(frame, text, box)
        if text is not None:
            raise ModelError("A text finds objects of its own; leave out the text, or the object_id.")
        if mask is not None and not (points is None and labels is None and box is None):
            raise ModelError("A mask says all of an object; leave out the mask, or the points and the box.")
        return self._prompt_object(frame, _integer("object id", object_id), ObjectPrompt(points, labels, box), mask)

    def propagate(
        self,
        *,
        start: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
        after_frame: Callable[[], None] | None = None,
    ) -> Iterator[TrackedFrame]:
        """Tracks the objects through the video.

        The first propagation finds and tracks everything. It returns a frame when 14 more have been processed, since
        objects that are found by mistake are removed in that time (`Rules.hotstart_frames`), or when the video ends. A
        propagation after prompts of single objects tracks these alone, and one after removals computes nothing (see
        `next_propagation`); but frames that were never computed are computed completely. A propagation that was left
        continues with another call with the same arguments.

        Args:
            start: The frame to start from; None for the first one that was processed before. Backwards, the frame
                before it is the first.
            limit: How many frames to go on after the first; None for all.
            reverse: Whether to go backwards.
            after_frame: Called after each processed frame, when the session can be saved.

        Raises:
            ModelError: There is no prompt yet, there is no such frame, the session has not kept what it needs, or
                another prompt or propagation followed this iterator; or a frame cannot be read, after earlier frames
                were returned. Errors of an iterator of frames are raised there, too.
        """
        progress = self.processor.progress
        request = (
            None if start is None else _integer("frame to start from", start),
            None if limit is None else _integer("number of frames to process", limit),
            bool(reverse),
        )
        if progress.propagation is None or progress.propagation.request != request:
            progress.propagation = self._start_propagation(*request)
        propagation = progress.propagation
        while propagation.outputs or propagation.failure is not None or propagation.order:
            if self.processor.progress.propagation is not propagation:
                raise ModelError("Something else was asked meanwhile; call propagate again.")
            if propagation.outputs:
                first, *following = propagation.outputs
                shown_frame = self._tracked_frame(*first)
                propagation.outputs = tuple(following)
                yield shown_frame
            elif propagation.failure is not None:
                failure, propagation.failure = propagation.failure, None
                raise failure
            else:
                self.processor.advance(propagation)
                if after_frame is not None:
                    after_frame()
        # Kept frames can be propagated again; a stream has ended.
        if self.processor.keeps and progress.propagation is propagation:
            progress.propagation = None

    def remove_object(self, object_id: int) -> None:
        """Removes an object, which is no longer tracked or shown.

        Raises:
            ModelError: No such object is tracked.
        """
        progress, object_id = self.processor.progress, _integer("object id", object_id)
        if object_id not in self.objects:
            listed = ", ".join(map(str, self.objects)) or "none"
            raise ModelError(f"Object {object_id} is not tracked; tracked are: {listed}.")
        removed = frozenset({object_id})
        with progress.transaction():
            progress.group_of(object_id).remove(object_id)
            if self.processor.keeps:
                progress.history += (Action("remove", removed),)  # without kept frames nothing can be fetched
            progress.frame_results = {
                index: result.drop_objects(removed) for index, result in progress.frame_results.items()
            }
            if progress.propagation is not None:
                progress.propagation.drop_objects(removed)

    def save(self, path: str | Path) -> None:
        """Writes the session to a file, from which `Sam3.resume_session` continues, in another process as well.

        The file has no pixels of the video and no weights.

        Raises:
            ModelError: The file cannot be written; an earlier file stays.
        """
        from harness.runtime.sam3.video.saving import save_session

        save_session(self.processor, Path(path))

    def _search(self, frame: int, text: Texts, box: Box) -> TrackedFrame:
        texts = tuple(text) if isinstance(text, list | tuple) else (text,)
        boxes = None if box is None else np.asarray(box, object).reshape(1, -1).tolist()
        prompts = tuple(Prompt(phrase, boxes=boxes) for phrase in texts or (None,))
        for prompt in prompts:
            self.processor.model.check_prompt(prompt)
        if len(set(texts)) < len(texts):
            raise ModelError(f"The texts {abbreviate(list(texts))} are not all different; give each one once.")
        pixels = self.processor.pixels(frame)
        for prompt in prompts:
            self.processor.model.encode_prompt(prompt, pixels.shape[1::-1])
        previous, self.processor.progress = self.processor.progress, self.processor.new_progress(prompts, frame)
        try:
            # A propagation processes this frame once more, as upstream's does (VI:241).
            return self._tracked_frame(self.processor.process(frame, reverse=False), pixels)
        except BaseException:
            self.processor.progress = previous
            raise

    def _prompt_object(self, frame: int, object_id: int, prompt: ObjectPrompt, mask: Masks | None) -> TrackedFrame:
        progress = self.processor.progress
        if not self.processor.keeps and (progress.propagation is not None or progress.first_frame not in (None, frame)):
            raise self._not_kept_error(f"Object {object_id} cannot be prompted on frame {frame}")
        pixels = self.processor.pixels(frame)
        if mask is None:
            self.processor.model.encode_object_prompt(prompt, pixels.shape[1::-1])
        else:
            _check_mask(mask, pixels)
        encoded = self.processor.encode_frame(frame)
        group, is_new = progress.group_of(object_id), object_id not in self.objects
        with progress.transaction():
            result = (
                group.click(encoded, object_id, prompt) if mask is None else group.set_mask(encoded, object_id, mask)
            )
            progress.user_objects |= {object_id} if is_new else frozenset()
            progress.history += (Action("add" if is_new else "refine", frozenset({object_id})),)
            progress.propagation = None
            return self._tracked_frame(self.processor.add_refined(encoded, {object_id: result}), pixels)

    def _start_propagation(self, start: int | None, limit: int | None, reverse: bool) -> Propagation:
        """Starts a propagation."""
        progress = self.processor.progress
        if not progress.detector.prompts and not progress.history:
            raise ModelError("Nothing is asked of this video; add a text, a box or points first.")
        first = progress.first_frame or 0
        if not self.processor.keeps:
            if reverse:
                raise self._not_kept_error("The video cannot be tracked backwards")
            if progress.propagation is not None or (start is not None and start < first):
                raise self._not_kept_error("The video cannot be tracked again")
        first = first if start is None else start
        self.processor.pixels(first)
        order = processing_order(first, limit, _ENDLESS, reverse)
        scope = replace(next_propagation(progress.history, self.frames.length or _ENDLESS), start=start)
        progress.history += (scope,)
        return Propagation((start, limit, reverse), scope, order)

    def _not_kept_error(self, action: str) -> ModelError:
        if self.frames.is_stream:
            return ModelError(
                f"{action}, because {self.frames.name} is a stream: it is read once, from the first prompt on."
            )
        return ModelError(
            f"{action}, because this session keeps only what is needed to go on once; start it with keep=True."
        )

    def _tracked_frame(self, result: FrameResult, pixels: Pixels) -> TrackedFrame:
        """Returns a frame with the objects that are tracked now; each pixel of a text's objects has one owner."""
        progress, objects = self.processor.progress, result.objects
        outputs = [frame_output(objects, group.state.scores, result.size) for group in progress.groups]
        texts = [group.text for group, output in zip(progress.groups, outputs, strict=True) for _ in output.ids]
        ids, scores, boxes, masks = map(np.concatenate, zip(*outputs, strict=True))
        corners = boxes + np.concatenate([np.zeros_like(boxes[:, :2]), boxes[:, :2]], axis=1)
        order = np.argsort(ids)
        return TrackedFrame(
            index=result.index,
            pixels=pixels,
            ids=ids[order],
            scores=scores[order],
            boxes=corners[order] * np.array([*result.size, *result.size], np.float32),
            masks=masks[order],
            texts=tuple(None if ids[row] in progress.user_objects else texts[row] for row in order),
        )


def _integer(name: str, value: Any) -> int:
    try:
        return int(operator.index(value))
    except TypeError:
        raise ModelError(f"The {name} is {abbreviate(value)}; give a whole number.") from None


def _check_mask(mask: Any, pixels: Pixels) -> None:
    """Checks that a user's mask is bool [h, w] of the frame, and not empty.

    Raises:
        ModelError: It is not.
    """
    height, width = pixels.shape[:2]
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (height, width):
        actual = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray) else abbreviate(mask)
        raise ModelError(f"The mask is {actual}; give bool [{height}, {width}], as the frames are.")
    if not mask.any():
        raise ModelError("The mask has no pixels; mark the object, or remove it.")
