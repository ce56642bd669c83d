"""What a folder says of itself: its manifest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from harness.compiler.deployment.deployable import ModelOptions
from harness.compiler.deployment.imported import Contents
from harness.compiler.targets import TARGETS
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.settings import Settings
from harness.core.weights import Weights
from harness.runtime.manifest import Entry, File, Manifest
from harness.runtime.weights import file_digest

if TYPE_CHECKING:
    import tvm


def describe(
    contents: Contents,
    schedules: str,
    tvm_target: tvm.target.Target,
    entries: Mapping[str, Entry],
    files: Mapping[str, File],
) -> Manifest:
    """Returns the manifest of a folder.

    Args:
        contents: What is in it.
        schedules: Where schedules are from, in words.
        tvm_target: What was compiled for.
        entries: The entry points, by name.
        files: The files of the folder, by name.
    """
    from harness.compiler.targets.compiling import platform_of, required_cpu
    from harness.core.machine import versions

    case, settings = contents.case, contents.settings
    host = tvm_target.host or tvm_target
    cpu, features = required_cpu(host)
    system, architecture = platform_of(host)
    architectures = TARGETS[case.target].architectures
    packages = {name: version for name, version in versions().items() if version}
    return Manifest(
        made={
            "compiled": now(),
            "target": str(tvm_target),
            "schedules": schedules,
            **packages,
        },
        target=case.target,
        system=system,
        architecture=architecture,
        cpu=cpu,
        cpu_features=tuple(features),
        architectures=architectures(tvm_target) if architectures is not None else (),
        model=contents.deployable.model,
        scale=str(case.scale),
        strategy=case.strategy,
        weights=origin(case, settings),
        trained=settings.checkpoint is not None,
        precision=case.precision,
        float32=tuple(sorted(contents.float32)),
        frontend=case.frontend,
        entries=entries,
        files=dict(sorted(files.items())),
        extra=contents.options.manifest_part(settings),
    )


def check_described(
    manifest: Manifest, case: Case, settings: Settings, found_options: ModelOptions, options: ModelOptions
) -> None:
    """Checks that a folder is what a case compiles: the same model with the same weights and all that is judged.

    Args:
        manifest: Its manifest.
        case: The case.
        settings: Where the weights come from.
        found_options: The options of the folder.
        options: The options that the case needs.

    Raises:
        HarnessError: It is another.
    """
    compiled = {
        "target": (manifest.target, case.target),
        "scale": (manifest.scale, case.scale),
        "strategy": (manifest.strategy, case.strategy),
        "precision": (manifest.precision, case.precision),
        "frontend": (manifest.frontend, case.frontend),
    }
    for name, (found, asked) in compiled.items():
        if found != asked:
            raise HarnessError(f"The folder was compiled with {name} {found}, not {asked}: leave out --{name}.")
    if not found_options.includes(options):
        raise HarnessError(
            f"{case.component} needs a model of {options}, and the folder has {found_options}: leave out "
            f"--component {case.component}, or compile such a model."
        )
    expected = origin(case, settings)
    # A checkpoint may have got another name since.
    if manifest.weights.rpartition(_DIGEST)[2] != expected.rpartition(_DIGEST)[2]:
        raise HarnessError(
            f"The folder has weights of {manifest.weights}, and would be judged by those of {expected}: give the "
            "same as when it was packed with --checkpoint, --allow-partial and --seed."
        )


_DIGEST = ", SHA-256 "


def described(folder: Path, known: Iterable[str] = ()) -> dict[str, File]:
    """Returns size and checksum of each file of a folder that is not known, by name."""
    return {path.name: file_digest(path) for path in folder.iterdir() if path.is_file() and path.name not in known}


def origin(case: Case, settings: Settings) -> str:
    """Returns where the weights are from, in words."""
    if settings.checkpoint is None:
        return f"seed {case.seed}" if case.weights == Weights.SEEDED else f"seed {case.seed}, {case.weights}"
    rest = f", what it lacks from seed {case.seed}" if settings.allow_partial else ""
    return f"{settings.checkpoint.name}{_DIGEST}{file_digest(settings.checkpoint).sha256}{rest}"


def seed_of(manifest: Manifest) -> int:
    """Returns the seed of the weights that a folder does not have from a checkpoint; see `origin`."""
    seed = re.search(r"seed (\d+)", manifest.weights)
    return 0 if seed is None else int(seed[1])


def now() -> str:
    """Returns the time, as manifests have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
