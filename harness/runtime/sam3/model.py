"""Loads a compiled SAM 3, which answers prompts on images and tracks objects through videos."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.runtime.artifact import Artifact
from harness.runtime.sam3.description import SAM_3_1
from harness.runtime.sam3.image_model import ImageModel

if TYPE_CHECKING:
    from harness.runtime.sam3.video.session import Session


class Sam3(ImageModel):
    """A compiled model. Several threads may use it, and several models may be in one process.

    Example::

        model = Sam3.load("dist/sam3-llvm")
        image = model.set_image("photo.jpg")
        found = image.segment(text="cat", boxes=[(x0, y0, x1, y1)], box_labels=[True])
        found.masks, found.boxes, found.scores, found.semantic

        clicked = image.predict(points=[(x, y)])
        better = image.predict(points=[(x, y), (u, v)], labels=[1, 0], mask=clicked.logits[clicked.best])
        better.masks, better.iou, better.best

    Attributes:
        manifest: The artifact's manifest.
    """

    @classmethod
    def load(cls, folder: str | Path, *, check: bool = True) -> Sam3:
        """Loads a folder that `sam3-tvm compile` wrote.

        Args:
            folder: The folder.
            check: Whether to compare every file with its checksum first.

        Raises:
            ArtifactError: The folder is no artifact, incomplete, damaged, or of another version.
            LoadError: The folder was compiled for another machine.
        """
        return cls(Artifact.load(folder, check=check))

    def start_session(self, video: Any, *, keep: bool = False) -> Session:
        """Starts a session that tracks objects through a video.

        Args:
            video: A file, a folder of images, a list or an array of frames, or an iterator of frames that may be
                endless; see `harness.runtime.sam3.video.frames.open_frames`.
            keep: Whether to keep the results of every frame, for each object 1 MB and a bit for each pixel of the
                video. Then objects can be prompted in any frame, and the video be tracked backwards and again.
                Otherwise memory does not grow.

        Raises:
            ModelError: The video cannot be opened, or this model was compiled without tracking.
        """
        # Images need fewer packages than videos.
        from harness.runtime.sam3.video.multiplex import MultiplexTracker
        from harness.runtime.sam3.video.session import Session
        from harness.runtime.sam3.video.tracker import Tracker

        tracker = MultiplexTracker if self.manifest.model == SAM_3_1 else Tracker
        return Session(self, tracker(self.artifact), video, tracker.rules, keep=keep)

    def resume_session(self, path: str | Path, video: Any) -> Session:
        """Continues a session that `Session.save` wrote to a file, as if it had not been interrupted.

        Args:
            path: The file.
            video: The video of the session; a stream must start with its first frame.

        Raises:
            ModelError: The file cannot be read, is damaged, or is of another model or another video; or an error of
                `start_session`.
        """
        from harness.runtime.sam3.video.saving import SessionFile

        saved = SessionFile(Path(path), self.manifest)
        session = self.start_session(video, keep=saved.keep)
        saved.restore(session.processor)
        return session
