"""Finds the source files that a module's results depend on: its import closure, for keys of cached arrays.

Imports are read from the source and not executed. Imports inside functions count, because they run with the code; those
under `if TYPE_CHECKING:` do not.
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
    """Returns the sorted files of modules and of everything that they import from their own packages.

    A package stands for its `__init__.py`. The parent packages of an imported module count too, because importing the
    module runs them.

    Args:
        modules: Dotted names of the modules.

    Raises:
        HarnessError: A module does not exist, or a file cannot be read.
    """
    packages = {name.partition(".")[0] for name in modules}
    files: dict[str, Path] = {}
    pending = list(modules)
    while pending:
        name = pending.pop()
        if name in files:
            continue
        path = _source_of(name)
        if path is None:
            raise HarnessError(f"there is no module {name!r} to take the import closure of; reinstall the package")
        files[name] = path
        parent = name.rpartition(".")[0]
        pending += [parent] if parent else []
        pending += _imports(path, name, packages)
    return tuple(sorted(set(files.values())))


def closure_digest(*modules: str) -> str:
    """Computes the SHA-256 of the names and contents of the files of `import_closure`.

    Raises:
        HarnessError: A module does not exist, or a file cannot be read.
    """
    digest = hashlib.sha256()
    package = _source_of(modules[0].partition(".")[0])
    assert package is not None
    root = package.parent.parent
    for path in import_closure(*modules):
        content = path.read_bytes()
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        digest.update(f"{name}\n{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _imports(path: Path, module: str, packages: Collection[str]) -> Iterator[str]:
    """Yields the modules of `packages` that a file imports; `from a import b` is `a.b` if that is one, else `a`."""
    try:
        statements = _import_statements(path.read_bytes())
    except (OSError, SyntaxError) as error:
        raise HarnessError(f"cannot read the source file {path}: {error}; reinstall the package") from error
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for level, source_name, names in statements:
        if source_name is None:
            yield from (name for name in names if name.partition(".")[0] in packages)
        else:
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - level + 1]) if level else ""
            source = ".".join(part for part in (base, source_name) if part)
            for name in names if source.partition(".")[0] in packages else ():
                submodule = f"{source}.{name}"
                yield submodule if _source_of(submodule) else source


@cache
def _import_statements(content: bytes) -> tuple[tuple[int, str | None, tuple[str, ...]], ...]:
    """Returns level, module and names of each import in a source file; the module of `import a` is None.

    The result is cached, because several keys of one case cover the same hundred files.
    """
    statements: list[tuple[int, str | None, tuple[str, ...]]] = []
    for node in _runtime_nodes(ast.parse(content)):
        if isinstance(node, ast.Import):
            statements.append((0, None, tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.ImportFrom):
            statements.append((node.level, node.module or "", tuple(alias.name for alias in node.names)))
    return tuple(statements)


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a syntax tree, except those that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (inner for statement in child.orelse for inner in (statement, *_runtime_nodes(statement)))
            continue
        yield child
        yield from _runtime_nodes(child)


def _source_of(name: str) -> Path | None:
    """Returns the source file of a module, if any; only top-level packages are found by the import system."""
    top, *submodules = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        folders = list(spec.submodule_search_locations or []) if spec is not None else []
        return _file_in(Path(folders[0]), submodules) if folders else None
    origin = Path(spec.origin)
    return _file_in(origin.parent, submodules) if origin.name == "__init__.py" else (origin if not submodules else None)


def _file_in(folder: Path, submodules: list[str]) -> Path | None:
    path = folder.joinpath(*submodules)
    candidates = path / "__init__.py", path.with_name(f"{path.name}.py") if submodules else path
    return next(filter(Path.is_file, candidates), None)
