"""`sam3-tvm segment`: what a text, boxes and points mean in images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.console import complain
from harness.cli.options import RemoteOption, ThreadsOption
from harness.core.errors import HarnessError
from harness.core.remote import Remote

if TYPE_CHECKING:
    from harness.runtime import ObjectPrompt, Prompt

DEFAULT_MODEL = Path("dist/sam3-llvm")


def segment(
    images: Annotated[list[Path], typer.Argument(help="Images, and folders of images.", metavar="IMAGE…")],
    out: Annotated[Path, typer.Option(help="Folder of the results.")],
    text: Annotated[list[str] | None, typer.Option(help="What to look for: a noun phrase; repeatable.")] = None,
    classes: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File of noun phrases to look for, one a line.")
    ] = None,
    box: Annotated[
        list[str] | None, typer.Option(help="What to look for is here: x0,y0,x1,y1 in pixels; repeatable.")
    ] = None,
    negative_box: Annotated[list[str] | None, typer.Option(help="It is not here: x0,y0,x1,y1; repeatable.")] = None,
    point: Annotated[list[str] | None, typer.Option(help="It is here: x,y in pixels; repeatable.")] = None,
    negative_point: Annotated[list[str] | None, typer.Option(help="It is not here: x,y; repeatable.")] = None,
    click: Annotated[
        list[str] | None, typer.Option(help="One object is here, whatever it is: x,y in pixels; repeatable.")
    ] = None,
    click_out: Annotated[list[str] | None, typer.Option(help="That object is not here: x,y; repeatable.")] = None,
    click_box: Annotated[str | None, typer.Option(help="Box of that object: x0,y0,x1,y1 in pixels.")] = None,
    model: Annotated[Path | None, typer.Option(help="Compiled model. Default: dist/sam3-llvm.")] = None,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Objects that score higher are kept.")] = 0.5,
    threads: ThreadsOption = None,
    remote: RemoteOption = None,
) -> None:
    """Find what texts, boxes and points mean in images: overlays, masks, and a data set in COCO's format.

    A run that was interrupted goes on where it was when it is started again.

    Exit code 0: all images were done; 1: some were not; 2: wrong usage or environment.
    """
    from harness.cli.segmenting import do
    from harness.processes.threads import configure_threads
    from harness.processes.torch_free import leave_torch_out
    from harness.segment import Job, failures, find_images

    texts = [*(text or ()), *(() if classes is None else read_classes(classes))]
    geometry = (box or (), negative_box or (), point or (), negative_point or ())
    clicked = make_object_prompt(click or (), click_out or (), click_box)
    if clicked is not None and (texts or any(geometry)):
        raise HarnessError("Clicks mean one object, and texts, boxes and points mean all of a kind; give one of both.")
    prompts = make_prompts(texts, *geometry) if clicked is None else [clicked]
    job = Job(find_images(images), prompts, out, threshold)
    folder = choose_model(model)
    device = None if remote is None else Remote(remote)
    configure_threads(threads)
    leave_torch_out()
    failed = failures(do(folder, job, device))
    for sentence in failed:
        complain(f"error: {sentence}")
    if failed:
        raise typer.Exit(1)


def choose_model(folder: Path | None) -> Path:
    """The folder of the model: the one given, or the one where the documentation has it compiled to.

    Raises:
        HarnessError: None was given and that one does not exist.
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
    """Reads noun phrases from a text file in UTF-8, one a line; empty lines are left out.

    Raises:
        HarnessError: The file cannot be read, or has none.
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
    """Makes the prompts that the options give: one for each text, which counts once; positive boxes and points first.

    Raises:
        HarnessError: A box or point is not numbers with commas between them, or goes with several texts.
    """
    from harness.segment.asking import prompts_of_kinds

    return prompts_of_kinds(
        texts,
        [numbers("--box", "x0,y0,x1,y1", box) for box in boxes]
        + [numbers("--negative-box", "x0,y0,x1,y1", box) for box in negative_boxes],
        [True] * len(boxes) + [False] * len(negative_boxes),
        [numbers("--point", "x,y", point) for point in points]
        + [numbers("--negative-point", "x,y", point) for point in negative_points],
        [True] * len(points) + [False] * len(negative_points),
    )


def make_object_prompt(clicks: Sequence[str], clicks_out: Sequence[str], box: str | None) -> ObjectPrompt | None:
    """Makes the prompt for one object that the options give, or None where they give none.

    Raises:
        HarnessError: A click or the box is not numbers with commas between them.
    """
    from harness.runtime import ObjectPrompt

    if not clicks and not clicks_out and box is None:
        return None
    points = [numbers("--click", "x,y", click) for click in clicks]
    points += [numbers("--click-out", "x,y", click) for click in clicks_out]
    corners = None if box is None else numbers("--click-box", "x0,y0,x1,y1", box)
    return ObjectPrompt(points, [1] * len(clicks) + [0] * len(clicks_out), corners)


def numbers(option: str, form: str, given: str) -> list[float]:
    """Reads the numbers of an option.

    Raises:
        HarnessError: What is given does not have the form.
    """
    try:
        found = [float(part) for part in given.split(",")]
    except ValueError:
        found = []
    if len(found) != form.count(",") + 1:
        raise HarnessError(f"{option} {given!r} is not {form}; give numbers of pixels with commas between them.")
    return found
