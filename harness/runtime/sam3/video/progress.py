"""Defines the progress of a session: its prompts, its actions, its objects, and the current propagation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from harness.runtime.sam3.video.detector import Detector
from harness.runtime.sam3.video.kept import FrameResult
from harness.runtime.sam3.video.masklets import Masklets
from harness.runtime.sam3.video.propagation import Action, PropagationScope

Pixels = npt.NDArray[np.uint8]


@dataclass(eq=False)
class Propagation:
    """A propagation that has not ended.

    Attributes:
        request: The arguments `start`, `limit` and `reverse`.
        scope: What is computed.
        order: The frames that are still to be processed.
        hotstart_buffer: Outputs that are delayed by hotstart, oldest first.
        outputs: Outputs that were not returned yet.
        failure: Why the next frame cannot be read.
    """

    request: tuple[int | None, int | None, bool]
    scope: PropagationScope
    order: range
    hotstart_buffer: tuple[tuple[FrameResult, Pixels], ...] = ()
    outputs: tuple[tuple[FrameResult, Pixels], ...] = ()
    failure: Exception | None = None

    def drop_objects(self, object_ids: frozenset[int]) -> None:
        """Drops objects from the outputs that were not returned yet."""
        self.hotstart_buffer = tuple(
            (result.drop_objects(object_ids), pixels) for result, pixels in self.hotstart_buffer
        )
        self.outputs = tuple((result.drop_objects(object_ids), pixels) for result, pixels in self.outputs)


@dataclass(eq=False)
class Progress:
    """The progress of a session since its last text or box.

    Attributes:
        detector: Finds the objects of the prompts.
        groups: The objects of each text; one group for all where there is at most one text.
        history: The actions of the user.
        first_frame: The first frame that was processed or prompted; None before there is one.
        frame_results: The results of frames that may be shown again, by frame.
        user_objects: The ids of objects that the user added.
        propagation: The current propagation.
        fingerprint: A frame and the SHA-256 of its pixels, by which a resumed session recognizes its video.
    """

    detector: Detector
    groups: tuple[Masklets, ...]
    history: tuple[Action, ...] = ()
    first_frame: int | None = None
    frame_results: dict[int, FrameResult] = field(default_factory=dict)
    user_objects: frozenset[int] = frozenset()
    propagation: Propagation | None = None
    fingerprint: tuple[int, str] | None = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Undoes all changes in the context if it ends by an exception, so that it can be repeated."""
        changing = [item for item in (self, self.propagation, *self.groups) if item is not None]
        snapshots = [(item, dict(vars(item))) for item in changing]
        results, buckets = dict(self.frame_results), [dict(group.buckets) for group in self.groups]
        try:
            yield
        except BaseException:
            for item, attributes in snapshots:
                vars(item).update(attributes)
            self.frame_results = results
            for group, previous in zip(self.groups, buckets, strict=True):
                group.buckets = previous
            raise

    @property
    def next_id(self) -> int:
        """The id of the next object that is found."""
        return max(group.state.next_id for group in self.groups)

    def group_of(self, object_id: int) -> Masklets:
        """Returns the group of an object; a new object joins the first group."""
        return next((group for group in self.groups if object_id in group.state.ids), self.groups[0])
