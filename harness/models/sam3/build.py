"""Builds the SAM 3 image model with upstream's own builder, and draws or loads its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from harness.core.case import Case, Weights
from harness.core.errors import HarnessError
from harness.core.settings import Settings
from harness.models.sam3.checkpoints.loading import Checkpoint, load_checkpoint
from harness.models.sam3.checkpoints.names import video_name
from harness.models.sam3.outliers import outlier_weights
from harness.models.sam3.patches.patch import replaced
from harness.models.sam3.scales import scaled
from harness.models.sam3.upstream import upstream, without_known_warnings
from harness.models.sam3.vocabulary import vocabulary_path
from harness.models.sam3.weights import seed_weights

if TYPE_CHECKING:
    import torch

FEATURE_SIZES = (288, 144, 72, 36)
"""Height and width of the four feature maps of a 1008x1008 image, patch 14, at 4, 2, 1 and 1/2 times the trunk's."""
MEMORY_SIZES = (72,)
"""Height and width of the tracker's memories of a frame."""
_TABLES: dict[tuple[Any, ...], Any] = {}
"""The tables of positions that were computed in this process, by the settings of their encoding and their size."""
_DRAWING = {Weights.SEEDED: seed_weights, Weights.OUTLIERS: outlier_weights}


def build_case(case: Case, settings: Settings, *, interactive: bool = False) -> Any:
    """Builds the model of a case, with its drawn weights or those of a checkpoint.

    Arguments, result and errors are those of `build_architecture` and `give_weights`.
    """
    model = build_architecture(case.scale, interactive=interactive)
    give_weights(model, case, settings)
    return model


def image_model(model: Any) -> Any:
    """Returns what upstream's `Sam3Processor` and `predict_inst` are called with: the model of `build_case` itself."""
    return model


def give_weights(
    model: Any,
    case: Case,
    settings: Settings,
    part: torch.nn.Module | None = None,
    *,
    kind: type[Checkpoint] = Checkpoint,
) -> None:
    """Draws or loads the weights of a model of `build_architecture`; the same seed gives the same at every scale.

    Args:
        model: The whole model.
        case: The seed, and the distribution of drawn weights.
        settings: The checkpoint; tensors that a partial load leaves out are drawn.
        part: If given, only the tensors of this module need weights: drawing all of them takes many seconds at full
            scale.
        kind: The class of the model's checkpoints.

    Raises:
        HarnessError: The checkpoint cannot be loaded, or is given together with weights that are not seeded.
    """
    draw, checkpoint = _DRAWING[Weights(case.weights)], settings.checkpoint
    if checkpoint is not None:
        if case.weights != Weights.SEEDED:
            raise HarnessError(
                f"A checkpoint brings its weights, and --weights {case.weights} draws others: give one of both."
            )
        left_out = load_checkpoint(model, checkpoint, allow_partial=settings.allow_partial, kind=kind)
        draw(model, case.seed, left_out)
    elif part is None:
        draw(model, case.seed)
    else:
        part_ids = {id(tensor) for tensor in (*part.parameters(), *part.buffers())}
        named_tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        draw(model, case.seed, {name for name, tensor in named_tensors if id(tensor) in part_ids})


def build_architecture(scale: str, *, interactive: bool = False) -> Any:
    """Builds SAM 3's image model without weights: parameters are uninitialised memory, buffers are upstream's.

    It takes seconds and little memory at any scale, because the parameters are not touched.

    Args:
        scale: A key of `harness.models.sam3.scales.SCALES`.
        interactive: Whether to add upstream's SAM 2 neck, tracker and interactive predictor.

    Returns:
        `sam3.model.sam3_image.Sam3Image`: fp32, on the CPU, in evaluation mode, without gradients. Run and export it
        inside `upstream()`.

    Raises:
        HarnessError: An unknown scale, or a missing package.
    """
    with upstream():
        from sam3.model_builder import build_sam3_image_model

        with building(scale):
            model = build_sam3_image_model(
                bpe_path=str(vocabulary_path()),
                device="cpu",
                eval_mode=True,
                load_from_HF=False,
                enable_inst_interactivity=interactive,
            )
        fill_position_cache(model.backbone.vision_backbone.position_encoding, FEATURE_SIZES)
        if interactive:
            memory_encoder = model.inst_interactive_predictor.model.maskmem_backbone
            fill_position_cache(memory_encoder.position_encoding, MEMORY_SIZES)
    return model.requires_grad_(False)


def build_video_model(image_model: Any, scale: str) -> Any:
    """Builds upstream's video model around the tensors of an interactive image model.

    Args:
        image_model: Interactive image model; the tensors are shared.
        scale: Scale of the image model.

    Returns:
        `sam3.model.sam3_video_inference.Sam3VideoInferenceWithInstanceInteractivity`, in upstream's configuration. Run
        it inside `upstream()`.
    """
    with upstream():
        from sam3.model_builder import build_sam3_video_model

        with building(scale):
            model = build_sam3_video_model(bpe_path=str(vocabulary_path()), load_from_HF=False, device="cpu")
        tensors = {video_name(name): tensor for name, tensor in image_model.state_dict().items()}
        model.load_state_dict(tensors, assign=True)
        fill_position_cache(model.detector.backbone.vision_backbone.position_encoding, FEATURE_SIZES)
        fill_position_cache(model.tracker.maskmem_backbone.position_encoding, MEMORY_SIZES)
    return model.eval().requires_grad_(False)


@contextmanager
def building(scale: str) -> Iterator[None]:
    """Builds at a scale, and skips upstream's random initialisation, a minute of work whose result is overwritten.

    The models of a process share the tokenizer, whose vocabulary takes longer to read than a module to build.
    """
    import sam3.model.vitdet
    import sam3.model_builder
    import torch

    def keep(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    with ExitStack() as stack:
        for name in vars(torch.nn.init):
            if name.endswith("_") and not name.startswith("_"):
                stack.enter_context(replaced(torch.nn.init, name, keep))
        stack.enter_context(replaced(sam3.model.vitdet, "trunc_normal_", keep))
        stack.enter_context(replaced(torch.nn.MultiheadAttention, "_reset_parameters", keep))
        stack.enter_context(replaced(sam3.model_builder, "SimpleTokenizer", _tokenizer))
        # Upstream draws some buffers from the global generator, which belongs to the caller.
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(scaled(scale))
        stack.enter_context(without_known_warnings())
        yield


@cache
def _tokenizer(bpe_path: str) -> Any:
    from sam3.model.tokenizer_ve import SimpleTokenizer

    return SimpleTokenizer(bpe_path=bpe_path)


def fill_position_cache(encoding: Any, sizes: Sequence[int]) -> None:
    """Gives an encoding the tables of positions that the model will use; models share them.

    Upstream fills its cache in the first run; a first run under torch.export would cache a tensor without values.
    """
    import torch

    for size in sizes:
        settings = (encoding.num_pos_feats, encoding.temperature, encoding.normalize, encoding.scale, size)
        if settings not in _TABLES:
            encoding(torch.zeros(1, 1, size, size))
            _TABLES[settings] = encoding.cache[size, size].clone().detach()
        encoding.cache[size, size] = _TABLES[settings]
