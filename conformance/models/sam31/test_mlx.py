"""The modules of SAM 3.1 compute what those of mlx-vlm compute, which nobody here wrote, on the same seeded weights.

Elements of mlx-vlm's outputs are recorded in `fixtures/sam31_mlx.json`. Where mlx-vlm is installed, all are compared;
this takes three minutes:

    pip install --constraint constraints.txt --editable ".[test,mlx]"
    pytest conformance/models/sam31/test_mlx.py
"""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from conformance.support import sam31_truth
from conformance.support.sam31_truth import COMPARED, FIXTURE, SEED, answer, ask_mlx, elements
from harness.models.sam31 import memory_attention, modules, multiplex

GATE = 1e-4
"""Largest difference of outputs of order one; those measured are up to 1.2e-5."""


@cache
def recorded() -> dict[str, Any]:
    content = json.loads(FIXTURE.read_text())
    assert content["seed"] == SEED
    outputs: dict[str, Any] = content["outputs"]
    return outputs


def difference_from_record(module: str) -> float:
    """Returns the largest difference of a module's outputs from the recorded elements."""
    differences = [0.0]
    for name, array in answer(module).items():
        expected = recorded()[f"{module}/{name}"]
        assert list(array.shape) == expected["shape"]
        differences.append(np.abs(elements(f"{module}/{name}", array) - expected["elements"]).max())
    return max(differences)


def test_every_output_is_recorded() -> None:
    assert {name.partition("/")[0] for name in recorded()} == set(COMPARED)


@pytest.mark.parametrize("module", COMPARED)
def test_it_equals_the_recorded_elements(module: str) -> None:
    assert difference_from_record(module) <= GATE


def reversed_pointers(module: Any, pointers: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    return FORWARD(module, pointers.flip(0), times)


FORWARD = modules.MultiplexPointers.forward
CHANGES = {
    "sigmoid bias": (multiplex, "SIGMOID_BIAS", 0.0, "multiplex_memory_encoder"),
    "SAM 2's sigmoid scale": (multiplex, "SIGMOID_SCALE", 20.0, "multiplex_memory_encoder"),
    "share of positions": (memory_attention, "POSITION_SCALE", 1.0, "multiplex_memory_attention"),
    "interchanged ranks": (sam31_truth, "TRACKED", (8, 7), "multiplex_memory_attention"),
    "interchanged pointers": (modules.MultiplexPointers, "forward", reversed_pointers, "multiplex_memory_attention"),
    "no object is absent": (modules, "_blend", lambda pointers, *_: pointers, "multiplex_mask_decoder"),
    "no given mask is absent": (modules, "_blend", lambda pointers, *_: pointers, "click_mask_pointer"),
    "logits of given masks": (modules, "ABSENT", 0.0, "click_mask_pointer"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_module_differs_from_the_record(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, value, module = CHANGES[change]
    monkeypatch.setattr(place, name, value)
    assert difference_from_record(module) > 10 * GATE


@pytest.mark.parametrize(
    ("path", "one", "other", "module"),
    [
        ("", "obj_ptr_proj", "interactive_obj_ptr_proj", "multiplex_mask_decoder"),
        ("", "output_valid_embed", "output_invalid_embed", "multiplex_mask_decoder"),
        ("transformer.encoder.layers.0", "cross_attn_q_proj", "image_cross_attn_q_proj", "multiplex_memory_attention"),
    ],
)
def test_interchanged_weights_differ_from_the_record(path: str, one: str, other: str, module: str) -> None:
    part = modules.tracker_of(sam31_truth.seeded_model()).get_submodule(path)
    first, second = getattr(part, one), getattr(part, other)
    try:
        setattr(part, one, second)
        setattr(part, other, first)
        assert difference_from_record(module) > 10 * GATE
    finally:
        setattr(part, one, first)
        setattr(part, other, second)


@pytest.mark.skipif(find_spec("mlx_vlm") is None, reason="mlx-vlm is not installed: install the extra [mlx]")
def test_every_element_equals_mlx() -> None:
    theirs = ask_mlx()
    ours = {f"{module}/{name}": array for module in COMPARED for name, array in answer(module).items()}
    assert ours.keys() == theirs.keys()
    differences = {name: np.abs(array - theirs[name]).max() for name, array in ours.items()}
    assert {name: value for name, value in differences.items() if not value <= GATE} == {}
