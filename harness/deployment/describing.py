"""What a folder says of itself: its manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.case import Case
from harness.core.settings import Settings
from harness.core.weights import Weights
from harness.deployment.deployable import Deployable
from harness.deployment.imported import Contents
from harness.runtime.manifest import Entry, File, Manifest
from harness.runtime.weights import file_digest
from harness.targets import TARGETS

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
    from harness.machine import versions
    from harness.targets.compiling import platform_of, required_cpu

    case, settings, deployable = contents.case, contents.settings, contents.deployable
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
        model=deployable.model,
        scale=str(case.scale),
        strategy=case.strategy,
        weights=origin(case, settings),
        trained=settings.checkpoint is not None,
        point_prompts=point_prompts(deployable, settings),
        precision=case.precision,
        float32=tuple(sorted(contents.float32)),
        frontend=case.frontend,
        capacity=contents.capacity,
        vocabulary=deployable.vocabulary,
        entries=entries,
        files=dict(sorted(files.items())),
    )


def described(folder: Path, known: Iterable[str] = ()) -> dict[str, File]:
    """Returns size and checksum of each file of a folder that is not known, by name."""
    return {path.name: file_digest(path) for path in folder.iterdir() if path.is_file() and path.name not in known}


def origin(case: Case, settings: Settings) -> str:
    """Returns where the weights are from, in words."""
    if settings.checkpoint is None:
        return f"seed {case.seed}" if case.weights == Weights.SEEDED else f"seed {case.seed}, {case.weights}"
    rest = f", what it lacks from seed {case.seed}" if settings.allow_partial else ""
    return f"{settings.checkpoint.name}, SHA-256 {file_digest(settings.checkpoint).sha256}{rest}"


def point_prompts(deployable: Deployable, settings: Settings) -> bool:
    """Returns whether the weights know points as prompts."""
    return settings.checkpoint is None or deployable.knows_points(settings.checkpoint)


def now() -> str:
    """Returns the time, as manifests have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
