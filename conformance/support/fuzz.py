"""Damages files of every kind that is read, and reads them: each is read, or refused in one sentence.

python -m conformance.support.fuzz --count 200000 --seed 1

Nothing else may happen: no other exception, no crash, no hang, no memory without bound. What does is told with the
number of the input, which the same seed makes again, and the command ends with 1.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import math
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy
from msgspec import to_builtins
from msgspec.structs import asdict

from conformance.support import damaged
from conformance.support.known_answers import KnownSegmenter, KnownTracker, write_pictures
from conformance.support.mutations import mutated, mutated_json, with_other
from harness.app.results.journal import JOURNAL
from harness.app.segment import job as segmenting
from harness.app.track import job as tracking
from harness.compiler.tuned.database import FILE as RECORDS
from harness.compiler.tuned.database import TUNED, open_database
from harness.core.budget import Budget, read_budget
from harness.core.case import Case, Scale
from harness.core.errors import HarnessError
from harness.core.expectations import load_expectations
from harness.core.machine import describe_machine
from harness.core.outcome import (
    BINS,
    CaseError,
    Distribution,
    Kernel,
    MaskPicture,
    Outcome,
    Stage,
    Status,
    Verdict,
    VerdictKind,
)
from harness.core.settings import REPOSITORY
from harness.runtime import Prompt
from harness.runtime.errors import ModelError
from harness.runtime.manifest import (
    MANIFEST,
    VARIANTS,
    Entry,
    File,
    Manifest,
    TensorSpec,
    Variants,
    read_manifest,
    read_variants,
)
from harness.runtime.sam3.description import Capacity, Sam3Description, read_sam3_description
from harness.runtime.sam3.images import load_image
from harness.runtime.sam3.video import saving
from harness.runtime.sam3.video.frames import Frames, open_frames
from harness.runtime.sam3.video.masklets import Bucket
from harness.runtime.sam3.video.memory_bank import MemoryBank, Retention, tracked_entry
from harness.runtime.sam3.video.outputs import FrameResult, VisibleObject, frame_output
from harness.runtime.sam3.video.processor import Action, Propagation, VideoProcessor
from harness.runtime.sam3.video.rules import DISAMBIGUATED, VideoState, state_after_click
from harness.runtime.sam3.video.saving import SessionFile, save_session
from harness.runtime.weights import MappedWeights, check_files, write_weights
from harness.verify.report.verification.document import Result, build_report
from harness.verify.report.verification.writer import write_pages

EXPECTATIONS = REPOSITORY / "fixtures" / "expectations.toml"

ENOUGH = 50
"""Frames of a damaged video that are read: one may state that it has billions."""
SECONDS, BYTES = 60, 4 << 30
"""What one input may take, and all of them in memory."""
_BATCH = 500
"""Inputs that one process reads, which starts with nothing that others left."""


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        samples: Gives whole files by name.
        read: Reads a file as a command does; what it raises besides errors for people is a fault.
        mutate: Damages the content of a file.
        prepare: Makes, once, what else is in the folder.
    """

    samples: Callable[[], dict[str, bytes]]
    read: Callable[[Path], object]
    mutate: Callable[[bytes, random.Random], bytes] = mutated
    prepare: Callable[[Path], object] = lambda folder: None


def json_or_bytes(content: bytes, draw: random.Random) -> bytes:
    """Damages JSON as a value or as text."""
    return mutated_json(content, draw) if draw.random() < 0.6 else mutated(content, draw)


def header_or_bytes(content: bytes, draw: random.Random) -> bytes:
    """Damages a file of safetensors: the JSON that it begins with, whose length is before it, or its bytes."""
    if draw.random() < 0.5:
        return mutated(content, draw)
    end = 8 + int.from_bytes(content[:8], "little")
    header = mutated_json(content[8:end], draw)
    return len(header).to_bytes(8, "little") + header + content[end:]


def lines_or_bytes(content: bytes, draw: random.Random) -> bytes:
    """Damages a journal: a line is missing, doubled, elsewhere or has another value, or bytes are damaged."""
    if draw.random() < 0.4:
        return mutated(content, draw)
    lines = content.splitlines(keepends=True)
    number, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    match draw.randrange(6):
        case 0:
            del lines[number]
        case 1:
            lines.insert(other, lines[number])
        case 2:
            lines[number], lines[other] = lines[other], lines[number]
        case _:
            text = mutated_json(lines[number].partition(b" ")[2], draw).replace(b"\n", b"")
            lines[number] = hashlib.sha256(text).hexdigest()[:16].encode() + b" " + text + b"\n"
    return b"".join(lines)


def session_or_bytes(content: bytes, draw: random.Random) -> bytes:
    """Damages a saved session: its state or an array, under the digest that belongs to it, or its bytes."""
    if draw.random() < 0.4:
        return header_or_bytes(content, draw)
    arrays = safetensors.numpy.load(content)
    name = draw.choice(sorted(arrays))
    array = arrays.pop(name)
    others = [array[None], array.astype(np.float64), array[..., :1], np.zeros_like(array)]
    if name == "state" or draw.random() < 0.7:
        state = arrays.pop("state", array).tobytes()
        with suppress(OverflowError, UnicodeEncodeError):
            state = msgspec.msgpack.encode(with_other(msgspec.msgpack.decode(state), draw))
        arrays |= {name: array, "state": np.frombuffer(state if draw.random() < 0.95 else b"\x91" * 100_000, np.uint8)}
    elif draw.random() < 0.8:
        arrays[name] = draw.choice(others)
    return safetensors.numpy.save(arrays, {"format": saving._FORMAT, "sha256": saving._digest(arrays)})


def _written(write: Callable[[Path], object], *names: str) -> dict[str, bytes]:
    """Gives the contents of files that a function writes into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return {name: (Path(folder) / name).read_bytes() for name in names}


def _frames(path: Path) -> None:
    for frame, _ in zip(open_frames(path), range(ENOUGH), strict=False):
        frame.sum()


_ARRAYS = {
    "a.weight": np.arange(32, dtype=np.float32).reshape(4, 8),
    "b.bias": np.arange(3, dtype=np.int64),
    "c": np.zeros((0, 2), np.float32),
}


def _weights() -> dict[str, bytes]:
    return _written(lambda folder: write_weights(folder / "step.safetensors", _ARRAYS), "step.safetensors")


def _read_weights(path: Path) -> None:
    for array in MappedWeights(path).tensors.values():
        array.tobytes()  # damaged numbers may be infinite or NaN


def _pickles() -> dict[str, bytes]:
    import torch

    tensors = {"detector.a.weight": torch.ones(4, 8), "tracker.no_mem_embed": torch.ones(1, 3)}

    def write(folder: Path) -> None:
        torch.save(tensors, folder / "zip.pt")
        torch.save({"model": tensors, "epoch": 3}, folder / "wrapped.pt")
        torch.save(tensors, folder / "legacy.pth", _use_new_zipfile_serialization=False)

    return _written(write, "zip.pt", "wrapped.pt", "legacy.pth")


def _safetensors() -> dict[str, bytes]:
    from safetensors.numpy import save

    return {"sam3.safetensors": save({f"detector.{name}": array for name, array in _ARRAYS.items()})}


def _descriptions() -> dict[str, bytes]:
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "base_model_name_or_path": "base.pt", "rank_pattern": {}}
    places = {"detector.a.weight": "part-1.safetensors", "tracker.no_mem_embed": "part-2.safetensors"}
    described = {"adapter_config.json": adapter, "model.safetensors.index.json": {"weight_map": places}}
    return {name: json.dumps(value).encode() for name, value in described.items()}


def _described_tensors(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    weight, factors = torch.ones(4, 8), {"A": torch.ones(2, 8), "B": torch.ones(4, 2)}
    torch.save({"detector.a.weight": weight}, folder / "base.pt")
    save_file({"detector.a.weight": weight}, folder / "part-1.safetensors")
    save_file({"tracker.no_mem_embed": torch.ones(1, 3)}, folder / "part-2.safetensors")
    named = {f"base_model.model.a.lora_{side}.weight": factor for side, factor in factors.items()}
    save_file(named, folder / "adapter_model.safetensors")


@cache
def _model() -> Any:
    import torch

    return torch.nn.ModuleDict({"a": torch.nn.Linear(8, 4, bias=False)})


def _read_checkpoint(path: Path) -> None:
    from harness.core.checkpoint_file import checkpoint_file_problem
    from harness.models.sam3.checkpoints.loading import Checkpoint, load_checkpoint

    if (problem := checkpoint_file_problem(path)) is not None:
        raise HarnessError(problem)
    Checkpoint.open(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is loaded (in part|without)", UserWarning)
        load_checkpoint(_model(), path, allow_partial=True)


FILES = {"model.so": b"library", "step.safetensors": b"weights" * 9}


def _described() -> dict[str, File]:
    return {name: File(len(content), hashlib.sha256(content).hexdigest()) for name, content in FILES.items()}


def _manifest() -> Manifest:
    inputs = (TensorSpec("frame", ("n", 16), "float32"), TensorSpec("index", (2,), "int64", "n"))
    entry = Entry(inputs, (TensorSpec("logits", ("n", 1), "float32"),), ("a.weight",))
    return Manifest(
        made={"compiled": "2026-01-02T03:04:05+00:00"},
        target="llvm",
        system="Linux",
        architecture="x86_64",
        cpu="x86-64-v3",
        cpu_features=("+avx2", "+fma"),
        scale="shallow",
        strategy="real",
        weights="seed 0",
        trained=False,
        entries={"step": entry},
        files=_described(),
        architectures=("sm_80",),
        float32=("a.b",),
        extra=to_builtins(Sam3Description(Capacity(), "")),
    )


def _manifests() -> dict[str, bytes]:
    return {MANIFEST: _manifest().to_json().encode()}


def _read_manifest(path: Path) -> None:
    manifest = read_manifest(path.parent)
    assert Manifest(**asdict(manifest)).to_json()
    read_sam3_description(path.parent, manifest)
    check_files(path.parent, manifest.files, contents=True)


def _described_files(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).write_bytes(content)


def _variants() -> dict[str, bytes]:
    variants = Variants(("x86-64-v3", "znver4"), {"step": ("a.weight",)}, _described())
    return {VARIANTS: variants.to_json().encode()}


def _read_variants(path: Path) -> None:
    variants = read_variants(path.parent)
    assert Variants(**asdict(variants)).to_json()
    check_files(path.parent, variants.files, contents=True)


def _budgets() -> dict[str, bytes]:
    budget = Budget("sam3", "vit", Scale.SHALLOW, "llvm", "bf16", 0.5, ("blocks.0.attn.qkv", "blocks.1.mlp.fc1"))
    return {"budget.json": json.dumps(budget.to_json()).encode()}


def _tuned() -> dict[str, bytes]:
    values = json.loads(next(TUNED.glob(f"*/{RECORDS}")).read_bytes())
    return {RECORDS: json.dumps(values | {"records": values["records"][:3]}).encode()}


def _reports() -> dict[str, bytes]:
    picture = MaskPicture((0,), (4, 6), 1, b"png", None, b"png")
    found = Distribution((0,) * BINS, ((0.5, math.inf),), (picture,))
    verdict = Verdict("masks", (1, 4, 6), "float32", 24, 1, 0.1, 0.1, math.inf, 0.1, 9.0, 2.0, 3.0, VerdictKind.ORACLE)
    kernel = Kernel("product", "sm_80", 256, 6912, registers=64)
    outcomes = [
        Outcome(Stage.JUDGE, Status.PASSED, verdicts=(replace(verdict, distribution=found),), seconds={"run": 1.5}),
        Outcome(Stage.RUN, Status.FAILED, CaseError("ValueError", "no", "Traceback"), kernels=(kernel,)),
    ]
    call = {"position": 3, "function": "fused", "node": "relu", "source": "a.py:1 in f: x", "own_share": 0.5}
    deviation = {"r_rms": 1.5, "r_inf": None}
    call |= {"operators": ["relu"], "between": [], "local": deviation, "accumulated": deviation}
    diagnosis = {"program": "main", "told": "No kernel diverges.", "boundaries": [call], "shown": [3]}
    diagnosis |= {"first": {"boundary": call, "confidence": "sure", "reason": "it differs", "others": []}}
    diagnosis |= {"ablation": {"cause": None, "reason": "", "experiments": []}, "budget": {"relu": 0.5}}
    results = [Result.from_outcome(Case("vit", "real", "llvm"), outcome, None) for outcome in outcomes]
    report = build_report([replace(results[0], diagnosis=diagnosis), results[1]], describe_machine(), {"torch": "2.15"})
    return {"verification_report.json": json.dumps(report).encode()}


def _expectations() -> dict[str, bytes]:
    return {"expectations.toml": b"\n[[expect]]\n".join(EXPECTATIONS.read_bytes().split(b"\n[[expect]]\n")[:4])}


def _journal_of(run: Callable[[Path], object]) -> Callable[[], dict[str, bytes]]:
    def samples() -> dict[str, bytes]:
        def write(folder: Path) -> None:
            run(folder)
            (folder / "out" / JOURNAL).rename(folder / JOURNAL)

        return _written(write, JOURNAL)

    return samples


def _segment(folder: Path) -> None:
    pictures = write_pictures(folder / "pictures", 2)
    for path in pictures:
        os.utime(path, (0, 0))
    segmenting.run(KnownSegmenter(), segmenting.Job(pictures, [Prompt("cat")], folder / "out", 0.5))  # type: ignore[arg-type]


def _track(folder: Path) -> None:
    for path in write_pictures(folder / "pictures", 2):
        os.utime(path, (0, 0))
    asked = tracking.Job(folder / "pictures", ["cat"], None, None, 0, folder / "out", has_overlay=False)
    tracking.run(KnownTracker(), asked, lambda total: None, lambda: None)  # type: ignore[arg-type]


def _resumed(run: Callable[[Path], object]) -> Callable[[Path], object]:
    """Runs a job again in a folder whose journal is damaged."""

    def read(path: Path) -> None:
        (path.parent / "out" / JOURNAL).write_bytes(path.read_bytes())
        run(path.parent)

    return read


def _processor() -> VideoProcessor:
    """Gives a session of two frames that no model is needed for."""
    frames = Frames("the pictures", lambda: (np.full((2, 3, 3), n, np.uint8) for n in range(2)), 2)
    return VideoProcessor(SimpleNamespace(manifest=_manifest()), None, frames, DISAMBIGUATED, keeps=True)  # type: ignore[arg-type]


def _save_session(folder: Path) -> None:
    """Saves a session with an object of a user in memory, which is shown on one frame, and held back on the other."""
    processor = _processor()
    progress = processor.progress = processor.new_progress([Prompt("dog", boxes=[(0, 0, 2, 2)]), Prompt("cup")], 0)
    group = progress.groups[0]
    group.state = state_after_click(VideoState(), 3, 0)
    entry = tracked_entry(np.ones((1, 4), np.float32), np.ones((1, 1), np.float32), np.full((1, 3), 0.5, np.float32))
    bank = MemoryBank(
        (3,),
        Retention.EVERYTHING,
        conditioning={0: entry},
        tracked={1: entry},
        inputs={0: frozenset({3})},
        first_frame=0,
    )
    group.buckets = {0: Bucket(bank, {0: np.ones((1, 4, 4), np.float32)}, frozenset({(0, 3)}))}
    shown = FrameResult.pack(0, (3, 2), {3: VisibleObject(np.ones((2, 3), bool), 1.0)}, is_complete=True)
    progress.frame_results = {0: shown}
    progress.history = (Action("add", frozenset({3})),)
    held = (shown, processor.pixels(0))
    progress.propagation = Propagation((None, None, False), Action("full"), range(1, 2), (held,))
    save_session(processor, folder / "session.safetensors")


def _read_session(path: Path) -> None:
    processor = _processor()
    SessionFile(path, _manifest()).restore(processor)
    progress = processor.progress
    for group in progress.groups:
        for bucket in group.buckets.values():
            with suppress(ModelError):
                bucket.bank.read(bucket.bank.plan(1))
    for result in progress.frame_results.values():
        frame_output(result.objects, progress.groups[0].state.scores, result.size)


KINDS = {
    "images": Kind(damaged.images, lambda path: np.asarray(load_image(path))),
    "animations": Kind(damaged.animations, _frames),
    "videos": Kind(damaged.videos, _frames),
    "weights": Kind(_weights, _read_weights, header_or_bytes),
    "checkpoints": Kind(_pickles, _read_checkpoint),
    "safetensors": Kind(_safetensors, _read_checkpoint, header_or_bytes),
    "adapters and indices": Kind(_descriptions, _read_checkpoint, json_or_bytes, _described_tensors),
    "manifests": Kind(_manifests, _read_manifest, json_or_bytes, _described_files),
    "variants": Kind(_variants, _read_variants, json_or_bytes, _described_files),
    "budgets": Kind(_budgets, read_budget, json_or_bytes),
    "journals of segment": Kind(_journal_of(_segment), _resumed(_segment), lines_or_bytes, _segment),
    "reports": Kind(_reports, lambda path: write_pages(path, path.parent / "pages"), json_or_bytes),
    "expectations": Kind(_expectations, load_expectations),
    "records of tuning": Kind(_tuned, lambda path: open_database(path.parent), json_or_bytes),
    "journals of track": Kind(_journal_of(_track), _resumed(_track), lines_or_bytes, _track),
    "saved sessions": Kind(
        lambda: _written(_save_session, "session.safetensors"),
        _read_session,
        session_or_bytes,
    ),
}


class Hang(Exception):
    """An input took too long."""


def outcomes(name: str, numbers: Iterable[int], seed: int, folder: Path) -> Iterator[tuple[int, str]]:
    """Reads damaged files of a kind.

    Yields:
        The number of each, and `read`, `refused`, or the traceback of a fault.
    """
    kind = KINDS[name]
    samples = kind.samples()
    kind.prepare(folder)
    for number in numbers:
        draw = random.Random(f"{seed} {name} {number}")
        file = draw.choice(sorted(samples))
        (folder / file).write_bytes(kind.mutate(samples[file], draw))
        yield number, _outcome(kind, folder / file)


def _outcome(kind: Kind, path: Path) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", DeprecationWarning)
            kind.read(path)
    except (HarnessError, ModelError) as error:
        return "refused" if len(str(error).splitlines()) == 1 else f"not one sentence: {error}"
    except Exception:
        return traceback.format_exc()
    return "read"


def _interrupt(_number: int, _frame: object) -> None:
    raise Hang


def _batch(name: str, numbers: range, seed: int) -> collections.Counter[str]:
    """Reads inputs in a process of its own, and counts outcomes."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as told:
        child = os.fork()
        if not child:
            try:
                resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
                signal.signal(signal.SIGALRM, _interrupt)
                signal.alarm(SECONDS)
                for number, outcome in outcomes(name, numbers, seed, Path(folder)):
                    print(json.dumps([number, outcome]), file=told, flush=True)
                    signal.alarm(SECONDS)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        found = [json.loads(line) for line in told]
    counts = collections.Counter(outcome for _, outcome in found if outcome in ("read", "refused"))
    faults = [(number, outcome) for number, outcome in found if outcome not in ("read", "refused")]
    if len(found) < len(numbers):
        faults.append((numbers[len(found)], f"the process ended with {os.waitstatus_to_exitcode(status)}"))
    for number, fault in faults:
        counts["fault"] += 1
        print(f"{name} {number}, seed {seed}:\n{fault}", flush=True)
    return counts


def main() -> int:
    """Reads so many inputs, the same number of each kind, and prints what became of them."""
    parser = argparse.ArgumentParser(prog="python -m conformance.support.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="number of inputs, of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind; repeatable")
    asked = parser.parse_args()
    kinds = asked.kind or list(KINDS)
    has_faults = False
    for name in kinds:
        each, counts = -(-asked.count // len(kinds)), collections.Counter[str]()
        for first in range(0, each, _BATCH):
            counts += _batch(name, range(first, min(first + _BATCH, each)), asked.seed)
        print(f"{name}: {each} inputs, " + ", ".join(f"{count} {what}" for what, count in counts.items()), flush=True)
        has_faults |= bool(counts["fault"])
    return int(has_faults)


if __name__ == "__main__":
    sys.exit(main())
