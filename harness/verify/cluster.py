"""Runs the processes of cases on the nodes of a Ray cluster that have what the cases need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from harness import __version__
from harness.compiler.targets import HOST
from harness.compiler.targets.llvm import required_features
from harness.core.case import Case
from harness.core.cluster import run_on_nodes
from harness.core.errors import HarnessError
from harness.core.outcome import CaseError
from harness.core.processes.call import Stopped, Template, WorkerEnd, WorkerResult, run_isolated
from harness.core.processes.threads import choose_threads, share_cpus, thread_count
from harness.core.processors import Processors
from harness.core.settings import Settings
from harness.runtime.cpu import cpu_features

FEATURES = {"amx": "amx-tile", "avx512": "avx512f", "arm64": "neon"}
"""Resource of a node → the feature of its CPU, in LLVM's spelling."""
_SHARE, _WHOLE = 0.001, 1.0
"""A case takes a share of such a resource, so that it limits no number of cases."""
_SECONDS, _LOOKS = 0.2, 50
"""Time between two looks at whether a case was stopped, and looks between two at the nodes."""


def resources_of_machine() -> dict[str, float]:
    """Returns the resources of this machine beside those that Ray finds: CPUs, memory and GPUs."""
    features = cpu_features() or frozenset()
    return {name: _WHOLE for name, feature in FEATURES.items() if feature in features}


def resources_of_case(case: Case, processors: Processors) -> dict[str, float]:
    """Returns the resources that a node must have to run a case; `GPU` is Ray's word for one."""
    if case.target != HOST.name:
        return {"GPU": _WHOLE}
    if processors.cpu is None:
        return {}
    required = required_features(processors)
    return {name: _SHARE for name, feature in FEATURES.items() if feature in required}


def check_nodes(memory_bytes: int | None = None) -> int:
    """Checks that each node of the connected Ray cluster has this version of the package, and returns their number.

    Args:
        memory_bytes: Memory that a case takes of a node; it takes `thread_count` CPUs, too.

    Raises:
        HarnessError: A node has another version, or none; or no node has room for a case.
    """
    import ray

    _check_room(memory_bytes, {})
    count = 0
    for node, version in run_on_nodes([node for node in ray.nodes() if node["Alive"]], _version):
        if version != __version__:
            raise HarnessError(
                f"The node {node['NodeManagerAddress']} has sam3-tvm {version} and not {__version__}; "
                "install the same version."
            )
        count += 1
    return count


def _version() -> str:
    return __version__


def _check_room(memory_bytes: int | None, resources: Mapping[str, float]) -> dict[str, float]:
    """Returns what a case takes of a node.

    Raises:
        HarnessError: No node has that.
    """
    room = {"CPU": thread_count(), "memory": memory_bytes or 0, **resources}
    if not _has_node(room):
        extra = "".join(f" and {name}" for name in resources)
        raise HarnessError(
            f"No node of the Ray cluster has room for a case on {thread_count()} threads{extra}; give fewer --threads, "
            "or a lower --memory-limit."
        )
    return room


def _has_node(needed: Mapping[str, float]) -> bool:
    """Returns whether a node has all these resources, used or not; Ray would wait for one that has."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return any(all(node.get(name, 0) >= amount for name, amount in needed.items()) for node in nodes)


def run_on_node(
    function: str,
    case: Case,
    settings: Settings,
    *,
    timeout: float | None = None,
    memory_limit_bytes: int | None = None,
    on_stage: Callable[[str], None] | None = None,
    template: Template | None = None,
    stop: threading.Event | None = None,
) -> WorkerResult:
    """Runs a case as `run_isolated` does, in a process on a node; its stages are called when it has ended.

    A node that is lost is replaced by another, twice.

    Raises:
        HarnessError: The input or the environment is wrong, or no node has room for the case.
        Stopped: `stop` was set before the case had ended.
    """
    import ray

    available = ray.cluster_resources()
    # What no node has is compiled anywhere, as on a machine without.
    needed = {
        name: amount for name, amount in resources_of_case(case, settings.processors).items() if name in available
    }
    room = _check_room(memory_limit_bytes, needed)
    task = ray.remote(_run).options(
        num_cpus=thread_count(),
        num_gpus=needed.pop("GPU", 0),
        resources=needed,
        memory=memory_limit_bytes,
        max_retries=2,
    )
    limits = {"timeout": timeout, "memory_limit_bytes": memory_limit_bytes}
    answer = task.remote(function, case, settings, limits, thread_count(), template is not None)
    if not _has_ended(answer, room, stop):
        lost = CaseError("NodeLost", "No node that is left has room for the case.")
        return WorkerResult(WorkerEnd.CRASHED, error=lost)
    try:
        result: WorkerResult = ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, HarnessError):
            raise error.cause from None
        raise
    except ray.exceptions.OutOfMemoryError as error:
        return WorkerResult(WorkerEnd.OUT_OF_MEMORY, error=CaseError("NodeMemory", str(error).partition("\n")[0]))
    except ray.exceptions.RayError as error:
        return WorkerResult(WorkerEnd.CRASHED, error=CaseError("NodeLost", str(error).partition("\n")[0]))
    if on_stage is not None:
        for crumb in result.breadcrumbs:
            on_stage(crumb.stage)
    return result


def _has_ended(answer: Any, room: Mapping[str, float], stop: threading.Event | None) -> bool:
    """Waits until a task has ended, and returns True; False if no node that is left has room for it.

    Raises:
        Stopped: `stop` was set before the task had ended.
    """
    import ray

    looks = 0
    while not ray.wait([answer], timeout=_SECONDS)[0]:
        looks += 1
        is_stopped = stop is not None and stop.is_set()
        if is_stopped or (looks % _LOOKS == 0 and not _has_node(room)):
            ray.cancel(answer, force=True)
            if is_stopped:
                raise Stopped
            return False
    return True


@cache
def _template() -> Template:
    """Returns the template of this node's process, which ends with it."""
    from harness.verify.runner import library_template

    return library_template()


def _run(
    function: str, case: Case, settings: Settings, limits: Mapping[str, Any], threads: int, has_template: bool
) -> WorkerResult:
    """Runs a case on the node that this process belongs to."""
    choose_threads(threads)
    share_cpus()
    return run_isolated(function, case, settings, **limits, template=_template() if has_template else None)


def resolved(settings: Settings) -> Settings:
    """Returns settings whose paths mean the same in every folder."""
    paths = {name: getattr(settings, name) for name in ("checkpoint", "image", "database", "model")}
    return replace(settings, **{name: path.resolve() for name, path in paths.items() if path is not None})
