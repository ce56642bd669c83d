"""Defines the devices of a tracker by its address and their key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.core.errors import HarnessError


@dataclass(frozen=True)
class Remote:
    """The devices that a tracker knows by a key.

    Attributes:
        address: HOST:PORT of the tracker.
        key: Key that the devices are registered with.
        secret_file: File of the secret that the devices share with this user; None for the default file.
    """

    address: str
    key: str
    secret_file: Path | None = None

    def __post_init__(self) -> None:
        split_address(self.address)
        if not self.key or self.key != "".join(self.key.split()) or ":" in self.key:
            raise HarnessError(
                f"--remote {self.address} needs --key, what the devices are known by: a word without spaces or colons"
            )

    @property
    def flags(self) -> tuple[str, ...]:
        """The equivalent command-line options."""
        secret = () if self.secret_file is None else ("--secret-file", str(self.secret_file))
        return "--remote", self.address, "--key", self.key, *secret

    def __str__(self) -> str:
        return f"{self.key} at {self.address}"


def chosen_remote(address: str | None, key: str, secret_file: Path | None = None) -> Remote | None:
    """Reads the options --remote, --key and --secret-file; None stands for this machine.

    Raises:
        HarnessError: The address is malformed, or an option is given without the other that it needs.
    """
    if address is None:
        if key:
            raise HarnessError(f"--key {key} says nothing without --remote HOST:PORT, the tracker that knows it")
        if secret_file is not None:
            raise HarnessError("--secret-file says nothing without --remote HOST:PORT, the tracker of the devices")
        return None
    return Remote(address, key, secret_file)


def split_address(address: str) -> tuple[str, int]:
    """Splits `HOST:PORT` into host and port.

    Raises:
        HarnessError: The address is malformed.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise HarnessError(f"{address!r} is not an address: give HOST:PORT of an RPC tracker")
    return host.strip("[]"), int(port)
