"""Defines `sam3-tvm track`: tracks objects through a video by texts, a box or clicks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options
from harness.cli.console import print_sentence, progress
from harness.cli.segment import (
    ClickBoxOption,
    ClickOption,
    ClickOutOption,
    FolderOption,
    choose_model,
    make_object_prompt,
    parse_numbers,
)
from harness.core.errors import HarnessError
from harness.core.names import plural


def track(
    video: Annotated[Path, typer.Argument(help="A video file, or a folder of images.")],
    out: Annotated[Path, typer.Option(help="Folder of the results.")],
    text: Annotated[list[str] | None, typer.Option(help="What to track: a noun phrase; repeatable.")] = None,
    box: Annotated[str | None, typer.Option(help="An example of what to track: x0,y0,x1,y1 in pixels.")] = None,
    click: ClickOption = None,
    click_out: ClickOutOption = None,
    click_box: ClickBoxOption = None,
    frame: Annotated[int, typer.Option(min=0, help="Frame of boxes and clicks, where tracking begins.")] = 0,
    model: FolderOption = None,
    no_overlay: Annotated[bool, typer.Option("--no-overlay", help="Write no video, which needs PyAV.")] = False,
    threads: options.ThreadsOption = None,
) -> None:
    """Track objects named by texts, a box or clicks through a video: overlay, masks, data set in COCO's format, table.

    The model must have been compiled with --video. Results for texts and a box are written 14 frames late, because
    objects found by mistake are removed in that time. The written files are valid whenever a run ends, and the same
    command continues an interrupted run.
    """
    object_prompt = make_object_prompt(click, click_out, click_box)
    if object_prompt is not None and (text or box is not None):
        raise HarnessError("Clicks mean one object, and a text or a box means all of a kind; give one of both.")
    if not text and box is None and object_prompt is None:
        raise HarnessError("Nothing is asked; give --text, --box or both, or --click.")
    from harness.app.track.job import Job, run
    from harness.cli.loading import load_model, warn_if_untrained
    from harness.core.processes.memory import hide_torch
    from harness.core.processes.threads import configure_threads

    corners = None if box is None else parse_numbers("--box", "x0,y0,x1,y1", box)
    job = Job(video, text or [], corners, object_prompt, frame, out, not no_overlay)
    folder = choose_model(model)
    configure_threads(threads)
    hide_torch()
    loaded = load_model(folder)
    warn_if_untrained(loaded.manifest)
    start = time.perf_counter()
    with progress("frames") as bar:
        task = bar.add_task(video.name, total=None)
        summary = run(loaded, job, lambda total: bar.update(task, total=total), lambda: bar.advance(task))
    seconds = time.perf_counter() - start
    speed = f"{seconds:.1f} s, {summary.processed / seconds:.2f} frames/s"
    print_sentence(
        f"{plural(len(summary.objects), 'object')} in {summary.frames} frames, "
        f"{speed if summary.processed else 'done by an earlier run'}; results in {out}"
    )
