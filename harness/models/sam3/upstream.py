"""Makes the unmodified sam3 package importable and runnable on any machine, inside `with upstream():`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec, module_from_spec

from harness.core.errors import HarnessError
from harness.models.sam3.patches import IMPORT_PATCHES, RUN_PATCHES, Patch

_depth = 0


def needed_patches() -> tuple[Patch, ...]:
    """Returns the patches that this machine and this version of sam3 need, in the order in which they are applied."""
    return tuple(patch for patch in (*IMPORT_PATCHES, *RUN_PATCHES) if patch.needed())


@contextmanager
def without_known_warnings() -> Iterator[None]:
    """Hides the warnings that upstream always raises when it is imported or built, about parts that are not run."""
    with warnings.catch_warnings():
        # Decorators of the video part, at import.
        warnings.filterwarnings("ignore", message="CUDA is not available", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated", category=FutureWarning)
        yield


def import_sam3() -> None:
    """Imports sam3's image model, with stand-ins for modules that only its video part runs.

    Raises:
        HarnessError: sam3 or one of its requirements is not installed.
    """
    if "sam3.model_builder" in sys.modules:
        return
    with ExitStack() as stack:
        for patch in IMPORT_PATCHES:
            if patch.needed():
                stack.enter_context(patch.apply())
        stack.enter_context(without_known_warnings())
        stack.enter_context(_without_timm_models())
        try:
            import sam3.model_builder  # noqa: F401
        except ModuleNotFoundError as error:
            raise HarnessError(
                f"sam3 cannot be imported because {error.name} is not installed; "
                "install the project with its extra [verify]."
            ) from error


@contextmanager
def _without_timm_models() -> Iterator[None]:
    """Imports of timm no more than `timm.layers`, which sam3 uses; its models take a third of a second."""
    spec = None if "timm" in sys.modules else find_spec("timm")
    if spec is None:
        yield
        return
    sys.modules["timm"] = module_from_spec(spec)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
            del sys.modules[name]  # another import of timm gets all of it


@contextmanager
def upstream() -> Iterator[None]:
    """Imports sam3 and lifts its assumptions about the machine for the duration of the context.

    The model is built, run and exported inside it. Contexts may be nested; the outermost one applies and undoes.

    Raises:
        HarnessError: sam3 or one of its requirements is not installed.
    """
    global _depth
    import_sam3()
    with ExitStack() as stack:
        if _depth == 0:
            for patch in RUN_PATCHES:
                if patch.needed():
                    stack.enter_context(patch.apply())
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
