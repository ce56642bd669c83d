"""Lists combinations of installed versions that do not work together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MISSING = "missing"
"""Condition that a package is not installed."""


@dataclass(frozen=True)
class KnownBad:
    """A combination of versions that is known not to work.

    Attributes:
        conditions: Condition by package, all of which must hold: a version range as in a requirement (`>=0.27,<0.28`),
            `missing`, `+cpu` for a version with that local label, or `+` for a version without a label.
        problem: Description of the problem.
        fix: Advice for the user.
    """

    conditions: Mapping[str, str]
    problem: str
    fix: str


KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad(
        {"apache-tvm": ">=0.27,<0.28", "apache-tvm-ffi": ">=0.1.15"},
        "structural hashing crashes the process in MetaSchedule's search and DLight's tensorized matrix products",
        "pip install 'apache-tvm-ffi<0.1.15'",
    ),
    KnownBad(
        {"torch": "+cpu", "torchvision": "+"},
        "torchvision's operators are built for the CUDA build of torch and cannot load beside a CPU-only one",
        "install both from PyPI, or both from PyTorch's CPU index",
    ),
    KnownBad({"sam3": ">=0.1.4", "psutil": MISSING}, "sam3 imports psutil without requiring it", "pip install psutil"),
    KnownBad(
        {"sam3": ">=0.1.4", "open_clip_torch": MISSING},
        "the sam3 wheel lacks the vocabulary that its text encoder opens",
        "pip install open_clip_torch, which carries the same file",
    ),
    KnownBad(
        {"torch": ">=0", "torchvision": MISSING},
        "sam3 needs torchvision beside torch",
        "pip install 'sam3-tvm[verify]'",
    ),
    KnownBad(
        {"torch": ">=0", "sam3": MISSING},
        "sam3 is not installed: nothing can be verified",
        "pip install 'sam3-tvm[verify]'",
    ),
    KnownBad({"sam3": ">=0", "numpy": ">=2.4"}, "sam3 asks for NumPy below 2.4", "pip install 'numpy<2.4'"),
)
"""Every combination that is known to fail; a new combination is one more entry."""

PACKAGES = (
    *("apache-tvm", "apache-tvm-ffi", "numpy", "torch", "torchvision", "sam3"),
    *("open_clip_torch", "psutil", "triton", "xgboost"),
)
"""Packages whose versions matter."""


def known_bad(versions: Mapping[str, str]) -> tuple[KnownBad, ...]:
    """Returns the entries of `KNOWN_BAD` whose conditions hold for the installed versions."""
    return tuple(
        entry
        for entry in KNOWN_BAD
        if all(_holds(name, condition, versions) for name, condition in entry.conditions.items())
    )


def _holds(name: str, condition: str, versions: Mapping[str, str]) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    version = versions.get(name)
    if version is None or condition == MISSING:
        return version is None and condition == MISSING
    if condition.startswith("+"):
        return version.partition("+")[2] == condition[1:]
    try:
        return SpecifierSet(condition).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
