"""Finds small connected components of masks, holes and sprinkles, in all masks of a frame at once.

Components are found among runs, which are stretches of consecutive pixels of a row. The mask of an object has some
hundred runs and 82,944 pixels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def small_components(masks: npt.NDArray[np.bool_], largest: int | Indices) -> Indices:
    """Finds the pixels of all 8-connected components of at most `largest` pixels.

    Upstream labels components with `skimage.measure.label`, which joins pixels at corners too
    (`sam3/perflib/connected_components.py`).

    Args:
        masks: bool [n, h, w].
        largest: Maximum number of pixels, one for all masks or int64 [n], one for each.

    Returns:
        int64 [k], positions in `masks.ravel()`, ascending.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    count, height, width = masks.shape
    # A column and a row of background separate rows and masks, so that only neighbours touch.
    stride, page = width + 1, (height + 1) * (width + 1)
    padded = np.zeros((count, height + 1, stride), bool)
    padded[:, :height, 1:] = masks
    flat = padded.ravel()
    edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    if not len(edges):
        return edges
    starts, ends = edges[0::2], edges[1::2]
    # The runs of the row above that touch a run are consecutive: from `first` up to `last`.
    first = np.searchsorted(ends, starts - stride, "left")
    last = np.searchsorted(starts, ends - stride, "right")
    graph = csr_array(
        (np.ones((last - first).sum(), np.int8), _ranges(first, last), np.append(0, np.cumsum(last - first))),
        shape=(len(starts), len(starts)),
    )
    _, component = connected_components(graph, directed=False)
    areas = np.bincount(component, weights=ends - starts)
    mask = starts // page
    small = np.flatnonzero(areas[component] <= np.broadcast_to(largest, count)[mask])
    row, column = np.divmod(starts[small] - mask[small] * page, stride)
    begin = (mask[small] * height + row) * width + column - 1
    return _ranges(begin, begin + ends[small] - starts[small])


def _ranges(starts: Indices, ends: Indices) -> Indices:
    """Lists the numbers from each start up to its end, one range after another."""
    lengths = ends - starts
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(lengths.sum())
