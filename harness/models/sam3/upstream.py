"""Makes the unmodified sam3 package importable and runnable on any machine, inside `with upstream():`."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec

from harness.core.errors import HarnessError
from harness.models.sam3.patches import IMPORT_PATCHES, RUN_PATCHES
from harness.models.sam3.patches.absent_modules import importing_without
from harness.models.sam3.vocabulary import package_folder

_depth = 0


@cache
def source_digest() -> str:
    """Computes the SHA-256 of sam3's source files; upstream's main has one version number, whatever it contains."""
    digest = hashlib.sha256()
    if (folder := package_folder()) is not None:
        for path in sorted(folder.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()}\n{len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


@contextmanager
def without_known_warnings() -> Iterator[None]:
    """Hides the warnings that upstream always raises when it is imported or built, about parts that are not run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="pkg_resources is deprecated", category=UserWarning)
        # Decorators of the video part, at import.
        warnings.filterwarnings("ignore", message="CUDA is not available", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated", category=FutureWarning)
        yield


def import_sam3() -> None:
    """Imports sam3's image model, with stand-ins for packages that are not installed and that it needs for other parts.

    Raises:
        HarnessError: sam3 is not installed, or it is of an unknown version.
    """
    if "sam3.model_builder" in sys.modules:
        return
    absent: set[str] = set()
    with ExitStack() as stack:
        for patch in IMPORT_PATCHES:
            if patch.needed():
                stack.enter_context(patch.apply())
        stack.enter_context(without_known_warnings())
        stack.enter_context(_without_timm_models())
        stack.enter_context(importing_without(absent))
        # An import that upstream guards itself never gets here: its package needs no stand-in.
        while (missing := _missing_package()) is not None:
            if missing in absent or missing == "sam3":
                raise HarnessError(
                    f"sam3 cannot be imported because {missing} is not installed; "
                    "install the project with its extra [verify]."
                )
            absent.add(missing)


def _missing_package() -> str | None:
    """Imports sam3's image model, and returns the package without which that fails; None if it is imported."""
    try:
        import sam3.model_builder  # noqa: F401
    except ModuleNotFoundError as error:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sam3"]:
            del sys.modules[name]
        return str(error.name).partition(".")[0]
    except Exception as error:
        raise _unknown_version(error) from error
    return None


def _unknown_version(error: Exception) -> HarnessError:
    return HarnessError(
        f"The installed sam3 is of a version that is not known here ({type(error).__name__}: {error}); "
        "install sam3 0.1.4, or upstream's main of July 2026 or before."
    )


@contextmanager
def _without_timm_models() -> Iterator[None]:
    """Imports of timm no more than `timm.layers`, which sam3 uses, under its old name too; models take time."""
    spec = None if "timm" in sys.modules else find_spec("timm")
    if spec is None:
        yield
        return
    sys.modules["timm"] = module_from_spec(spec)
    try:
        sys.modules["timm.models.layers"] = import_module("timm.layers")
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
            del sys.modules[name]  # another import of timm gets all of it


@contextmanager
def upstream() -> Iterator[None]:
    """Imports sam3 and lifts its assumptions about the machine for the duration of the context.

    The model is built, run and exported inside it. Contexts may be nested; the outermost one applies and undoes.

    Raises:
        HarnessError: sam3 is not installed, or it is of an unknown version.
    """
    global _depth
    import_sam3()
    with ExitStack() as stack:
        if _depth == 0:
            for patch in RUN_PATCHES:
                if patch.needed():
                    try:
                        stack.enter_context(patch.apply())
                    except (AttributeError, ImportError) as error:
                        raise _unknown_version(error) from error
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
