"""Measures `sam3-tvm segment --ray` beside `segment`, and simulates the workers of many machines."""

from __future__ import annotations

import heapq
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

WORKER = "ray::Segmenter"
"""Part of the command line of a worker."""


@dataclass(frozen=True)
class Throughput:
    """A run of `segment`.

    Attributes:
        intervals: Seconds between results, without those until each worker's first one.
        bytes: The most memory of all workers: what each has alone, and the pages of the model's files that the system
            holds for all of them; 0 without Ray.
    """

    intervals: Sequence[float]
    bytes: int

    @property
    def images_per_second(self) -> float:
        """Images a second once the model is loaded."""
        return len(self.intervals) / sum(self.intervals)


def segment(model: Path, photographs: Path, out: Path, workers: int, *options: str) -> Throughput:
    """Runs the command, and returns its throughput once the workers have loaded the model."""
    command = [sys.executable, "-m", "harness", "segment", str(photographs), "--text", "cat", "--threshold", "0.99"]
    command += ["--model", str(model), "--out", str(out), *options]
    files = [path for path in model.iterdir() if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # only pages that workers read count
    most = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if workers_bytes := _workers_bytes(process.pid):
                most = max(most, workers_bytes + _cached_bytes(files))
            time.sleep(2)  # reading the sizes stops a worker
    if process.returncode:
        raise RuntimeError(f"segment ended with {process.returncode}")
    ends = sorted(path.stat().st_mtime for path in out.glob("*_overlay.png"))[workers - 1 :]
    return Throughput([after - before for before, after in itertools.pairwise(ends)], most)


def _workers_bytes(command: int) -> int:
    total = 0
    with suppress(psutil.Error):
        for child in psutil.Process(command).children(recursive=True):
            if WORKER in " ".join(child.cmdline()):
                total += child.memory_full_info().uss
    return total


def _cached_bytes(files: Sequence[Path]) -> int:
    """Returns the bytes of the files' pages that are in memory."""
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", *map(str, files)]
    return sum(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))


def simulate(
    images: int, workers: int, seconds: Sequence[float], handing: float, start: float = 30.0, seed: int = 0
) -> float:
    """Returns the efficiency of workers that take images from one process: their useful share of the whole time.

    Args:
        images: Number of images.
        workers: Number of workers on all nodes.
        seconds: Measured seconds of an image in a worker, from which those of each image are drawn independently.
        handing: Seconds of the one process for an image: it writes the results and hands out the next image.
        start: Seconds until a worker has loaded the model.
        seed: Seed of the draw.
    """
    draw = random.Random(seed)
    free = [start] * workers
    busy = now = 0.0
    for _ in range(images):
        now = max(now, heapq.heappop(free)) + handing
        taken = draw.choice(seconds)
        busy += taken
        heapq.heappush(free, now + taken)
    return busy / (workers * max(free))
