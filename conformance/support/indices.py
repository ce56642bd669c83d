"""Calls entry points with indices out of range in a process of its own, which may crash."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec.structs import replace

from harness.runtime.artifact import Artifact

# Values to give, and those that are the same thing, by entry point and input.
CALLS: dict[tuple[str, str], tuple[tuple[int, ...], Callable[[np.ndarray], np.ndarray]]] = {
    ("encode_text", "tokens"): ((-1, 50_000_000, 1 << 40), lambda x: x.clip(0, 49407)),
    ("encode_text", "starts"): ((31, -50_000_000, 50_000_000), lambda x: x),  # those of one text are alike
    ("ground", "point_labels"): ((-1, 50_000_000), lambda x: x.clip(0, 1)),
    ("ground", "box_labels"): ((-1, 50_000_000), lambda x: x.clip(0, 1)),
    ("memory_attention", "ranks"): ((-1, 9, 50_000_000), lambda x: x.clip(0, 6)),
}


def outside(folder: str, on_stage: Callable[[str], None]) -> list[str]:
    """Returns the calls whose outputs are not finite, or differ from those of the nearest index."""
    artifact = Artifact.load(folder, check=False)
    entries = {
        name: replace(entry, inputs=tuple(replace(spec, below=None) for spec in entry.inputs))
        for name, entry in artifact.manifest.entries.items()
    }
    artifact.manifest = replace(artifact.manifest, entries=entries)
    wrong = []
    for (entry, name), (values, nearest) in CALLS.items():
        inputs = {
            spec.name: np.zeros([1 if isinstance(extent, str) else extent for extent in spec.shape], spec.dtype)
            for spec in entries[entry].inputs
        }
        for value in values:
            on_stage(f"{entry} {name} {value}")
            given = np.full_like(inputs[name], value)
            found, expected = (artifact.call(entry, **{**inputs, name: indices}) for indices in (given, nearest(given)))
            for output, tensor in found.items():
                one, other = artifact.fetch(tensor), artifact.fetch(expected[output])
                if output != "text_mask" and not (np.isfinite(one).all() and np.array_equal(one, other)):
                    wrong.append(f"{entry} {name} {value} {output}")
    return wrong
