"""How running on a device can fail."""

from __future__ import annotations

from harness.runtime.errors import Sam3Error


class DeviceLostError(Sam3Error):
    """A session that ended before its work was done, or no device is left: not the fault of what was run, as a rule."""


class RemoteError(Exception):
    """An error of the code that was run on a device; the message is that of the error there.

    Attributes:
        type: Name of the error there.
        details: The end of its traceback.
    """

    def __init__(self, type_name: str, message: str, details: str) -> None:
        super().__init__(message)
        self.type = type_name
        self.details = details
