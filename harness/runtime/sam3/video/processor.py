"""Processes the frames of a video: each frame is read, encoded, detected on and tracked, and its result is stored.

It also decides which frames a propagation processes, and what it computes on them. VI is upstream's
model/sam3_video_inference.py, with the lines of sam3 0.1.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from harness.runtime.arrays import Pixels
from harness.runtime.errors import ModelError
from harness.runtime.sam3.prompts import Prompt
from harness.runtime.sam3.video.detector import Detector, EncodedFrame
from harness.runtime.sam3.video.frames import FrameReader, Frames
from harness.runtime.sam3.video.masklets import Masklets
from harness.runtime.sam3.video.memory_bank import Retention
from harness.runtime.sam3.video.outputs import FrameResult, VisibleObject
from harness.runtime.sam3.video.rules import Rules, release_outputs
from harness.runtime.sam3.video.tracker import Tracker

if TYPE_CHECKING:
    from harness.runtime.sam3.image_model import ImageModel


ActionKind = Literal["add", "refine", "remove", "full", "partial", "fetch"]


@dataclass(frozen=True)
class Action:
    """An action of the user since the last text or box.

    Attributes:
        kind: An object was added, refined or removed; or a propagation ran. "full": detector and tracker run, and the
            planner decides. "partial": the tracker runs for some objects, and the others' outputs stay. "fetch": the
            outputs are the earlier ones.
        objects: The objects of the action; none for "full" and "fetch".
        start: For a propagation the frame that the user asked to start from, None for the default.
    """

    kind: ActionKind
    objects: frozenset[int] = frozenset()
    start: int | None = None


def next_propagation(history: Sequence[Action], frames: int) -> Action:
    """Returns the next propagation, by the history (`parse_action_history_for_propagation`, VI:1219).

    - The first one is full.
    - After objects were added or refined, it is partial, of these objects. After objects were only removed, outputs
      are fetched. On frames that were never computed `VideoProcessor` computes everything, whatever the scope is.
    - After a propagation it is the same kind again, for the other direction. It is a fetch if two of them ran
      already, if the last one was asked to start at the first or the last frame, or was a fetch itself.

    An object that was added before the first propagation makes it partial; then the detector never runs.

    Args:
        history: All actions since the last text or box, oldest first.
        frames: The number of frames of the video.
    """
    if not history:
        return Action("full")
    last = history[-1]
    if last.kind == "fetch":
        return Action("fetch")
    if last.kind in ("full", "partial"):
        ran_twice = len(history) > 1 and history[-2].kind in ("full", "partial")
        if ran_twice or last.start in (0, frames - 1):
            return Action("fetch")
        return Action(last.kind, last.objects)
    changed: set[int] = set()
    for action in reversed(history):
        if action.kind in ("full", "partial", "fetch"):
            break
        if action.kind in ("add", "refine"):
            changed |= action.objects
    return Action("partial", frozenset(changed)) if changed else Action("fetch")


def processing_order(first: int, limit: int | None, frames: int, reverse: bool) -> range:
    """Returns the frames of a propagation in order (`_get_processing_order`, VI:221).

    Forwards it begins with the frame `first` and goes on for `limit` frames after it. Backwards it begins with the
    frame before `first`.

    Args:
        first: The frame to start from, one of the video.
        limit: The number of frames to go on; None for all.
        frames: The number of frames of the video.
        reverse: Whether to go backwards.

    Raises:
        ModelError: The number of frames to go on is negative.
    """
    reach = frames if limit is None else limit
    if reach < 0:
        raise ModelError(f"The number of frames to process is {reach}; give 0 or a larger number.")
    if reverse:
        return range(first - 1, max(first - reach, 0) - 1, -1)
    return range(first, min(first + reach, frames - 1) + 1)


@dataclass(eq=False)
class Propagation:
    """A propagation that has not ended.

    Attributes:
        request: The arguments `start`, `limit` and `reverse`.
        scope: What is computed.
        order: The frames that are still to be processed.
        hotstart_buffer: Outputs that are delayed by hotstart, oldest first.
        outputs: Outputs that were not returned yet.
        failure: Why the next frame cannot be read.
    """

    request: tuple[int | None, int | None, bool]
    scope: Action
    order: range
    hotstart_buffer: tuple[tuple[FrameResult, Pixels], ...] = ()
    outputs: tuple[tuple[FrameResult, Pixels], ...] = ()
    failure: Exception | None = None

    @property
    def pending(self) -> tuple[tuple[FrameResult, Pixels], ...]:
        """The outputs that were not returned yet, in their order."""
        return (*self.outputs, *self.hotstart_buffer)

    def drop_objects(self, object_ids: frozenset[int]) -> None:
        """Drops objects from the outputs that were not returned yet."""
        self.hotstart_buffer = tuple(
            (result.drop_objects(object_ids), pixels) for result, pixels in self.hotstart_buffer
        )
        self.outputs = tuple((result.drop_objects(object_ids), pixels) for result, pixels in self.outputs)


@dataclass(eq=False)
class Progress:
    """The progress of a session since its last text or box.

    Attributes:
        detector: Finds the objects of the prompts.
        groups: The objects of each text; one group for all where there is at most one text.
        history: The actions of the user.
        first_frame: The first frame that was processed or prompted; None before there is one.
        frame_results: The results of frames that may be shown again, by frame.
        user_objects: The ids of objects that the user added.
        propagation: The current propagation.
        fingerprint: A frame and the SHA-256 of its pixels, by which a resumed session recognizes its video.
    """

    detector: Detector
    groups: tuple[Masklets, ...]
    history: tuple[Action, ...] = ()
    first_frame: int | None = None
    frame_results: dict[int, FrameResult] = field(default_factory=dict)
    user_objects: frozenset[int] = frozenset()
    propagation: Propagation | None = None
    fingerprint: tuple[int, str] | None = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Undoes all changes in the context if it ends by an exception, so that it can be repeated."""
        changing = [item for item in (self, self.propagation, *self.groups) if item is not None]
        snapshots = [(item, dict(vars(item))) for item in changing]
        results, buckets = dict(self.frame_results), [dict(group.buckets) for group in self.groups]
        try:
            yield
        except BaseException:
            for item, attributes in snapshots:
                vars(item).update(attributes)
            self.frame_results = results
            for group, previous in zip(self.groups, buckets, strict=True):
                group.buckets = previous
            raise

    @property
    def next_id(self) -> int:
        """The id of the next object that is found."""
        return max(group.state.next_id for group in self.groups)

    def group_of(self, object_id: int) -> Masklets:
        """Returns the group of an object; a new object joins the first group."""
        return next((group for group in self.groups if object_id in group.state.ids), self.groups[0])


class VideoProcessor:
    """Processes the frames of a session's video.

    Attributes:
        model: The model.
        frames: The video.
        keeps: Whether everything is kept, see `Sam3.start_session`.
        progress: The progress of the session.
        latest: The frame that was encoded last.
    """

    def __init__(self, model: ImageModel, tracker: Tracker, frames: Frames, rules: Rules, keeps: bool) -> None:
        """Stores a model, its tracker, a video, the thresholds, and whether everything is kept; processes nothing."""
        self.model, self.frames, self.keeps = model, frames, keeps
        self._tracker, self._rules = tracker, rules
        self._reader = FrameReader(frames)
        self.latest: EncodedFrame | None = None
        self.progress = self.new_progress((), 0)

    def new_progress(self, prompts: Sequence[Prompt], frame: int) -> Progress:
        """Returns the progress of a session that starts with these prompts on a frame."""
        retention = Retention.EVERYTHING if self.keeps else Retention.FORWARD
        texts = [prompt.text for prompt in prompts] or [None]
        groups = tuple(Masklets(self.model, self._tracker, self._rules, retention, text) for text in texts)
        return Progress(Detector(self.model, prompts, frame, self._rules), groups)

    def pixels(self, frame: int) -> Pixels:
        """Returns the pixels of a frame, uint8 [h, w, 3].

        Raises:
            ModelError: There is no such frame, it cannot be read, or a stream has passed it.
        """
        if frame < 0:
            raise ModelError(f"The frame is {frame}; give 0 or a larger number.")
        pixels = self._reader.frame(frame)
        if pixels is None:
            raise ModelError(f"{self.frames.name} ends before frame {frame}; give a frame that it has.")
        return pixels

    def advance(self, propagation: Propagation) -> None:
        """Processes a frame and reads the next one; `outputs` are those that then leave the hotstart buffer.

        If it is interrupted or fails, nothing has changed, and it can be called again.

        Raises:
            ModelError: See `pixels`.
        """
        with self.progress.transaction():
            self._advance(propagation)

    def _advance(self, propagation: Propagation) -> None:
        """Processes the next frame in the propagation's scope; changes are undone by `advance` if this fails."""
        index, propagation.order = propagation.order[0], propagation.order[1:]
        pixels = self.pixels(index)
        reverse, progress, scope = propagation.request[2], self.progress, propagation.scope
        previous = progress.frame_results.get(index)
        # Only computed frames can be fetched; upstream returns nothing for other frames, or fails (VI:553).
        full = scope.kind == "full" or previous is None or not previous.is_complete
        detects = full and bool(progress.detector.prompts)
        tracked = frozenset(item for group in progress.groups for item in group.state.ids)
        if detects:
            output = self.process(index, reverse)
        elif ids := tracked if full else tracked & scope.objects:
            encoded = self.encode_frame(index)
            refined: dict[int, VisibleObject] = {}
            for group in progress.groups:
                refined |= group.refine(encoded, ids, self._length(index), reverse)
            output = self.add_refined(encoded, refined, full)
        else:
            output = previous or FrameResult.pack(index, pixels.shape[1::-1], {}, full)
        try:
            is_last = not propagation.order or self._reader.frame(propagation.order[0]) is None
        except Exception as error:  # also an error of the source; the frames before it are returned first
            is_last, propagation.failure = True, error
        if is_last and propagation.failure is None:
            propagation.order = range(0)
        if propagation.hotstart_buffer or detects:
            propagation.hotstart_buffer, propagation.outputs = release_outputs(
                propagation.hotstart_buffer, (output, pixels), is_last, self._rules
            )
        else:
            propagation.outputs = ((output, pixels),)
        self._store(propagation.outputs)

    def _store(self, outputs: tuple[tuple[FrameResult, Pixels], ...]) -> None:
        """Stores outputs without the objects that hotstart has removed, or deletes them where nothing is kept."""
        states = [group.state for group in self.progress.groups]
        # An id that was removed in one group may be tracked in another group, because the user added it.
        removed = (
            frozenset[int]().union(*(state.removed for state in states)).difference(*(state.ids for state in states))
        )
        for output, _ in outputs:
            if self.keeps:
                self.progress.frame_results[output.index] = output.drop_objects(removed)
            else:
                self.progress.frame_results.pop(output.index, None)

    def process(self, index: int, reverse: bool) -> FrameResult:
        """Detects and tracks all objects on a frame, and stores the result."""
        progress, frame, length = self.progress, self.encode_frame(index), self._length(index)
        objects: dict[int, VisibleObject] = {}
        for group, detected in zip(progress.groups, progress.detector.detect(frame, length, reverse), strict=True):
            objects |= group.process(frame, detected, progress.next_id, length, reverse)
        return self._keep(FrameResult.pack(index, frame.image.size, objects, is_complete=True))

    def add_refined(self, frame: EncodedFrame, refined: Mapping[int, VisibleObject], full: bool = False) -> FrameResult:
        """Stores refined objects of a frame, beside its other objects as they were (`_build_tracker_output`, VI:550).

        A frame that no propagation has reached has no other objects. Upstream's assertion fails there (VI:553): for
        points before any propagation, and where a refinement goes further than the propagation went.

        Args:
            frame: The frame.
            refined: The refined objects.
            full: Whether these are all tracked objects.
        """
        previous = self.progress.frame_results.get(frame.index)
        full = full or (previous is not None and previous.is_complete)
        objects = {**(previous.objects if previous is not None else {}), **refined}
        return self._keep(FrameResult.pack(frame.index, frame.image.size, objects, full))

    def _keep(self, result: FrameResult) -> FrameResult:
        """Adds a result to the progress, and returns it."""
        progress = self.progress
        progress.first_frame = result.index if progress.first_frame is None else min(progress.first_frame, result.index)
        progress.frame_results[result.index] = result
        return result

    def encode_frame(self, index: int) -> EncodedFrame:
        """Returns an encoded frame; the latest one is cached.

        Raises:
            ModelError: See `pixels`.
        """
        if self.latest is None or self.latest.index != index:
            self.latest = None  # its tensors are large
            image = self.model.set_image(self.pixels(index))
            self.latest = EncodedFrame(index, image, self.model.interactive_features(image.features))
        return self.latest

    def _length(self, index: int) -> int | None:
        """Returns the length of the video; None where it is not known, or longer than its source states."""
        stated = self.frames.length
        return None if stated is None or index >= stated else stated
