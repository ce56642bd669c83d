"""Defines the distributions that weights are drawn from if there is no checkpoint."""

from __future__ import annotations

from enum import StrEnum


class Weights(StrEnum):
    """The statistics of drawn weights: even, or with the outliers of trained weights."""

    SEEDED = "seeded"
    OUTLIERS = "outliers"

    @property
    def ill_conditioned(self) -> bool:
        """Returns whether PyTorch fp32 itself may leave the strict gate, so that the oracle decides."""
        return self is Weights.OUTLIERS


WEIGHTS = tuple(kind.value for kind in Weights)
"""Names of all distributions."""
