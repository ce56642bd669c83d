"""The secret that devices and their clients share: where it lies, how one is made, and proofs of knowing it.

It is read from a file that only its owner may read, or from an environment variable; never from a command line, which
every user of a machine can list.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.core.errors import HarnessError
from harness.files import explain_write_errors, temporary_name, user_folder

VARIABLE = "SAM3_TVM_DEVICE_SECRET"
"""The environment variable that may have the secret itself."""
_SHORTEST = 32
"""Characters of a secret at least: whoever listens on the network may try secrets against a proof, without a limit."""
_MADE_BYTES = 32
_ADVICE = "give another file with --secret-file"


@dataclass(frozen=True)
class Secret:
    """A shared secret, which is never shown.

    Attributes:
        source: Where it comes from, in words.
    """

    source: str
    _value: bytes = field(repr=False)

    def proof(self, purpose: str, facts: Sequence[str | int]) -> str:
        """Returns what only who knows the secret can compute: HMAC-SHA256, in hexadecimal digits.

        Args:
            purpose: What it proves; a proof of one purpose is none of another.
            facts: What it is about.
        """
        return hmac.new(self._value, json.dumps([purpose, *facts]).encode(), hashlib.sha256).hexdigest()


def default_file() -> Path:
    """Returns the file of the secret in the user's folder for configuration."""
    import platformdirs

    return user_folder(platformdirs.user_config_dir) / "device-secret"


def read_secret(file: Path | None) -> Secret:
    """Returns the secret of this user.

    Args:
        file: Where it is; None for the variable, and for the default file if that is not set.

    Raises:
        HarnessError: There is none, it is too short, or others may read the file.
    """
    if file is None and (text := os.environ.get(VARIABLE)):
        return _checked(text, VARIABLE)
    path = file or default_file()
    try:
        with path.open("rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            text = opened.read(1 << 16).decode("utf-8", "replace")
    except FileNotFoundError:
        raise HarnessError(
            f"there is no secret to share with devices: copy the one that `sam3-tvm serve-device` made on the device "
            f"to {path} (chmod 600), name another file with --secret-file, or set {VARIABLE}"
        ) from None
    except OSError as error:
        raise HarnessError(f"the secret in {path} cannot be read ({error.strerror or error}): {_ADVICE}") from error
    if mode & 0o077:
        raise HarnessError(
            f"others may use the secret in {path} (its mode is {mode:03o}): chmod 600 {path}, and remove it first if "
            "somebody may have read it, so that serve-device makes another"
        )
    return _checked(text, str(path))


def make_secret(file: Path | None) -> Path | None:
    """Makes a strong secret where `read_secret` would find none; returns the file if it was made.

    Raises:
        HarnessError: The file cannot be written.
    """
    path = file or default_file()
    if path.exists() or (file is None and os.environ.get(VARIABLE)):
        return None
    with explain_write_errors(path, _ADVICE):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = temporary_name(path)
        try:
            temporary.touch(mode=0o600, exist_ok=False)
            temporary.write_text(secrets.token_hex(_MADE_BYTES) + "\n", encoding="ascii")
            # Not renamed: of two servers that start at once, the second must not replace what the first has read.
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(temporary)
                return path
        finally:
            temporary.unlink(missing_ok=True)
    return None


def forget_variable() -> None:
    """Keeps the variable from the processes that this one starts."""
    os.environ.pop(VARIABLE, None)


def _checked(text: str, source: str) -> Secret:
    value = text.strip().encode()
    if len(value) < _SHORTEST:
        raise HarnessError(
            f"the secret in {source} has {len(value)} characters, and {_SHORTEST} are needed: take one that "
            "`sam3-tvm serve-device` makes where there is none"
        )
    return Secret(source, value)
