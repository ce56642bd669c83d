"""The source files that a module's results depend on: its import closure, for keys of cached arrays.

Imports are read from the source and not executed. Those inside functions count, because they run when the code does;
those under `if TYPE_CHECKING:` do not.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from harness.core.errors import HarnessError


def import_closure(*modules: str) -> tuple[Path, ...]:
    """Returns the files of these modules and of all that they import from the packages that they are in, sorted.

    A package stands for its `__init__.py`; the packages around an imported module count too, because importing the
    module runs them.

    Args:
        modules: Dotted names.

    Raises:
        HarnessError: There is no such module, or a file cannot be read.
    """
    tops = {name.partition(".")[0] for name in modules}
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        path = _source_of(name)
        if path is None:
            raise HarnessError(f"there is no module {name!r} to take the import closure of; reinstall the package")
        found[name] = path
        around = name.rpartition(".")[0]
        waiting += [around] if around else []
        waiting += _imports(path, name, tops)
    return tuple(sorted(set(found.values())))


def closure_digest(*modules: str) -> str:
    """Computes the SHA-256 over the files of `import_closure`: their names and contents.

    Raises:
        HarnessError: As `import_closure`.
    """
    digest = hashlib.sha256()
    root = _root_of(modules[0])
    for path in import_closure(*modules):
        content = path.read_bytes()
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        digest.update(f"{name}\n{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _root_of(module: str) -> Path:
    """Returns the folder that a module's top package is in."""
    path = _source_of(module.partition(".")[0])
    assert path is not None
    return path.parent.parent


def _imports(path: Path, module: str, tops: Collection[str]) -> Iterator[str]:
    """Yields the modules below `tops` that a file imports; `from a import b` is `a.b` if that is a module, else `a`."""
    try:
        statements = _import_statements(path.read_bytes())
    except (OSError, SyntaxError) as error:
        raise HarnessError(f"cannot read the source file {path}: {error}; reinstall the package") from error
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for level, named, names in statements:
        if named is None:
            yield from (name for name in names if name.partition(".")[0] in tops)
        else:
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - level + 1]) if level else ""
            source = ".".join(part for part in (base, named) if part)
            for name in names if source.partition(".")[0] in tops else ():
                inner = f"{source}.{name}"
                yield inner if _source_of(inner) else source


@cache
def _import_statements(content: bytes) -> tuple[tuple[int, str | None, tuple[str, ...]], ...]:
    """Returns level, module and names of each import in a source file; the module of `import a` is None.

    Several keys of one case are about the same hundred files.
    """
    found: list[tuple[int, str | None, tuple[str, ...]]] = []
    for node in _run(ast.parse(content)):
        if isinstance(node, ast.Import):
            found.append((0, None, tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or "", tuple(alias.name for alias in node.names)))
    return tuple(found)


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a tree without what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (inner for other in child.orelse for inner in (other, *_run(other)))
            continue
        yield child
        yield from _run(child)


def _source_of(name: str) -> Path | None:
    """Returns the source file of a module, if any. Only top packages are looked up in the import system."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        folders = list(spec.submodule_search_locations or []) if spec is not None else []
        return _inside(Path(folders[0]), rest) if folders else None
    origin = Path(spec.origin)
    return _inside(origin.parent, rest) if origin.name == "__init__.py" else (origin if not rest else None)


def _inside(folder: Path, rest: list[str]) -> Path | None:
    path = folder.joinpath(*rest)
    for candidate in (path / "__init__.py", path.with_name(f"{path.name}.py") if rest else path):
        if candidate.is_file():
            return candidate
    return None
