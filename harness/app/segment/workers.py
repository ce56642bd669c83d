"""Segments images in worker processes of Ray, on this machine or on the nodes of a cluster.

A worker loads the folder once; the pages of its weights are shared by all workers of a node. This process hands out
image after image and alone writes results, so that nodes need no folder for them.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from harness import __version__
from harness.app.segment.job import Computation, FailedImage, Job, PendingImage, Result, segment
from harness.app.segment.sources import Image
from harness.core.cluster import has_head, run_on_nodes
from harness.core.errors import HarnessError
from harness.core.processes.memory import hide_torch
from harness.core.processes.threads import configure_threads, share_cpus
from harness.runtime import ObjectPrompt, Prompt, Sam3
from harness.runtime.errors import ModelError, reason
from harness.runtime.manifest import MANIFEST, VARIANTS, is_for_several
from harness.runtime.threads import BINDING_VARIABLE

DEFAULT_THREADS = 1
"""Threads of a worker: one loses nothing in waiting for others, and a node has as many workers as CPUs."""

_MEMORY = 2 << 30
"""Bytes of memory that a worker is granted beside the weights, which all workers of a node share."""
_TRIES = 3
"""Number of workers that an image may end, that may fail to start one after another, and that find no room for one."""
_MISSED = 2
"""Number of times in a row that the cluster's head is looked for until it counts as lost."""
_FULL = "Ray's object store and the disk of its node have no room for it or its results; free some space there."
_SECONDS = 10
"""Time without a result, after which the nodes are counted, and time after which the cluster's head is looked for."""


def distribute(folder: Path, job: Job, threads: int | None) -> Computation:
    """Returns the computation of a job on the Ray cluster that this process is connected to.

    Args:
        folder: Folder of the compiled model, by the same path on every node.
        job: The job; nodes read its images by the same paths and addresses, and get those of shards from this process.
        threads: Threads of each worker; by default `DEFAULT_THREADS`.

    Raises:
        HarnessError: A node cannot run the folder, or none has room for a worker.
    """
    threads = DEFAULT_THREADS if threads is None else threads
    if threads < 1:
        raise HarnessError(f"A worker cannot run on {threads} threads; give 1 or more.")
    described = (str(folder.resolve()), _digest(folder), __version__)
    arguments = (*described, job.prompts, job.threshold, threads)
    workers = _count_workers(described, threads)
    return lambda images: _Pool(workers, threads, arguments, images).run()


def _digest(folder: Path) -> str | None:
    """Returns the digest of a folder's description; None if it has none, which loading it explains."""
    with suppress(OSError):
        return hashlib.sha256((folder / (VARIANTS if is_for_several(folder) else MANIFEST)).read_bytes()).hexdigest()
    return None


def _count_workers(described: tuple[str, str | None, str], threads: int) -> int:
    """Checks the folder on all nodes at once, and returns the number of workers that they have room for.

    Raises:
        HarnessError: A node cannot run the folder, or none has room for a worker.
    """
    import ray

    rooms, workers = _rooms(threads), 0
    nodes = [node for node in ray.nodes() if node["NodeID"] in rooms]
    for node, problem in run_on_nodes(nodes, check_node, *described):
        if problem is not None:
            raise HarnessError(f"The node {node['NodeManagerAddress']} cannot take part: {problem}.")
        workers += rooms[node["NodeID"]]
    if not workers:
        raise HarnessError(
            f"No node of the cluster has {threads} CPU{'' if threads == 1 else 's'} and {_MEMORY >> 30} GiB of memory "
            "for a worker; give fewer --threads, or a larger node."
        )
    return workers


def _rooms(threads: int) -> dict[str, int]:
    """Returns the number of workers that each node has room for, by its identifier; others are left out."""
    import ray

    rooms = {}
    for node in ray.nodes():
        resources = node["Resources"]
        room = int(min(resources.get("CPU", 0) // threads, resources.get("memory", 0) // _MEMORY))
        if node["Alive"] and room:
            rooms[node["NodeID"]] = room
    return rooms


def check_node(folder: str, digest: str | None, version: str) -> str | None:
    """Returns why this node cannot run a folder, or None; the weights of a variant are packed meanwhile."""
    hide_torch()
    try:
        _load(folder, digest, version)
    except (HarnessError, ModelError) as error:
        return str(error).removesuffix(".")
    return None


def _load(folder: str, digest: str | None, version: str, check: bool = True) -> Sam3:
    """Returns the model; its files are compared with their checksums if `check` is True.

    Raises:
        HarnessError: This node has another version or another folder than the command.
        ModelError: It cannot load the folder.
    """
    if version != __version__:
        raise HarnessError(f"it has sam3-tvm {__version__} and not {version}; install the same version")
    model = Sam3.load(folder, check=check)
    if _digest(Path(folder)) != digest:
        raise HarnessError(f"its {folder} is another one than that of this machine; copy this one there")
    return model


class Segmenter:
    """Segments images in a worker, which loads the model once."""

    def __init__(
        self,
        folder: str,
        digest: str | None,
        version: str,
        prompts: Sequence[Prompt | ObjectPrompt],
        threshold: float,
        threads: int,
    ) -> None:
        """Loads the folder, whose files `check_node` has checked unless the node is new."""
        share_cpus()
        os.environ[BINDING_VARIABLE] = "0"  # all workers of a node would be bound to its first CPUs
        configure_threads(threads)
        hide_torch()
        self._model = _load(folder, digest, version, check=False)
        self._prompts, self._threshold = prompts, threshold

    def start(self) -> None:
        """Returns when the worker can segment."""

    def segment(self, image: Image, content: bytes | None) -> Result:
        """Segments an image; one that cannot be segmented does not end the worker."""
        try:
            return segment(self._model, self._prompts, self._threshold, image, content)
        except Exception as error:
            return FailedImage(image, f"it cannot be segmented ({type(error).__name__}: {reason(error)}).")


class _Pool:
    """Workers, and the images that they segment; a worker that is lost is replaced, and its image tried again."""

    def __init__(self, workers: int, threads: int, arguments: tuple[Any, ...], images: Iterator[PendingImage]) -> None:
        import ray

        self._create = ray.remote(Segmenter).options(num_cpus=threads, memory=_MEMORY).remote
        self._arguments, self._threads, self._images = arguments, threads, images
        self._waiting = deque(islice(images, workers))
        self._losses: Counter[int] = Counter()
        self._refusals: Counter[int] = Counter()
        # What a worker is doing: its image, or None while it starts, which it may do when a node has room.
        self._running: dict[Any, tuple[Any, PendingImage | None]] = {}
        self._failed_starts, self._missed, self._looked = 0, 0, time.monotonic()

    def run(self) -> Iterator[tuple[int, Result]]:
        """Yields results as workers return them.

        Raises:
            HarnessError: Workers do not start, no node is left for them, or the cluster's head is lost.
        """
        import ray

        for _ in range(len(self._waiting)):
            self._start()
        while self._waiting or any(pending is not None for _, pending in self._running.values()):
            answers, _ = ray.wait(list(self._running), timeout=_SECONDS)
            self._check_cluster(has_answer=bool(answers))
            if not answers:
                continue
            worker, pending = self._running.pop(answers[0])
            try:
                result = ray.get(answers[0])
            except ray.exceptions.OutOfDiskError:
                result = None
            except ray.exceptions.RayError as error:
                yield from self._replace(pending, error)
                continue
            if pending is None:
                self._failed_starts = 0
            if self._waiting:
                yield from self._hand_out(worker, self._waiting.popleft())
            if pending is not None:
                yield pending.index, result or FailedImage(pending.image, _FULL)
            if not self._waiting:
                self._waiting.extend(islice(self._images, 1))  # it is read while others are segmented

    def _start(self, worker: Any = None) -> None:
        """Makes a worker, or takes this one, and adds it to those that are not ready."""
        worker = worker or self._create(*self._arguments)
        self._running[worker.start.remote()] = worker, None

    def _check_cluster(self, *, has_answer: bool) -> None:
        """Looks for the cluster's head now and then, and for nodes if there was no answer for a while."""
        if not has_answer or time.monotonic() > self._looked + _SECONDS:
            self._missed, self._looked = 0 if has_head() else self._missed + 1, time.monotonic()
            if self._missed == _MISSED:  # after a minute Ray would end this process without a sentence
                raise HarnessError("The head of the Ray cluster is lost; the same command continues when it is back.")
        if not has_answer and not self._missed and not _rooms(self._threads):
            raise HarnessError(
                "No node of the cluster has room for a worker any more; the same command continues when one has."
            )

    def _replace(self, pending: PendingImage | None, error: Exception) -> Iterator[tuple[int, Result]]:
        """Replaces a worker that was lost with its image or while it started; yields an image that ends all workers."""
        if pending is None:
            self._failed_starts += 1
            if self._failed_starts >= _TRIES:
                if self._running:
                    return
                last = str(error).strip().splitlines()[-1]
                raise HarnessError(f"No worker of Ray can start ({last}); give other --threads.") from error
        else:
            self._losses[pending.index] += 1
            if self._losses[pending.index] < _TRIES:
                self._waiting.appendleft(pending)
            else:
                sentence = f"its worker was lost {_TRIES} times, killed or out of memory; scale the image down."
                yield pending.index, FailedImage(pending.image, sentence)
        if self._waiting:
            self._start()

    def _hand_out(self, worker: Any, pending: PendingImage) -> Iterator[tuple[int, Result]]:
        """Gives an image to a worker; yields it if Ray has no room for it again and again."""
        import ray

        try:
            answer = worker.segment.remote(pending.image.resolve(), pending.content)
        except ray.exceptions.OutOfDiskError:
            self._refusals[pending.index] += all(other is None for _, other in self._running.values())
            if self._refusals[pending.index] < _TRIES:
                self._waiting.appendleft(pending)  # what was segmented, or is, leaves the store
                time.sleep(1)
            else:
                yield pending.index, FailedImage(pending.image, _FULL)
            self._start(worker)
        else:
            self._running[answer] = worker, pending
