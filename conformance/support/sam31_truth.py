"""Asks the modules of SAM 3.1 and those of mlx-vlm the same questions, on the same seeded weights.

    python -m conformance.support.sam31_truth

writes `fixtures/sam31_mlx.json` again, where mlx-vlm is installed: elements of its answers, which the tests of any
machine compare with.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.core.settings import REPOSITORY
from harness.models.sam3.components.tracker_modules import PromptEncoder
from harness.models.sam3.upstream import upstream
from harness.models.sam3.weights import generator, seed_weights
from harness.models.sam31 import modules
from harness.models.sam31.build import ATTENTION_LAYERS, build_architecture

FIXTURE = REPOSITORY / "fixtures" / "sam31_mlx.json"
SEED = 31
GRID = 24
"""Height and width of the feature maps, a third of the published model's; masks are read in their full size."""
OBJECTS = 19
"""Two buckets, the second with three objects and thirteen empty slots."""
SAMPLES = 256
"""Recorded elements of each output."""
NOW, CONDITIONING, TRACKED = 9, 0, (7, 8)
"""Numbers of a frame and of its memories' frames."""

Arrays = dict[str, np.ndarray]


@cache
def seeded_model() -> Any:
    """Returns the model with the published memory attention on the grid of this comparison."""
    from harness.models.sam31.memory_attention import DecoupledMemoryAttention

    model = build_architecture("shallow")
    tracker = modules.tracker_of(model)
    with upstream():
        tracker.transformer.encoder = DecoupledMemoryAttention(ATTENTION_LAYERS, (GRID, GRID)).eval()
        tracker.requires_grad_(False)
    seed_weights(model, SEED, set(compared_names(model)))
    tracker.sam_mask_decoder.pred_obj_score_head.layers[2].bias -= 3.0  # so that some of the objects are absent
    return model


def compared_names(model: Any) -> list[str]:
    """Returns the names of the tensors of three necks and of the tracker."""
    kinds = ("convs", "interactive_convs", "propagation_convs")
    prefixes = ("tracker.", *(f"detector.backbone.vision_backbone.{kind}." for kind in kinds))
    return [name for name in model.state_dict() if name.startswith(prefixes)]


def drawn(name: str, *shape: int) -> np.ndarray:
    return generator(SEED, name).standard_normal(shape, dtype=np.float32)


def blobs(name: str, objects: int, size: int) -> np.ndarray:
    """Returns logits [objects, 1, size, size] of an ellipse of each object, between -8 and 8."""
    numbers = generator(SEED, name).uniform(0.2, 0.8, (objects, 4, 1, 1))
    y, x = np.mgrid[0 : 1 : size * 1j, 0 : 1 : size * 1j]
    distance = ((x - numbers[:, 0]) / numbers[:, 2]) ** 2 + ((y - numbers[:, 1]) / numbers[:, 3]) ** 2
    return (8 * np.cos(np.minimum(4 * distance, np.pi)))[:, None].astype(np.float32)


@cache
def questions() -> Arrays:
    """Returns the inputs `module/name` of mlx-vlm's modules."""
    channels, finer, finest = 256, 2 * GRID, 4 * GRID
    maps = {
        "high_res_0": drawn("high_res_0", 1, 32, finest, finest),
        "high_res_1": drawn("high_res_1", 1, 64, finer, finer),
    }
    image = {"image_embed": drawn("image_embed", 1, channels, GRID, GRID)} | maps
    frames = len(TRACKED) + 1
    points = generator(SEED, "points").uniform(0, 1008, (3, 2, 2)).astype(np.float32)
    asked = {
        "tri_neck": {"trunk": drawn("trunk", 1, 1024, GRID, GRID)},
        "click_prompt_encoder": {
            "points": points,
            "labels": np.array([[1, 0], [2, 3], [1, -1]], np.int32),
            "masks": blobs("prompt masks", 3, 288),
        },
        "click_mask_decoder": {
            **image,
            "sparse": drawn("sparse", 2, 3, channels),
            "dense": drawn("dense", 2, channels, GRID, GRID),
            "positions": positions("interactive_sam_prompt_encoder.pe_layer", GRID),
        },
        # The mask prompt of 1152×1152 fits a grid of 72×72 alone.
        "click_mask_pointer": {
            "image_embed": drawn("image_embed 72", 1, channels, 72, 72),
            "high_res_0": drawn("high_res_0 72", 1, 32, 288, 288),
            "high_res_1": drawn("high_res_1 72", 1, 64, 144, 144),
            "masks": (blobs("given masks", 2, 1152) > 0) * np.array([1, 0], np.float32).reshape(2, 1, 1, 1),
            "positions": positions("interactive_sam_prompt_encoder.pe_layer", 72),
        },
        "multiplex_mask_decoder": {
            "conditioned": drawn("conditioned", 2, channels, GRID, GRID),
            **maps,
            "objects": np.array(OBJECTS),
            "positions": positions("image_pe_layer", GRID),
        },
        "multiplex_memory_encoder": {
            "features": drawn("features 72", 1, channels, 72, 72),
            "masks": blobs("masks", 3, 1008),
            "object_logits": np.array([[3.0], [-1.0], [2.0]], np.float32),
            "conditioning": np.array([0]),
        },
        "multiplex_memory_attention": {
            "features": drawn("features", 1, channels, GRID, GRID),
            "memory_features": drawn("memory_features", frames, channels, GRID, GRID),
            "memories": drawn("memories", frames, 2, channels, GRID, GRID),
            "pointers": drawn("pointers", frames, 2, 16, channels),
            "objects": np.array(OBJECTS),
            "frames": np.array([NOW, CONDITIONING, *TRACKED]),
        },
    }
    return {f"{module}/{name}": array for module, arguments in asked.items() for name, array in arguments.items()}


def positions(encoding: str, side: int) -> np.ndarray:
    """Returns Meta's dense positions [1, 256, side, side], from which mlx-vlm's differ by half a cell."""
    layer = modules.tracker_of(seeded_model()).get_submodule(encoding)
    return layer((side, side)).unsqueeze(0).numpy()


def slots(array: np.ndarray) -> Tensor:
    """Returns values of objects [N, …] in buckets [B, 16, …], zero where there is no object."""
    tensor = torch.from_numpy(array)
    buckets = -(-len(tensor) // 16)
    empty = tensor.new_zeros(16 * buckets - len(tensor), *tensor.shape[1:])
    return torch.cat((tensor, empty)).unflatten(0, (buckets, 16))


def objects_of(tensor: Tensor) -> Tensor:
    """Returns the values of the objects [N, …] of buckets [B, 16, …]."""
    return tensor.flatten(0, 1)[:OBJECTS]


def tri_neck(model: Any, trunk: Tensor) -> dict[str, Tensor]:
    maps = modules.TriNeckFeatures(model)(trunk)
    return {str(number): level for number, level in enumerate(maps)}


def click_prompt_encoder(model: Any, points: Tensor, labels: Tensor, masks: Tensor) -> dict[str, Tensor]:
    encoder = PromptEncoder(modules.tracker_of(model).interactive_sam_prompt_encoder)
    sparse, dense = encoder(points, labels, masks, torch.tensor([True]))
    return {"sparse": sparse, "dense": dense}


def click_mask_decoder(model: Any, positions: Tensor, **arguments: Tensor) -> dict[str, Tensor]:
    outputs = modules.ClickMaskDecoder(model)(**arguments)
    return dict(zip(("masks", "ious", "object_logits", "pointers"), outputs, strict=True))


def click_mask_pointer(model: Any, positions: Tensor, **arguments: Tensor) -> dict[str, Tensor]:
    pointers, object_logits = modules.ClickMaskPointer(model)(**arguments)
    return {"pointers": pointers, "object_logits": object_logits}


def multiplex_mask_decoder(model: Any, positions: Tensor, objects: Tensor, **arguments: Tensor) -> dict[str, Tensor]:
    """Masks of absent objects, and the choice of the best mask's pointer, are those of whoever calls the graph."""
    valid = slots(np.ones(int(objects), np.float32))
    outputs = modules.MultiplexMaskDecoder(model)(**arguments, valid=valid)
    masks, ious, object_logits, pointers = map(objects_of, outputs)
    best = ious.argmax(dim=1)
    return {
        "masks": torch.where(object_logits[:, :, None, None] > 0, masks, -1024.0),
        "ious": ious,
        "object_logits": object_logits,
        "pointers": pointers[torch.arange(len(best)), best],
    }


def multiplex_memory_encoder(
    model: Any, features: Tensor, masks: Tensor, object_logits: Tensor, conditioning: Tensor
) -> dict[str, Tensor]:
    given = np.zeros(len(masks), np.float32)
    given[conditioning] = 1
    muxed = (slots(masks[:, 0].numpy()), slots(object_logits.numpy()), slots(np.ones_like(given)), slots(given))
    (memory,) = modules.MultiplexMemoryEncoder(model)(features, *muxed)
    return {"memory": memory}


def multiplex_memory_attention(
    model: Any,
    features: Tensor,
    memory_features: Tensor,
    memories: Tensor,
    pointers: Tensor,
    objects: Tensor,
    frames: Tensor,
) -> dict[str, Tensor]:
    """The conditioning frame is out of the table's range; pointers follow from the nearest frame on."""
    ranks = torch.tensor([6, *(NOW - frame - 1 for frame in TRACKED)])
    order = [0, *range(len(TRACKED), 0, -1)]
    times = torch.tensor([(NOW - int(frames[1:][number])) / NOW for number in order])
    tokens, pointer_pos = modules.MultiplexPointers(model)(pointers[order], times)
    attention = modules.MultiplexMemoryAttention(model)
    (conditioned,) = attention(features, memory_features, memories, ranks, tokens, pointer_pos)
    return {"conditioned": conditioned}


COMPARED: Mapping[str, Callable[..., dict[str, Tensor]]] = {
    question.__name__: question
    for question in (
        tri_neck,
        click_prompt_encoder,
        click_mask_decoder,
        click_mask_pointer,
        multiplex_mask_decoder,
        multiplex_memory_encoder,
        multiplex_memory_attention,
    )
}
"""By the name of a component: runs ours on mlx-vlm's inputs."""


@torch.no_grad()
def answer(module: str) -> Arrays:
    """Returns the outputs of one of our modules, by name."""
    arguments = {
        path.partition("/")[2]: torch.from_numpy(np.ascontiguousarray(array))
        for path, array in questions().items()
        if path.startswith(f"{module}/")
    }
    with upstream():
        outputs = COMPARED[module](seeded_model(), **arguments)
    return {name: tensor.numpy() for name, tensor in outputs.items()}


def ask_mlx() -> dict[str, np.ndarray]:
    """Returns all of mlx-vlm's outputs, `module/name`, computed in a process of its own."""
    from safetensors.torch import save_file

    model = seeded_model()
    weights = {
        name: tensor.contiguous() for name, tensor in model.state_dict().items() if name in compared_names(model)
    }
    with TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("weights.safetensors", "inputs.npz", "outputs.npz")]
        save_file({name: tensor.clone() for name, tensor in weights.items()}, files[0])
        np.savez(files[1], grid=np.array(GRID), **questions())
        subprocess.run([sys.executable, "-m", "conformance.support.mlx_sam31", *files], cwd=REPOSITORY, check=True)
        return dict(np.load(files[2]))


def elements(name: str, array: np.ndarray) -> np.ndarray:
    """Returns elements of an output at places that its name and the seed determine."""
    places = generator(SEED, f"elements of {name}").permutation(array.size)[:SAMPLES]
    return array.reshape(-1)[places]


def record() -> None:
    outputs = {
        name: {"shape": list(array.shape), "elements": [round(float(value), 7) for value in elements(name, array)]}
        for name, array in ask_mlx().items()
    }
    recorded = {"mlx-vlm": version("mlx-vlm"), "mlx": version("mlx"), "seed": SEED, "outputs": outputs}
    FIXTURE.write_text(json.dumps(recorded).replace("}, ", "},\n") + "\n")


if __name__ == "__main__":
    record()
