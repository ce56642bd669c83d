"""Holds sessions of the compiled SAM 3.1 to PyTorch, which computes each step of the tracker from the same inputs.

A session goes on from the compiled model's outputs. The rules between the steps are code without networks, which is
held to upstream's (`docs/design/video-rules.md`); what finds objects is judged by the subject `sam31_end_to_end`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.core.expectations import Expectation
from harness.core.outcome import Verdict
from harness.core.program import Array, Arrays
from harness.core.settings import FIXTURES
from harness.models.sam3.deployed.entry_points import predict_masks
from harness.models.sam3.patches.patch import wrapped
from harness.models.sam3.scripted import Answer, Script, judge_numbers, pool
from harness.models.sam3.source import UpstreamModel
from harness.models.sam3.video.judging import judge_rounded
from harness.models.sam3.video.questions import SessionQuestion, frames_of
from harness.models.sam31.deployed.deployable import WITH_VIDEO
from harness.models.sam31.deployed.entry_points import click_head, interactive_features, mask_pointer
from harness.models.sam31.modules import (
    MultiplexMaskDecoder,
    MultiplexMemoryAttention,
    MultiplexMemoryEncoder,
    MultiplexPointers,
)
from harness.parity.arrays import arrays_digest
from harness.parity.references import Reference, RunModule, add_prefix, select
from harness.runtime.arrays import Floats
from harness.runtime.artifact import LoadedModel, Tensors
from harness.runtime.sam3.model import Sam3
from harness.runtime.sam3.video.memory_bank import MISSING_MASK_LOGIT, AttentionInputs
from harness.runtime.sam3.video.multiplex import PROPAGATION_FEATURES, MultiplexTracker
from harness.runtime.sam3.video.session import Session
from harness.runtime.sam3.video.slots import SLOTS, Placement, Slots
from harness.runtime.sam3.video.tracker import Bits, TrackedMasks, from_bfloat16

SESSIONS = FIXTURES / "sam31_sessions.toml"
MEMORY = "memory"
"""Output that a session keeps rounded to bfloat16."""


class TrackedGroup(nn.Module):
    """The masks of objects on a frame, from the memories of all their buckets at once, without padding."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pointers = MultiplexPointers(model)
        self.attention = MultiplexMemoryAttention(model)
        self.decoder = MultiplexMaskDecoder(model)

    def forward(
        self,
        high_res_0: Tensor,
        high_res_1: Tensor,
        features: Tensor,
        memory_features: Tensor,
        memories: Tensor,
        ranks: Tensor,
        pointers: Tensor,
        times: Tensor,
        places: Tensor,
    ) -> tuple[Tensor, ...]:
        """Tracks N objects; all but `places`, int64 [N] as in `Slots`, are as in `MultiplexTracker.track`.

        Returns:
            The fields of `TrackedMasks`, in their order.
        """
        tokens, positions = self.pointers(pointers, times)
        (conditioned,) = self.attention(features, memory_features, memories, ranks, tokens, positions)
        valid = in_slots(torch.ones(len(places)), places)
        outputs = self.decoder(conditioned, high_res_0, high_res_1, valid)
        masks, iou, object_logits, pointers = (values.flatten(0, 1)[places] for values in outputs)
        objects, best = torch.arange(len(places)), iou.argmax(dim=1)
        logits = masks[objects, best].masked_fill(object_logits[:, :, None] <= 0, float(MISSING_MASK_LOGIT))
        return logits, pointers[objects, best], object_logits, iou


class GroupMemory(nn.Module):
    """The memories of a frame, of all buckets at once."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = MultiplexMemoryEncoder(model)

    def forward(
        self, features: Tensor, masks: Tensor, object_logits: Tensor, given: Tensor, places: Tensor
    ) -> tuple[Tensor, ...]:
        """Encodes masks [N, S, S] of objects with logits [N, 1]; `given` [N] and `places` [N] are as in `Placement`."""
        inputs = (in_slots(values, places) for values in (masks, object_logits, torch.ones_like(given), given))
        memory: tuple[Tensor, ...] = self.encoder(features, *inputs)
        return memory


def in_slots(values: Tensor, places: Tensor) -> Tensor:
    """Returns values of objects [N, …] at their places in the slots of buckets [B, 16, …], zero elsewhere."""
    buckets = int(places.max()) // SLOTS + 1  # a bucket without objects is deleted
    slots = values.new_zeros(buckets * SLOTS, *values.shape[1:])
    slots[places] = values
    return slots.view(buckets, SLOTS, *values.shape[1:])


class ComparedTracker(MultiplexTracker):
    """The compiled model's tracker, beside which PyTorch computes each step from the same inputs.

    Calls of entry points that have no slots are compared one by one (`call`). Steps with slots are compared as the
    tracker returns them, so that slots, buckets and padding are compared, too.

    Attributes:
        outputs: By entry point and output, `encode_memory/memory`, the compiled model's array and PyTorch's of each
            step; steps with inputs that are known already are left out.
    """

    def __init__(self, artifact: LoadedModel, model: Any, run: RunModule) -> None:
        """Takes a loaded model, `harness.models.sam31.architecture.Sam31`, and what runs modules of it."""
        super().__init__(artifact)
        plain = (
            interactive_features(model, for_video=True),
            predict_masks(click_head(model), WITH_VIDEO),
            mask_pointer(model),
        )
        self.outputs: dict[str, list[tuple[Array, Array]]] = defaultdict(list)
        self._programs = {program.name: program for program in plain}
        self._tracked, self._memory = TrackedGroup(model), GroupMemory(model)
        self._run = run
        self._known: set[str] = set()
        self._latest_entry = ""

    def call(self, original: Callable[..., Tensors], entry: str, **inputs: Any) -> Tensors:
        """Calls an entry point, and compares it if it has no slots."""
        self._latest_entry = entry
        outputs = original(entry, **inputs)
        if (program := self._programs.get(entry)) is not None:
            self._compare(program.module, [inputs[name] for name in program.example], outputs)
        return outputs

    def track(self, features: Tensors, attended: AttentionInputs, slots: Slots | None = None) -> TrackedMasks:
        """Tracks as `MultiplexTracker.track` and compares."""
        tracked = super().track(features, attended, slots)
        assert slots is not None
        maps = (features[name] for name in PROPAGATION_FEATURES)
        memories = attended.features, from_bfloat16(attended.memories), attended.ranks
        inputs = *maps, *memories, attended.pointers, attended.times, np.array(slots.places)
        self._compare(self._tracked, inputs, tracked._asdict())
        return tracked

    def _encode_buckets(
        self, entry: str, features: Tensors, logits: Floats, object_logits: Floats, placement: Placement | None
    ) -> Bits:
        bits = super()._encode_buckets(entry, features, logits, object_logits, placement)
        assert placement is not None
        inputs = features["features"], logits, object_logits[:, None], placement.given, np.array(placement.slots.places)
        self._compare(self._memory, inputs, {MEMORY: bits})
        return bits

    def arrays(self) -> Arrays:
        """Returns the outputs, each of all steps in one array: `compiled/…` and `pytorch/…`."""
        arrays: Arrays = {}
        for name, steps in self.outputs.items():
            compiled, pytorch = zip(*steps, strict=True)
            arrays |= {f"compiled/{name}": pool(compiled), f"pytorch/{name}": pool(pytorch)}
        return arrays

    def _compare(self, module: nn.Module, inputs: Iterable[Any], outputs: Mapping[str, Any]) -> None:
        """Adds the outputs of the latest entry point and those of a module."""
        entry = self._latest_entry
        arrays = [np.array(self._artifact.fetch(tensor)) for tensor in inputs]
        digest = arrays_digest({f"{entry}/{number}": array for number, array in enumerate(arrays)})
        if digest not in self._known:
            self._known.add(digest)
            expected = self._run(module, [torch.from_numpy(array) for array in arrays], tuple(outputs))
            for name, tensor in outputs.items():
                self.outputs[f"{entry}/{name}"].append((np.array(self._artifact.fetch(tensor)), expected[name]))


def _ask_compiled(model: Sam3, question: SessionQuestion, upstream: UpstreamModel) -> Arrays:
    """Sends the requests of a session; returns the outputs of its steps (`ComparedTracker.arrays`)."""
    frames = frames_of(question)
    tracker = ComparedTracker(model.artifact, upstream.whole, upstream.runner.run)
    session = Session(model, tracker, list(frames), tracker.rules, keep=True)
    with wrapped(model.artifact, "call", tracker.call):
        for _ in question.send(session, frames[0].shape[:2]):
            pass
    return tracker.arrays()


def answer(_upstream: UpstreamModel, _question: SessionQuestion, actual: Arrays) -> Reference:
    """Returns PyTorch's outputs, which the answer has beside the compiled model's."""
    outputs = select(actual, "pytorch")
    return Reference(outputs, outputs)


def _judge(
    answers: Iterable[Answer[SessionQuestion]], expectation: Expectation | None, _by_oracle: bool
) -> Iterator[Verdict]:
    for session in answers:
        name = session.question.name
        yield from judge_steps(name, select(session.actual, "compiled"), session.reference, expectation)


def judge_steps(
    name: str, actual: Arrays, reference: Reference, expectation: Expectation | None = None
) -> Iterator[Verdict]:
    """Yields the verdicts on each output over all steps; those of memories are on rounded ones."""
    memories = [output for output in actual if output.endswith(f"/{MEMORY}")]

    def numbers(arrays: Arrays) -> Arrays:
        return add_prefix(name, {output: array for output, array in arrays.items() if output not in memories})

    yield from judge_numbers(numbers(actual), reference.map(numbers), expectation)
    for output in memories:
        yield judge_rounded(f"{name}/{output}", actual[output], reference.first[output])


SCRIPTS = (Script(SESSIONS, SessionQuestion, __name__, _ask_compiled, _judge),)
