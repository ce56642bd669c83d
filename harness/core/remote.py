"""Defines the address of a device, and its session limit."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.errors import HarnessError


@dataclass(frozen=True)
class Remote:
    """A device that `sam3-tvm serve-device` serves.

    Attributes:
        address: HOST:PORT, normally of this end of an SSH tunnel.
        seconds: Time after which the device ends a session; 0 for no limit.
    """

    address: str
    seconds: float = 0.0

    def __post_init__(self) -> None:
        port = self.address.rpartition(":")[2]
        if not (self.host and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise HarnessError(f"{self.address!r} is not an address: give HOST:PORT of a device, see docs/REMOTE.md")

    @property
    def host(self) -> str:
        """Name or address of the device's machine."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Port of the device."""
        return int(self.address.rpartition(":")[2])

    @property
    def flags(self) -> tuple[str, ...]:
        """The equivalent command-line options."""
        return "--remote", self.address

    def __str__(self) -> str:
        return self.address
