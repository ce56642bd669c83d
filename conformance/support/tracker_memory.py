"""Runs upstream's tracker on scripts: its own state machine, with small numbered arrays in place of its networks.

Every memory and every pointer is a number of its own, and the tables of temporal positions hold their row and their
time, so that what the attention to memories gets tells which frames it reads, in which order, as how old.

    python -m conformance.support.tracker_memory --frames 100000 --seed 1

compares so many frames, and prints how many there were of each kind.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from harness.models.sam3.patches.patch import replaced
from harness.models.sam3.upstream import upstream
from harness.runtime.errors import ModelError
from harness.runtime.sam3.video.memory_bank import (
    HOTSTART,
    MemoryBank,
    MemoryEntry,
    MemoryRules,
    PromptOutput,
    Retention,
    consolidate,
    plan_attention,
    tracked_entry,
)
from harness.runtime.sam3.video.tracker import from_bfloat16, to_bfloat16

THRESHOLD = np.float32(0.01)
NEAR_THE_THRESHOLD = [THRESHOLD, np.nextafter(THRESHOLD, np.float32(1)), np.nextafter(THRESHOLD, np.float32(0))]
SIZE, POINTER, MEMORY = 4, 2, 1
"""Pixels of a frame; channels of a pointer and of a memory, of which a pointer is two tokens."""
EMPTY_POINTER = np.full((1, POINTER), -7, np.float32)


@dataclass(frozen=True, eq=False)
class Read:
    """The inputs of the attention to memories: memories [M, B], ranks [M], pointers [P, B, 2], times [P]."""

    memories: np.ndarray
    ranks: np.ndarray
    pointers: np.ndarray
    times: np.ndarray

    def same(self, other: Read) -> bool:
        return all(np.array_equal(value, getattr(other, name)) for name, value in vars(self).items())


@dataclass
class Networks:
    """The next answers of the replaced networks, and the questions that they got."""

    count: int = 0
    frame: int = -1
    answer: PromptOutput | None = None
    encoded: list[tuple[int, np.ndarray]] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)

    def numbers(self, *shape: int) -> np.ndarray:
        """fp32 that were not there before, with bits that bfloat16 lacks."""
        counts = np.arange(self.count, self.count + int(np.prod(shape)), dtype=np.uint64)
        self.count += len(counts)
        return ((counts * np.uint64(0x9E3779B1) % np.uint64(2**32)) / 2**31 - 1).astype(np.float32).reshape(shape)

    def features(self, state: Any, frame: int, objects: int) -> tuple[Any, ...]:
        self.frame = frame
        nothing = torch.zeros(1, objects, POINTER)
        return None, None, [nothing], [nothing], [(1, 1)]

    def heads(self, *_: Any, **__: Any) -> tuple[torch.Tensor | None, ...]:
        assert self.answer is not None
        pointer, logits, iou = map(torch.from_numpy, (self.answer.pointer, self.answer.object_logits, self.answer.iou))
        masks = torch.zeros(len(pointer), 1, 1, 1)
        return masks, masks, iou, masks, masks, pointer, logits

    def encode(self, *, current_vision_feats: Sequence[torch.Tensor], **_: Any) -> tuple[torch.Tensor, Any]:
        memory = self.numbers(current_vision_feats[-1].size(1), MEMORY, 1, 1)
        self.encoded.append((self.frame, memory))
        return torch.from_numpy(memory), [torch.zeros(memory.shape)]

    def attend(self, *, src: Any, prompt: Any, prompt_pos: Any, num_obj_ptr_tokens: int, **_: Any) -> dict[str, Any]:
        prompt = prompt.float()  # of memories alone it is bfloat16
        count, parts = len(prompt) - num_obj_ptr_tokens, POINTER // MEMORY
        pointers = prompt[count:].view(num_obj_ptr_tokens // parts, parts, prompt.shape[1])
        self.reads.append(
            Read(
                memories=prompt[:count, :, 0].numpy(),
                ranks=prompt_pos[:count, 0, 0].numpy(),
                pointers=pointers.transpose(1, 2).numpy(),
                times=prompt_pos[count::parts, 0, 0].numpy(),
            )
        )
        return {"memory": src[0]}


@cache
def scripted_tracker(memory_selection: bool = True) -> tuple[Any, Networks]:
    """Builds upstream's tracker as in its video model, or without memory selection, with its networks."""
    with upstream():
        from sam3.model_builder import build_tracker

        tracker = build_tracker(apply_temporal_disambiguation=memory_selection).eval().requires_grad_(False)
    networks = Networks()
    tracker.hidden_dim, tracker.mem_dim = POINTER, MEMORY
    tracker.image_size = tracker.input_mask_size = SIZE
    tracker.low_res_mask_size = 1
    tracker.maskmem_backbone.mask_downsampler.interpol_size = [1, 1]
    tracker.maskmem_tpos_enc.data = torch.arange(tracker.num_maskmem).float().view(-1, 1, 1, 1)
    tracker.no_mem_embed.data = torch.zeros(1, 1, POINTER)
    del tracker.obj_ptr_tpos_proj
    tracker.obj_ptr_tpos_proj = lambda encoded: encoded[:, :MEMORY]
    tracker.transformer.encoder.forward = networks.attend
    tracker._get_image_feature = networks.features
    tracker._use_mask_as_output = tracker._forward_sam_heads = networks.heads
    tracker._encode_new_memory = networks.encode
    # Upstream's own fails: `test_upstream_cannot_make_the_pointer_of_an_empty_mask`.
    tracker._get_empty_mask_ptr = lambda state, frame: torch.from_numpy(EMPTY_POINTER)
    return tracker, networks


@contextmanager
def scripted() -> Iterator[None]:
    """Runs a scripted tracker in the context; the encoding of times returns the times themselves."""
    threads = torch.get_num_threads()
    with upstream(), torch.inference_mode():
        import sam3.model.sam3_tracker_base as base

        torch.set_num_threads(1)  # arrays are so small that threads would only wait for each other
        try:
            with replaced(base, "get_1d_sine_pe", lambda times, dim: times[:, None].expand(-1, dim)):
                yield
        finally:
            torch.set_num_threads(threads)


def attended_by_upstream(
    memory_selection: bool, outputs: Any, frame: int, num_frames: int, reverse: bool, objects: int
) -> Read:
    """Returns the memories that upstream attends to for a frame, given its `output_dict`."""
    tracker, networks = scripted_tracker(memory_selection)
    networks.reads.clear()
    features = torch.zeros(1, objects, POINTER)
    tracker._prepare_memory_conditioned_features(
        frame, False, [features], [features], [(1, 1)], outputs, num_frames, track_in_reverse=reverse
    )
    (read,) = networks.reads
    return read


# A bank that is drawn, and everything that may be asked of it


def compare_plans(random: Random, memory_selection: bool) -> Counter[str]:
    """Plans of every frame of a drawn bank, forwards and backwards, against upstream's.

    Returns:
        How many frames were compared.
    """
    _, networks = scripted_tracker(memory_selection)
    num_frames, objects = random.choice([1, 2, 3, 5, 15, 16, 17, 24, 40]), random.choice([1, 2])
    frames = list(range(num_frames))
    random.shuffle(frames)
    conditioning = frames[: random.choice([1, 1, 2, 3, 4, 5, 6, 9])]
    choices = random.choice(
        [[np.float32(0.5)], [np.float32(0.5), np.float32(0)], [*NEAR_THE_THRESHOLD, np.float32(0.5), None]]
    )
    share = random.choice([0.3, 0.8, 1])
    scores = {each: random.choice(choices) for each in frames[len(conditioning) :] if random.random() < share}
    memories = {each: networks.numbers(objects, MEMORY, 1, 1) for each in frames}
    pointers = {each: networks.numbers(objects, POINTER) for each in frames}

    def output(each: int) -> dict[str, Any]:
        entry = {
            "maskmem_features": torch.from_numpy(memories[each]),
            "maskmem_pos_enc": [torch.zeros(objects, MEMORY, 1, 1)],
            "obj_ptr": torch.from_numpy(pointers[each]),
        }
        score = scores.get(each)
        return entry if score is None else {**entry, "eff_iou_score": torch.tensor(score)}

    outputs = {
        "cond_frame_outputs": {each: output(each) for each in conditioning},
        "non_cond_frame_outputs": {each: output(each) for each in scores},
    }
    rules = MemoryRules(use_memory_selection=memory_selection)
    compared = 0
    for frame in range(num_frames):
        for reverse in (False, True):
            if num_frames == 1:  # upstream divides by zero: `test_the_only_frame_of_a_video_has_time_zero`
                continue
            theirs = attended_by_upstream(memory_selection, outputs, frame, num_frames, reverse, objects)
            plan = plan_attention(frame, conditioning, scores, num_frames=num_frames, reverse=reverse, rules=rules)
            ours = Read(
                memories=np.array([memories[each][:, 0, 0, 0] for each, _ in plan.memories]),
                ranks=np.array([rank for _, rank in plan.memories]),
                pointers=np.array([pointers[each] for each, _ in plan.pointers]).reshape(-1, objects, POINTER),
                times=np.array([time for _, time in plan.pointers], np.float32),
            )
            assert ours.same(theirs), (frame, reverse, num_frames, conditioning, scores, plan, theirs)
            compared += 1
    return Counter(frames=compared)


# A session that is drawn: clicks, masks, tracking in both directions, reconditioning, taking back, removal


class Session:
    """Upstream's tracker and a bank that keeps everything, side by side."""

    def __init__(self, random: Random, memory_selection: bool) -> None:
        self.random = random
        self.tracker, self.networks = scripted_tracker(memory_selection)
        self.num_frames = random.choice([2, 6, 16, 17, 30, 45])
        self.state = self.tracker.init_state(
            video_height=SIZE, video_width=SIZE, num_frames=self.num_frames, cached_features={}
        )
        objects = random.sample(range(10), random.choice([1, 1, 2, 3]))
        rules = MemoryRules(use_memory_selection=memory_selection)
        self.bank = MemoryBank(tuple(objects), Retention.EVERYTHING, rules)
        self.asked: dict[int, dict[int, PromptOutput]] = {}
        self.done: Counter[str] = Counter()
        # Sums of these are exact in any order; a single object is seen as barely as a score can tell.
        barely = [*NEAR_THE_THRESHOLD, np.float32(0), np.float32(0.5)]
        self.ious = barely if len(objects) == 1 else [np.float32(2.0**-each) for each in (0, 1, 6, 8)]

    def answer(self, objects: int, masks: int) -> PromptOutput:
        logits = [self.random.choice([20.0, 20.0, 20.0, 1.5, 0.0, -0.5, -3.0]) for _ in range(objects)]
        best = np.array([self.random.choice(self.ious) for _ in range(objects)], np.float32)
        shares = np.array([0.5] * (masks - 1) + [1], np.float32)
        return PromptOutput(
            self.networks.numbers(objects, POINTER), np.array(logits, np.float32)[:, None], best[:, None] * shares
        )

    def ask(self, frame: int, object_id: int) -> None:
        """A click or a mask, which counts once tracking goes on."""
        answer = self.networks.answer = self.answer(1, self.random.choice([1, 3]))
        if self.random.random() < 0.5:
            self.tracker.add_new_mask(self.state, frame, object_id, torch.ones(SIZE, SIZE))
        else:
            self.tracker.add_new_points_or_box(self.state, frame, object_id, points=[[0.5, 0.5]], labels=[1])
        self.asked.setdefault(frame, {})[object_id] = answer

    def finalize(self) -> None:
        """Frames that were asked about become conditioning."""
        self.networks.encoded.clear()
        self.tracker.propagate_in_video_preflight(self.state)
        assert sorted(frame for frame, _ in self.networks.encoded) == sorted(self.asked)
        for frame, memory in self.networks.encoded:
            entry = consolidate(self.bank.objects, self.asked[frame], self.bank.entry(frame), EMPTY_POINTER)
            self.bank = self.bank.condition(frame, entry, list(self.asked[frame]))
            self.bank = self.bank.with_memory(frame, to_bfloat16(memory))
        self.asked = {}
        self.done["finalized"] += 1

    def track(self, frame: int, reverse: bool, encoded_at_once: bool = True) -> None:
        """One frame as `Sam3VideoBase` propagates it, whose memory may be encoded afterwards."""
        self.networks.reads.clear()
        self.networks.encoded.clear()
        answer = self.networks.answer = self.answer(len(self.bank.objects), 1)
        list(
            self.tracker.propagate_in_video(
                self.state, frame, 0, reverse, tqdm_disable=True, run_mem_encoder=encoded_at_once
            )
        )
        if frame in self.bank.conditioning:
            assert not self.networks.reads
            return
        (theirs,) = self.networks.reads
        attended = self.bank.read(self.bank.plan(frame, num_frames=self.num_frames, reverse=reverse))
        memories = from_bfloat16(attended.memories)[:, :, 0, 0, 0]
        ours = Read(memories, attended.ranks, attended.pointers, attended.times)
        assert ours.same(theirs), (frame, reverse, self.num_frames, ours, theirs)
        memory = to_bfloat16(self.networks.encoded[-1][1]) if encoded_at_once else None
        entry = tracked_entry(answer.pointer, answer.object_logits, answer.iou, memory)
        self.bank = self.bank.track(frame, entry)
        self.done["frames"] += 1

    def encode_memories(self, frame: int) -> None:
        """As `Sam3VideoBase` does at the end of a frame, whatever its memory was before."""
        from sam3.model.sam3_video_base import Sam3VideoBase

        objects = len(self.bank.objects)
        self.networks.encoded.clear()
        planner = SimpleNamespace(tracker=self.tracker, rank=0)
        metadata = {"num_obj_per_gpu": [objects]}
        Sam3VideoBase._tracker_update_memories(planner, [self.state], frame, metadata, torch.ones(objects, 1, 1))
        ((_, memory),) = self.networks.encoded
        self.bank = self.bank.with_memory(frame, to_bfloat16(memory))

    def clear(self, frame: int, object_id: int) -> None:
        self.tracker.clear_all_points_in_frame(self.state, frame, object_id, need_output=False)
        self.bank = self.bank.clear(frame, object_id)
        self.done["cleared"] += 1

    def remove(self, object_id: int) -> None:
        self.tracker.remove_object(self.state, object_id, strict=True, need_output=False)
        self.bank = self.bank.remove(object_id)
        self.done["removed"] += 1

    def check(self) -> None:
        """Both remember the same of the same frames."""
        outputs = self.state["output_dict"]
        assert tuple(self.state["obj_ids"]) == self.bank.objects
        assert list(outputs["cond_frame_outputs"]) == list(self.bank.conditioning)
        assert set(outputs["non_cond_frame_outputs"]) == set(self.bank.tracked)
        for frame, entry in (*self.bank.conditioning.items(), *self.bank.tracked.items()):
            theirs = outputs["cond_frame_outputs"].get(frame) or outputs["non_cond_frame_outputs"][frame]
            assert_same_entry(entry, theirs)
        for row, each in enumerate(self.bank.objects):
            points, masks = self.state["point_inputs_per_obj"][row], self.state["mask_inputs_per_obj"][row]
            assert {*points, *masks} == {frame for frame, ids in self.bank.inputs.items() if each in ids}


def assert_same_entry(ours: MemoryEntry, theirs: dict[str, Any]) -> None:
    assert ours.memory is not None and ours.pointer is not None
    assert np.array_equal(from_bfloat16(ours.memory), theirs["maskmem_features"].float().numpy())
    assert np.array_equal(ours.pointer, theirs["obj_ptr"].numpy())
    assert np.array_equal(ours.object_logits, theirs["object_score_logits"].numpy())
    if "iou_score" in theirs:
        assert np.array_equal(ours.iou, theirs["iou_score"].numpy())
        assert (ours.score is None) == ("eff_iou_score" not in theirs)
    if ours.score is not None and "eff_iou_score" in theirs:
        # The logistic function and a mean are rounded in another order.
        assert np.isclose(ours.score, theirs["eff_iou_score"].numpy(), rtol=1e-6, atol=1e-9)


def compare_session(random: Random, memory_selection: bool) -> Counter[str]:
    """Compares a drawn session, step by step.

    Returns:
        How many frames were compared, and how often each other thing happened.
    """
    session = Session(random, memory_selection)

    def start() -> None:
        """Objects are mostly clicked on one frame; elsewhere upstream needs its repair."""
        together = random.randrange(session.num_frames)
        elsewhere = random.random() < 0.3
        for each in session.bank.objects:
            session.ask(random.randrange(session.num_frames) if elsewhere else together, each)
        session.finalize()

    start()
    frame = random.choice(list(session.bank.conditioning))
    for _ in range(random.randrange(1, 12)):
        step = random.choice(["run", "run", "run", "recondition", "click", "click", "clear", "remove", "jump"])
        if step == "run":
            reverse = random.random() < 0.3
            for _ in range(random.randrange(1, 25)):
                frame += -1 if reverse else 1
                if not 0 <= frame < session.num_frames:
                    frame = random.randrange(session.num_frames)
                    break
                session.track(frame, reverse)
        elif step == "recondition":
            session.track(frame, False, encoded_at_once=False)
            for each in random.sample(session.bank.objects, random.randrange(len(session.bank.objects) + 1)):
                session.ask(frame, each)
            session.finalize()
            session.encode_memories(frame)
        elif step == "click":
            for _ in range(random.choice([1, 1, 2])):
                session.ask(random.randrange(session.num_frames), random.choice(session.bank.objects))
            session.finalize()
        elif step == "clear":
            cleared = random.choice(list(session.bank.conditioning))
            for each in random.sample(session.bank.objects, random.randrange(1, len(session.bank.objects) + 1)):
                if session.bank.conditioning:
                    session.clear(cleared, each)
        elif step == "remove" and (len(session.bank.objects) > 1 or random.random() < 0.2):
            session.remove(random.choice(session.bank.objects))
        elif step == "jump":
            frame = random.randrange(session.num_frames)
        if step in ("clear", "remove"):
            session.check()
        if not session.bank.objects:
            break
        if not session.bank.conditioning:
            refused(session, frame)
            start()
    session.check()
    return session.done


def refused(session: Session, frame: int) -> None:
    """Checks that neither side tracks without a conditioning frame."""
    for track, error in (
        (lambda: list(session.tracker.propagate_in_video(session.state, frame, 0, False)), RuntimeError),
        (lambda: session.bank.plan(frame), ModelError),
    ):
        try:
            track()
        except error:
            continue
        raise AssertionError(f"{error.__name__} was expected")


# A bank that forgets


def compare_forgetting(random: Random, memory_selection: bool) -> Counter[str]:
    """Compares a bank that forgets with one that keeps everything, for a drawn history of forward frames.

    Returns:
        How many plans were compared.
    """
    objects = tuple(range(random.choice([1, 1, 2, 3])))
    rules = MemoryRules(use_memory_selection=memory_selection)
    banks = [MemoryBank(objects, retention, rules) for retention in (Retention.EVERYTHING, Retention.FORWARD)]
    kinds = random.choice([[1.0], [1.0, 0.0], [0.0, 0.0, 0.0, 1.0], [*map(float, NEAR_THE_THRESHOLD), 1.0, 0.0]])
    often = random.choice([0.02, 0.06, 0.5])
    frame, count, compared = random.choice([0, 0, 7]), 0, 0

    def drawn() -> MemoryEntry:
        nonlocal count
        count += 1
        numbers = np.arange(len(objects)) + 10 * count
        logits = np.array([[random.choice([20, 20, -3])] for _ in objects], np.float32)
        iou = np.array([[random.choice(kinds)] for _ in objects], np.float32)
        return tracked_entry(numbers[:, None].astype(np.float32), logits, iou, numbers[:, None].astype(np.uint16))

    def apply(change: Any) -> None:
        nonlocal banks
        banks = [change(each) for each in banks]

    def asked(answered: tuple[int, ...]) -> None:
        at, new = frame, drawn()
        iou, asked_for = new.iou[:, None], answered or objects[:1]
        apply(lambda bank: bank.condition(at, MemoryEntry(new.memory, new.pointer, new.object_logits, iou), asked_for))

    asked(objects)
    born = frame
    for _ in range(random.randrange(10, 90)):
        frame += random.choice([1, 1, 1, 1, 1, 1, 2, 5])
        # The next frame, and others in case that some are left out.
        for ahead in (0, 1, 4):
            everything, forward = (each.plan(frame + ahead, num_frames=random.choice([None, 2000])) for each in banks)
            assert forward == everything, (frame, ahead, forward, everything)
            for name, array in vars(banks[1].read(forward)).items():
                assert np.array_equal(array, getattr(banks[0].read(everything), name))
            compared += 1
        tracked = drawn()
        apply(lambda bank, at=frame, new=tracked: bank.track(at, new))
        if random.random() < often:
            asked(tuple(each for each in objects if random.random() < 0.7))
        memory = (np.arange(len(objects))[:, None] + 10 * count + 5).astype(np.uint16)
        apply(lambda bank, at=frame, new=memory: bank.with_memory(at, new))
        if len(objects) > 1 and frame - born <= HOTSTART and random.random() < 0.1:
            removed = random.choice(objects)
            apply(lambda bank, removed=removed: bank.remove(removed))
            objects = banks[0].objects
            if not banks[0].conditioning:
                break
    return Counter(forgetting=compared)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares the memory rules with upstream's, frame by frame.")
    parser.add_argument("--frames", type=int, default=100_000, help="how many frames; default: 100000")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    done: Counter[str] = Counter()
    random = Random(arguments.seed)
    with scripted():
        while done["frames"] < arguments.frames:
            compare = random.choice([compare_plans, compare_session, compare_session, compare_forgetting])
            done += compare(random, memory_selection=random.random() < 0.75)
            done["scripts"] += 1
    print(f"seed {arguments.seed}: {dict(done)}")


if __name__ == "__main__":
    main()
