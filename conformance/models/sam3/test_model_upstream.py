"""sam3 on any machine: every patch does what it says, only where it is needed, and leaves nothing behind."""

from __future__ import annotations

import builtins
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

from conformance.support.sentences import sentence
from conformance.support.shallow import shallow_model
from harness.core.errors import HarnessError
from harness.models.sam3.build import build_architecture
from harness.models.sam3.patches import IMPORT_PATCHES, RUN_PATCHES, Patch
from harness.models.sam3.upstream import import_sam3, upstream

ROOT = Path(__file__).resolve().parents[3]
PATCHES = (*IMPORT_PATCHES, *RUN_PATCHES)

WITHOUT_MODULES = """
import json, sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in hidden else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

hidden = set(json.loads(sys.argv[1]))
sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""


def run_without(modules: list[str], script: str) -> dict[str, Any]:
    """What the script prints as JSON in a process in which these modules are not installed."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MODULES + script, json.dumps(modules)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def everything_patchable() -> dict[str, Any]:
    """Every attribute of sam3's modules and classes, and of the torch namespaces that patches touch."""
    state: dict[str, Any] = {}
    owners: list[tuple[str, Any]] = [
        ("builtins", builtins),
        ("torch", torch),
        ("torch.Tensor", torch.Tensor),
        ("torch.nn.init", torch.nn.init),
        ("torchvision.ops", torchvision.ops),
    ]
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "sam3":
            owners.append((name, module))
            owners += [(f"{name}.{key}", value) for key, value in vars(module).items() if inspect.isclass(value)]
    for name, owner in owners:
        state |= {f"{name}:{key}": value for key, value in list(vars(owner).items())}
    return state


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    keys = before.keys() | after.keys()
    # `isinstance` with an abstract class writes its caches; a lazily imported submodule of torch is none of ours.
    caches = ("_abc_impl", "__annotations__", "__warningregistry__")
    changed = [key for key in keys if before.get(key) is not after.get(key) and not key.endswith(caches)]
    return sorted(key for key in changed if not (key.startswith("torch:") and inspect.ismodule(after.get(key))))


@pytest.fixture(autouse=True)
def _imported() -> Iterator[None]:
    import_sam3()
    import sam3.perflib.connected_components  # noqa: F401  (upstream imports it where it needs it)

    yield


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_patch_says_what_where_and_why(patch: Patch) -> None:
    facts = re.search(
        r"Assumption: \S+ .*\((sam3/[\w/]+\.py).*Without the patch: \S+ ", patch.apply.__doc__ or "", re.S
    )
    assert facts
    assert [other.name for other in PATCHES].count(patch.name) == 1
    assert (Path(sys.modules["sam3"].__file__ or "").parent.parent / facts[1]).is_file()


@pytest.mark.parametrize("patch", RUN_PATCHES, ids=lambda patch: patch.name)
def test_patch_changes_something_and_undoes_it(patch: Patch) -> None:
    before = everything_patchable()
    with patch.apply():
        assert changes(before, everything_patchable())
    assert changes(before, everything_patchable()) == []


def test_nested_contexts_apply_once_and_undo_at_the_end() -> None:
    before = everything_patchable()
    with upstream():
        outer = everything_patchable()
        assert changes(before, outer)
        with upstream():
            assert changes(outer, everything_patchable()) == []
        assert changes(outer, everything_patchable()) == []
    assert changes(before, everything_patchable()) == []


def test_everything_is_undone_after_an_error() -> None:
    before = everything_patchable()
    with pytest.raises(ZeroDivisionError), upstream(), upstream():
        raise ZeroDivisionError
    assert changes(before, everything_patchable()) == []
    with upstream():
        assert torch.ones(1).cuda().device.type == "cpu"


def test_building_leaves_nothing_behind() -> None:
    before, generator = everything_patchable(), torch.get_rng_state()
    build_architecture("shallow", interactive=True)
    assert changes(before, everything_patchable()) == []
    assert torch.equal(generator, torch.get_rng_state())
    assert not torch.is_autocast_enabled("cuda")


def test_building_for_interactive_use_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    build_architecture("shallow", interactive=True)
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the unpatched calls succeed")
def test_without_the_patches_upstream_fails_here() -> None:
    from sam3.model.decoder import TransformerDecoder
    from sam3.model.position_encoding import PositionEmbeddingSine

    for call in (
        lambda: PositionEmbeddingSine(num_pos_feats=64, precompute_resolution=64),
        lambda: TransformerDecoder._get_coords(2, 2, device="cuda"),
        lambda: torch.ones(1).pin_memory(),
        lambda: torch.ones(1).cuda(),
    ):
        with pytest.raises((RuntimeError, AssertionError)):
            call()
        with upstream():
            call()


MODULES = {
    "psutil": ["psutil"],
    "all": [
        *("triton", "psutil", "decord", "flash_attn", "flash_attn_interface", "cv2", "torch_generic_nms"),
        *("huggingface_hub", "pkg_resources"),
    ],
}

IMPORT_AND_LOOK = """
import builtins
real = builtins.__import__
from harness.core.errors import HarnessError
from harness.models.sam3.upstream import upstream
with upstream():
    pass
import torch, sam3.model.edt, sam3.model.sam3_video_predictor as video
from torch.utils._triton import has_triton
import torch._inductor.runtime.triton_helpers
from harness.core.case import Case
from harness.core.settings import SEEDED
from harness.models.sam3.build import build_case

features = torch.zeros(0)
if "triton" in hidden:
    model = build_case(Case("", "real", "llvm"), SEEDED)
    with upstream(), torch.no_grad():
        features = model.backbone.forward_text(["cat"], device="cpu")["language_features"]

def raised(call):
    try:
        call()
    except HarnessError as error:
        return str(error)
    except Exception as error:
        return type(error).__name__

print(json.dumps({
    "modules": [name for name in sys.modules if name.split(".")[0] in hidden],
    "import undone": builtins.__import__ is real,
    "has_triton": has_triton(),
    "import triton": raised(lambda: __import__("triton")),
    "launch": raised(lambda: sam3.model.edt.edt_kernel[(1, 1)](1)),
    "call": raised(lambda: video.psutil.pid_exists(1)),
    "features": features.flatten()[:8].tolist(),
}))
"""


@pytest.mark.parametrize("hidden", MODULES.values(), ids=MODULES)
def test_model_imports_builds_and_runs_without_optional_modules(hidden: list[str]) -> None:
    seen = run_without(hidden, IMPORT_AND_LOOK)
    assert seen["modules"] == []
    assert seen["import undone"]
    assert "psutil.pid_exists" in seen["call"]
    assert "install psutil" in seen["call"]
    if "triton" in hidden:
        assert not seen["has_triton"]
        assert seen["import triton"] == "ModuleNotFoundError"
        assert "triton is not installed" in seen["launch"]
        with upstream(), torch.no_grad():
            features = shallow_model().backbone.forward_text(["cat"], device="cpu")["language_features"]
        torch.testing.assert_close(torch.tensor(seen["features"]), features.flatten()[:8])


def test_missing_requirement_is_one_sentence() -> None:
    script = """
from harness.core.errors import HarnessError
from harness.models.sam3.build import build_architecture
try:
    build_architecture("tiny")
except HarnessError as error:
    print(json.dumps({"error": str(error)}))
"""
    for module, fix in (("sam3", "[verify]"), ("iopath", "install iopath")):
        error = run_without([module], script)["error"]
        assert f"{module} is not installed" in error
        assert fix in error


def test_open_clip_is_not_imported_for_its_vocabulary() -> None:
    seen = run_without(
        [],
        'from harness.models.sam3.vocabulary import installed_tokenizer\ninstalled_tokenizer().tokenize(["cat"])\n'
        'print(json.dumps({"modules": [m for m in ("open_clip", "torch", "sam3", "tvm") if m in sys.modules]}))',
    )
    assert seen["modules"] == []


def test_needed_patches_are_asked_and_not_applied_blindly() -> None:
    names = {patch.name for patch in PATCHES if patch.needed()}
    assert names >= {"position_encoding_not_precomputed", "pin_memory_does_nothing", "constant_spatial_shapes"}


class Geometry(torch.nn.Module):
    """The geometry encoder on one point and one box, reduced to tensors in and out."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, points: torch.Tensor, boxes: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        from sam3.model.geometry_encoders import Prompt

        prompt = Prompt(point_embeddings=points, box_embeddings=boxes)
        encoded, _ = self.encoder(prompt, [features], [(72, 72)], [features])
        return encoded


class Decoder(torch.nn.Module):
    """The decoder with `spatial_shapes` as upstream's encoder hands it over: a tensor."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, memory: torch.Tensor, prompt: torch.Tensor, shapes: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.decoder(
            tgt=self.decoder.query_embed.weight.unsqueeze(1),
            memory=memory,
            pos=memory,
            spatial_shapes=shapes,
            valid_ratios=torch.ones(1, 1, 2),
            memory_text=prompt,
            text_attention_mask=torch.zeros(1, prompt.shape[0], dtype=torch.bool),
            apply_dac=False,
        )[0]
        return hidden


def exported_case(name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(5184, 1, 256, generator=generator)
    if name == "geometry":
        points, boxes = torch.tensor([[[0.4, 0.3]]]), torch.tensor([[[0.5, 0.5, 0.4, 0.6]]])
        return Geometry(shallow_model().geometry_encoder), (points, boxes, features)
    return Decoder(shallow_model().transformer.decoder), (features, features[:5], torch.tensor([[72, 72]]))


@pytest.mark.parametrize("name", ["geometry", "decoder"])
def test_exported_programs_keep_no_trace_of_lifted_assumptions(name: str) -> None:
    module, arguments = exported_case(name)
    with upstream(), torch.no_grad():
        program = torch.export.export(module, arguments, strict=False)
        eager = module(*arguments)
        torch.testing.assert_close(program.module()(*arguments), eager)
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    lifted = ("_assert_async", "pin", "autocast", "sort", "aten.item", "_local_scalar", "cuda")
    assert [operator for operator in operators if any(word in operator for word in lifted)] == []


def test_eager_runs_keep_upstreams_assert() -> None:
    from sam3.model.geometry_encoders import concat_padded_sequences

    sequence, padded_left = torch.ones(2, 1, 4), torch.tensor([[True, False]])
    with upstream(), pytest.raises(RuntimeError):
        concat_padded_sequences(sequence, padded_left, sequence, padded_left)


def test_spatial_shapes_are_read_where_they_have_values() -> None:
    decoder = shallow_model().transformer.decoder
    boxes = torch.full((200, 1, 4), 0.5)
    with upstream(), torch.no_grad():
        bias = decoder._get_rpb_matrix(boxes, (torch.tensor(36), torch.tensor(48)))
    assert bias.shape == (1, 8, 200, 36 * 48)
    decoder.coord_cache.clear()


def test_feed_forward_layer_without_autocast_computes_what_upstreams_own_does() -> None:
    layer = shallow_model().transformer.decoder.layers[0]
    tokens = torch.randn(200, 1, 256, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = layer.forward_ffn(tokens)
        with upstream():
            assert torch.equal(layer.forward_ffn(tokens), expected)


def test_geometry_encoder_runs_in_float64() -> None:
    from copy import deepcopy

    module, arguments = exported_case("geometry")
    with upstream(), torch.no_grad():
        single = module(*arguments)
        double = deepcopy(module).double()(*(argument.double() for argument in arguments))
    assert double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-4)


def test_stand_ins_are_for_sam3_alone() -> None:
    from harness.models.sam3.patches.absent_modules import importing_without

    with importing_without({"absent"}):
        stand_in = builtins.__import__("absent", {"__name__": "sam3.model.edt"})
        with pytest.raises(ModuleNotFoundError):
            builtins.__import__("absent", {"__name__": "torch"})
        kernel = stand_in.jit(print)
    for use in (stand_in.cdiv, kernel):
        with pytest.raises(HarnessError, match=sentence("not-installed", package="absent")):
            use(1, 2)
    with pytest.raises(AttributeError):
        _ = stand_in.__path__
