"""How far a session is: what was asked and done, which objects there are, and what is under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from harness.runtime.sam3.video.detector import Detector
from harness.runtime.sam3.video.kept import KeptFrame
from harness.runtime.sam3.video.masklets import Masklets
from harness.runtime.sam3.video.propagation import Action, Propagation

Pixels = npt.NDArray[np.uint8]


@dataclass(eq=False)
class Underway:
    """A propagation that is under way.

    Attributes:
        asked: `start`, `limit` and `reverse` as they were given.
        what: What it computes.
        order: The frames that are still to be processed.
        held: Outputs that are held back, oldest first.
        ready: Outputs that were not asked for yet.
        failure: Why the next frame cannot be read.
    """

    asked: tuple[int | None, int | None, bool]
    what: Propagation
    order: range
    held: tuple[tuple[KeptFrame, Pixels], ...] = ()
    ready: tuple[tuple[KeptFrame, Pixels], ...] = ()
    failure: Exception | None = None

    def without(self, object_ids: frozenset[int]) -> None:
        """Takes objects out of what is still to be given out."""
        self.held = tuple((kept.without(object_ids), pixels) for kept, pixels in self.held)
        self.ready = tuple((kept.without(object_ids), pixels) for kept, pixels in self.ready)


@dataclass(eq=False)
class Progress:
    """What a session knows of its video since its last text or box.

    Attributes:
        detector: Finds what is asked.
        groups: The objects of each text; all of them in one group where there is no text, or one.
        history: What was done.
        first: The first frame that was processed or prompted; None before there is one.
        kept: The outputs of frames that may be shown again, by frame.
        added: The ids of objects that the user added.
        underway: The propagation that is under way.
        checked: A frame and the SHA-256 of its pixels, by which a session that was resumed knows its video.
    """

    detector: Detector
    groups: tuple[Masklets, ...]
    history: tuple[Action, ...] = ()
    first: int | None = None
    kept: dict[int, KeptFrame] = field(default_factory=dict)
    added: frozenset[int] = frozenset()
    underway: Underway | None = None
    checked: tuple[int, str] | None = None

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """What is done in this context is done as a whole; an exception undoes it, so that it can be done again."""
        changing = [each for each in (self, self.underway, *self.groups) if each is not None]
        before = [(each, dict(vars(each))) for each in changing]
        kept, buckets = dict(self.kept), [dict(group.buckets) for group in self.groups]
        try:
            yield
        except BaseException:
            for each, attributes in before:
                vars(each).update(attributes)
            self.kept = kept
            for group, known in zip(self.groups, buckets, strict=True):
                group.buckets = known
            raise

    @property
    def next_id(self) -> int:
        """The id of the next object that is found."""
        return max(group.state.next_id for group in self.groups)

    def group_of(self, object_id: int) -> Masklets:
        """The group of an object; a new one joins the first."""
        return next((group for group in self.groups if object_id in group.state.ids), self.groups[0])
