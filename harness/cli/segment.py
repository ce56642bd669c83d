"""Defines `sam3-tvm segment`: segments images by texts, boxes, points or clicks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options
from harness.cli.console import print_error, print_sentence
from harness.core.errors import HarnessError
from harness.core.processors import Remote

if TYPE_CHECKING:
    from harness.runtime import ObjectPrompt, Prompt

DEFAULT_MODEL = Path("dist/sam3-llvm")

FolderOption = Annotated[Path | None, typer.Option(help="Compiled model. Default: dist/sam3-llvm.")]
ClickOption = Annotated[
    list[str] | None, typer.Option(help="Point on the one object to find: x,y in pixels; repeatable.")
]
ClickOutOption = Annotated[list[str] | None, typer.Option(help="Point beside that object: x,y; repeatable.")]
ClickBoxOption = Annotated[str | None, typer.Option(help="Box of that object: x0,y0,x1,y1 in pixels.")]


def segment(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Images, folders, lists (.txt) or shards (.tar, .parquet) of images, and addresses of these (s3://…).",
            metavar="SOURCE…",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the results.")],
    text: Annotated[
        list[str] | None, typer.Option(help="What to look for: a noun phrase; repeatable, each is its own category.")
    ] = None,
    classes: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File of noun phrases, one on each line.")
    ] = None,
    box: Annotated[
        list[str] | None, typer.Option(help="Box around an example: x0,y0,x1,y1 in pixels; repeatable.")
    ] = None,
    negative_box: Annotated[
        list[str] | None, typer.Option(help="Box around what is not meant: x0,y0,x1,y1; repeatable.")
    ] = None,
    point: Annotated[list[str] | None, typer.Option(help="Point on an example: x,y in pixels; repeatable.")] = None,
    negative_point: Annotated[
        list[str] | None, typer.Option(help="Point on what is not meant: x,y; repeatable.")
    ] = None,
    click: ClickOption = None,
    click_out: ClickOutOption = None,
    click_box: ClickBoxOption = None,
    model: FolderOption = None,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Objects that score higher are kept.")] = 0.5,
    threads: options.ThreadsOption = None,
    remote: options.RemoteOption = None,
    ray: Annotated[bool, typer.Option("--ray", help="Segment in Ray workers, on --threads each.")] = False,
    ray_address: options.RayAddressOption = None,
) -> None:
    """Find the objects that texts, boxes and points describe in images: overlays, masks, a data set in COCO's format.

    An interrupted run continues when the same command is started again.

    Exit code 0: all images were done. 1: some were not. 2: wrong usage or environment.
    """
    from harness.app.segment.job import Job, failures
    from harness.app.segment.sources import find_images
    from harness.cli.segment_display import run_job
    from harness.core.processes.memory import hide_torch
    from harness.core.processes.threads import configure_threads

    texts = [*(text or ()), *(() if classes is None else read_classes(classes))]
    geometry = (box or (), negative_box or (), point or (), negative_point or ())
    object_prompt = make_object_prompt(click, click_out, click_box)
    if object_prompt is not None and (texts or any(geometry)):
        raise HarnessError("Clicks mean one object, and texts, boxes and points mean all of a kind; give one of both.")
    options.check_ray(ray, ray_address, {"--remote": remote})
    prompts = make_prompts(texts, *geometry) if object_prompt is None else [object_prompt]
    job = Job(find_images(sources), prompts, out, threshold)
    folder = choose_model(model)
    device = None if remote is None else Remote(remote)
    hide_torch()
    if ray:
        from harness.app.segment.workers import distribute
        from harness.core.cluster import connect

        with connect(ray_address) as dashboard:
            if dashboard is not None:
                print_sentence(f"Ray's dashboard: http://{dashboard}")
            failed = failures(run_job(folder, job, compute=distribute(folder, job, threads)))
    else:
        configure_threads(threads)
        failed = failures(run_job(folder, job, device))
    for sentence in failed:
        print_error(f"error: {sentence}")
    if failed:
        raise typer.Exit(1)


def choose_model(folder: Path | None) -> Path:
    """Returns the folder of the model: the option's value, or the folder that the documentation uses.

    Raises:
        HarnessError: No folder was given, and the default one does not exist.
    """
    if folder is not None:
        return folder
    if DEFAULT_MODEL.is_dir():
        return DEFAULT_MODEL
    raise HarnessError(
        f"There is no compiled model in {DEFAULT_MODEL}; make one with `sam3-tvm compile --out {DEFAULT_MODEL}`, "
        "or say with --model where one is."
    )


def read_classes(file: Path) -> list[str]:
    """Reads noun phrases from a text file in UTF-8, one per line; empty lines are skipped.

    Raises:
        HarnessError: The file cannot be read, or contains none.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HarnessError(f"{file} cannot be read as text in UTF-8 ({error}); give a file of noun phrases.") from error
    phrases = [phrase for line in lines if (phrase := line.strip())]
    if not phrases:
        raise HarnessError(f"{file} has no noun phrase; write one on each line.")
    return phrases


def make_prompts(
    texts: Sequence[str],
    boxes: Sequence[str],
    negative_boxes: Sequence[str],
    points: Sequence[str],
    negative_points: Sequence[str],
) -> list[Prompt]:
    """Builds the prompts of the options: one for each distinct text; positive boxes and points first.

    Raises:
        HarnessError: A box or point is not a list of numbers, or is combined with several texts.
    """
    from harness.app.segment.prompts import prompts_of_kinds

    return prompts_of_kinds(
        texts,
        [parse_numbers("--box", "x0,y0,x1,y1", box) for box in boxes]
        + [parse_numbers("--negative-box", "x0,y0,x1,y1", box) for box in negative_boxes],
        [True] * len(boxes) + [False] * len(negative_boxes),
        [parse_numbers("--point", "x,y", point) for point in points]
        + [parse_numbers("--negative-point", "x,y", point) for point in negative_points],
        [True] * len(points) + [False] * len(negative_points),
    )


def make_object_prompt(
    click: Sequence[str] | None, click_out: Sequence[str] | None, click_box: str | None
) -> ObjectPrompt | None:
    """Builds the prompt for one object from the options of these names; None if they give none.

    Raises:
        HarnessError: A click or the box is not a list of numbers.
    """
    from harness.runtime import ObjectPrompt

    if not click and not click_out and click_box is None:
        return None
    inside = [parse_numbers("--click", "x,y", point) for point in click or ()]
    outside = [parse_numbers("--click-out", "x,y", point) for point in click_out or ()]
    corners = None if click_box is None else parse_numbers("--click-box", "x0,y0,x1,y1", click_box)
    return ObjectPrompt([*inside, *outside], [1] * len(inside) + [0] * len(outside), corners)


def parse_numbers(option: str, form: str, value: str) -> list[float]:
    """Reads the comma-separated numbers of an option.

    Raises:
        HarnessError: The value does not have this form.
    """
    try:
        parsed = [float(part) for part in value.split(",")]
    except ValueError:
        parsed = []
    if len(parsed) != form.count(",") + 1:
        raise HarnessError(f"{option} {value!r} is not {form}; give numbers of pixels with commas between them.")
    return parsed
