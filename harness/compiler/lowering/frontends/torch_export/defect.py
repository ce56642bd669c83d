"""Defines a defect of TVM's PyTorch frontend as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.compiler.lowering.frontends.defect import Defect

if TYPE_CHECKING:
    import torch

Converter = Callable[[Any, Any], Any]
"""Takes the fx node and TVM's importer and returns the Relax expression (the signature of `custom_convert_map`)."""

GraphPass = Callable[["torch.fx.GraphModule"], None]
"""Rewrites the decomposed graph in place, before the import; every new node carries `meta["val"]`."""


@dataclass(frozen=True)
class TorchDefect(Defect):
    """One defect of TVM's PyTorch frontend, and its workaround.

    Attributes:
        converters: Importer functions that replace TVM's, by the importer's operator name.
        passes: Rewrites of the exported graph before the import.
    """

    converters: Mapping[str, Converter] = field(default_factory=dict)
    passes: tuple[GraphPass, ...] = ()
