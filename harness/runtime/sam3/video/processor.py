"""Processing the frames of a video: each is read, encoded, looked at, and its objects are tracked and kept.

VI is upstream's model/sam3_video_inference.py, with the lines of sam3 0.1.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.runtime.errors import Sam3Error
from harness.runtime.sam3.prompts import Prompt
from harness.runtime.sam3.video.detector import Detector, EncodedFrame
from harness.runtime.sam3.video.frames import Frames
from harness.runtime.sam3.video.hotstart import released
from harness.runtime.sam3.video.kept import KeptFrame
from harness.runtime.sam3.video.masklets import Masklets
from harness.runtime.sam3.video.outputs import ShownObject, with_refined
from harness.runtime.sam3.video.progress import Progress, Underway
from harness.runtime.sam3.video.reading import Reader
from harness.runtime.sam3.video.retention import Retention
from harness.runtime.sam3.video.rules import Rules
from harness.runtime.sam3.video.tracker import Tracker

if TYPE_CHECKING:
    from harness.runtime.sam3.image_model import ImageModel

Pixels = npt.NDArray[np.uint8]


class VideoProcessor:
    """Does with the frames of a video what a session asks for.

    Attributes:
        model: The model.
        frames: The video.
        keeps: Whether everything is kept, see `Sam3.start_session`.
        progress: What is known so far.
        latest: The frame that was encoded last.
    """

    def __init__(self, model: ImageModel, tracker: Tracker, frames: Frames, rules: Rules, keeps: bool) -> None:
        """Takes a model, its tracker, a video, the thresholds, and whether everything is kept; nothing is done yet."""
        self.model, self.frames, self.keeps = model, frames, keeps
        self._tracker, self._rules = tracker, rules
        self._reader = Reader(frames)
        self.latest: EncodedFrame | None = None
        self.progress = self.begun((), 0)

    def begun(self, prompts: Sequence[Prompt], frame: int) -> Progress:
        """Nothing done yet for these prompts on a frame."""
        retention = Retention.EVERYTHING if self.keeps else Retention.FORWARD
        texts = [prompt.text for prompt in prompts] or [None]
        groups = tuple(Masklets(self.model, self._tracker, self._rules, retention, text) for text in texts)
        return Progress(Detector(self.model, prompts, frame, self._rules), groups)

    def pixels(self, frame: int) -> Pixels:
        """The pixels of a frame, uint8 [h, w, 3].

        Raises:
            Sam3Error: There is no such frame, it cannot be read, or it is gone.
        """
        if frame < 0:
            raise Sam3Error(f"The frame is {frame}; give 0 or a larger number.")
        pixels = self._reader.frame(frame)
        if pixels is None:
            raise Sam3Error(f"{self.frames.name} ends before frame {frame}; give a frame that it has.")
        return pixels

    def advance(self, underway: Underway) -> None:
        """Processes a frame and looks at the next one; what is given out by now becomes ready.

        Where it is interrupted or fails, nothing has changed, and it can be called again.

        Raises:
            Sam3Error: As `pixels`.
        """
        with self.progress.all_or_nothing():
            self._advance(underway)

    def _advance(self, underway: Underway) -> None:
        index, underway.order = underway.order[0], underway.order[1:]
        pixels = self.pixels(index)
        reverse, progress, what = underway.asked[2], self.progress, underway.what
        earlier = progress.kept.get(index)
        # Only what was computed before can be kept; upstream gives out nothing of other frames, or fails (VI:553).
        whole = what.kind == "full" or earlier is None or not earlier.whole
        detects = whole and bool(progress.detector.prompts)
        tracked = frozenset(each for group in progress.groups for each in group.state.ids)
        if detects:
            output = self.process(index, reverse)
        elif asked := tracked if whole else tracked & what.objects:
            encoded = self.encoded(index)
            refined: dict[int, ShownObject] = {}
            for group in progress.groups:
                refined |= group.refine(encoded, asked, self._length(index), reverse)
            output = self.keep_refined(encoded, refined, whole)
        else:
            output = earlier or KeptFrame.of(index, pixels.shape[1::-1], {}, whole)
        try:
            is_last = not underway.order or self._reader.frame(underway.order[0]) is None
        except Exception as error:  # of whoever gives the frames, too; those before it are given out first
            is_last, underway.failure = True, error
        if is_last and underway.failure is None:
            underway.order = range(0)
        if underway.held or detects:
            underway.held, underway.ready = released(underway.held, (output, pixels), is_last, self._rules)
        else:
            underway.ready = ((output, pixels),)
        self._settle(underway.ready)

    def _settle(self, outputs: tuple[tuple[KeptFrame, Pixels], ...]) -> None:
        """Keeps outputs without what hotstart has removed until they are given out, or forgets them."""
        states = [group.state for group in self.progress.groups]
        # An id that was removed in one group may be tracked in another one, because the user added it.
        removed = frozenset[int]().union(*(each.removed for each in states)).difference(*(each.ids for each in states))
        for output, _ in outputs:
            if self.keeps:
                self.progress.kept[output.index] = output.without(removed)
            else:
                self.progress.kept.pop(output.index, None)

    def process(self, index: int, reverse: bool) -> KeptFrame:
        """Detects and tracks everything on a frame, and keeps what may be shown."""
        progress, frame, length = self.progress, self.encoded(index), self._length(index)
        objects: dict[int, ShownObject] = {}
        for group, found in zip(progress.groups, progress.detector.found(frame, length, reverse), strict=True):
            objects |= group.process(frame, found, progress.next_id, length, reverse)
        return self._keep(KeptFrame.of(index, frame.image.size, objects, whole=True))

    def keep_refined(self, frame: EncodedFrame, refined: Mapping[int, ShownObject], whole: bool = False) -> KeptFrame:
        """Keeps objects of a frame as they were refined, beside the others as they were kept (VI:550).

        Args:
            frame: The frame.
            refined: What the objects look like.
            whole: Whether these are all that are tracked.
        """
        earlier = self.progress.kept.get(frame.index)
        whole = whole or (earlier is not None and earlier.whole)
        objects = with_refined(None if earlier is None else earlier.objects, refined)
        return self._keep(KeptFrame.of(frame.index, frame.image.size, objects, whole))

    def _keep(self, kept: KeptFrame) -> KeptFrame:
        progress = self.progress
        progress.first = kept.index if progress.first is None else min(progress.first, kept.index)
        progress.kept[kept.index] = kept
        return kept

    def encoded(self, index: int) -> EncodedFrame:
        """A frame, encoded; the latest one is remembered.

        Raises:
            Sam3Error: As `pixels`.
        """
        if self.latest is None or self.latest.index != index:
            self.latest = None  # its tensors are large
            image = self.model.set_image(self.pixels(index))
            self.latest = EncodedFrame(index, image, self.model.interactive_features(image.features))
        return self.latest

    def _length(self, index: int) -> int | None:
        """The length of the video; None where it is not known, or longer than its source states."""
        stated = self.frames.length
        return None if stated is None or index >= stated else stated
