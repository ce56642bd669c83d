"""Assigns the objects of SAM 3.1 to slots: a bucket has sixteen, whose objects the model tracks in one call.

MU is upstream's model/multiplex_utils.py and MX its model/sam3_multiplex_base.py, on its main branch of July 2026.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.runtime.arrays import Array

SLOTS = 16
"""Objects of a bucket."""


@dataclass(frozen=True)
class Slots:
    """The places of objects that share conditioning frames, in one bucket or several (`MultiplexState`, MU:19).

    Slots are taken in their order. That of a removed object stays taken, because its pointers stay in the memories; a
    bucket without objects is deleted.

    Attributes:
        places: For each object, in the order in which they were added, 16 times its bucket plus its slot.
        taken: For each bucket the number of slots that have or had an object.
    """

    places: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()

    @property
    def free(self) -> int:
        """The number of objects that can still be added to these buckets."""
        return SLOTS * len(self.taken) - sum(self.taken)

    @property
    def valid(self) -> npt.NDArray[np.float32]:
        """1 where a slot has an object, else 0: fp32 [buckets, 16]."""
        return self.mux(np.ones(len(self.places), np.float32))

    def add(self, count: int) -> Slots:
        """Returns the slots with more objects, in new buckets where these are full (`add_objects`, MU:170)."""
        places, taken = list(self.places), list(self.taken)
        for _ in range(count):
            bucket = next((number for number, filled in enumerate(taken) if filled < SLOTS), len(taken))
            if bucket == len(taken):
                taken.append(0)
            places.append(SLOTS * bucket + taken[bucket])
            taken[bucket] += 1
        return Slots(tuple(places), tuple(taken))

    def remove(self, rows: Collection[int]) -> tuple[Slots, list[int]]:
        """Returns the slots without some objects, and the remaining buckets by number (`remove_objects`, MU:263)."""
        places = [place for row, place in enumerate(self.places) if row not in rows]
        buckets = sorted({place // SLOTS for place in places})
        renumbered = tuple(SLOTS * buckets.index(place // SLOTS) + place % SLOTS for place in places)
        return Slots(renumbered, tuple(self.taken[bucket] for bucket in buckets)), buckets

    def mux(self, values: Array) -> Array:
        """Returns values of the objects, [objects, …], in their slots, [buckets, 16, …], zero elsewhere."""
        muxed = np.zeros((SLOTS * len(self.taken), *values.shape[1:]), values.dtype)
        muxed[list(self.places[: len(values)])] = values
        return muxed.reshape(len(self.taken), SLOTS, *values.shape[1:])

    def demux(self, values: Array) -> Array:
        """Returns the values of the objects, [objects, …], of those of all slots, [buckets, 16, …]."""
        demuxed: Array = values.reshape(-1, *values.shape[2:])[list(self.places)]
        return demuxed


@dataclass(frozen=True, eq=False)
class Placement:
    """The objects on a frame, as a memory has them.

    Attributes:
        slots: Their slots.
        given: 1 where an object has a click or a mask on the frame, else 0: fp32 [objects].
    """

    slots: Slots
    given: npt.NDArray[np.float32]


def best_fit(groups: Collection[tuple[int, Slots]], count: int) -> int | None:
    """Returns the number of the group with the fewest free slots that has enough of them; None if none has (MX:2699).

    Args:
        groups: (number, slots) of each group, in the order in which they were made.
        count: How many objects are added.
    """
    fitting = [(slots.free, number) for number, slots in groups if slots.free >= count]
    return min(fitting, key=lambda fit: fit[0])[1] if fitting else None
