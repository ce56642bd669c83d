"""Replaces what is not installed: Triton and psutil, which sam3 imports and never runs here, and the BPE vocabulary."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.core.errors import HarnessError
from harness.models.sam3.patches.patch import Patch, patch, wrapped
from harness.models.sam3.vocabulary import shipped_vocabulary, vocabulary_path


class _Unusable:
    """A name from a module that is not installed: it can be passed around and used as an annotation, but not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> _Unusable:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Unusable(f"{self._name}.{attribute}")

    def _refuse(self, *_: Any, **__: Any) -> Any:
        module = self._name.split(".")[0]
        raise HarnessError(
            f"sam3 used {self._name}, but {module} is not installed here; install {module} to run this part."
        )

    __call__ = _refuse
    __getitem__ = _refuse


class _StandIn(ModuleType):
    """A module that is not installed, visible to sam3's import only; any real use raises an error."""

    def __init__(self, name: str, decorators: frozenset[str]) -> None:
        super().__init__(name)
        self._decorators = decorators

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if attribute in self._decorators:
            # The import defines the decorated kernel; only launching it is an error.
            return lambda function: _Unusable(f"{self.__name__}.{attribute}({function.__name__})")
        return _Unusable(f"{self.__name__}.{attribute}")


def _absent_module(module: str, importing_file: str, decorators: frozenset[str] = frozenset()) -> Patch:
    stand_in = _StandIn(module, decorators)

    # Through __import__ and not sys.modules, because torch's own optional `import triton` must keep failing.
    def hook(real: Any, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        importer = str((globals or {}).get("__name__", ""))
        if level == 0 and name.split(".")[0] == module and importer.split(".")[0] == "sam3":
            return stand_in
        return real(name, globals, locals, fromlist, level)

    return Patch(
        name=f"absent_{module}",
        assumption=f"{module} is installed",
        location=f"{importing_file}, import",
        reason=f"the whole package fails to import without {module}, which the image model never runs",
        needed=lambda: find_spec(module) is None,
        apply=lambda: wrapped(builtins, "__import__", hook),
    )


absent_triton = _absent_module("triton", "sam3/model/edt.py", frozenset({"jit"}))
absent_psutil = _absent_module("psutil", "sam3/model/sam3_video_predictor.py")


def _import_sets_tf32() -> bool:
    import torch

    return torch.cuda.is_available()


@patch(
    assumption="importing the package may switch TensorFloat-32 on for the whole process",
    location="sam3/model_builder.py, _setup_tf32",
    reason="a reference computed on the GPU afterwards would have 10 bits of mantissa",
    needed=_import_sets_tf32,
)
@contextmanager
def keep_tf32() -> Iterator[None]:
    """Restores the process's setting."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


@patch(
    assumption="the BPE vocabulary lies in an `assets` folder beside the package",
    location="sam3/model_builder.py, build_sam3_image_model",
    reason="the published wheel does not contain it; open_clip_torch carries the same file",
    needed=lambda: shipped_vocabulary() is None,
)
def installed_vocabulary() -> AbstractContextManager[None]:
    """Opens the vocabulary of an installed package."""
    import sam3.model_builder

    def tokenizer(original: Any, bpe_path: Any, *args: Any, **kwargs: Any) -> Any:
        return original(bpe_path if Path(bpe_path).is_file() else str(vocabulary_path()), *args, **kwargs)

    return wrapped(sam3.model_builder, "SimpleTokenizer", tokenizer)
