"""Runs the job of `sam3-tvm segment`, and displays its progress, results and speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from harness.app.segment.job import Computation, FailedImage, Job, Result, SegmentedImage, run
from harness.app.segment.sources import is_shard
from harness.cli.console import console, print_sentence, progress
from harness.cli.loading import load_model, warn_if_untrained
from harness.core.errors import HarnessError
from harness.core.names import plural
from harness.core.processors import Remote
from harness.runtime import Sam3
from harness.runtime.manifest import read_manifest

_MAX_ROWS = 20


def run_job(folder: Path, job: Job, remote: Remote | None = None, compute: Computation | None = None) -> list[Result]:
    """Loads the model, runs the job, and prints its progress, results and speed.

    Args:
        folder: Folder of the compiled model.
        job: The job.
        remote: Device that runs the model; None for this machine.
        compute: Segments the images elsewhere; by default this process does.

    Raises:
        HarnessError: A file cannot be written, or the device is none of this version.
        ModelError: The model cannot be loaded, there is no device, or the prompt makes no sense for any image.
    """
    model = _load(folder, remote)
    warn_if_untrained(model.manifest)
    start = time.perf_counter()
    with progress("images") as bar:
        total = None if any(map(is_shard, job.images)) else len(job.images)
        task = bar.add_task(job.images[0].name, total=total)
        failed = 0

        def on_done(result: Result) -> None:
            nonlocal failed
            failed += isinstance(result, FailedImage)
            description = f"{result.image.name}, {failed} failed" if failed else result.image.name
            bar.update(task, advance=1, description=description)

        results = run(model, job, on_done, compute)
    _print_results(results, time.perf_counter() - start, job.out)
    return results


def _load(folder: Path, remote: Remote | None) -> Sam3:
    if remote is None:
        return load_model(folder)
    from harness.compiler.execution.remote.client import DeviceSession, RemoteArtifact, RemoteError, describe_remote

    read_manifest(folder)
    description = describe_remote(remote)
    with console.status(Text(f"Loading {folder} on {remote}; what is not there yet is sent")):
        try:
            model = Sam3(RemoteArtifact(DeviceSession(remote), folder))
        except RemoteError as error:
            raise HarnessError(f"the device {remote} cannot load {folder}: {error}") from error
    print_sentence(f"Runs on {description}, {remote}.")
    return model


def _print_results(results: Sequence[Result], seconds: float, out: Path) -> None:
    segmented = [result for result in results if isinstance(result, SegmentedImage)]
    if len(segmented) == 1:
        console.print(objects_table(segmented[0]))
    elif segmented:
        console.print(images_table(segmented))
    for note in dict.fromkeys(note for result in segmented for note in result.notes):
        print_sentence(f"Note: {note}")
    if resumed := sum(result.resumed for result in segmented):
        print_sentence(f"{plural(resumed, 'image')} had been done by an earlier run.")
    if segmented and resumed == len(segmented):
        print_sentence(f"Done; results in {out}")
    elif segmented:
        count = len(segmented) - resumed
        speed = f"{count / seconds:.2f} images/s"
        print_sentence(f"{plural(count, 'image')} in {seconds:.1f} s, {speed}; results in {out}")


def objects_table(result: SegmentedImage) -> Table:
    """Returns a table of the objects found in one image, best first."""
    width, height = result.size
    entries = sorted(result.annotations, key=lambda entry: -float(entry["score"]))
    title = Text(f"{result.image.name}, {width} x {height}: {plural(len(entries), 'object')}")
    table = Table("object", "score", "box", "area", title=title, title_justify="left")
    for entry in entries[:_MAX_ROWS]:
        x, y, w, h = entry["bbox"]
        box = f"{x:.0f}, {y:.0f}, {x + w:.0f}, {y + h:.0f}"
        share = f"{entry['area'] / (width * height):.1%}"
        table.add_row(Text(str(entry["category"])), f"{entry['score']:.3f}", box, share)
    if len(entries) > _MAX_ROWS:
        table.add_row(f"and {len(entries) - _MAX_ROWS} more", "", "", "")
    return table


def images_table(results: Sequence[SegmentedImage]) -> Table:
    """Returns a table of the number of objects found in each image."""
    table = Table("image", "size", "objects", "best score", "seconds")
    for result in results[:_MAX_ROWS]:
        best = max((float(entry["score"]) for entry in result.annotations), default=None)
        table.add_row(
            Text(result.image.name),
            f"{result.size[0]} x {result.size[1]}",
            str(len(result.annotations)),
            "" if best is None else f"{best:.3f}",
            f"{result.seconds:.1f}",
        )
    if len(results) > _MAX_ROWS:
        table.add_row(f"and {len(results) - _MAX_ROWS} more", "", "", "", "")
    return table
