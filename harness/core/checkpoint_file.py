"""Recognizes a checkpoint by the first bytes of its file, before anything large is imported."""

from __future__ import annotations

from pathlib import Path

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
"""First bytes of the formats of torch.save: a ZIP archive, or a pickle before torch 1.6."""
_TAR, _TAR_OFFSET = b"ustar", 257
"""Mark of a tar archive (POSIX.1-1988), the format of torch 0.1, and its offset in bytes."""


def checkpoint_file_problem(path: Path) -> str | None:
    """Returns why a file cannot be a checkpoint, by its name and first bytes; None if it may be one."""
    if not path.exists():
        return f"The checkpoint {path} does not exist; check the path."
    if not path.is_file():
        return f"The checkpoint {path} is not a file; give the .pt or .safetensors file itself."
    if path.suffix == ".json":
        return (
            f"The checkpoint {path} lists the parts of a checkpoint that was saved in several files; "
            "save it as one, as the published model.safetensors is."
        )
    try:
        with path.open("rb") as file:
            head = file.read(_TAR_OFFSET + len(_TAR))
    except OSError as error:
        return f"The checkpoint {path} cannot be read: {error.strerror}; check its permissions."
    if path.suffix == ".safetensors":
        # Eight bytes with the length of a header in JSON, then the header.
        has_header = head[8:9] == b"{"
        return (
            None
            if has_header
            else f"The checkpoint {path} is not a safetensors file or is truncated; download it again."
        )
    if head.startswith((_ZIP, _PICKLE)) or head[_TAR_OFFSET:] == _TAR:
        return None
    return f"The file {path} is not a checkpoint; give a .pt file saved by torch or a .safetensors file."
