"""Replaces the BPE vocabulary that the text encoder opens and that the sam3 wheel does not ship."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.models.sam3.patches.patch import Patch, replaced


def _is_shipped() -> bool:
    spec = find_spec("sam3")
    if spec is None or not spec.submodule_search_locations:
        return False
    return (Path(spec.submodule_search_locations[0]).parent / "assets" / "bpe_simple_vocab_16e6.txt.gz").is_file()


@contextmanager
def _installed_vocabulary() -> Iterator[None]:
    import sam3.model_builder

    from harness.models.sam3.vocabulary import vocabulary_path

    original = sam3.model_builder.SimpleTokenizer

    def tokenizer(bpe_path: Any, *args: Any, **kwargs: Any) -> Any:
        return original(bpe_path if Path(bpe_path).is_file() else str(vocabulary_path()), *args, **kwargs)

    with replaced(sam3.model_builder, "SimpleTokenizer", tokenizer):
        yield


VOCABULARY = Patch(
    name="vocabulary",
    assumption="the BPE vocabulary lies in an `assets` folder beside the package",
    location="sam3/model_builder.py, build_sam3_image_model",
    reason="the published wheel does not contain it; open_clip_torch carries the same file",
    needed=lambda: not _is_shipped(),
    apply=_installed_vocabulary,
)
