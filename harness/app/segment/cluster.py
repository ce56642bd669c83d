"""Segments images in the worker processes of a Ray, on this machine or on a cluster.

Ray Data hands one image after another to a pool of workers. A worker loads the folder once; the pages of its
weights are shared by all workers of a node. This process alone writes results, so that nodes need no folder for them.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from harness import __version__
from harness.app.segment.job import Computation, FailedImage, Job, Segmentation, segment
from harness.core import cluster
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
_RETRIES = 2
"""How often an image is tried again whose worker was lost."""


@contextmanager
def connect(folder: Path, job: Job, threads: int | None = None, address: str | None = None) -> Iterator[Computation]:
    """Yields the computation of a job on Ray, which ends with the context.

    Args:
        folder: Folder of the compiled model, by the same path on every node.
        job: The job; nodes read its images by the same paths.
        threads: Threads of each worker; by default `DEFAULT_THREADS`.
        address: The address of a cluster. By default `RAY_ADDRESS`, otherwise the Ray that runs on this machine,
            otherwise one that is started for the context.

    Raises:
        HarnessError: Ray is not installed, there is no cluster, or a node cannot run the folder.
    """
    threads = DEFAULT_THREADS if threads is None else threads
    if threads < 1:
        raise HarnessError(f"A worker cannot run on {threads} threads; give 1 or more.")
    digest = _digest(folder)
    with cluster.connect(address) as dashboard:
        workers = _count_workers(str(folder.resolve()), digest, threads)
        arguments = (str(folder.resolve()), job.prompts, job.threshold, threads)
        yield partial(_compute, workers, threads, arguments)


def _digest(folder: Path) -> str | None:
    """Returns the digest of a folder's description; None if it has none, which loading it explains."""
    with suppress(OSError):
        return hashlib.sha256((folder / (VARIANTS if is_for_several(folder) else MANIFEST)).read_bytes()).hexdigest()
    return None


def _count_workers(folder: str, digest: str | None, threads: int) -> int:
    """Checks the folder on all nodes at once, and returns the number of workers that they have room for.

    Raises:
        HarnessError: A node cannot run the folder, or none has room for a worker.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    rooms, checks = {}, {}
    for node in ray.nodes():
        resources = node["Resources"]
        room = int(min(resources.get("CPU", 0) // threads, resources.get("memory", 0) // _MEMORY))
        if node["Alive"] and room:
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            check = ray.remote(num_cpus=0, scheduling_strategy=place)(check_node)
            address = node["NodeManagerAddress"]
            rooms[node["NodeID"]], checks[check.remote(folder, digest, __version__)] = room, address
    if not rooms:
        raise HarnessError(
            f"No node of the cluster has {threads} CPU{'' if threads == 1 else 's'} and {_MEMORY >> 30} GiB of memory "
            "for a worker; give fewer --threads, or a larger node."
        )
    for answer, address in checks.items():
        try:
            problem = ray.get(answer)
        except ray.exceptions.RayError as error:
            last = str(error).strip().splitlines()[-1]
            problem = f"sam3-tvm {__version__} does not start there ({last}); install it in the Python of Ray"
        if problem is not None:
            raise HarnessError(f"The node {address} cannot take part: {problem}.")
    return sum(rooms.values())


def check_node(folder: str, digest: str | None, version: str) -> str | None:
    """Returns why this node cannot run a folder, or None; the weights of a variant are packed meanwhile."""
    if version != __version__:
        return f"it has sam3-tvm {__version__} and not {version}; install the same version"
    hide_torch()
    try:
        Sam3.load(folder)
    except (HarnessError, ModelError) as error:
        return str(error).removesuffix(".")
    if _digest(Path(folder)) != digest:
        return f"its {folder} is another one than that of this machine; copy this one there"
    return None


class Segmenter:
    """Segments images in a worker, which loads the model once."""

    def __init__(self, folder: str, prompts: Sequence[Prompt | ObjectPrompt], threshold: float, threads: int) -> None:
        """Loads the folder, whose files `check_node` has checked."""
        share_cpus()
        os.environ[BINDING_VARIABLE] = "0"  # all workers of a node would be bound to its first CPUs
        configure_threads(threads)
        hide_torch()
        self._model = Sam3.load(folder, check=False)
        self._prompts, self._threshold = prompts, threshold

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Segments the image of a row; one that cannot be segmented does not end the worker."""
        image = Path(row["image"])
        result: Segmentation | FailedImage
        try:
            result = segment(self._model, self._prompts, self._threshold, image)
        except Exception as error:
            result = FailedImage(image, f"it cannot be segmented ({type(error).__name__}: {reason(error)}).")
        return {"index": row["index"], "result": pickle.dumps(result)}


def _compute(
    workers: int, threads: int, arguments: tuple[Any, ...], images: Sequence[Path]
) -> Iterator[tuple[int, Segmentation | FailedImage]]:
    """Yields segmentations as workers return them; then a failure for each image that was lost with its workers."""
    if not images:
        return
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.max_errored_blocks = -1  # an image that ends its workers does not end the others
    rows = [{"index": index, "image": str(image.resolve())} for index, image in enumerate(images)]
    workers = min(workers, len(rows))
    with warnings.catch_warnings():
        # Its successor cannot limit how often an image is tried.
        warnings.simplefilter("ignore", DeprecationWarning)
        # A block is one image: it is journaled when it is done, and is all that is computed again for a lost worker.
        results = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            Segmenter,
            fn_constructor_args=arguments,
            # Idle workers end, so that those of a lost node can start elsewhere.
            compute=ray.data.ActorPoolStrategy(
                min_size=1, max_size=workers, initial_size=workers, max_tasks_in_flight_per_actor=1
            ),
            num_cpus=threads,
            memory=_MEMORY,
            max_restarts=-1,
            max_task_retries=_RETRIES,
        )
    lost = set(range(len(rows)))
    for row in results.iter_rows():
        lost.discard(row["index"])
        yield row["index"], pickle.loads(row["result"])
    for index in sorted(lost):
        yield (
            index,
            FailedImage(
                images[index],
                f"its worker was lost {_RETRIES + 1} times, killed or out of memory; "
                "give --ray fewer workers a node with more --threads, or scale the image down.",
            ),
        )
