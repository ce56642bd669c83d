"""The scripts of sessions that `sam3-tvm verify --component video` asks, and that their judge sees what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conformance.support.sentences import sentence
from harness.core.case import DEFAULT_STRATEGY, Case
from harness.core.errors import HarnessError
from harness.core.outcome import VerdictKind
from harness.core.program import Arrays
from harness.models.sam3.fixtures import read_questions
from harness.models.sam3.video.judging import judge_frames
from harness.models.sam3.video.questions import (
    SESSIONS,
    Request,
    SessionQuestion,
    VideoQuestion,
    frames_of,
    mask_of,
    number_frames,
    pixels_of,
)
from harness.models.sam3.video.visible_objects import PROMPT_SCORE
from harness.runtime.sam3.resizing import resize

pytestmark = pytest.mark.law

SIZE = (96, 144)


def disc(column: float, size: tuple[int, int]) -> np.ndarray:
    """Logits that are above zero in a disc whose middle is at a share of the width; no pixel is near zero."""
    y, x = np.mgrid[: size[0], : size[1]]
    inside = np.hypot((x / size[1] - column) * 1.5, y / size[0] - 0.5) < 0.2
    return np.where(inside, 5, -5).astype(np.float32)


def answer(frame: int, prompted: bool) -> Arrays:
    """A frame with two objects; the logits of the first one have the video's size if it was prompted."""
    logits = {3: disc(0.2, SIZE if prompted else (288, 288)), 4: disc(0.7, (288, 288))}
    masks = np.array([resize(each[None], *SIZE)[0] > 0 for each in logits.values()])
    found = [(np.flatnonzero(m.any(0)), np.flatnonzero(m.any(1))) for m in masks]
    return {
        "index": np.array([frame]),
        "ids": np.array([3, 4]),
        "scores": np.array([1, 0.8], np.float32),
        "boxes": np.array([(c[0], r[0], c[-1], r[-1]) for c, r in found], np.float32),
        "masks": masks,
        "candidates": np.array([3, 4]),
        "tracker_scores": np.array([0.99, 0.9], np.float32),
        **{f"logits/{each}": array for each, array in logits.items()},
    }


@pytest.fixture
def reference() -> Arrays:
    """A prompt of the first object on frame 1, and two frames that are tracked backwards."""
    return number_frames([(0, answer(1, True)), (1, answer(0, False)), (1, answer(1, False))])


def go_the_other_way(actual: Arrays) -> None:
    actual["1/index"], actual["2/index"] = actual["2/index"], actual["1/index"]


def give_a_frame_more(actual: Arrays) -> None:
    actual.update({name.replace("2/", "3/", 1): array for name, array in actual.items() if name.startswith("2/")})


def answer_another_request(actual: Arrays) -> None:
    actual["2/request"] += 1


def confuse_objects(actual: Arrays) -> None:
    actual["2/ids"] = np.array([3, 5])


def flip_a_pixel(actual: Arrays) -> None:
    actual["0/masks"][0, 2, 3] ^= True


def change_a_score(actual: Arrays) -> None:
    actual["1/scores"][1] += 1e-3


def move_a_box(actual: Arrays) -> None:
    actual["2/boxes"][0, 0] += 3


FAULTS: dict[Callable[[Arrays], None], set[str]] = {
    go_the_other_way: {"frames"},
    give_a_frame_more: {"frames"},
    answer_another_request: {"frames"},
    confuse_objects: {"ids"},
    flip_a_pixel: {"masks"},
    change_a_score: {"scores"},
    move_a_box: {"boxes"},
}
"""What goes wrong, and where it must be seen."""


@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda fault: fault.__name__ if fault else "none")
def test_faults_are_seen_where_they_are(reference: Arrays, fault: Callable[[Arrays], None] | None) -> None:
    actual = {name: array.copy() for name, array in reference.items()}
    if fault is not None:
        fault(actual)
    verdicts = judge_frames("asked", actual, reference)
    failed = {verdict.name.removeprefix("asked/") for verdict in verdicts if verdict.kind is not VerdictKind.STRICT}
    assert failed == (FAULTS[fault] if fault else set())
    if fault is None:
        assert [verdict.name for verdict in verdicts] == [
            f"asked/{what}" for what in ("frames", "ids", "scores", "boxes", "masks")
        ]


@pytest.mark.parametrize("logit", [1e-3, 1.0])
def test_a_pixel_of_a_prompted_object_is_undecided_near_zero_alone(reference: Arrays, logit: float) -> None:
    """Its logits have the video's size. 25 pixels are more than a sprinkle that is removed."""
    reference["0/logits/3"][1:6, 1:6] = logit
    inside = reference["0/logits/3"] > 0
    reference["0/masks"][0] = inside
    reference["0/boxes"][0, :2] = 1, 1
    actual = {name: array.copy() for name, array in reference.items()}
    actual["0/masks"][0, 2, 3] ^= True
    masks = judge_frames("asked", actual, reference)[-1]
    assert masks.kind is (VerdictKind.STRICT if logit == 1e-3 else VerdictKind.FAILED)


@pytest.mark.parametrize(
    ("scores", "kind"),
    [
        ((PROMPT_SCORE, PROMPT_SCORE), VerdictKind.FAILED),
        ((0.99, 0.99), VerdictKind.STRICT),
        ((0.990003, 0.99), VerdictKind.STRICT),
        ((0.99003, 0.99), VerdictKind.FAILED),
    ],
)
def test_objects_of_nearly_one_score_are_in_any_order(
    reference: Arrays, scores: tuple[float, float], kind: VerdictKind
) -> None:
    """Both claim the same pixels. The score of a prompt is a constant; rounding exchanges others, equal ones too."""
    reference["1/logits/4"] = reference["1/logits/3"]
    reference["1/tracker_scores"] = np.array(scores, np.float32)
    both = reference["1/masks"][0]
    reference["1/masks"] = np.array([both, both & False])
    reference["1/boxes"][1] = reference["1/boxes"][0]
    actual = {name: array.copy() for name, array in reference.items()}
    actual["1/masks"] = actual["1/masks"][::-1]
    assert judge_frames("asked", actual, reference)[-1].kind is kind


def test_scripts_have_prompts_of_every_kind() -> None:
    scripts, full = read_questions(SESSIONS, SessionQuestion), Case("video", DEFAULT_STRATEGY, "llvm", "full")
    requests = [request for script in scripts for request in script.requests]
    prompts = [request for request in requests if request.type == "add_prompt"]
    assert {bool(request.points) for request in prompts} == {True, False}
    assert all(any(getattr(request, kind) is not None for request in prompts) for kind in ("text", "box", "mask"))
    assert any(0 in request.labels for request in prompts)
    assert {request.reverse for request in requests if request.type == "propagate_in_video"} == {True, False}
    assert any(request.type == "remove_object" for request in requests)
    assert [script.name for script in scripts if script.is_asked(full)] == ["few_frames"]
    for script in scripts:
        (frame,) = frames_of(VideoQuestion(script.name, image=script.image, length=1))
        for request in script.requests:
            if request.mask is not None:
                assert mask_of(request.mask, frame.shape[:2]).any()


def test_places_are_whole_pixels() -> None:
    assert pixels_of([[0.25, 0.5], [1, 1]], (10, 30)).tolist() == [[8, 5], [30, 10]]
    assert np.argwhere(mask_of((0.1, 0, 0.2, 0.2), (10, 10))).tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("request_", "fact"),
    [
        ('type = "add_prompt", colour = 3', "`colour`"),
        ('type = "start"', "add_prompt, propagate_in_video, remove_object"),
        ('type = "propagate_in_video", frame = 4', "frame 4 of 4"),
        ('type = "propagate_in_video", object = 4', "a text, or an object"),
        ('type = "remove_object"', "a text, or an object"),
        ('type = "add_prompt"', "a text, or an object"),
        ('type = "add_prompt", object = 1', "a text, or an object"),
        ('type = "add_prompt", points = [[0.5, 0.5]]', "a text, or an object"),
        ('type = "add_prompt", text = "dog", object = 1', "a text, or an object"),
        ('type = "add_prompt", object = 1, box = [0, 0, 1, 1], mask = [0, 0, 1, 1]', "a text, or an object"),
        ('type = "add_prompt", object = 1, points = [[0.5, 0.5]], labels = [1, 0]', "2 labels of 1 points"),
    ],
)
def test_scripts_that_make_no_sense(tmp_path: Path, request_: str, fact: str) -> None:
    path = tmp_path / "scripts.toml"
    path.write_text(f'[[question]]\nname = "a"\nvideo = "scene"\nlength = 4\nrequests = [{{ {request_} }}]\n')
    with pytest.raises(HarnessError, match=sentence("bad-description", path="scripts.toml", error=fact)):
        read_questions(path, SessionQuestion)


def test_a_script_is_data(tmp_path: Path) -> None:
    path = tmp_path / "scripts.toml"
    request = '{ type = "add_prompt", frame = 1, object = 2, points = [[0.5, 0.25]], labels = [0] }'
    path.write_text(f'[[question]]\nname = "a"\nvideo = "scene"\nlength = 4\nrequests = [{request}]\n')
    (script,) = read_questions(path, SessionQuestion)
    assert script.requests == (Request("add_prompt", 1, object=2, points=((0.5, 0.25),), labels=(0,)),)
    assert hash(script)
