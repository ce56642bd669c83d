"""Queues the calls of the model, caches encoded photographs, and runs prompts on them.

TVM keeps a pool of threads for every thread that calls it, so that all calls come from the same one.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from harness.app.results.coco import coco_annotations
from harness.app.results.objects import best_object
from harness.app.segment.prompts import category_name, is_ambiguous, run_prompts
from harness.app.ui.photographs import Photograph, Photographs
from harness.runtime import EncodedImage, ObjectPrompt, Prompt, Sam3
from harness.runtime.arrays import Floats

T = TypeVar("T")

WAITING = "waiting"


@dataclass
class _PendingCall:
    """A call that has not returned.

    Attributes:
        owner: The session that waits for it.
        doing: Its current activity; `WAITING` until its turn comes.
        since: The start of this activity, in seconds of `time.monotonic`.
    """

    owner: str
    doing: str
    since: float

    def announce(self, doing: str) -> None:
        """Notes an activity that starts now."""
        self.doing, self.since = doing, time.monotonic()


class ModelQueue:
    """Runs calls in their order. Its methods are called in the thread of one event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._calls: list[_PendingCall] = []

    async def run(self, owner: str, function: Callable[[Callable[[str], object]], T]) -> T:
        """Runs a function when its turn comes.

        Args:
            owner: The session that calls.
            function: Takes a function that it calls with each activity that it starts.
        """
        call = _PendingCall(owner, WAITING, time.monotonic())
        self._calls.append(call)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, call.announce)
        finally:
            self._calls.remove(call)

    def status(self, owner: str) -> dict[str, Any]:
        """Returns the status of a session's call.

        Returns:
            `doing` is the activity of the model, or `WAITING`, or None where the session waits for nothing; `ahead` the
            number of calls of all sessions that come first; `seconds` the duration of the activity so far.
        """
        for ahead, call in enumerate(self._calls):
            if call.owner == owner:
                return {"doing": call.doing, "ahead": ahead, "seconds": time.monotonic() - call.since}
        return {"doing": None, "ahead": 0, "seconds": 0.0}

    def close(self) -> None:
        """Cancels the calls that have not started, and waits for the running one."""
        self._thread.shutdown(wait=True, cancel_futures=True)


ENCODING, ASKING = "encoding", "asking"
"""The activities of the model."""
_REMEMBERED_TIMES = 9

Logits = Floats
Announce = Callable[[str], object]
"""Called with `ENCODING` or `ASKING` when this activity starts."""


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks of a prompt.

    Attributes:
        annotations: Entries of `harness.app.results.coco.coco_annotations`.
        notes: A sentence for each part of the prompt that was changed or ignored.
        logits: fp32 [288, 288] of the one mask of a prompt for one object, to refine it; None for other prompts.
    """

    annotations: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    logits: Logits | None = None


class Encodings:
    """Runs prompts on photographs, and caches those that were encoded or used last. One thread uses it."""

    def __init__(self, model: Sam3, photographs: Photographs, capacity: int) -> None:
        """Stores a model and its photographs; caches at most `capacity` encoded photographs."""
        self._model = model
        self._photographs = photographs
        self._capacity = capacity
        self._encoded: OrderedDict[str, EncodedImage] = OrderedDict()
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED_TIMES)

    @property
    def expected_seconds(self) -> float | None:
        """Median time of the last encodings in seconds; None before the first."""
        times = list(self._seconds)
        return statistics.median(times) if times else None

    def encode(self, photograph: Photograph, announce: Announce) -> EncodedImage:
        """Returns a photograph encoded, from the cache or anew.

        Raises:
            ModelError: The photograph can no longer be read.
        """
        cached = self._encoded.get(photograph.key)
        if cached is not None:
            self._encoded.move_to_end(photograph.key)
            return cached
        announce(ENCODING)
        while len(self._encoded) >= self._capacity:
            self._encoded.popitem(last=False)
        start = time.perf_counter()
        encoded = self._model.set_image(self._photographs.pixels(photograph))
        self._seconds.append(time.perf_counter() - start)
        self._encoded[photograph.key] = encoded
        return encoded

    def predict(self, photograph: Photograph, prompt: ObjectPrompt, announce: Announce) -> Masks:
        """Predicts the best mask of one object, as `sam3-tvm segment --click` does.

        Raises:
            ModelError: The prompt is invalid for this photograph or this model.
        """
        image = self.encode(photograph, announce)
        announce(ASKING)
        (prediction,) = image.predict_batch([prompt], multimask=is_ambiguous(prompt))
        objects = best_object(prediction, category_name(prompt))
        return Masks(tuple(coco_annotations(objects)), objects.notes, prediction.logits[prediction.best])

    def find(self, photograph: Photograph, prompt: Prompt, threshold: float, announce: Announce) -> Masks:
        """Finds all objects of a kind, as `sam3-tvm segment --text` does.

        Raises:
            ModelError: The prompt is invalid for this photograph or this model.
        """
        image = self.encode(photograph, announce)
        announce(ASKING)
        (objects,) = run_prompts(image, [prompt], threshold)
        return Masks(tuple(coco_annotations(objects)), objects.notes)
