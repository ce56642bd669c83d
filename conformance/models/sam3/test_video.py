"""Videos through the compiled model, frame by frame against upstream's own video model on the same weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.nn import functional as F

from conformance.support.video_model import Answered, answers
from harness.models.sam3.tracker.scene import SCENE
from harness.models.sam3.upstream import upstream
from harness.runtime import Sam3
from harness.runtime.artifact import Artifact
from harness.runtime.errors import Sam3Error
from harness.runtime.sam3.resizing import resized, resized_with_antialias
from harness.runtime.sam3.video.session import Session, TrackedFrame

TEXT = "dog"
FRAMES = 3
NEAR = 1e-2
"""Share of a frame's largest logit below which a pixel may be decided differently."""
TIED = 1e-5
"""Difference of two tracker scores that rounding can turn around."""


@cache
def frames() -> tuple[npt.NDArray[np.uint8], ...]:
    """Every eighth frame of the scene, so that something moves."""
    return tuple(SCENE.picture(8 * number) for number in range(FRAMES))


@pytest.fixture(scope="module")
def model(shallow_artifact: Path) -> Sam3:
    return Sam3.load(shallow_artifact)


@pytest.fixture(scope="module")
def expected() -> tuple[Answered, ...]:
    return answers(frames(), text_str=TEXT)


@pytest.fixture(scope="module")
def tracked(model: Sam3) -> tuple[TrackedFrame, ...]:
    """The second call of `propagate` goes on where the first one was left."""
    session = model.start_session(list(frames()))
    return (session.add_prompt(0, TEXT), next(session.propagate()), *session.propagate())


def test_the_same_objects_on_every_frame(tracked: tuple[TrackedFrame, ...], expected: tuple[Answered, ...]) -> None:
    assert [each.index for each in tracked] == [each.index for each in expected] == [0, *range(FRAMES)]
    assert [each.ids.tolist() for each in tracked] == [each.ids.tolist() for each in expected]
    assert all(len(each.ids) > 1 for each in tracked[1:]), "there is something to track"


def test_scores_and_boxes(tracked: tuple[TrackedFrame, ...], expected: tuple[Answered, ...]) -> None:
    height, width = frames()[0].shape[:2]
    for ours, theirs in zip(tracked, expected, strict=True):
        np.testing.assert_allclose(ours.scores, theirs.scores, rtol=1e-5, atol=1e-5)
        corner, extent = theirs.boxes[:, :2], theirs.boxes[:, 2:]
        corners = np.concatenate([corner, corner + extent], axis=1) * np.array([width, height, width, height])
        np.testing.assert_allclose(ours.boxes, corners, atol=1.01)


def test_masks_differ_at_most_where_upstream_itself_decides_by_a_rounding_error(
    tracked: tuple[TrackedFrame, ...], expected: tuple[Answered, ...]
) -> None:
    """Where a logit is near zero, and where two objects that claim a pixel have the same tracker score but for one."""
    for ours, theirs in zip(tracked[2:], expected[2:], strict=True):
        logits = torch.from_numpy(theirs.logits)[:, None]
        at_size = F.interpolate(logits, ours.masks.shape[1:], mode="bilinear", align_corners=False)[:, 0]
        near = (at_size.abs() <= NEAR * logits.abs().max()).any(dim=0)
        scores = torch.from_numpy(theirs.object_logits).sigmoid()[:, None, None]
        best = torch.where(at_size > 0, scores, 0).topk(2, dim=0).values
        tied = (best[1] > 0) & (best[0] - best[1] <= TIED)
        differing = torch.from_numpy((ours.masks != theirs.masks).any(axis=0))
        assert not (differing & ~near & ~tied).any()
        assert (near & ~tied).float().mean() < 0.2, "most pixels are compared"
        union = torch.from_numpy(ours.masks.any(axis=0) != theirs.masks.any(axis=0))
        assert union.float().mean() < 1e-3


def test_the_session_ends_where_the_video_ends_and_forgets_what_it_does_not_need(model: Sam3) -> None:
    session = model.start_session(iter(frames()))
    first = session.add_prompt(0, TEXT)
    assert session.objects == tuple(first.ids.tolist()) or len(session.objects) >= len(first.ids)
    assert session.nbytes > 0
    for each in session.objects:
        session.remove_object(each)
    assert session.objects == ()
    assert session.nbytes == 0


def test_a_box_without_a_text_is_an_example_in_one_frame(model: Sam3) -> None:
    """Upstream finds nothing on later frames and removes the objects of the first one; here they are kept."""
    found = []
    for count in (1, 2):
        session = model.start_session(list(frames()[:count]))
        session.add_prompt(0, box=(5, 60, 135, 180))
        results = list(session.propagate())
        assert [each.index for each in results] == list(range(count))
        assert set(results[-1].ids.tolist()) <= set(session.objects)
        found.append(session.objects)
    assert found[0]
    assert found[0] == found[1]


def test_what_is_asked_wrongly(model: Sam3) -> None:
    session = model.start_session(list(frames()[:1]))
    with pytest.raises(Sam3Error, match="Nothing is asked of this video"):
        next(session.propagate())
    with pytest.raises(Sam3Error, match="ends before frame 3"):
        session.add_prompt(3, TEXT)
    with pytest.raises(Sam3Error, match="give 0 or a larger number"):
        session.add_prompt(-1, TEXT)
    with pytest.raises(Sam3Error, match="Nothing is asked"):
        session.add_prompt(0)
    with pytest.raises(Sam3Error, match="Object 7 is not tracked"):
        session.remove_object(7)


def test_a_model_that_was_compiled_without_tracking_says_so(shallow_artifact: Path) -> None:
    artifact = Artifact.load(shallow_artifact)
    entries = {name: entry for name, entry in artifact.manifest.entries.items() if name != "memory_attention"}
    artifact.manifest = replace(artifact.manifest, entries=entries)
    with pytest.raises(Sam3Error, match="compile it again with `sam3-tvm compile --video`"):
        Sam3(artifact).start_session(list(frames()))


def test_a_broken_frame_is_told_after_those_before_it(model: Sam3) -> None:
    def broken() -> Iterator[npt.NDArray[np.uint8]]:
        yield from frames()[:2]
        yield np.zeros((8, 8, 3), np.uint8)

    session: Session = model.start_session(broken())
    session.add_prompt(0, TEXT)
    seen = []
    with pytest.raises(Sam3Error, match="Frame 2 of the stream has 8 x 8 pixels"):
        seen.extend(each.index for each in session.propagate())
    assert seen == [0, 1]


@pytest.mark.parametrize(("height", "width"), [(288, 288), (240, 424), (1080, 1920), (1152, 1152), (100, 90)])
def test_masks_are_resized_as_pytorch_resizes_them(height: int, width: int) -> None:
    values = np.random.default_rng(0).normal(size=(2, 288, 300)).astype(np.float32)
    tensor = torch.from_numpy(values)[:, None]
    plain = F.interpolate(tensor, (height, width), mode="bilinear", align_corners=False)[:, 0].numpy()
    smooth = F.interpolate(tensor, (height, width), mode="bilinear", align_corners=False, antialias=True)[:, 0].numpy()
    np.testing.assert_allclose(resized(values, height, width), plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(resized_with_antialias(values, height, width), smooth, rtol=1e-5, atol=1e-6)


def test_upstream_fails_on_a_frame_without_a_new_object_and_is_patched() -> None:
    import sam3.perflib.connected_components as components

    from harness.models.sam3.patches.tracking import NO_MASKS_HAVE_NO_COMPONENTS

    nothing = torch.zeros(0, 1, 288, 288, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="non-empty"):
        components.connected_components_cpu(nothing)
    with upstream():
        labels, areas = components.connected_components_cpu(nothing)
    assert labels.shape == areas.shape == nothing.shape
    assert NO_MASKS_HAVE_NO_COMPONENTS.needed(), "delete the patch"
    assert "sam3" in sys.modules
