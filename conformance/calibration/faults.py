"""Faults, drawn by rule: each number of a seed is one fault, whatever was drawn before it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One fault; where it goes is found when the component is known.

    Attributes:
        seed: The seed that it is drawn from.
        number: Its number among the faults of that seed.
        component: What it is put into.
        layer: Key of `layers.LAYERS`: the part of this project that is made wrong.
        kind: What is made wrong there.
        place: Which of the places that the layer has: a part of 1.
        function: Which of the functions at that place, if there are several: a part of 1.
        site: Which expression or loop of that function: a part of 1.
    """

    seed: int
    number: int
    component: str
    layer: str
    kind: str
    place: float
    function: float
    site: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def drawn(seed: int, number: int, components: Sequence[str], layers: dict[str, tuple[int, Sequence[str]]]) -> Fault:
    """Draws a fault.

    Args:
        seed: The seed.
        number: Number of the fault.
        components: What it may be put into, each as likely as the others.
        layers: By name: how likely a layer is, and its kinds, each as likely as the others.
    """
    draw = random.Random(f"{seed} {number}")
    component = draw.choice(list(components))
    (layer,) = draw.choices(list(layers), [weight for weight, _ in layers.values()])
    kind = draw.choice(list(layers[layer][1]))
    return Fault(seed, number, component, layer, kind, draw.random(), draw.random(), draw.random())


def picked(choices: Sequence[Any], part: float) -> Any:
    """Returns the choice that lies at a part of 1."""
    return choices[int(part * len(choices))]
