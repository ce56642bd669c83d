"""Damages files as disks, networks and attackers do."""

from __future__ import annotations

import random
import struct

_EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Returns a file with one to six faults: bits, bytes, numbers, places cut out, doubled or swapped, an early end."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
        _damage(changed, draw)
    return bytes(changed)


def _damage(content: bytearray, draw: random.Random) -> None:
    """One fault; heads, which say most, are hit as often as all the rest."""
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
