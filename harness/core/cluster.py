"""Connects this process to a Ray cluster, or to one that is started on this machine alone."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import __version__
from harness.core.errors import HarnessError
from harness.runtime.errors import reason
from harness.runtime.threads import usable_cpus

ADDRESS_VARIABLE = "RAY_ADDRESS"
"""Ray's environment variable with the default of the address."""
_VARIABLES = {
    # No log on the terminal, and nothing is sent to Ray's makers.
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^",  # it prints a page for each worker or node that is lost
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # it prints the traceback of each task that an interrupt ended
}
"""Ray's variables, unless the environment has them."""
_CLUSTER_VARIABLES = {"RAY_NUM_REDIS_GET_RETRIES": "1", "RAY_py_gcs_connect_timeout_s": "15"}
"""Those for a cluster: by default Ray asks whatever listens at the address for ten minutes."""
_SECONDS = 5
"""Time for a cluster to accept a connection."""
_thread = threading.local()
"""Has `starts_ray` in the thread that starts Ray's processes."""


@contextmanager
def connect(address: str | None = None, resources: Mapping[str, float] | None = None) -> Iterator[str | None]:
    """Connects to Ray in the context; a cluster that was started for it ends with it.

    Args:
        address: `HOST:PORT` of a cluster that this machine belongs to. By default `RAY_ADDRESS`, otherwise one is
            started on this machine.
        resources: Resources of that one beside the CPUs, memory and GPUs, which Ray finds.

    Yields:
        The address of the cluster's dashboard; None if there is none.

    Raises:
        HarnessError: Ray is not installed, or there is no cluster.
    """
    if find_spec("ray") is None:
        raise HarnessError("Ray is not installed; pip install 'sam3-tvm[ray]', or leave out --ray.")
    address = address or os.environ.get(ADDRESS_VARIABLE) or None
    if address is not None:
        _check(address)
    for name, value in (_VARIABLES if address is None else _VARIABLES | _CLUSTER_VARIABLES).items():
        os.environ.setdefault(name, value)
    import ray

    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        settings |= {"num_cpus": usable_cpus(), "include_dashboard": False, "resources": resources}
    start = partial(_start, partial(ray.init, address or "local", **settings))
    # In a thread, so that an interrupt waits for what Ray is starting; all of that ends with the thread.
    with ThreadPoolExecutor(1) as executor, ExitStack() as cleanup:
        cleanup.callback(_disconnect)
        try:
            with _silence():
                started = executor.submit(start)
                try:
                    context = started.result()
                finally:
                    wait([started])
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            if "AuthenticationError" in str(error.__cause__):
                raise HarnessError(
                    f"The cluster at {address} wants its token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN."
                ) from error
            raise _no_cluster(address or "this machine", reason(error)) from error
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # for which Ray prints its stack
        yield context.dashboard_url or None


def _disconnect() -> None:
    """Leaves the cluster; where its head is lost, Ray does so when this process ends, for it waits for the head."""
    import ray

    if not ray.is_initialized() or has_head():
        ray.shutdown()


def _start(init: Callable[[], Any]) -> Any:
    _thread.starts_ray = True
    return init()


def _leave_group() -> None:
    """Takes a process of Ray out of the command's group: a signal to all of the group is for the command to handle.

    Linux ends the process with the thread that started it; elsewhere Ray ends the group.
    """
    if getattr(_thread, "starts_ray", False) and sys.platform == "linux":
        os.setpgid(0, 0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_group)


def _check(address: str) -> None:
    """Refuses an address where nothing accepts connections."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise HarnessError(
            f"The address {address!r} of Ray is not HOST:PORT; give that of the cluster's head, whose port is 6379 "
            "unless `ray start` says otherwise."
        )
    try:
        socket.create_connection((host, int(port)), _SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, reason(error)) from error


def has_head() -> bool:
    """Returns whether the head of this process's cluster accepts connections; Ray's own calls would wait for it."""
    import ray

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _SECONDS).close()
    except OSError:
        return False
    return True


def run_on_nodes(nodes: Iterable[Mapping[str, Any]], function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """Runs a function on nodes of this process's cluster at once; yields each node with its result.

    A node that is lost meanwhile is left out.

    Args:
        nodes: The nodes, as `ray.nodes` describes them.
        function: A function of this package.
        arguments: Its arguments.

    Raises:
        HarnessError: The package does not start on a node.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    answers = {}
    for node in nodes:
        place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(num_cpus=0, scheduling_strategy=place)(function)
        answers[task.remote(*arguments)] = node
    for answer, node in answers.items():
        try:
            result = ray.get(answer)
        except ray.exceptions.TaskUnschedulableError:
            continue
        except ray.exceptions.RayError as error:
            raise HarnessError(
                f"sam3-tvm does not start on the node {node['NodeManagerAddress']} "
                f"({str(error).strip().splitlines()[-1]}); install {__version__} in the Python of Ray there."
            ) from error
        yield node, result


def _no_cluster(place: str, problem: str) -> HarnessError:
    return HarnessError(
        f"No Ray cluster can be used at {place} ({problem}); start one with `ray start` on this machine, "
        "or leave the address out to use this machine alone."
    )


@contextmanager
def _silence() -> Iterator[None]:
    """Drops what native code writes to stderr in the context: Ray says there that its log is off."""
    with os.fdopen(os.dup(2), "wb") as stderr, Path(os.devnull).open("wb") as null:
        os.dup2(null.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr.fileno(), 2)
