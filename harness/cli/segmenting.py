"""The work of `sam3-tvm segment` as it is watched: progress, what was found, and how fast."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from harness.cli.console import console, progress, tell_untrained
from harness.cli.loading import load_model
from harness.core.errors import HarnessError
from harness.core.remote import Remote
from harness.runtime import Sam3
from harness.runtime.manifest import read_manifest
from harness.segment.job import Job, Result, Segmented, run

_MOST_ROWS = 20


def do(folder: Path, job: Job, remote: Remote | None = None) -> list[Result]:
    """Loads the model, does the job, and prints progress, what was found and how fast.

    Args:
        folder: The compiled model.
        job: What to do.
        remote: The device to run it on; None for this machine.

    Raises:
        HarnessError: A file cannot be written, or the device is none of this version.
        Sam3Error: The model cannot be loaded, there is no device, or the prompt makes no sense for any image.
    """
    model = _loaded(folder, remote)
    tell_untrained(model.manifest)
    start = time.perf_counter()
    with progress("images") as bar:
        task = bar.add_task(job.images[0].name, total=len(job.images))

        def on_done(_result: Result) -> None:
            bar.advance(task)
            following = int(bar.tasks[task].completed)
            if following < len(job.images):
                bar.update(task, description=job.images[following].name)

        results = run(model, job, on_done)
    _tell(results, time.perf_counter() - start, job.out)
    return results


def _loaded(folder: Path, remote: Remote | None) -> Sam3:
    if remote is None:
        return load_model(folder)
    from harness.execution.remote.client import DeviceSession, RemoteArtifact, RemoteError, describe_remote

    read_manifest(folder)
    description = describe_remote(remote)
    with console.status(Text(f"Loading {folder} on {remote}; what is not there yet is sent")):
        try:
            model = Sam3(RemoteArtifact(DeviceSession(remote), folder))
        except RemoteError as error:
            raise HarnessError(f"the device {remote} cannot load {folder}: {error}") from error
    console.print(f"Runs on {description}, {remote}.", markup=False, highlight=False, soft_wrap=True)
    return model


def _tell(results: Sequence[Result], seconds: float, out: Path) -> None:
    done = [result for result in results if isinstance(result, Segmented)]
    if len(done) == 1:
        console.print(objects_table(done[0]))
    elif done:
        console.print(images_table(done))
    for note in dict.fromkeys(note for result in done for note in result.notes):
        console.print(f"Note: {note}", markup=False, highlight=False, soft_wrap=True)
    if resumed := sum(result.resumed for result in done):
        console.print(f"{_images(resumed)} had been done by an earlier run.", highlight=False, soft_wrap=True)
    if done and resumed == len(done):
        console.print(f"Done; results in {out}", markup=False, highlight=False, soft_wrap=True)
    elif done:
        now = len(done) - resumed
        speed = f"{now / seconds:.2f} images/s"
        console.print(f"{_images(now)} in {seconds:.1f} s, {speed}; results in {out}", highlight=False, soft_wrap=True)


def _images(count: int) -> str:
    return f"{count} image{'' if count == 1 else 's'}"


def objects_table(result: Segmented) -> Table:
    """What was found in one image, best first."""
    width, height = result.size
    entries = sorted(result.annotations, key=lambda entry: -float(entry["score"]))
    table = Table("object", "score", "box", "area", title=_title(result), title_justify="left")
    for entry in entries[:_MOST_ROWS]:
        x, y, w, h = entry["bbox"]
        box = f"{x:.0f}, {y:.0f}, {x + w:.0f}, {y + h:.0f}"
        share = f"{entry['area'] / (width * height):.1%}"
        table.add_row(Text(str(entry["category"])), f"{entry['score']:.3f}", box, share)
    if len(entries) > _MOST_ROWS:
        table.add_row(f"and {len(entries) - _MOST_ROWS} more", "", "", "")
    return table


def _title(result: Segmented) -> Text:
    width, height = result.size
    count = len(result.annotations)
    return Text(f"{result.image.name}, {width} x {height}: {count} object{'' if count == 1 else 's'}")


def images_table(done: Sequence[Segmented]) -> Table:
    """How much was found in each image."""
    table = Table("image", "size", "objects", "best score", "seconds")
    for result in done[:_MOST_ROWS]:
        best = max((float(entry["score"]) for entry in result.annotations), default=None)
        table.add_row(
            Text(result.image.name),
            f"{result.size[0]} x {result.size[1]}",
            str(len(result.annotations)),
            "" if best is None else f"{best:.3f}",
            f"{result.seconds:.1f}",
        )
    if len(done) > _MOST_ROWS:
        table.add_row(f"and {len(done) - _MOST_ROWS} more", "", "", "", "")
    return table
