"""Damages files as disks, networks and attackers do."""

from __future__ import annotations

import copy
import json
import math
import random
import struct
from typing import Any

_EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Returns a file with one to six faults: bits, bytes, numbers, places cut out, doubled or swapped, an early end."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
        _damage(changed, draw)
    return bytes(changed)


def _damage(content: bytearray, draw: random.Random) -> None:
    """Makes one fault; heads, which say most, are hit as often as all the rest."""
    if not content:
        return
    place = draw.randrange(draw.choice((min(len(content), 400), len(content))))
    length = draw.choice((1, 2, 4, 16, 100))
    match draw.randrange(7):
        case 0:
            content[place] ^= 1 << draw.randrange(8)
        case 1:
            content[place] = draw.randrange(256)
        case 2:
            value = struct.pack(draw.choice("<>") + "I", draw.choice(_EXTREMES))
            width = draw.choice((1, 2, 4))
            content[place : place + width] = value[:width] if draw.random() < 0.5 else value[-width:]
        case 3:
            del content[place : place + length]
        case 4:
            content[place:place] = content[place : place + length]
        case 5:
            other = draw.randrange(len(content))
            content[place : place + length] = content[other : other + length]
        case 6:
            del content[place:]


_STRANGE: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 0.5, -0.0, 2**31, 2**63, -(2**64), 10**400, 1e308, math.nan, math.inf, -math.inf),
    *("", "a", "\ud800", "\0", "../..", "a" * 10_000, [], {}, [[]], [None], {"": None}, {"a": {"a": []}}),
)
_DEEP = "[" * 100_000


def mutated_json(text: bytes, draw: random.Random) -> bytes:
    """Returns JSON with one to three values replaced, removed, doubled or moved; one in fifty is nested too deeply."""
    value = json.loads(text)
    for _ in range(draw.choice((1, 1, 2, 3))):
        value = with_other(value, draw)
    changed = json.dumps(value, indent=draw.choice((None, 1)))
    if draw.random() < 0.02:
        changed = changed[: draw.randrange(len(changed) + 1)] + _DEEP
    return changed.encode()


def with_other(value: Any, draw: random.Random) -> Any:
    """Changes a value that is drawn among all inner ones, at any depth."""
    places = list(_places(value))
    if not places:
        return draw.choice(_STRANGE)
    inside, key = draw.choice(places)
    match draw.randrange(6):
        case 0:
            del inside[key]
        case 1:
            other, name = draw.choice(places)
            inside[key] = copy.deepcopy(other[name])
        case 2 if isinstance(inside, list):
            inside.insert(key, copy.deepcopy(inside[key]))
        case 2:
            inside[draw.choice(("", "format", f"{key}s"))] = inside.pop(key)
        case _:
            inside[key] = copy.deepcopy(draw.choice(_STRANGE))
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Returns each container in a value with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]
