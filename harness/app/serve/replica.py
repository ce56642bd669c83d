"""Answers the questions that reach one replica of the model: those about one image together, on one encoding."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.app.results.coco import coco_annotations
from harness.app.results.objects import concatenate_objects
from harness.app.segment.prompts import check_prompts, run_prompts
from harness.app.ui.encodings import ENCODING, Encodings
from harness.app.ui.photographs import Photograph, Photographs
from harness.core.errors import HarnessError
from harness.core.files import temporary_folder
from harness.core.processes.memory import hide_torch
from harness.core.processes.threads import configure_threads
from harness.runtime import ObjectPrompt, Prompt, Sam3
from harness.runtime.errors import ModelError

MOST_TOGETHER = 16
"""Maximum number of requests that a replica answers together."""
_GATHERING_SECONDS = 0.01
"""Time in which a replica that is idle gathers requests to answer together."""
_NAME = "of the request"
"""The image in sentences. All have one name, so that an image is identified by its contents."""


@dataclass(frozen=True)
class Question:
    """A question about an image.

    Attributes:
        image: The contents of its file.
        prompts: At least one prompt.
        threshold: Objects of a prompt for all of a kind score above this.
    """

    image: bytes
    prompts: tuple[Prompt | ObjectPrompt, ...]
    threshold: float


@dataclass(frozen=True)
class Found:
    """The objects that were found.

    Attributes:
        size: Width and height of the image in pixels, upright.
        annotations: Entries of `harness.app.results.coco.coco_annotations`.
        notes: A sentence for each part of a prompt that was changed or ignored.
    """

    size: tuple[int, int]
    annotations: list[dict[str, Any]]
    notes: tuple[str, ...]


Answer = Found | str
"""The objects that were found, or the sentence that says why the question cannot be answered."""


class Answerer:
    """Answers questions with a model. One thread uses it."""

    def __init__(self, model: Sam3, files: Path, most_encoded: int) -> None:
        """Stores a model, and a folder for images that nobody else writes."""
        self._model = model
        self._photographs = Photographs(files)
        self._encodings = Encodings(model, self._photographs, most_encoded)
        self.encoded = 0
        """Number of images that were encoded so far."""

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers questions; those about one image with one threshold run together."""
        answers: dict[int, Answer] = {}
        groups: dict[tuple[Photograph, float], list[int]] = defaultdict(list)
        for index, question in enumerate(questions):
            try:
                photograph = self._photographs.add(question.image, _NAME)
                # A prompt that is wrong must not reach those of others.
                check_prompts(self._model, question.prompts, photograph.size)
                groups[photograph, question.threshold].append(index)
            except (HarnessError, ModelError) as error:
                answers[index] = str(error)
        for (photograph, threshold), indices in groups.items():
            try:
                found = self._find(photograph, [questions[index] for index in indices], threshold)
                answers.update(zip(indices, found, strict=True))
            except (HarnessError, ModelError) as error:
                answers.update(dict.fromkeys(indices, str(error)))
        return [answers[index] for index in range(len(questions))]

    def _find(self, photograph: Photograph, questions: Sequence[Question], threshold: float) -> list[Found]:
        image = self._encodings.encode(photograph, self._count)
        prompts = [prompt for question in questions for prompt in question.prompts]
        results = iter(run_prompts(image, prompts, threshold))
        found = []
        for question in questions:
            objects = concatenate_objects([next(results) for _ in question.prompts])
            found.append(Found(photograph.size, coco_annotations(objects), objects.notes))
        return found

    def _count(self, activity: str) -> None:
        self.encoded += activity == ENCODING


class Replica:
    """A replica of the model in Ray Serve, which gathers requests while it answers others."""

    def __init__(self, folder: str, threads: int, most_encoded: int) -> None:
        """Loads the folder.

        Args:
            folder: Folder of the compiled model.
            threads: Threads of the model.
            most_encoded: Maximum number of encoded images in memory; those that were used last stay.
        """
        self._cleanup = ExitStack()
        from ray import serve
        from ray.serve.metrics import Counter

        configure_threads(threads)
        hide_torch()
        files = self._cleanup.enter_context(temporary_folder("serve"))
        self._answerer = Answerer(Sam3.load(folder), files, most_encoded)
        # TVM has a pool of threads for every thread that calls it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._answer = serve.batch(
            self._answer_batch, max_batch_size=MOST_TOGETHER, batch_wait_timeout_s=_GATHERING_SECONDS
        )
        self._encoded = Counter("sam3_tvm_encoded_images")

    def __del__(self) -> None:
        """Removes the images; Ray Serve calls this before it ends the process."""
        self._cleanup.close()

    async def __call__(self, question: Question) -> Answer:
        """Answers a question."""
        answer: Answer = await self._answer(question)
        return answer

    async def _answer_batch(self, questions: list[Question]) -> list[Answer]:
        before = self._answerer.encoded
        loop = asyncio.get_running_loop()
        answers = await loop.run_in_executor(self._thread, self._answerer.answer, questions)
        if count := self._answerer.encoded - before:
            self._encoded.inc(count)
        return answers
