"""Deploys a compiled model as a service on a Ray cluster."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.app.serve.gate import APPLICATION, MODEL, Gate
from harness.app.serve.replica import MOST_TOGETHER, Replica
from harness.core.errors import HarnessError
from harness.core.processes.threads import SPIN_VARIABLE
from harness.runtime.threads import BINDING_VARIABLE

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
"""Sends the requests about one image to one replica."""
_MOST_REQUESTS = 1000
"""Maximum number of requests that are checked or wait for their answers at a time."""

_SHARING = {BINDING_VARIABLE: "0", SPIN_VARIABLE: "0"}
"""Variables of replicas that share a machine: each would bind its threads to the first CPUs, and spin there."""
_GRACE_SECONDS = 20
"""Time for running requests when the service ends."""


@dataclass(frozen=True)
class Limits:
    """The limits of a service.

    Attributes:
        encoded: Maximum number of encoded images in the memory of a replica.
        queue: Maximum number of requests that wait, besides the `MOST_TOGETHER` of each replica.
        seconds: Maximum time for an answer.
    """

    encoded: int
    queue: int
    seconds: float


@contextmanager
def deploy(
    folder: Path, description: Mapping[str, str], replicas: int, threads: int, limits: Limits, host: str, port: int
) -> Iterator[None]:
    """Serves a model on the connected Ray cluster as long as the context lasts.

    Args:
        folder: Folder of the compiled model, by the same path on every node.
        description: The model in `/health`.
        replicas: Number of replicas.
        threads: Threads, and CPUs, of each replica.
        limits: The limits.
        host: Address at which each node that has a replica listens.
        port: Port there.

    Raises:
        HarnessError: There is no room for the replicas, or one does not start.
    """
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig
    from ray.serve.schema import LoggingConfig

    room = sum(int(node["Resources"].get("CPU", 0) // threads) for node in ray.nodes() if node["Alive"])
    if replicas > room:
        raise HarnessError(
            f"Ray has room for {room} replicas on {threads} threads each, and {replicas} were asked for; "
            "give fewer --replicas or --threads."
        )
    quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(http_options={"host": host, "port": port}, logging_config=quiet)
    model = serve.deployment(Replica).options(
        name=MODEL,
        num_replicas=replicas,
        ray_actor_options={"num_cpus": threads, "runtime_env": {"env_vars": _SHARING if replicas > 1 else {}}},
        max_ongoing_requests=MOST_TOGETHER,
        max_queued_requests=limits.queue,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
    )
    gate = serve.deployment(serve.ingress()(Gate)).options(
        name="gate", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=_MOST_REQUESTS
    )
    application = gate.bind(
        model.bind(str(folder.resolve()), threads, limits.encoded), limits.seconds, dict(description)
    )
    try:
        try:
            serve.run(application, name=APPLICATION, logging_config=quiet)
        except RuntimeError as error:
            message = serve.status().applications[APPLICATION].deployments[MODEL].message
            raise HarnessError(f"A replica does not start: {_last_error(message)}") from error
        yield
    finally:
        # A cluster that was killed at the same time does not answer.
        end = threading.Thread(target=serve.delete, args=(APPLICATION,), daemon=True)
        end.start()
        end.join(_GRACE_SECONDS)


def _last_error(message: str) -> str:
    """Returns the sentence of the last error in a message of Ray Serve, which has the traceback of a replica."""
    lines = [line for line in message.splitlines() if line.strip()]
    errors = [line.partition(": ")[2] for line in lines if line.startswith("harness.")]
    return (errors or lines or ["Ray's logs say why."])[-1]
