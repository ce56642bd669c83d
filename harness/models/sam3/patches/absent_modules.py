"""Replaces Triton and psutil, which sam3 imports at the top of a file although the image model never runs them."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from harness.core.errors import HarnessError
from harness.models.sam3.patches.patch import Patch, replaced


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


def _absent_module_patch(module: str, decorators: frozenset[str] = frozenset()) -> Patch:
    stand_in = _StandIn(module, decorators)

    @contextmanager
    def apply() -> Iterator[None]:
        real = builtins.__import__

        # Through __import__ and not sys.modules, because torch's own optional `import triton` must keep failing.
        def hook(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            importer = str((globals or {}).get("__name__", ""))
            if level == 0 and name.split(".")[0] == module and importer.split(".")[0] == "sam3":
                return stand_in
            return real(name, globals, locals, fromlist, level)

        with replaced(builtins, "__import__", hook):
            yield

    importing_file = {"triton": "sam3/model/edt.py", "psutil": "sam3/model/sam3_video_predictor.py"}[module]
    return Patch(
        name=f"absent_{module}",
        assumption=f"{module} is installed",
        location=f"{importing_file}, import",
        reason=f"the whole package fails to import without {module}, which the image model never runs",
        needed=lambda: find_spec(module) is None,
        apply=apply,
    )


ABSENT_TRITON = _absent_module_patch("triton", frozenset({"jit"}))
ABSENT_PSUTIL = _absent_module_patch("psutil")


def _import_sets_tf32() -> bool:
    import torch

    return torch.cuda.is_available()


@contextmanager
def _keep_tf32() -> Iterator[None]:
    import torch

    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


KEEP_TF32 = Patch(
    name="keep_tf32",
    assumption="importing the package may switch TensorFloat-32 on for the whole process",
    location="sam3/model_builder.py, _setup_tf32",
    reason="a reference computed on the GPU afterwards would have 10 bits of mantissa",
    needed=_import_sets_tf32,
    apply=_keep_tf32,
)
