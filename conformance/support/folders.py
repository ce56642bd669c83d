"""Changes a copy of a compiled model, whose files are hard links, by writing files anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.runtime.manifest import MANIFEST


def rewrite(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def change_manifest(folder: Path, **fields: Any) -> None:
    data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    rewrite(folder / MANIFEST, json.dumps(data | fields).encode())
