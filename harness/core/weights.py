"""Weights: what they are drawn by where no checkpoint gives them."""

from __future__ import annotations

from enum import StrEnum


class Weights(StrEnum):
    """The statistics of drawn weights: even ones, or those with the outliers of trained weights."""

    SEEDED = "seeded"
    OUTLIERS = "outliers"

    @property
    def strain_fp32(self) -> bool:
        """Whether PyTorch fp32 itself may leave the strict gate; where it does, the oracle decides."""
        return self is Weights.OUTLIERS


WEIGHTS = tuple(kind.value for kind in Weights)
"""All kinds by name."""
