"""A compiled model on whichever device is free."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.remote import Remote
from harness.execution.remote.artifact import RemoteArtifact
from harness.execution.remote.client import GONE_SECONDS, DeviceSession
from harness.execution.remote.description import Description
from harness.execution.remote.errors import DeviceLostError
from harness.runtime.sam3.model import Sam3

if TYPE_CHECKING:
    from harness.runtime.manifest import Manifest
    from harness.runtime.sam3.image_model import EncodedImage
    from harness.runtime.sam3.interactive import EncodedObjectPrompt, ObjectPrompt
    from harness.runtime.sam3.prompts import EncodedPrompt, Prompt


class RemoteModel:
    """A model as `harness.segment` uses it; where a session is lost, the next image begins another one.

    Attributes:
        manifest: What the model says about itself.
        description: The machine that runs it.
        sent_bytes: Bytes of weights and code that it did not have when the session began.
    """

    def __init__(self, remote: Remote, folder: Path) -> None:
        """Loads a model on a device.

        Args:
            remote: Where devices are found.
            folder: Written by `sam3-tvm compile`.

        Raises:
            ArtifactError: It is no model, incomplete, damaged, or of another version.
            LoadError: The device cannot run it.
            DeviceLostError: There is none, or it is gone.
        """
        self._remote = remote
        self._folder = folder
        self._gone_seconds = GONE_SECONDS
        self._begin()

    @property
    def manifest(self) -> Manifest:
        """The attribute that the class describes."""
        return self._model.manifest

    @property
    def description(self) -> Description:
        """The attribute that the class describes."""
        return self._session.description

    @property
    def sent_bytes(self) -> int:
        """The attribute that the class describes."""
        return self._session.sent_bytes

    def check_prompt(self, prompt: Prompt) -> None:
        """Does what `harness.runtime.sam3.model.Sam3` does."""
        self._model.check_prompt(prompt)

    def encode_prompt(self, prompt: Prompt, size: tuple[int, int]) -> EncodedPrompt:
        """Does what `harness.runtime.sam3.model.Sam3` does."""
        return self._model.encode_prompt(prompt, size)

    def encode_object_prompt(self, prompt: ObjectPrompt, size: tuple[int, int]) -> EncodedObjectPrompt:
        """See `harness.runtime.sam3.model.Sam3`."""
        return self._model.encode_object_prompt(prompt, size)

    def set_image(self, image: Any) -> EncodedImage:
        """Does what `harness.runtime.sam3.model.Sam3` does.

        Raises:
            DeviceLostError: The device is gone, and no other is there.
        """
        if self._session.lost:
            self._begin()
        return self._model.set_image(image)

    def close(self) -> None:
        """Ends the session."""
        self._session.close()

    def _begin(self) -> None:
        try:
            self._session = DeviceSession(self._remote, self._gone_seconds)
        except DeviceLostError:
            self._gone_seconds = 0.0  # whoever tries again need not wait again
            raise
        self._gone_seconds = GONE_SECONDS
        self._model = Sam3(RemoteArtifact(self._session, self._folder))
