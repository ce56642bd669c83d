"""The questions of the subject `video`, and that its judge sees what is wrong; `sam3-tvm verify` runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from conformance.support.sentences import sentence
from harness.cli.verify import LONG_TIMEOUT, TIMEOUT, time_limit
from harness.core.case import DEFAULT_STRATEGY, Case
from harness.core.errors import HarnessError
from harness.core.outcome import VerdictKind
from harness.core.program import Arrays
from harness.models.registry import subjects
from harness.models.sam3.fixtures import read_questions
from harness.models.sam3.upstream import upstream
from harness.models.sam3.video import FOLLOWED, STEP, answers
from harness.models.sam3.video import upstream as tracking
from harness.models.sam3.video.drift import drift
from harness.models.sam3.video.following import Following, NotRoundingError
from harness.models.sam3.video.judging import judge_step, judge_video
from harness.models.sam3.video.questions import QUESTIONS, Question, VideoQuestion, frames_of
from harness.models.sam3.video.upstream import round_to_bfloat16, vectorized_mask_iou
from harness.models.selection import select
from harness.parity.references import Reference, add_prefix
from harness.runtime.sam3.resizing import resize
from harness.runtime.sam3.video.tracker import to_bfloat16

pytestmark = pytest.mark.law

HEIGHT, WIDTH = 96, 144


def blob(column: float, radius: float = 40) -> np.ndarray:
    """Logits [288, 288], above zero in a disc; no pixel is near zero."""
    y, x = np.mgrid[:288, :288]
    return np.where(np.hypot(x - column, y - 144) < radius, 5, -5).astype(np.float32)


def shown(logits: list[np.ndarray]) -> np.ndarray:
    return resize(np.array(logits), HEIGHT, WIDTH) > 0


def boxes(masks: np.ndarray) -> np.ndarray:
    found = [(np.flatnonzero(m.any(0)), np.flatnonzero(m.any(1))) for m in masks]
    return np.array([(c[0], r[0], c[-1], r[-1]) for c, r in found], np.float32).reshape(-1, 4)


@pytest.fixture
def answer() -> Reference:
    """Two objects are born on the first frame; one of them is removed on the second, the other one stays."""
    generator = np.random.default_rng(0)
    rows = {0: [0, 1], 1: [0, 1], 2: [0, 1], 3: [0]}
    tracked, after = {1: 0, 2: 2, 3: 1}, {1: [0, 1], 2: [0], 3: [0]}
    reference: Arrays = {"0/objects": np.zeros(0, np.int64)}
    exact: Arrays = {}
    for number, ids in rows.items():
        logits = [blob(80 + 4 * number), blob(200 + 4 * number)][: len(ids)]
        masks = shown(logits)
        reference |= {
            f"{number}/ids": np.array(ids),
            f"{number}/scores": np.array([0.9, 0.8], np.float32)[: len(ids)],
            f"{number}/boxes": boxes(masks),
            f"{number}/masks": masks,
            f"{number}/candidates": np.array(ids),
            f"{number}/unfilled": np.array(logits),
            f"{number}/tracker_scores": np.array([0.99, 0.98], np.float32)[: len(ids)],
        }
        if number:
            count = tracked[number]
            truth = generator.normal(size=(count, 288, 288))
            memories = generator.normal(size=(count, 64, 72, 72)).astype(np.float32)
            exact |= {f"{number}/logits": truth, f"{number}/memories": to_bfloat16(memories)}
            reference |= {
                f"{number}/objects": np.array(after[number]),
                f"{number}/logits": (truth + 1e-5 * generator.normal(size=truth.shape)).astype(np.float32),
                f"{number}/memories": to_bfloat16(memories * (1 + 1e-5 * generator.normal(size=memories.shape))),
                f"{number}/remembered": np.ones(count, bool),
            }
    return Reference(reference, reference, exact)


def faultless(answer: Reference) -> Arrays:
    births = {1: 2, 2: 0, 3: 0}
    return (
        {name: array.copy() for name, array in answer.first.items()}
        | {f"{number}/births": np.array([count]) for number, count in births.items()}
        | {"left": np.array([1])}
    )


def lose_an_object(actual: Arrays) -> None:
    actual["2/ids"] = actual["2/ids"][:1]


def remove_later(actual: Arrays) -> None:
    actual["3/memories"] = np.concatenate([actual["3/memories"]] * 2)


def find_another(actual: Arrays) -> None:
    actual["2/births"] += 1
    actual["left"] += 1


def remember_another(actual: Arrays) -> None:
    actual["2/remembered"][0] = False


def flip_a_pixel(actual: Arrays) -> None:
    actual["2/masks"][0, 2, 3] ^= True


def change_a_score(actual: Arrays) -> None:
    actual["1/scores"][1] += 1e-3


def move_a_box(actual: Arrays) -> None:
    actual["1/boxes"][0, 0] += 3


def drift_twice_as_far(actual: Arrays) -> None:
    actual["3/logits"] += np.random.default_rng(1).normal(scale=3e-5, size=actual["3/logits"].shape).astype(np.float32)


FAULTS: dict[Callable[[Arrays], None], set[str]] = {
    lose_an_object: {"ids"},
    remove_later: {"removals", "drift/memories"},
    find_another: {"births", "removals"},
    remember_another: {"remembered"},
    flip_a_pixel: {"masks"},
    change_a_score: {"scores"},
    move_a_box: {"boxes"},
    drift_twice_as_far: {"drift/logits"},
}
"""What goes wrong, and where it must be seen."""


@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda fault: fault.__name__ if fault else "none")
def test_faults_are_seen_where_they_are(answer: Reference, fault: Callable[[Arrays], None] | None) -> None:
    actual = faultless(answer)
    if fault is not None:
        fault(actual)
    verdicts = judge_video("walk", actual, answer)
    failed = {verdict.name.removeprefix("walk/") for verdict in verdicts if verdict.kind is not VerdictKind.STRICT}
    assert failed == (FAULTS[fault] if fault else set())
    if fault is None:
        names = [
            "ids",
            "births",
            "removals",
            "remembered",
            "scores",
            "boxes",
            "masks",
            "drift/logits",
            "drift/memories",
        ]
        assert [verdict.name for verdict in verdicts] == [f"walk/{name}" for name in names]


def test_a_pixel_near_zero_is_undecided_and_counted(answer: Reference) -> None:
    answer.first["2/unfilled"][0, 6:12, 6:12] = 1e-3
    actual = faultless(answer)
    actual["2/masks"][0, 2, 3] ^= True
    masks = next(verdict for verdict in judge_video("walk", actual, answer) if verdict.name == "walk/masks")
    assert masks.kind is VerdictKind.STRICT
    assert masks.reason.startswith("1 pixels differ, all of which are undecided")


@pytest.mark.parametrize(("outside", "kind"), [(-5.0, VerdictKind.STRICT), (-5.1, VerdictKind.FAILED)])
def test_a_pixel_is_undecided_by_its_own_logit(answer: Reference, outside: float, kind: VerdictKind) -> None:
    """A pixel of the video is the mean of two logits, which are far from zero."""
    logits = answer.first["2/unfilled"]
    logits[0, :20, :5] = 5
    logits[0, 7, 5] = outside
    masks = shown(list(logits))
    answer.first["2/masks"], answer.first["2/boxes"] = masks, boxes(masks)
    actual = faultless(answer)
    actual["2/masks"][0, 2, 2] ^= True
    verdict = next(verdict for verdict in judge_video("walk", actual, answer) if verdict.name == "walk/masks")
    assert verdict.kind is kind


@pytest.mark.parametrize(
    ("score", "taken", "kind"),
    [
        (0.990003, "all", VerdictKind.STRICT),
        (0.990003, "half", VerdictKind.FAILED),
        (0.99003, "all", VerdictKind.FAILED),
    ],
)
def test_objects_of_one_score_are_in_one_order_or_the_other(
    answer: Reference, score: float, taken: str, kind: VerdictKind
) -> None:
    logits = [blob(120), blob(150)]
    first, second = shown(logits)
    both = first & second
    masks = np.array([first & ~both, second])
    answer.first.update(
        {
            "2/unfilled": np.array(logits),
            "2/tracker_scores": np.array([0.99, score], np.float32),
            "2/masks": masks,
            "2/boxes": boxes(np.array([first, second])),
        }
    )
    actual = faultless(answer)
    where = both if taken == "all" else both & (np.arange(WIDTH) < WIDTH * 135 / 288)
    assert where.any()
    actual["2/masks"] ^= where
    verdict = next(verdict for verdict in judge_video("walk", actual, answer) if verdict.name == "walk/masks")
    assert verdict.kind is kind
    assert ("on 1 frames" in verdict.reason) is (kind is VerdictKind.STRICT)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_three_objects_of_one_score_may_be_in_any_order(answer: Reference, order: tuple[int, ...]) -> None:
    """The third one is not shown, and has what the other two lack."""
    logits = [blob(120), blob(135), blob(150)]
    claims = shown(logits)
    answer.first.update(
        {
            "2/candidates": np.array([0, 1, 5]),
            "2/unfilled": np.array(logits),
            "2/tracker_scores": np.full(3, 0.99, np.float32),
            "2/masks": shared_out(claims, (0, 1, 2))[:2],
            "2/boxes": boxes(claims[:2]),
        }
    )
    actual = faultless(answer)
    actual["2/masks"] = shared_out(claims, order)[:2]
    verdict = next(verdict for verdict in judge_video("walk", actual, answer) if verdict.name == "walk/masks")
    assert verdict.kind is VerdictKind.STRICT, verdict
    first, second = claims[:2]
    actual["2/masks"][:, first & second & (np.arange(WIDTH) < WIDTH * 135 / 288)] ^= True
    verdict = next(verdict for verdict in judge_video("walk", actual, answer) if verdict.name == "walk/masks")
    assert verdict.kind is VerdictKind.FAILED, verdict


def shared_out(claims: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """Masks whose common pixels are those of the first object in the order."""
    masks, left = claims.copy(), np.ones(claims.shape[1:], bool)
    for each in order:
        masks[each] &= left
        left &= ~claims[each]
    return masks


class UpstreamModel:
    """The two methods that `Following` replaces, which return the same rows on every frame."""

    def __init__(self) -> None:
        self.tracker = self

    def track_step(self, **arguments: Any) -> dict[str, torch.Tensor]:
        masks = torch.from_numpy(np.array([blob(80), blob(200)]))
        masks = masks if arguments["point_inputs"] is None else masks[:1]
        return {"pred_masks": masks[:, None], "object_score_logits": torch.full((len(masks), 1), 7.0)}

    def run_backbone_and_detection(self, frame_idx: int) -> dict[str, torch.Tensor]:
        return {"mask": torch.from_numpy(np.array([blob(80), blob(200)])), "scores": torch.tensor([0.9, 0.8])}

    def process(self, frame: int) -> dict[str, torch.Tensor]:
        """Detects, tracks and clicks on a frame; returns the results by the names in `FOLLOWED`."""
        detected = self.run_backbone_and_detection(frame_idx=frame)
        tracked, clicked = (
            self.track_step(frame_idx=frame, mask_inputs=None, point_inputs=points) for points in (None, {})
        )
        return {
            "logits": tracked["pred_masks"][:, 0],
            "object_logits": tracked["object_score_logits"][:, 0],
            "clicked_logits": clicked["pred_masks"][:, 0],
            "clicked_object_logits": clicked["object_score_logits"][:, 0],
            "detected_logits": detected["mask"],
            "detected_scores": detected["scores"],
        }


@pytest.mark.parametrize(
    ("name", "rounding", "fault"),
    [
        ("logits", 4e-3, 6e-3),
        ("object_logits", 5e-4, 2e-3),
        ("clicked_logits", -4e-3, -6e-3),
        ("clicked_object_logits", -5e-4, -2e-3),
        ("detected_logits", 4e-3, np.nan),
        ("detected_scores", 1e-5, 3e-5),
    ],
)
def test_upstream_goes_on_from_logits_that_differ_by_rounding_and_from_no_others(
    name: str, rounding: float, fault: float
) -> None:
    """Logits of 5 may be moved by 0.005."""
    model = UpstreamModel()
    own = {part: tensor.numpy() for part, tensor in model.process(3).items()}
    visits = [{part: rows.copy() for part, rows in own.items()} for _ in range(2)]
    visits[1][name][-1] += np.float32(rounding)
    computed = {part: np.concatenate([visit[part] for visit in visits]) for part in FOLLOWED}
    with Following({3: computed}).running(model):
        for visit in visits:
            for part, rows in model.process(3).items():
                np.testing.assert_array_equal(rows, visit[part])
        with pytest.raises(NotRoundingError, match="frame 3"):  # the compiled model visited the frame twice
            model.process(3)
    computed[name][-1] += np.float32(fault)
    with Following({3: computed}).running(model):
        model.process(3)
        with pytest.raises(NotRoundingError, match=f"{name} of frame 3"):
            model.process(3)


def test_a_video_is_held_to_upstreams_answer_from_the_compiled_models_logits(answer: Reference) -> None:
    """The drift is measured from upstream's own logits."""
    actual = faultless(answer)
    flip_a_pixel(actual)
    followed = {name: array.copy() for name, array in actual.items() if not name.endswith(("logits", "memories"))}
    verdicts = {verdict.name: verdict for verdict in judge_video("walk", actual, answer, followed)}
    assert {verdict.kind for verdict in verdicts.values()} == {VerdictKind.STRICT}
    assert verdicts["walk/ids"].reason.startswith("upstream goes on from the compiled model's logits")
    assert verdicts["walk/drift/logits"].r_rms == 1
    actual["2/masks"][0, 2, 4] ^= True
    verdicts = {verdict.name: verdict for verdict in judge_video("walk", actual, answer, followed)}
    assert verdicts["walk/masks"].kind is VerdictKind.FAILED


@pytest.mark.parametrize("fault", [None, flip_a_pixel, change_a_score], ids=["none", "a pixel", "a score"])
@pytest.mark.parametrize("rounding", [True, False])
def test_upstream_answers_again_where_the_compiled_model_answers_otherwise(
    answer: Reference, fault: Callable[[Arrays], None] | None, rounding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream's first answer stands where the logits differ by more than rounding."""
    question = Question("walk", image=Path("scene"), length=3, text="dog")
    actual = faultless(answer)
    followed = {name: array.copy() for name, array in actual.items()}
    rows = dict.fromkeys(FOLLOWED, np.zeros((0, 1), np.float32))
    for number in range(4):
        actual |= add_prefix(str(number), rows)
    if fault is not None:
        fault(actual)

    def answer_frames(*_: Any) -> Arrays:
        if not rounding:
            raise NotRoundingError
        return followed

    class Upstream:
        video = SimpleNamespace(tracker=SimpleNamespace(track_step=int), run_backbone_and_detection=int)

        def cached(self, module: str, question: Question, make: Callable[[], Reference], **_: Any) -> Reference:
            return make()

    monkeypatch.setattr(tracking, "answer", lambda *_: answer.map(lambda arrays: add_prefix("frames", arrays)))
    monkeypatch.setattr(tracking, "answer_frames", answer_frames)
    upstreams = answers.answer(Upstream(), question, add_prefix("frames", actual)).first
    assert any(name.startswith("followed/") for name in upstreams) is (rounding and fault is not None)
    assert answers.answer(Upstream(), question, {}).first.keys() == add_prefix("frames", answer.first).keys()


def test_drift_is_measured_against_float64(answer: Reference) -> None:
    found = drift(answer.first, answer.first, answer.exact, "logits")
    assert found.frames.tolist() == [1, 2]
    assert found.ratio == 1
    np.testing.assert_allclose(found.torch, 1e-5, rtol=0.02)
    with pytest.raises(ValueError, match="nothing is tracked in float64"):
        drift(answer.first, answer.first, {"1/logits": np.zeros((0, 288, 288))}, "logits")


def step_of(values: np.ndarray) -> Reference:
    reference = {name: np.ones(3, np.float32) for name in STEP} | {"memory": values}
    oracle = {name: array.astype(np.float64) for name, array in reference.items()}
    return Reference(reference, reference, oracle)


@pytest.mark.parametrize(("steps", "distance", "kind"), [(1, 0, "strict"), (1, 1e-3, "failed"), (2, 0, "failed")])
def test_rounded_memories_may_differ_at_a_boundary_alone(steps: int, distance: float, kind: str) -> None:
    """1 + 2^-8 lies between 1 and the next value of bfloat16; half to even gives 1."""
    values = np.full(8, 1 + 2**-8 - distance, np.float32)
    bits = to_bfloat16(values)
    bits[3] += steps
    actual = step_of(values).first | {"rounded": bits}
    verdict = judge_step("step", actual, step_of(values))[-1]
    assert verdict.name == "step/rounded"
    assert verdict.kind == kind
    assert ("7 elements are equal, 1 one step" in verdict.reason) is (kind == "strict")


@pytest.mark.parametrize(("ours", "kind"), [(-8e-6, "strict"), (3e-5, "failed")])
def test_near_zero_a_rounded_memory_may_be_as_far_as_the_gate(ours: float, kind: str) -> None:
    values = np.full(8, 1e-6, np.float32)
    bits = to_bfloat16(values)
    bits[3] = to_bfloat16(np.array([ours], np.float32))[0]
    verdict = judge_step("step", step_of(values).first | {"rounded": bits}, step_of(values))[-1]
    assert verdict.kind == kind
    assert verdict.outside == (kind == "failed")


def test_questions_and_their_frames() -> None:
    questions = {question.name: question for question in read_questions(QUESTIONS, Question)}
    full = Case("video", DEFAULT_STRATEGY, "llvm", "full")
    assert {question.image.name for question in questions.values()} >= {"scene", "bigbuckbunny.mp4"}
    assert any(question.float64 and question.length >= 34 for question in questions.values())
    assert [question.full for question in questions.values() if question.is_asked(full)] == [True]
    for question in questions.values():
        (frame,) = frames_of(VideoQuestion(question.name, image=question.image, length=1))
        assert frame.ndim == 3
        assert frame.dtype == np.uint8


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("colour = 3", "`colour`"),
        ("frame = 4", "frame 4 of 4"),
        ("steps = [9]", "steps"),
        ("", "nothing"),
    ],
)
def test_questions_that_make_no_sense(tmp_path: Path, line: str, fact: str) -> None:
    text = "" if not line else 'text = "dog"'
    (tmp_path / "video.toml").write_text(f'[[question]]\nname = "a"\nvideo = "scene"\nlength = 4\n{text}\n{line}\n')
    with pytest.raises(HarnessError, match=sentence("bad-description", path="video.toml", error=fact)):
        read_questions(tmp_path / "video.toml", Question)


def test_videos_take_long_and_are_verified_where_they_are_named() -> None:
    assert [name for name, subject in subjects().items() if subject.long] == ["video", "sam31_video"]
    assert "video" not in {case.component for case in select()}


def test_videos_have_a_time_limit_of_their_own() -> None:
    assert time_limit(None, select(["box_head"])) == TIMEOUT
    assert time_limit(None, select(["box_head", "video"])) == LONG_TIMEOUT
    assert time_limit(7, select(["video"])) == 7


def test_only_what_takes_symbolic_axes_is_asked() -> None:
    cases = select(["video"], targets=["llvm", "cuda"])
    assert {(case.target, case.strategy) for case in cases} == {("llvm", "real")}
    with pytest.raises(HarnessError, match=sentence("symbolic-axes", symbolic="video", support="llvm")):
        select(["video"], targets=["cuda"])


def test_masks_are_compared_and_memories_rounded_as_upstream_does() -> None:
    with upstream():
        from sam3.perflib import masks_ops, nms

        generator = torch.Generator().manual_seed(0)
        first, second = (torch.rand(n, 12, 17, generator=generator) > 0.6 for n in (5, 3))
        expected = masks_ops.mask_iou(first, second)
        with vectorized_mask_iou():
            assert torch.equal(nms.mask_iou(first, second), expected)
        assert nms.mask_iou is masks_ops.mask_iou
    values = torch.randn(1000, generator=generator)
    assert torch.equal(round_to_bfloat16(values), values.to(torch.bfloat16).float())
    assert torch.equal(round_to_bfloat16(values.double()).float(), values.to(torch.bfloat16).float())
