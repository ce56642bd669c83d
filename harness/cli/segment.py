"""`sam3-tvm segment`: what a text, boxes and points mean in images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.console import complain, console
from harness.cli.options import KeyOption, RemoteOption, ThreadsOption
from harness.core.errors import HarnessError
from harness.core.remote import chosen_remote

if TYPE_CHECKING:
    from harness.runtime import Prompt

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
    model: Annotated[Path | None, typer.Option(help="Compiled model. Default: dist/sam3-llvm.")] = None,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Objects that score higher are kept.")] = 0.5,
    threads: ThreadsOption = None,
    remote: RemoteOption = None,
    key: KeyOption = "",
) -> None:
    """Find what texts, boxes and points mean in images: overlays, masks, and a data set in COCO's format.

    A run that was interrupted goes on where it was when it is started again.

    Exit code 0: all images were done; 1: some were not; 2: wrong usage or environment.
    """
    from harness.cli.segmenting import do
    from harness.processes.threads import configure_threads
    from harness.segment import Job, failures, find_images

    texts = [*(text or ()), *(() if classes is None else read_classes(classes))]
    prompts = make_prompts(texts, box or (), negative_box or (), point or (), negative_point or ())
    job = Job(find_images(images), prompts, out, threshold)
    folder = choose_model(model)
    devices = chosen_remote(remote, key)
    configure_threads(threads)
    failed = failures(do(console, folder, job, devices))
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
    from harness.runtime import Prompt

    distinct = list(dict.fromkeys(texts))
    if len(distinct) > 1 and any((boxes, negative_boxes, points, negative_points)):
        raise HarnessError(
            f"Boxes and points go with one text, and {len(distinct)} were given; give one --text, or leave them out."
        )
    with_geometry = Prompt(
        distinct[0] if distinct else None,
        [_numbers("--box", "x0,y0,x1,y1", box) for box in boxes]
        + [_numbers("--negative-box", "x0,y0,x1,y1", box) for box in negative_boxes],
        [True] * len(boxes) + [False] * len(negative_boxes),
        [_numbers("--point", "x,y", point) for point in points]
        + [_numbers("--negative-point", "x,y", point) for point in negative_points],
        [True] * len(points) + [False] * len(negative_points),
    )
    return [with_geometry, *(Prompt(text) for text in distinct[1:])]


def _numbers(option: str, form: str, given: str) -> list[float]:
    try:
        numbers = [float(part) for part in given.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != form.count(",") + 1:
        raise HarnessError(f"{option} {given!r} is not {form}; give numbers of pixels with commas between them.")
    return numbers
