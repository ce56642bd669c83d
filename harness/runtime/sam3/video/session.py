"""A session: a video, what is asked of it, and its objects, frame after frame in bounded memory.

VB is upstream's model/sam3_video_base.py and VI its model/sam3_video_inference.py, with the lines of sam3 0.1.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.runtime.artifact import Tensors
from harness.runtime.errors import Sam3Error
from harness.runtime.sam3.interactive import MASK_SIZE, Box
from harness.runtime.sam3.prompts import Prompt
from harness.runtime.sam3.resizing import resized
from harness.runtime.sam3.video.bucket import Bucket, born
from harness.runtime.sam3.video.detections import Detections, kept, video_scores
from harness.runtime.sam3.video.frames import Frames, open_frames
from harness.runtime.sam3.video.hotstart import released
from harness.runtime.sam3.video.masks import without_holes_and_sprinkles
from harness.runtime.sam3.video.memory_bank import MemoryBank
from harness.runtime.sam3.video.objects import VideoState, without_chosen
from harness.runtime.sam3.video.occlusion import SUPPRESSED_LOGIT, object_logits, without_shrunken
from harness.runtime.sam3.video.outputs import FrameOutput, ShownObject, frame_output, shown_objects, sigmoid
from harness.runtime.sam3.video.planner import Observations, Plan, plan_frame
from harness.runtime.sam3.video.propagation import prompts_of_detections
from harness.runtime.sam3.video.reconditioning import Reconditioning
from harness.runtime.sam3.video.rules import DISAMBIGUATED, Rules
from harness.runtime.sam3.video.tracker import GIVEN_MASK, Tracker

if TYPE_CHECKING:
    from harness.runtime.sam3.model import EncodedImage, Sam3

Floats = npt.NDArray[np.float32]
Masks = npt.NDArray[np.bool_]
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class TrackedFrame:
    """A frame and the n objects that are shown in it, by rising id.

    Attributes:
        index: Number of the frame.
        pixels: uint8 [h, w, 3].
        ids: int64 [n].
        scores: fp32 [n], of the detections that the objects were found by.
        boxes: fp32 [n, 4], (x0, y0, x1, y1) in pixels.
        masks: bool [n, h, w]; no pixel belongs to several of them.
    """

    index: int
    pixels: Pixels
    ids: npt.NDArray[np.int64]
    scores: Floats
    boxes: Floats
    masks: Masks


@dataclass(frozen=True, eq=False)
class _Found:
    """What the detector found: what counts of it, and the logits [D, 288, 288] of its masks."""

    detections: Detections
    logits: Floats


@dataclass(frozen=True, eq=False)
class _Frame:
    """A frame that is encoded; `found` is None where the detector is not asked."""

    index: int
    image: EncodedImage
    features: Tensors
    found: _Found | None


@dataclass(frozen=True, eq=False)
class _Held:
    """A frame whose output is held back; the masks of its objects are kept as bits."""

    index: int
    pixels: Pixels
    bits: Mapping[int, npt.NDArray[np.uint8]]
    tracker_scores: Mapping[int, float]

    @classmethod
    def of(cls, image: EncodedImage, index: int, objects: Mapping[int, ShownObject]) -> _Held:
        """Keeps what may be shown of a frame."""
        bits = {number: np.packbits(each.mask) for number, each in objects.items()}
        return cls(index, image.pixels, bits, {number: each.tracker_score for number, each in objects.items()})

    @property
    def objects(self) -> dict[int, ShownObject]:
        """What may be shown, as it was given."""
        height, width = self.pixels.shape[:2]
        return {
            number: ShownObject(
                np.unpackbits(bits, count=height * width).reshape(height, width).astype(bool),
                self.tracker_scores[number],
            )
            for number, bits in self.bits.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the objects' masks."""
        return sum(bits.nbytes for bits in self.bits.values())

    def without(self, object_id: int) -> _Held:
        """The same without an object."""
        return replace(self, bits={number: bits for number, bits in self.bits.items() if number != object_id})


class Session:
    """A video and what is asked of it; `Sam3.start_session` makes one. One thread uses it at a time.

    Frames are processed forwards and then forgotten: what stays in memory does not grow with the video.
    """

    def __init__(self, model: Sam3, tracker: Tracker, source: Any, rules: Rules = DISAMBIGUATED) -> None:
        """Takes a model, its tracker, and a video as `harness.runtime.sam3.video.frames.open_frames` takes it.

        Raises:
            Sam3Error: The video cannot be opened.
        """
        self.frames: Frames = open_frames(source)
        self.rules = rules
        self._model = model
        self._tracker = tracker
        self._reading: Iterator[Pixels] = iter(())
        self._forget()

    def _forget(self) -> None:
        self._prompt: Prompt | None = None
        self._prompted = 0
        self._boxes_of: dict[int, int] = {}
        self._state = VideoState()
        self._buckets: dict[int, Bucket] = {}
        self._current: _Frame | None = None
        self._held: tuple[_Held, ...] = ()
        self._ready: tuple[_Held, ...] = ()
        self._failure: Sam3Error | None = None

    @property
    def objects(self) -> tuple[int, ...]:
        """The ids of the objects that are tracked now."""
        return self._state.ids

    @property
    def nbytes(self) -> int:
        """Bytes of what is remembered of the objects, and of their masks on frames that are held back."""
        held = sum(each.nbytes for each in (*self._held, *self._ready))
        return held + sum(bucket.nbytes for bucket in self._buckets.values())

    def add_prompt(self, frame: int = 0, text: str | None = None, box: Box = None) -> TrackedFrame:
        """Asks for objects, and finds them in one frame; what was tracked before is forgotten, as upstream forgets it.

        Args:
            frame: Where to begin; frames before it are skipped.
            text: A noun phrase; new objects that it means are found on every later frame, too.
            box: (x0, y0, x1, y1) in pixels around an example in this frame. Without a text, objects are found in this
                frame alone.

        Returns:
            The frame with what was found.

        Raises:
            Sam3Error: Nothing is asked, the prompt makes no sense, or there is no such frame.
        """
        prompt = Prompt(text, boxes=None if box is None else np.asarray(box, object).reshape(1, -1).tolist())
        self._model.check_prompt(prompt)
        reading, pixels = self._begun(frame)
        height, width = pixels.shape[:2]
        self._model.encode_prompt(prompt, (width, height))
        self._forget()
        self._reading = reading
        self._prompt, self._prompted = prompt, frame
        # A propagation processes this frame once more, as upstream's does (VI:241).
        self._current = self._encoded(frame, pixels)
        return self._shown(self._processed(self._current))

    def propagate(self) -> Iterator[TrackedFrame]:
        """Tracks the objects through the video, from the frame of the prompt on.

        A frame is given out when 14 more have been processed, since objects that are found by mistake are removed in
        that time (`Rules.hotstart_frames`), or when the video ends. Whoever stops in between goes on with another call.

        Raises:
            Sam3Error: Nothing is asked yet; or a frame cannot be read, after those before it were given out.
        """
        if self._prompt is None:
            raise Sam3Error("Nothing is asked of this video; add a text or a box first.")
        while True:
            while self._ready:
                first, *others = self._ready
                self._ready = tuple(others)
                yield self._shown(first)
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if self._current is None:
                return
            self._advance(self._current)

    def remove_object(self, object_id: int) -> None:
        """Tracks an object no longer, and shows it no longer.

        Raises:
            Sam3Error: No such object is tracked.
        """
        self._state = without_chosen(self._state, object_id)
        self._drop(object_id)
        self._held = tuple(held.without(object_id) for held in self._held)
        self._ready = tuple(held.without(object_id) for held in self._ready)

    def _begun(self, frame: int) -> tuple[Iterator[Pixels], Pixels]:
        """Begins to read, and returns the pixels of a frame with what reads on after it."""
        if frame < 0:
            raise Sam3Error(f"The frame is {frame}; give 0 or a larger number.")
        reading = iter(self.frames)
        pixels = next(islice(reading, frame, None), None)
        if pixels is None:
            raise Sam3Error(f"{self.frames.name} ends before frame {frame}; give a frame that it has.")
        return reading, pixels

    def _advance(self, frame: _Frame) -> None:
        """Processes a frame and reads the next one; what is given out by now becomes ready."""
        output = self._processed(frame)
        try:
            pixels = next(self._reading, None)
        except Sam3Error as error:
            pixels, self._failure = None, error
        self._held, self._ready = released(self._held, output, pixels is None, self.rules)
        self._current = None if pixels is None else self._encoded(frame.index + 1, pixels)

    def _encoded(self, index: int, pixels: Pixels) -> _Frame:
        image = self._model.set_image(pixels)
        features = self._tracker.features(image.features["trunk"])
        return _Frame(index, image, features, self._detected(index, image))

    def _detected(self, index: int, image: EncodedImage) -> _Found | None:
        """What the detector finds, which reads the boxes of the frame that was processed when it ran."""
        prompt = self._prompt or Prompt()
        self._boxes_of = prompts_of_detections(self._boxes_of, index, self._length(index) or index + 2, False)
        if prompt.text is None and index != self._prompted:
            return None
        boxed = self._boxes_of[index] == self._prompted
        encoded = self._model.encode_prompt(prompt if boxed else Prompt(prompt.text), image.size)
        grounded = self._model.ground(image.features, encoded)
        scores = video_scores(self._model.fetch(grounded["scores"])[0])
        if (scores > np.float32(self.rules.detection_score)).any():
            logits = self._model.segmentation_head(image.features, grounded).output("masks")[0]
        else:
            logits = np.zeros((len(scores), MASK_SIZE, MASK_SIZE), np.float32)
        detections = kept(scores, logits, self.rules)
        return _Found(detections, logits[detections.queries])

    def _processed(self, frame: _Frame) -> _Held:
        """Tracks the objects on a frame, decides, remembers, and returns what may be shown (VB:151)."""
        before = self._state
        logits, present = self._seen(frame)
        logits = without_holes_and_sprinkles(logits)
        detections = None if frame.found is None else frame.found.detections
        self._state, plan = plan_frame(before, Observations(frame.index, logits > 0, present, detections), self.rules)
        for correction in plan.reconditionings:
            self._correct(frame, before, correction)
        logits[plan.suppressed] = SUPPRESSED_LOGIT
        self._remember(frame, logits)
        found = self._born(frame, before, plan)
        for gone in plan.removed:
            self._drop(gone)
        tracked, new = self._at_size(logits, frame), self._at_size(without_holes_and_sprinkles(found), frame)
        return _Held.of(frame.image, frame.index, shown_objects(before, plan, tracked, sigmoid(present), new))

    def _seen(self, frame: _Frame) -> tuple[Floats, Floats]:
        """Mask logits [N, 288, 288] and object logits [N] of all objects, bucket by bucket."""
        masks, present = [np.zeros((0, MASK_SIZE, MASK_SIZE), np.float32)], [np.zeros(0, np.float32)]
        for number, bucket in self._buckets.items():
            self._buckets[number], logits, scores = bucket.seen(
                self._tracker, frame.features, frame.index, self._length(frame.index)
            )
            masks.append(logits)
            present.append(scores)
        return np.concatenate(masks), np.concatenate(present)

    def _length(self, index: int) -> int | None:
        """The length of the video; None where it is not known, or longer than its source states."""
        stated = self.frames.length
        return None if stated is None or index >= stated else stated

    def _correct(self, frame: _Frame, before: VideoState, correction: Reconditioning) -> None:
        assert frame.found is not None
        number = next(each.bucket for each in before.objects if each.id == correction.object_id)
        mask = resized(frame.found.logits[[correction.detection]], GIVEN_MASK, GIVEN_MASK)[0] > 0
        self._buckets[number] = self._buckets[number].corrected(
            self._tracker, frame.features, frame.index, correction.object_id, mask, frame.image.size
        )

    def _remember(self, frame: _Frame, logits: Floats) -> None:
        """Encodes the memories of all objects, of which none may claim what belongs to another one (VB:1437)."""
        if not len(logits):
            return
        enlarged = without_shrunken(resized(logits, GIVEN_MASK, GIVEN_MASK))
        present = object_logits(enlarged)
        start = 0
        for number, bucket in self._buckets.items():
            rows = slice(start, start := start + len(bucket.bank.objects))
            self._buckets[number] = bucket.remembering(
                self._tracker, frame.features, frame.index, enlarged[rows], present[rows]
            )

    def _born(self, frame: _Frame, before: VideoState, plan: Plan) -> Floats:
        """New objects get a bucket; returns the logits [births, 288, 288] of their detections."""
        if frame.found is None or not plan.births:
            return np.zeros((0, MASK_SIZE, MASK_SIZE), np.float32)
        ids = tuple(birth.object_id for birth in plan.births)
        logits = frame.found.logits[[birth.detection for birth in plan.births]]
        self._buckets[before.next_bucket] = born(
            self._tracker, frame.features, frame.index, ids, logits, MemoryBank(ids), frame.image.size
        )
        return logits

    def _drop(self, object_id: int) -> None:
        for number, bucket in list(self._buckets.items()):
            if object_id in bucket.bank.objects:
                remaining = bucket.without(object_id)
                if remaining.bank.objects:
                    self._buckets[number] = remaining
                else:
                    del self._buckets[number]

    def _at_size(self, logits: Floats, frame: _Frame) -> Masks:
        width, height = frame.image.size
        if not len(logits):
            return np.zeros((0, height, width), bool)
        masks: Masks = self._model.resize_masks(logits[None], np.arange(len(logits)), frame.image.pixels)
        return masks

    def _shown(self, held: _Held) -> TrackedFrame:
        height, width = held.pixels.shape[:2]
        output: FrameOutput = frame_output(held.objects, self._state.scores, (width, height), self._state.removed)
        corners = output.boxes + np.concatenate([np.zeros_like(output.boxes[:, :2]), output.boxes[:, :2]], axis=1)
        scale = np.array([width, height, width, height], np.float32)
        return TrackedFrame(held.index, held.pixels, output.ids, output.scores, corners * scale, output.masks)
