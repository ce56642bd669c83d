"""Describes a compiled folder by its manifest, and compares a manifest with a case."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from harness.compiler.deployment.deployable import ArtifactSpec, ModelOptions
from harness.compiler.targets import TARGETS
from harness.core.case import Case, Weights
from harness.core.checkpoint_file import checkpoint_digest
from harness.core.errors import HarnessError
from harness.core.settings import Settings
from harness.runtime.manifest import Entry, File, Manifest
from harness.runtime.weights import file_digest

if TYPE_CHECKING:
    import tvm


def describe(
    spec: ArtifactSpec,
    schedules: str,
    tvm_target: tvm.target.Target,
    entries: Mapping[str, Entry],
    files: Mapping[str, File],
) -> Manifest:
    """Returns the manifest of a folder.

    Args:
        spec: The artifact that the folder has.
        schedules: Origin of the schedules, in words.
        tvm_target: TVM's target that the folder was compiled for.
        entries: The entry points, by name.
        files: The files of the folder, by name.
    """
    from harness.compiler.targets.compiling import platform_of
    from harness.compiler.targets.llvm import required_cpu
    from harness.core.machine import versions

    case, settings = spec.case, spec.settings
    host = tvm_target.host or tvm_target
    cpu, features = required_cpu(host)
    system, architecture = platform_of(host)
    architectures = TARGETS[case.target].architectures
    packages = {name: version for name, version in versions().items() if version}
    return Manifest(
        made={"compiled": timestamp(), "target": str(tvm_target), "schedules": schedules, **packages},
        target=case.target,
        system=system,
        architecture=architecture,
        cpu=cpu,
        cpu_features=tuple(features),
        architectures=architectures(tvm_target) if architectures is not None else (),
        model=spec.deployable.model,
        scale=str(case.scale),
        strategy=case.strategy,
        weights=describe_weights(case, settings),
        trained=settings.checkpoint is not None,
        precision=case.precision,
        float32=tuple(sorted(settings.float32)),
        frontend=case.frontend,
        entries=entries,
        files=dict(sorted(files.items())),
        extra=spec.options.manifest_part(settings),
    )


def check_matches(
    manifest: Manifest, case: Case, settings: Settings, found_options: ModelOptions, options: ModelOptions
) -> None:
    """Checks that a folder was compiled from the model, weights and options of a case.

    Args:
        manifest: Its manifest.
        case: The case.
        settings: Where the weights come from.
        found_options: The options of the folder.
        options: The options that the case needs.

    Raises:
        HarnessError: It was compiled from others.
    """
    for name in ("target", "scale", "strategy", "precision", "frontend"):
        actual, requested = getattr(manifest, name), getattr(case, name)
        if actual != requested:
            raise HarnessError(f"The folder was compiled with {name} {actual}, not {requested}: leave out --{name}.")
    if not found_options.includes(options):
        raise HarnessError(
            f"{case.component} needs a model of {options}, and the folder has {found_options}: leave out "
            f"--component {case.component}, or compile such a model."
        )
    weights = describe_weights(case, settings)
    # A checkpoint may have got another name since.
    if manifest.weights.rpartition(_DIGEST)[2] != weights.rpartition(_DIGEST)[2]:
        raise HarnessError(
            f"The folder has weights of {manifest.weights}, and would be judged by those of {weights}: give the "
            "same as when it was packed with --checkpoint, --allow-partial and --seed."
        )


_DIGEST = ", SHA-256 "


def describe_files(folder: Path, excluded: Iterable[str] = ()) -> dict[str, File]:
    """Returns size and checksum of each file of a folder by name, the excluded names aside."""
    return {path.name: file_digest(path) for path in folder.iterdir() if path.is_file() and path.name not in excluded}


def describe_weights(case: Case, settings: Settings) -> str:
    """Returns the origin of the weights, in words."""
    if settings.checkpoint is None:
        return f"seed {case.seed}" if case.weights == Weights.SEEDED else f"seed {case.seed}, {case.weights}"
    remainder = f", what it lacks from seed {case.seed}" if settings.allow_partial else ""
    return f"{settings.checkpoint.name}{_DIGEST}{checkpoint_digest(settings.checkpoint).sha256}{remainder}"


def read_seed(manifest: Manifest) -> int:
    """Returns the seed of the weights that a folder does not have from a checkpoint; see `describe_weights`."""
    seed = re.search(r"seed (\d+)", manifest.weights)
    return 0 if seed is None else int(seed[1])


def timestamp() -> str:
    """Returns the current time in UTC, in the manifest's format."""
    return datetime.now(UTC).isoformat(timespec="seconds")
