"""Tracks masklets: the objects of one text or box, or those that were clicked, with their memories.

Objects that were found on the same frame are a bucket, whose memories are read together. VB is upstream's
model/sam3_video_base.py and VI its model/sam3_video_inference.py, with the lines of sam3 0.1.4.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from harness.runtime.arrays import Floats, Masks
from harness.runtime.sam3.images import MASK_SIZE
from harness.runtime.sam3.interactive import LARGEST_LOGIT, ObjectPrompt
from harness.runtime.sam3.resizing import resize, resize_antialiased
from harness.runtime.sam3.video.detector import Detections, EncodedFrame
from harness.runtime.sam3.video.masks import (
    SUPPRESSED_LOGIT,
    corrected_logits,
    object_logits,
    remove_logit_overlaps,
    suppress_shrunken,
    without_holes_and_sprinkles,
)
from harness.runtime.sam3.video.memory_bank import (
    MISSING_MASK_LOGIT,
    MemoryBank,
    MemoryEntry,
    PromptOutput,
    Retention,
    consolidate,
    merge_rows,
    tracked_entry,
)
from harness.runtime.sam3.video.outputs import VisibleObject, sigmoid, visible_objects
from harness.runtime.sam3.video.planner import FramePlan, plan_frame
from harness.runtime.sam3.video.rules import (
    CLICKED_SCORE,
    Rules,
    VideoState,
    cleared_by_click,
    drop_objects,
    state_after_click,
)
from harness.runtime.sam3.video.slots import Placement, Slots, best_fit
from harness.runtime.sam3.video.tracker import INPUT_MASK_SIZE, PROMPT_MASK_SIZE, Tracker

if TYPE_CHECKING:
    from harness.runtime.sam3.image_model import ImageModel


_PRESENT_MASK_LOGIT = -MISSING_MASK_LOGIT


@dataclass(frozen=True, eq=False)
class Bucket:
    """The objects of a bucket and their memories.

    Attributes:
        bank: The memories of the objects.
        mask_logits: By frame, the masks as logits fp32 [B, 288, 288] that a click refines: of every remembered frame,
            or of the latest one alone, as the bank's retention says.
        user_prompts: (frame, object) for each click and mask of the user.
        cleared_frames: Frames whose masks a click does not refine (`_clear_non_cond_mem_around_input`, TP:1301).
    """

    bank: MemoryBank
    mask_logits: Mapping[int, Floats] = field(default_factory=dict)
    user_prompts: frozenset[tuple[int, int]] = frozenset()
    cleared_frames: frozenset[int] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of the memories and masks."""
        return self.bank.nbytes + sum(logits.nbytes for logits in self.mask_logits.values())

    def track_frame(
        self, tracker: Tracker, frame: EncodedFrame, length: int | None, reverse: bool
    ) -> tuple[Bucket, Floats, Floats]:
        """Tracks the objects on a frame; returns mask logits [B, 288, 288] and object logits [B].

        A conditioning frame is not tracked again; its masks stay as they are (TP:836).
        """
        index = frame.index
        if index in self.bank.conditioning:
            return self._clear_around(index), self.mask_logits[index], self.bank.conditioning[index].object_logits[:, 0]
        attended = self.bank.read(self.bank.plan(index, num_frames=length, reverse=reverse))
        output = tracker.track(frame.features, attended, self.bank.slots)
        entry = replace(
            tracked_entry(self._in_slots(output.pointers), output.object_logits, output.iou),
            features=tracker.remembered_features(frame.features),
        )
        bucket = self._with_logits(self.bank.track(index, entry), index, output.logits)
        return bucket, output.logits, output.object_logits[:, 0]

    def previous_logits(self, frame: int, object_id: int) -> Floats | None:
        """Returns the mask logits [288, 288] that a click on an object refines; None if there are none."""
        if frame in self.cleared_frames or frame not in self.mask_logits:
            return None
        row = self.bank.objects.index(object_id)
        if row >= len(self.mask_logits[frame]):
            return None  # it was added later
        mask: Floats = self.mask_logits[frame][row]
        return mask

    def condition(
        self,
        tracker: Tracker,
        frame: EncodedFrame,
        outputs: Mapping[int, tuple[PromptOutput, Floats]],
        *,
        detected: bool = False,
    ) -> Bucket:
        """Returns the bucket with the frame as a conditioning frame of all its objects (TP:491, VB:497).

        The frame's memory must be encoded afterwards. Objects without an output keep their earlier output on the frame,
        or are empty there. In SAM 3.1 a frame that was tracked before stays so if a detector made the outputs
        (`add_new_masks`).

        Args:
            tracker: The tracker.
            frame: The frame.
            outputs: By object, the model's output for its prompt, and its mask logits [288, 288].
            detected: Whether these are masks of the detector.
        """
        object_ids, slots, previous = self.bank.objects, self.bank.slots, self.bank.entry(frame.index)
        given = frozenset(outputs) if previous is None else previous.given | frozenset(outputs)
        if slots is not None and previous is not None and previous.pointer is not None:
            previous = replace(previous, pointer=slots.demux(previous.pointer))
        empty = np.zeros((1, 0), np.float32)  # not needed where every object is known
        if previous is None and len(outputs) < len(object_ids):
            empty_mask = np.zeros((INPUT_MASK_SIZE, INPUT_MASK_SIZE), np.float32)
            empty = tracker.use_mask(frame.features, empty_mask).pointer
        entry = consolidate(
            object_ids, {object_id: output for object_id, (output, _) in outputs.items()}, previous, empty
        )
        assert entry.pointer is not None
        entry = replace(
            entry,
            pointer=self._in_slots(entry.pointer),
            features=tracker.remembered_features(frame.features),
            given=given,
        )
        missing = np.full((1, MASK_SIZE, MASK_SIZE), MISSING_MASK_LOGIT)
        masks = {object_id: logits[None] for object_id, (_, logits) in outputs.items()}
        logits = merge_rows(object_ids, masks, self.mask_logits.get(frame.index), missing)
        if slots is not None and detected and frame.index in self.bank.tracked:
            return self._with_logits(self.bank.track(frame.index, entry), frame.index, logits)
        bank = self.bank.condition(frame.index, entry, tuple(outputs))
        return self._with_logits(bank, frame.index, logits)._clear_around(frame.index)

    def add_prompt(
        self, tracker: Tracker, frame: EncodedFrame, object_id: int, output: PromptOutput, logits: Floats
    ) -> Bucket:
        """Adds the user's prompt of one object, with its mask `logits` [288, 288], and encodes the memory (TP:674)."""
        bucket = self.condition(tracker, frame, {object_id: (output, logits)}).encode_prompt_memory(tracker, frame)
        return replace(bucket, user_prompts=self.user_prompts | {(frame.index, object_id)})

    def clear_detections_near(self, frame: int, object_id: int) -> Bucket:
        """Clears detections of an object near a click, so that these frames are tracked again (VI:1675).

        The frames are no longer conditioning for the whole bucket.
        """
        clicked = [index for index, prompted_id in self.user_prompts if prompted_id == object_id]
        masked = [index for index, ids in self.bank.inputs.items() if object_id in ids]
        bucket = self
        for cleared in cleared_by_click(masked, clicked, frame):
            bank = bucket.bank
            for member in bank.objects:
                bank = bank.clear(cleared, member)
            user_prompts = frozenset(prompt for prompt in bucket.user_prompts if prompt[0] != cleared)
            bucket = replace(bucket, bank=bank, user_prompts=user_prompts)
        return bucket

    def encode_memory(self, tracker: Tracker, frame: EncodedFrame, logits: Floats, object_logits: Floats) -> Bucket:
        """Encodes the frame's memory from mask logits [B, 1152, 1152] and object logits [B]."""
        memory = tracker.encode_memory(frame.features, logits, object_logits, self._placement(frame.index))
        return replace(self, bank=self.bank.with_memory(frame.index, memory))

    def encode_prompt_memory(self, tracker: Tracker, frame: EncodedFrame) -> Bucket:
        """Encodes the memory of a frame with a prompt from its masks without overlaps (TP:617)."""
        index, entry = frame.index, self.bank.entry(frame.index)
        assert entry is not None
        enlarged = remove_logit_overlaps(resize(self.mask_logits[index], PROMPT_MASK_SIZE, PROMPT_MASK_SIZE))
        object_logits = entry.object_logits[:, 0]
        memory = tracker.encode_prompt_memory(frame.features, enlarged, object_logits, self._placement(index))
        return replace(self, bank=self.bank.with_memory(index, memory))

    def encode_predicted_memory(self, tracker: Tracker, frame: EncodedFrame) -> Bucket:
        """Encodes the memory of a tracked frame from the masks that the model predicted (TB:1030)."""
        index = frame.index
        enlarged = resize(self.mask_logits[index], PROMPT_MASK_SIZE, PROMPT_MASK_SIZE)
        object_logits = self.bank.tracked[index].object_logits[:, 0]
        memory = tracker.encode_predicted_memory(frame.features, enlarged, object_logits, self._placement(index))
        return replace(self, bank=self.bank.with_memory(index, memory))

    def remove(self, object_id: int) -> Bucket:
        """Returns the bucket without an object; masks that were cleared for other objects come back (TP:1252)."""
        rows = [row for row, member in enumerate(self.bank.objects) if member != object_id]
        bank = self.bank.remove(object_id)
        mask_logits = {
            frame: logits[[row for row in rows if row < len(logits)]]
            for frame, logits in self.mask_logits.items()
            if bank.entry(frame) is not None
        }
        return Bucket(bank, mask_logits, frozenset(prompt for prompt in self.user_prompts if prompt[1] != object_id))

    def single(self, object_id: int) -> Bucket:
        """Returns a bucket of one of the objects, with its pointers and without memories, which the others share.

        SAM 3.1 makes one for the first click on an object (`_extract_object_to_singleton_state`).
        """
        row, slots = self.bank.objects.index(object_id), self.bank.slots
        assert slots is not None
        alone = Slots().add(1)

        def entry_of(entry: MemoryEntry) -> MemoryEntry:
            rows = slice(row, row + 1)
            return replace(
                entry,
                memory=None,
                features=None,
                pointer=None if entry.pointer is None else alone.mux(slots.demux(entry.pointer)[rows]),
                object_logits=entry.object_logits[rows],
                iou=entry.iou[rows],
                given=entry.given & {object_id},
            )

        known = {frame: logits for frame, logits in self.mask_logits.items() if row < len(logits)}
        bank = replace(
            self.bank,
            objects=(object_id,),
            slots=alone,
            conditioning={frame: entry_of(entry) for frame, entry in self.bank.conditioning.items()},
            tracked={frame: entry_of(entry) for frame, entry in self.bank.tracked.items()},
            inputs={frame: ids & {object_id} for frame, ids in self.bank.inputs.items()},
        )
        user_prompts = frozenset(prompt for prompt in self.user_prompts if prompt[1] == object_id)
        return Bucket(bank, {frame: logits[[row]] for frame, logits in known.items()}, user_prompts)

    def _in_slots(self, pointers: Floats) -> Floats:
        """Returns pointers [B, 256] as they are remembered: for SAM 3.1 in their slots."""
        return pointers if self.bank.slots is None else self.bank.slots.mux(pointers)

    def _placement(self, frame: int) -> Placement | None:
        """Returns the slots of the objects, and which of them have a prompt on a frame; None for SAM 3."""
        entry = self.bank.entry(frame)
        if self.bank.slots is None or entry is None:
            return None
        given = np.array([object_id in entry.given for object_id in self.bank.objects], np.float32)
        return Placement(self.bank.slots, given)

    def _with_logits(self, bank: MemoryBank, frame: int, logits: Floats) -> Bucket:
        """Returns the bucket with another bank and mask logits [B, 288, 288] of a frame, which a click refines."""
        previous = self.mask_logits if bank.retention is Retention.EVERYTHING else {}
        return replace(
            self, bank=bank, mask_logits={**previous, frame: logits}, cleared_frames=self.cleared_frames - {frame}
        )

    def _clear_around(self, frame: int) -> Bucket:
        """Clears the masks around a conditioning frame if the bucket has one object; SAM 3.1 does not.

        Upstream clears these frames in its copies for single objects. Nothing attends to these copies, but a click on
        such a frame finds no mask to refine.
        """
        if len(self.bank.objects) > 1 or self.bank.slots is not None:
            return self
        near = {index for index in self.bank.tracked if abs(index - frame) <= self.bank.rules.num_maskmem}
        return replace(
            self, cleared_frames=frozenset(index for index in self.cleared_frames | near if index in self.mask_logits)
        )


def resize_to_video(masks: Masks, size: tuple[int, int]) -> Masks:
    """Resizes masks [B, 1152, 1152] to the video's width and height.

    A pixel of several masks belongs to the last one (TP:600).
    """
    width, height = size
    resized = resize_antialiased(masks.astype(np.float32), height, width) > 0.5
    covered = np.logical_or.accumulate(resized[::-1])[::-1]
    resized[:-1] &= ~covered[1:]
    return resized


def mask_to_logits(masks: Masks) -> Floats:
    """Returns the logits [B, 288, 288] of given masks [B, height, width], shrunk with antialiasing (TP:357)."""
    return resize_antialiased(np.where(masks, _PRESENT_MASK_LOGIT, MISSING_MASK_LOGIT), MASK_SIZE, MASK_SIZE)


class Masklets:
    """The objects of one prompt through a video.

    Attributes:
        text: The text that they were found by; None if a box or clicks are the prompt.
        state: The state of the planner.
        buckets: Their memories, by the number of the bucket.
    """

    def __init__(
        self, model: ImageModel, tracker: Tracker, rules: Rules, retention: Retention, text: str | None
    ) -> None:
        """Stores the models, the thresholds and the retention; there are no objects yet."""
        self.text = text
        self.state = VideoState()
        self.buckets: dict[int, Bucket] = {}
        self._model, self._tracker = model, tracker
        self._rules, self._retention = rules, retention

    @property
    def nbytes(self) -> int:
        """Bytes of the memories and masks."""
        return sum(bucket.nbytes for bucket in self.buckets.values())

    def process(
        self, frame: EncodedFrame, detections: Detections | None, next_id: int, length: int | None, reverse: bool
    ) -> dict[int, VisibleObject]:
        """Tracks the objects on a frame, plans, encodes memories, and returns the visible objects (VB:151).

        Args:
            frame: The frame.
            detections: The detections; None if the detector did not run.
            next_id: The id of the next object that is found.
            length: The length of the video; None if it is not known.
            reverse: Whether frames are processed backwards.
        """
        previous_state = replace(self.state, next_id=next_id)
        logits, presence = self._track(frame, length, reverse)
        logits = self._cleaned(logits)
        state, plan = plan_frame(
            previous_state, frame.index, logits > 0, presence, detections, rules=self._rules, reverse=reverse
        )
        # Only kept frames need the ids of removed objects.
        drops_removed = self._retention is Retention.FORWARD
        self.state = replace(state, removed=frozenset()) if drops_removed else state
        for object_id, detection in plan.reconditionings.items():
            assert detections is not None
            self._recondition(frame, object_id, detections.logits[[detection]])
            if self._rules.multiplex:
                row = previous_state.ids.index(object_id)
                logits[row] = corrected_logits(logits[row], detections.logits[detection])
        logits[plan.suppressed] = SUPPRESSED_LOGIT
        self._encode_memories(frame, logits, previous_state.ids)
        birth_logits = self._add_objects(frame, detections, previous_state, plan)
        for removed_id in plan.removed:
            self._drop(removed_id)
        tracked, new = self._resize(logits, frame), self._resize(self._cleaned(birth_logits), frame)
        born_scores = [state.scores[object_id] for object_id in plan.births]
        return visible_objects(
            (*previous_state.ids, *plan.births), (*tracked, *new), (*sigmoid(presence), *born_scores)
        )

    def refine(
        self, frame: EncodedFrame, ids: Collection[int], length: int | None, reverse: bool
    ) -> dict[int, VisibleObject]:
        """Tracks some objects on a frame, with the others of their buckets, and returns them (VI:1086).

        Nothing is planned, and memories are encoded from the masks that the model predicts. An object's tracker score
        is its logit, as upstream's (VI:1141): beside the probabilities of other objects, a logit above 1 wins every
        pixel and a negative one none. This project follows it.
        """
        refined: dict[int, VisibleObject] = {}
        for number, bucket in self.buckets.items():
            members = [object_id for object_id in bucket.bank.objects if object_id in ids]
            if not members:
                continue
            bucket, logits, presence = bucket.track_frame(self._tracker, frame, length, reverse)
            if frame.index not in bucket.bank.conditioning:
                bucket = bucket.encode_predicted_memory(self._tracker, frame)
            self.buckets[number] = bucket
            rows = [bucket.bank.objects.index(object_id) for object_id in members]
            masks = self._resize(self._cleaned(logits[rows]), frame)
            for object_id, mask, logit in zip(members, masks, presence[rows], strict=True):
                refined[object_id] = VisibleObject(mask, float(logit))
        return refined

    def click(self, frame: EncodedFrame, object_id: int, prompt: ObjectPrompt) -> VisibleObject:
        """Adds or corrects an object by points or a box on a frame; refines its earlier mask on this frame (VI:1397).

        Raises:
            ModelError: The prompt or the id is invalid; nothing has changed.
        """
        number = self._number_of(object_id)
        previous = None if number is None else self.buckets[number].previous_logits(frame.index, object_id)
        if previous is not None:
            prompt = replace(prompt, mask=np.clip(previous, -LARGEST_LOGIT, LARGEST_LOGIT))
        encoded = self._model.encode_object_prompt(prompt, frame.image.size)
        output, logits = self._tracker.decode_prompt(frame.features, encoded)
        width, height = frame.image.size
        return self._apply_prompt(frame, object_id, output, logits, resize(logits[None], height, width))

    def set_mask(self, frame: EncodedFrame, object_id: int, mask: Masks) -> VisibleObject:
        """Adds or corrects an object by its mask bool [height, width] on a frame.

        In a video, upstream gives only a detector's masks to its tracker; a user's mask is treated like a click.

        Raises:
            ModelError: The id is invalid; nothing has changed.
        """
        values = mask[None].astype(np.float32)
        output = self._tracker.use_mask(frame.features, resize_antialiased(values, INPUT_MASK_SIZE, INPUT_MASK_SIZE)[0])
        return self._apply_prompt(frame, object_id, output, mask_to_logits(mask[None])[0], 2 * values - 1)

    def remove(self, object_id: int) -> None:
        """Removes an object that is tracked (VI:1277)."""
        self.state = drop_objects(self.state, frozenset({object_id}))
        self._drop(object_id)

    def _apply_prompt(
        self, frame: EncodedFrame, object_id: int, output: PromptOutput, logits: Floats, resized: Floats
    ) -> VisibleObject:
        """Adds the output for a prompt to an object; returns the object on this frame (VI:1506-1560).

        Args:
            frame: The frame.
            object_id: The object.
            output: The tracker's output.
            logits: fp32 [288, 288], the mask.
            resized: fp32 [1, height, width], the mask in the video's size.
        """
        state = state_after_click(self.state, object_id, frame.index)
        number = next(item.bucket for item in state.objects if item.id == object_id)
        previous = self._number_of(object_id)
        if previous is None:
            bucket = Bucket(self._tracker.new_bank((object_id,), self._retention))
        elif self.buckets[previous].bank.slots is not None and len(self.buckets[previous].bank.objects) > 1:
            bucket, number = self.buckets[previous].single(object_id), state.next_bucket
            state = replace(state, next_bucket=number + 1)
            self._drop(object_id)
        else:
            bucket, number = self.buckets[previous], previous
        prompted = bucket.add_prompt(self._tracker, frame, object_id, output, logits)
        self.buckets[number] = prompted.clear_detections_near(frame.index, object_id)
        self.state = state
        return VisibleObject(self._cleaned(resized)[0] > 0, CLICKED_SCORE)

    def _number_of(self, object_id: int) -> int | None:
        """Returns the number of an object's bucket; None for a new object."""
        return next((number for number, bucket in self.buckets.items() if object_id in bucket.bank.objects), None)

    def _track(self, frame: EncodedFrame, length: int | None, reverse: bool) -> tuple[Floats, Floats]:
        """Returns mask logits [N, 288, 288] and object logits [N] of all objects, in the order of the state."""
        masks, presence = [np.zeros((0, MASK_SIZE, MASK_SIZE), np.float32)], [np.zeros(0, np.float32)]
        for number, bucket in self.buckets.items():
            self.buckets[number], logits, scores = bucket.track_frame(self._tracker, frame, length, reverse)
            masks.append(logits)
            presence.append(scores)
        members = [object_id for bucket in self.buckets.values() for object_id in bucket.bank.objects]
        order = [members.index(object_id) for object_id in self.state.ids]
        return np.concatenate(masks)[order], np.concatenate(presence)[order]

    def _recondition(self, frame: EncodedFrame, object_id: int, detected: Floats) -> None:
        """Corrects an object by a detection's logits [1, 288, 288] (VB:475)."""
        number = self._number_of(object_id)
        assert number is not None
        self.buckets[number] = self._condition(self.buckets[number], frame, (object_id,), detected)

    def _condition(self, bucket: Bucket, frame: EncodedFrame, objects: Sequence[int], logits: Floats) -> Bucket:
        """Returns a bucket whose objects get the masks of detections, as if the user gave them (VB:475, VB:1517).

        Args:
            bucket: The bucket.
            frame: The frame, which becomes conditioning.
            objects: The ids of n of its objects.
            logits: fp32 [n, 288, 288], the detections' masks.
        """
        masks = resize(logits, INPUT_MASK_SIZE, INPUT_MASK_SIZE) > 0
        outputs = [self._tracker.use_mask(frame.features, mask.astype(np.float32)) for mask in masks]
        prompts = zip(outputs, mask_to_logits(resize_to_video(masks, frame.image.size)), strict=True)
        given = dict(zip(objects, prompts, strict=True))
        return bucket.condition(self._tracker, frame, given, detected=True)

    def _encode_memories(self, frame: EncodedFrame, logits: Floats, ids: tuple[int, ...]) -> None:
        """Encodes the memories of objects, suppressing those that lose most of their pixels to others (VB:1437)."""
        if not len(logits):
            return
        enlarged = suppress_shrunken(resize(logits, INPUT_MASK_SIZE, INPUT_MASK_SIZE))
        presence = object_logits(enlarged)
        for number, bucket in self.buckets.items():
            rows = [ids.index(object_id) for object_id in bucket.bank.objects]
            self.buckets[number] = bucket.encode_memory(self._tracker, frame, enlarged[rows], presence[rows])

    def _add_objects(
        self, frame: EncodedFrame, detections: Detections | None, previous_state: VideoState, plan: FramePlan
    ) -> Floats:
        """Adds new objects in a bucket; returns the logits [births, 288, 288] of their detections.

        In SAM 3.1 the bucket is an earlier one if it has enough free slots (MX:2690).
        """
        if detections is None or not plan.births:
            return np.zeros((0, MASK_SIZE, MASK_SIZE), np.float32)
        objects = tuple(plan.births)
        logits = detections.logits[list(plan.births.values())]
        slots = [(key, bucket.bank.slots) for key, bucket in self.buckets.items() if bucket.bank.slots is not None]
        number = best_fit(slots, len(objects))
        if number is None:
            number, bucket = previous_state.next_bucket, Bucket(self._tracker.new_bank(objects, self._retention))
        else:
            bucket = self.buckets[number]
            bucket = replace(bucket, bank=bucket.bank.add(frame.index, objects))
        conditioned = self._condition(bucket, frame, objects, logits)
        self.buckets[number] = conditioned.encode_prompt_memory(self._tracker, frame)
        return logits

    def _drop(self, object_id: int) -> None:
        """Removes an object from its bucket, and the bucket if no object is left."""
        for number, bucket in list(self.buckets.items()):
            if object_id in bucket.bank.objects:
                remaining = bucket.remove(object_id)
                if remaining.bank.objects:
                    self.buckets[number] = remaining
                else:
                    del self.buckets[number]

    def _cleaned(self, logits: Floats) -> Floats:
        """Returns masks [N, h, w] without small holes and parts, as far as the rules fill and remove them."""
        return without_holes_and_sprinkles(logits, self._rules.largest_filled)

    def _resize(self, logits: Floats, frame: EncodedFrame) -> Masks:
        """Returns masks [N, 288, 288] as bool [N, height, width] of the video."""
        return self._model.resize_masks(logits[None], np.arange(len(logits)), frame.image.pixels)
