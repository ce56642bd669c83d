"""Lets peers run the entry points of a compiled folder: the whole model as `harness.runtime` asks it, by other code.

So a peer gets the division into entry points, and does nothing twice that ours does once. Preprocessing of images and
resizing of masks are no modules of PyTorch; the folder's own code runs them for every peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core.case import Case
from harness.core.program import Program
from harness.core.settings import Settings
from harness.runtime import Sam3
from harness.runtime.artifact import Artifact, Tensors
from harness.runtime.loading import load_runtime
from harness.runtime.sam3.description import NAME
from perf import peers
from perf.peers import EXPORT, PEERS, PeerError
from perf.processes import Calls, Load
from perf.sides import RUN, Request

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.deployed.options import Sam3Options

Run = Callable[..., list[np.ndarray]]


@dataclass(frozen=True)
class ModelPeer:
    """A peer that runs the entry points of a folder.

    Attributes:
        name: A key of `perf.peers.PEERS`.
        case: The case of the model.
        options: The model's options.
        folder: Where its files are, in a folder for each entry point.
    """

    name: str
    case: Case
    options: Sam3Options
    folder: Path

    def requests(self) -> dict[str, EntryRequest]:
        """Builds the model, and returns what the peer's sides take by entry point; inside the model's context.

        Raises:
            PeerError: An entry point has a symbolic axis, and files of peers have fixed shapes.
        """
        from harness.models.sam3.deployed.deployable import DEPLOYABLE

        found: dict[str, EntryRequest] = {}
        for program in DEPLOYABLE.programs(self.case, Settings(), self.options):
            if any(program.axes):
                raise PeerError(f"{program.name} takes any number of inputs, and files of peers have fixed shapes")
            folder = self.folder / program.name
            folder.mkdir(parents=True, exist_ok=True)
            found[program.name] = EntryRequest(folder, NAME, program=program)
        return found


@dataclass(frozen=True)
class EntryRequest(Request):
    """An entry point that a peer's side loads, whose module is in memory: all entry points share their weights."""

    program: Program | None = None

    def module(self) -> torch.nn.Module:
        """Returns PyTorch's module."""
        assert self.program is not None
        return self.program.module

    def inputs(self) -> list[np.ndarray]:
        """Returns inputs of the entry point's shapes; none if only its file is there."""
        return [] if self.program is None else [tensor.numpy() for tensor in self.program.example.values()]


@dataclass(frozen=True)
class FolderRequest:
    """A compiled folder that a side asks.

    Attributes:
        calls: The function `folder_calls` of the module with the questions, as `module:name`.
        artifact: The folder.
        peer: What runs its entry points; None for the folder's code.
    """

    calls: str
    artifact: Path
    peer: ModelPeer | None = None


@contextmanager
def folder_side(request: FolderRequest) -> Iterator[Load]:
    """Answers questions by a compiled folder, whose entry points a peer may run."""
    load_runtime()
    calls: Callable[[Sam3], Calls] = resolve_name(request.calls)()
    with ExitStack() as stack:
        open_sides = None if request.peer is None else _opening(request.peer, stack)

        def load() -> Calls:
            if open_sides is None:
                return calls(Sam3.load(request.artifact))
            loaded = {name: load_entry() for name, load_entry in open_sides().items()}
            runs = {name: functions[RUN] for name, functions in loaded.items()}
            model = Sam3(PeerModel(Artifact.load(request.artifact, check=False), runs))
            return {**loaded["encode_image"], **calls(model)}

        yield load


def _opening(peer: ModelPeer, stack: ExitStack) -> Callable[[], dict[str, Load]]:
    """Returns the function that opens the peer's side of each entry point.

    A peer that reads files is imported at once, and needs no model of PyTorch. The model of another peer belongs to
    what it loads.
    """
    open_side = resolve_name(PEERS[peer.name].side)

    def open_all(requests: Mapping[str, EntryRequest]) -> dict[str, Load]:
        return {name: stack.enter_context(open_side(entry)) for name, entry in requests.items()}

    if PEERS[peer.name].prepare is not None:
        sides = open_all({folder.name: EntryRequest(folder, NAME) for folder in peer.folder.iterdir()})
        return lambda: sides
    stack.enter_context(Request(peer.folder, NAME).context())
    return lambda: open_all(peer.requests())


class PeerModel:
    """A loaded folder whose entry points a peer runs; see `harness.runtime.artifact.LoadedModel`."""

    def __init__(self, artifact: Artifact, runs: Mapping[str, Run]) -> None:
        self.folder, self.manifest = artifact.folder, artifact.manifest
        self.fetch = artifact.fetch
        self._artifact, self._runs = artifact, runs

    def call(self, entry: str, **inputs: Any) -> Tensors:
        """Runs an entry point by the peer, or a kernel by the folder's code."""
        if entry not in self._runs:
            return self._artifact.call(entry, **inputs)
        signature = self.manifest.entries[entry]
        arrays = [self.fetch(inputs[spec.name]) for spec in signature.inputs]
        results = self._runs[entry](arrays)
        return {spec.name: result for spec, result in zip(signature.outputs, results, strict=True)}

    def reading_once(self, entry: str) -> AbstractContextManager[None]:
        """Keeps the weights, which are the peer's."""
        return nullcontext()


def export_entry_points(peer: ModelPeer, on_stage: Callable[[str], None]) -> float:
    """Writes the ONNX file of each entry point, and returns the seconds; in a process of its own."""
    with Request(peer.folder, NAME).context():
        return sum(peers.export_onnx(request, on_stage) for request in peer.requests().values())


def prepare(peer: ModelPeer, artifact: Path, run_bytes: int, done: dict[str, float]) -> float:
    """Writes what a peer loads, and returns the seconds that this takes.

    Args:
        peer: The peer.
        artifact: The compiled folder, which has the model's weights.
        run_bytes: Memory that PyTorch needs for a question, beside the weights.
        done: As for `perf.peers.prepare`.

    Raises:
        PeerError: The peer cannot be measured.
    """
    kind = PEERS[peer.name]
    if kind.prepare not in (None, EXPORT):
        raise PeerError("it is measured beside components alone")
    peers.check_room(kind, sum(path.stat().st_size for path in artifact.iterdir()), run_bytes)
    if kind.prepare is None:
        return 0.0
    if kind.prepare not in done:
        done[kind.prepare] = float(peers.run_step("perf.model_peers:export_entry_points", peer))
    return done[kind.prepare]
