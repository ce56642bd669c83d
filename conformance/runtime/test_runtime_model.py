"""The compiled model as its users meet it: an image, prompts, what was found; threads; several models; memory."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from conformance.support.examples import examples
from conformance.support.folders import EncodesOnce
from conformance.support.sentences import sentence
from conformance.support.shallow import build_model
from harness.core.case import TINY
from harness.models.sam3.capture import find_stage, upstream_prompt
from harness.models.sam3.images import preprocess
from harness.models.sam3.patches.patch import wrapped
from harness.models.sam3.upstream import upstream
from harness.runtime import EncodedImage, Found, Prompt, Sam3
from harness.runtime.artifact import Artifact, Tensors
from harness.runtime.devices import to_numpy
from harness.runtime.errors import ModelError
from harness.runtime.sam3.image_model import REMEMBERED_TEXTS
from harness.runtime.sam3.images import load_image
from harness.runtime.sam3.prompts import VISUAL, EncodedPrompt

CAT = Path(__file__).resolve().parents[2] / "fixtures" / "images" / "cat.png"
COFFEE = CAT.with_name("coffee.png")
OUTPUTS = ("logits", "boxes", "masks", "presence", "semantic", "scores", "boxes_xyxy")
ASKED = {"text": "cat", "boxes": [(60, 20, 400, 290)], "points": [(200, 150), (5, 5)], "point_labels": [True, False]}


@pytest.fixture(scope="module")
def artifact(tiny_artifact: Path) -> EncodesOnce:
    return EncodesOnce.load(tiny_artifact)


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Sam3:
    return Sam3(artifact)


@pytest.fixture(scope="module")
def image(model: Sam3) -> EncodedImage:
    return model.set_image(CAT)


@pytest.fixture(scope="module")
def everything(image: EncodedImage) -> Found:
    """What is found when nothing is too unlikely."""
    return image.segment(**ASKED, threshold=0)


@pytest.fixture(scope="module")
def threshold(everything: Found) -> float:
    """Between the scores of the 14th and the 15th best query."""
    best = np.sort(everything.scores)[::-1]
    return float(best[13] + best[14]) / 2


@pytest.fixture(scope="module")
def found(image: EncodedImage, threshold: float) -> Found:
    return image.segment(**ASKED, threshold=threshold)


def assert_same(one: Found, other: Found) -> None:
    for name in OUTPUTS:
        np.testing.assert_array_equal(getattr(one.outputs, name), getattr(other.outputs, name))
    for name in ("masks", "boxes", "scores", "queries"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_shapes_and_dtypes(found: Found) -> None:
    told = {
        name: (getattr(found, name).dtype.name, getattr(found, name).shape) for name in ("masks", "boxes", "scores")
    }
    assert told == {"masks": ("bool", (14, 300, 451)), "boxes": ("float32", (14, 4)), "scores": ("float32", (14,))}
    assert found.size == (451, 300)
    assert found.notes == ()


def test_what_is_kept_follows_upstreams_processor(found: Found, threshold: float) -> None:
    """The end of `Sam3Processor._forward_grounding`, line by line, on the model's raw outputs."""
    from sam3.model.box_ops import box_cxcywh_to_xyxy

    raw = {name: torch.from_numpy(np.array(getattr(found.outputs, name))) for name in OUTPUTS}
    probabilities = (raw["logits"].sigmoid() * raw["presence"].sigmoid().unsqueeze(1)).squeeze(-1)
    keep = probabilities > threshold
    assert 0 < int(keep.sum()) < 200
    np.testing.assert_array_equal(found.queries, np.flatnonzero(keep[0].numpy()))
    np.testing.assert_allclose(found.scores, probabilities[keep].numpy(), rtol=0, atol=1e-6)
    boxes = box_cxcywh_to_xyxy(raw["boxes"][keep]) * torch.tensor([451, 300, 451, 300])[None]
    np.testing.assert_allclose(found.boxes, boxes.numpy(), rtol=0, atol=1e-3)
    logits = torch.nn.functional.interpolate(
        raw["masks"][keep].unsqueeze(1), (300, 451), mode="bilinear", align_corners=False
    )
    decided = logits.squeeze(1).abs().numpy() > 1e-4
    assert decided.mean() > 0.99
    np.testing.assert_array_equal(found.masks[decided], (logits.sigmoid() > 0.5).squeeze(1).numpy()[decided])
    assert 0 < found.masks.mean() < 1


def test_semantic_is_the_probability_at_the_images_size(found: Found) -> None:
    logits = torch.from_numpy(np.array(found.outputs.semantic))
    expected = torch.nn.functional.interpolate(logits, (300, 451), mode="bilinear", align_corners=False).sigmoid()
    assert found.semantic.dtype == np.float32
    np.testing.assert_allclose(found.semantic, expected[0, 0].numpy(), rtol=0, atol=1e-6)
    assert found.semantic.std() > 1e-3


def test_threshold(image: EncodedImage, everything: Found) -> None:
    assert len(everything.scores) == 200
    np.testing.assert_array_equal(everything.queries, np.arange(200))
    nothing = image.segment("cat", threshold=1)
    assert (nothing.masks.shape, nothing.boxes.shape, nothing.scores.shape) == ((0, 300, 451), (0, 4), (0,))
    assert nothing.masks.dtype == bool
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(ModelError, match=sentence("bad-threshold")):
            image.segment("cat", threshold=bad)


class Recording:
    """A folder that is loaded and notes which entry points are called."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact, self.folder, self.manifest = artifact, artifact.folder, artifact.manifest
        self.fetch, self.reading_once = artifact.fetch, artifact.reading_once
        self.called: list[str] = []

    def call(self, entry: str, **inputs: Any) -> Tensors:
        self.called.append(entry)
        return self.artifact.call(entry, **inputs)


class OneHead(Recording):
    """As folders were when one entry point made the masks of all queries and the semantic map."""

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(artifact)
        entries = dict(artifact.manifest.entries)
        embed, predict = entries.pop("embed_pixels"), entries.pop("mask_predictor")
        (hs,) = (spec for spec in entries["ground"].outputs if spec.name == "hs")
        outputs = (*predict.outputs, *[spec for spec in embed.outputs if spec.name == "semantic"])
        entries["segmentation_head"] = replace(embed, inputs=(*embed.inputs, hs), outputs=outputs)
        self.manifest = replace(artifact.manifest, entries=entries)

    def call(self, entry: str, **inputs: Any) -> Tensors:
        if entry != "segmentation_head":
            return super().call(entry, **inputs)
        hs = np.pad(to_numpy(inputs.pop("hs")), [(0, 0), (0, 0), (0, 8), (0, 0)])
        embedded = super().call("embed_pixels", **inputs)
        pixels = embedded["pixel_embed"]
        parts = []
        for part in np.split(hs, 13, axis=2):
            parts.append(to_numpy(super().call("mask_predictor", pixel_embed=pixels, hs=part)["masks"]))
        return {"masks": np.concatenate(parts, axis=1)[:, :200], "semantic": embedded["semantic"]}


class OneEntryPoint(OneHead):
    """As folders were when `ground` made the masks too, and `encode_text` took one text."""

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(artifact)
        entries = dict(self.manifest.entries)
        head, ground = entries.pop("segmentation_head"), entries["ground"]
        made = {spec.name for spec in ground.outputs}
        self._read = [spec.name for spec in head.inputs if spec.name in made]
        levels = [spec for spec in head.inputs if spec.name not in made]
        self._levels = [spec.name for spec in levels]
        inputs = (*levels, *ground.inputs)
        outputs = (*[spec for spec in ground.outputs if spec.name not in self._read], *head.outputs)
        entries["ground"] = replace(ground, inputs=inputs, outputs=outputs)
        text = entries["encode_text"]
        entries["encode_text"] = replace(text, inputs=tuple(spec for spec in text.inputs if spec.name == "tokens"))
        self.manifest = replace(self.manifest, entries=entries)

    def call(self, entry: str, **inputs: Any) -> Tensors:
        if entry == "encode_text":
            return super().call(entry, **inputs, starts=np.zeros_like(inputs["tokens"]))
        if entry != "ground":
            return super().call(entry, **inputs)
        levels = {name: inputs.pop(name) for name in self._levels}
        found = super().call("ground", **inputs)
        head = super().call("segmentation_head", **levels, **{name: found.pop(name) for name in self._read})
        return found | head


def test_what_finds_nothing_makes_no_masks_until_one_asks(artifact: Artifact, everything: Found) -> None:
    recording = Recording(artifact)
    nothing = Sam3(recording).set_image(CAT).segment(**ASKED, threshold=1)
    assert recording.called == ["preprocess", "encode_image", "encode_text", "ground"]
    np.testing.assert_array_equal(nothing.outputs.masks, everything.outputs.masks)
    np.testing.assert_array_equal(nothing.semantic, everything.semantic)
    assert recording.called[4:] == ["embed_pixels", *["mask_predictor"] * 13]


def test_masks_are_predicted_for_what_is_found_alone(artifact: Artifact, everything: Found) -> None:
    recording = Recording(artifact)
    image = Sam3(recording).set_image(CAT)
    best = np.sort(everything.scores)[::-1]
    for count, calls in ((1, 1), (16, 1), (17, 2)):
        recording.called.clear()
        few = image.segment(**ASKED, threshold=float(best[count - 1] + best[count]) / 2)
        assert (len(few.queries), recording.called.count("mask_predictor")) == (count, calls)
        np.testing.assert_array_equal(few.masks, everything.masks[few.queries])


@pytest.mark.parametrize("older", [OneHead, OneEntryPoint])
def test_an_older_folder_finds_the_same(
    older: type[OneHead], artifact: Artifact, found: Found, threshold: float
) -> None:
    assert_same(Sam3(older(artifact)).set_image(CAT).segment(**ASKED, threshold=threshold), found)


def test_a_batch_is_the_prompts_one_by_one(image: EncodedImage, found: Found, threshold: float) -> None:
    first, second, third = image.segment_batch(
        [Prompt("a dog"), Prompt(**ASKED), Prompt(boxes=[(9, 9, 99, 99)])], threshold
    )
    assert_same(second, found)
    assert not np.array_equal(first.outputs.logits, third.outputs.logits)
    assert image.segment_batch([]) == []


def test_every_prompt_is_checked_before_any_is_run(image: EncodedImage) -> None:
    with pytest.raises(ModelError, match=sentence("nothing-asked")):
        image.segment_batch([Prompt("cat"), Prompt()])
    with pytest.raises(ModelError, match=sentence("outside", width=451, height=300)):
        image.segment(points=[(460, 10)])


def test_each_part_of_a_prompt_matters(image: EncodedImage, found: Found) -> None:
    others: list[dict[str, Any]] = [{"text": "dog"}, {"point_labels": [True, True]}, {"box_labels": [False]}]
    for changed, other in zip(others, image.segment_batch([Prompt(**{**ASKED, **new}) for new in others]), strict=True):
        assert np.abs(other.outputs.logits - found.outputs.logits).max() > 1e-4, changed


# Without a text every night: it is the text "visual" (`test_runtime_prompts.py`).
@pytest.mark.parametrize("text", [pytest.param(None, marks=pytest.mark.wide), "cat"])
def test_boxes_and_points_on_an_exemplar_are_upstreams_tokens_of_it(model: Sam3, text: str | None) -> None:
    """Upstream's `_encode_prompt` gets the exemplar's features, and all that follows it the image's."""
    exemplar, image = model.set_image(CAT), model.set_image(COFFEE)
    places = {name: value for name, value in ASKED.items() if name != "text"}
    found = image.segment(text, **places, exemplar=exemplar, threshold=0)
    raw = ground_with_exemplar(text or VISUAL, model.encode_prompt(Prompt(**places), exemplar.size))
    for name, theirs in (("logits", "pred_logits"), ("boxes", "pred_boxes"), ("presence", "presence_logit_dec")):
        np.testing.assert_allclose(getattr(found.outputs, name), raw[theirs].numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.outputs.masks, raw["pred_masks"].numpy(), rtol=1e-3, atol=1e-3)
    here = image.segment(text, boxes=[(60, 20, 200, 150)], threshold=0)
    assert np.abs(found.outputs.logits - here.outputs.logits).max() > 1e-2
    assert found.size == image.size
    same = exemplar.segment(text, **places, exemplar=exemplar, threshold=0)
    assert_same(same, exemplar.segment(text, **places, threshold=0))


@cache
def upstreams_photographs() -> tuple[Any, tuple[dict[str, Any], ...]]:
    """Returns upstream's model, and its features of the cat and of the coffee."""
    model = build_model(TINY)
    with upstream(), torch.no_grad():
        return model, tuple(model.backbone.forward_image(preprocess(load_image(path))) for path in (CAT, COFFEE))


def ground_with_exemplar(text: str, prompt: EncodedPrompt) -> dict[str, torch.Tensor]:
    """Returns upstream's outputs for the coffee, asked with places on the cat."""
    upstreams, (shown, searched) = upstreams_photographs()
    with upstream(), torch.no_grad():
        places = upstream_prompt({name: torch.from_numpy(array) for name, array in prompt.geometry.items()})
        language = upstreams.backbone.forward_text([text], device="cpu")

        def encode_prompt(original: Any, features: Any, stage: Any, geometry: Any) -> Any:
            return *original({**shown, **language}, stage, geometry)[:2], features

        with wrapped(upstreams, "_encode_prompt", encode_prompt):
            outputs: dict[str, torch.Tensor] = upstreams.forward_grounding(
                {**searched, **language}, find_stage(1), None, places
            )
    return outputs


def test_an_exemplar_that_cannot_be_used_is_refused(image: EncodedImage, model: Sam3, artifact: Artifact) -> None:
    with pytest.raises(ModelError, match=sentence("nothing-shown")):
        image.segment("cat", exemplar=image)
    with pytest.raises(ModelError, match=sentence("outside", width=451, height=300)):
        model.set_image(COFFEE).segment(points=[(460, 10)], exemplar=image)
    other = Sam3(Recording(artifact))
    with pytest.raises(ModelError, match=sentence("foreign-exemplar")):
        other.set_image(CAT).segment(boxes=[(9, 9, 99, 99)], exemplar=image)
    ground = other.manifest.entries["ground"]
    inputs = tuple(spec for spec in ground.inputs if spec.name != "attended")
    other.manifest = replace(
        other.manifest, entries={**other.manifest.entries, "ground": replace(ground, inputs=inputs)}
    )
    older = other.set_image(CAT)
    with pytest.raises(ModelError, match=sentence("no-exemplars")):
        older.segment(boxes=[(9, 9, 99, 99)], exemplar=older)


def test_an_image_that_is_none(model: Sam3) -> None:
    with pytest.raises(ModelError, match=sentence("no-such-file", name="nowhere.png")):
        model.set_image("nowhere.png")


def test_extreme_sizes(model: Sam3) -> None:
    image = model.set_image(np.full((7, 3000, 3), (120, 30, 200), np.uint8))
    assert image.size == (3000, 7)
    found = image.segment("cat", threshold=0)
    assert found.masks.shape == (200, 7, 3000)
    assert found.semantic.shape == (7, 3000)


def test_a_long_text_is_cut_and_it_says_so(image: EncodedImage) -> None:
    cut, whole = image.segment_batch([Prompt("dog " * 100), Prompt("dog " * 30)])
    assert_same(cut, whole)
    assert "100 tokens" in cut.notes[0]
    assert whole.notes == ()


def tokens(number: int, length: int = 3) -> np.ndarray:
    """A text of so many tokens, start and end among them."""
    row = np.zeros((1, 32), np.int64)
    row[0, :length] = 49406, *range(320 + number, 318 + number + length), 49407
    return row


def test_texts_are_remembered(model: Sam3) -> None:
    def encode(*numbers: int) -> list[Tensors]:
        return model.encode_texts([tokens(number) for number in numbers])

    (first,) = encode(0)
    assert encode(0, 0) == [first, first]
    encode(*range(1, REMEMBERED_TEXTS))
    assert encode(0)[0] is first, "used last, so the others go first"
    encode(REMEMBERED_TEXTS)
    assert encode(0)[0] is first
    encode(*range(2, REMEMBERED_TEXTS + 1))
    (again,) = encode(0)
    for name, features in again.items():
        np.testing.assert_array_equal(to_numpy(features), to_numpy(first[name]))


@given(lengths=st.lists(st.integers(3, 32), min_size=1, max_size=12))
@examples(5, deadline=None)
def test_texts_that_are_encoded_together_are_those_encoded_alone(artifact: Artifact, lengths: list[int]) -> None:
    texts = [tokens(number, length) for number, length in enumerate(lengths)]
    recording = Recording(artifact)
    together = Sam3(recording).encode_texts(texts)
    assert (len(recording.called) < len(texts)) == any(sum(pair) <= 32 for pair in pairwise(lengths))
    for text, length, encoded in zip(texts, lengths, together, strict=True):
        alone = artifact.call("encode_text", tokens=text, starts=np.zeros_like(text))
        np.testing.assert_array_equal(to_numpy(encoded["text_mask"]), to_numpy(alone["text_mask"]))
        features = (to_numpy(tensors["text_features"])[:length] for tensors in (encoded, alone))
        np.testing.assert_allclose(*features, rtol=1e-5, atol=1e-5)


def test_results_own_their_memory(image: EncodedImage, found: Found) -> None:
    kept = {name: np.array(getattr(found.outputs, name)) for name in OUTPUTS}
    masks = found.masks.copy()
    image.segment("something else", threshold=0)
    for name, values in kept.items():
        np.testing.assert_array_equal(getattr(found.outputs, name), values)
    np.testing.assert_array_equal(found.masks, masks)


def test_threads_and_models_do_not_disturb_each_other(
    tiny_artifact: Path, model: Sam3, image: EncodedImage, found: Found, threshold: float
) -> None:
    other = Sam3.load(tiny_artifact, check=False)

    images = image, EncodedImage(other, image.pixels, image.features)

    def ask(number: int) -> Found:
        return images[number % 2].segment(**ASKED, threshold=threshold)

    with ThreadPoolExecutor(4) as pool:
        for answer in pool.map(ask, range(4)):
            assert_same(answer, found)


def test_the_runtime_imports_nothing_else_of_the_project() -> None:
    script = (
        "import pkgutil, sys, harness.runtime\n"
        "sys.modules['torch'] = sys.modules['sam3'] = sys.modules['torchvision'] = None\n"
        "for module in pkgutil.walk_packages(harness.runtime.__path__, 'harness.runtime.'):\n"
        "    __import__(module.name)\n"
        "others = [name for name in sys.modules if name.startswith('harness.') and 'runtime' not in name]\n"
        "print(others, 'tvm' in sys.modules, 'harness.runtime.sam3.model' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "[] False True\n", done.stderr
