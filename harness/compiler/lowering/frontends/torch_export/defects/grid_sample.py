"""Works around the layout of grid_sample's grid: [N, 2, H, W] in TVM, [N, H, W, 2] in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect

_METHODS = ("bilinear", "nearest", "bicubic")
_PADDINGS = ("zeros", "border", "reflection")


class _Sample(torch.nn.Module):
    def forward(self, image: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grid_sample(image, grid, align_corners=False)


def _reproduction() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    return _Sample(), (torch.randn(1, 2, 5, 6, generator=generator), torch.rand(1, 2, 2, 2, generator=generator))


def _convert(node: Node, importer: Any) -> Any:
    from tvm import relax

    image, grid, method, padding, align_corners = importer.retrieve_args(node)
    grid = importer.block_builder.emit(relax.op.permute_dims(grid, [0, 3, 1, 2]))
    return importer.block_builder.emit(
        relax.op.image.grid_sample(
            image,
            grid,
            method=_METHODS[method],
            layout="NCHW",
            padding_mode=_PADDINGS[padding],
            align_corners=align_corners,
        )
    )


DEFECTS = (
    TorchDefect(
        name="grid_sample_layout",
        title="grid_sample reads the grid in the wrong layout",
        location="ExportedProgramImporter._grid_sampler_2d",
        description=(
            "The grid [N, H, W, 2] is handed to relax.op.image.grid_sample, which expects [N, 2, H, W]. The "
            "result is wrong without an error when H = W = 2, and has the wrong shape otherwise. In SAM 3's "
            "geometry encoder (points, grid [B, N, 1, 2]) the shape is wrong, so that the squeeze behind it "
            "removes nothing and the permute then rejects the rank."
        ),
        reproduction=_reproduction,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values differ by more than 1"),
        workaround="A converter that permutes the grid first.",
        converters={"grid_sampler_2d.default": _convert},
    ),
)
