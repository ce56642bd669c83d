"""The address of a device, and when it ends a session."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.errors import HarnessError


@dataclass(frozen=True)
class Remote:
    """A device that `sam3-tvm serve-device` serves.

    Attributes:
        address: HOST:PORT, as a rule of this end of an SSH tunnel.
        seconds: When the device ends a session; 0 for never.
    """

    address: str
    seconds: float = 0.0

    def __post_init__(self) -> None:
        port = self.address.rpartition(":")[2]
        if not (self.host and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise HarnessError(f"{self.address!r} is not an address: give HOST:PORT of a device, see docs/REMOTE.md")

    @property
    def host(self) -> str:
        """Name or address of the machine."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Port there."""
        return int(self.address.rpartition(":")[2])

    @property
    def flags(self) -> tuple[str, ...]:
        """The options that mean the same on the command line."""
        return "--remote", self.address

    def __str__(self) -> str:
        return self.address
