"""A session in a file, from which another process goes on: tensors in safetensors' format, all else as JSON in it."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from harness.runtime.errors import Sam3Error
from harness.runtime.sam3.prompts import Prompt
from harness.runtime.sam3.video.bucket import Bucket
from harness.runtime.sam3.video.kept import KeptFrame
from harness.runtime.sam3.video.masklets import Masklets
from harness.runtime.sam3.video.memory_bank import Entry, MemoryBank
from harness.runtime.sam3.video.objects import TrackedObject, VideoState
from harness.runtime.sam3.video.processor import VideoProcessor
from harness.runtime.sam3.video.progress import Underway
from harness.runtime.sam3.video.propagation import Action, Propagation
from harness.runtime.sam3.video.retention import Retention

if TYPE_CHECKING:
    from harness.runtime.manifest import Manifest

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Pixels = npt.NDArray[np.uint8]

_FORMAT = 2
_PARTS = ("memory", "pointer", "object_logits", "iou")


def model_digest(manifest: Manifest) -> str:
    """SHA-256 of all that a model's answers depend on; its manifest has the checksums of its files."""
    return hashlib.sha256(manifest.to_json().encode()).hexdigest()


def save_session(processor: VideoProcessor, path: Path) -> None:
    """Writes a session to a file, which is there as a whole or not at all.

    Raises:
        Sam3Error: It cannot be written; what was there before still is.
    """
    if not path.name:
        raise Sam3Error(f"{str(path)!r} is not the name of a file; give one to save the session in.")
    arrays: Arrays = {}
    text = json.dumps(_described(processor, arrays))
    metadata = {"session": text, "sha256": _digest(text, arrays)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary, metadata)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise Sam3Error(f"{path} cannot be written ({error}); free some space or choose another folder.") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


class SessionFile:
    """The file of a session that was read."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Reads the file for a model.

        Raises:
            Sam3Error: It cannot be read, is damaged, or was saved with another model.
        """
        self.path = path
        self._arrays: Arrays = {}
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                self._arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            text = metadata["session"]
            self._description = json.loads(text)
            whole = metadata["sha256"] == _digest(text, self._arrays) and self._description["format"] == _FORMAT
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise Sam3Error(f"{path} cannot be read as a saved session ({error}); start a new one.") from error
        if not whole:
            raise Sam3Error(f"{path} is damaged or of another version; start a new session.")
        if self._description["model"] != model_digest(manifest):
            raise Sam3Error(f"{path} was saved with another model; load that one.")

    @property
    def keep(self) -> bool:
        """Whether the session keeps everything."""
        return bool(self._description["keep"])

    def fill(self, processor: VideoProcessor) -> None:
        """Gives a session that has just been started what was saved.

        Raises:
            Sam3Error: Its video is another one.
        """
        saved = self._description
        if saved["length"] != processor.frames.length:
            raise Sam3Error(f"{self.path} was saved with another video, whose length differs; give that one.")
        if saved["checked"] is not None:
            index, digest = saved["checked"]
            waiting = [each["index"] for each in _waiting(saved)]
            try:
                pixels = {each: processor.pixels(each) for each in sorted({index, *waiting})}
            except Sam3Error as error:
                raise Sam3Error(f"{self.path} was saved with another video: {error}") from error
            if hashlib.sha256(pixels[index].tobytes()).hexdigest() != digest:
                raise Sam3Error(f"{self.path} was saved with another video; give that one.")
        else:
            pixels = {}
        prompts = [Prompt(each["text"], boxes=each["boxes"]) for each in saved["prompts"]]
        progress = processor.begun(prompts, saved["prompted"])
        progress.detector.boxes_of = dict(saved["boxes_of"])
        for number, (group, state) in enumerate(zip(progress.groups, saved["groups"], strict=True)):
            group.state = _state(state)
            retention = Retention.EVERYTHING if self.keep else Retention.FORWARD
            group.buckets = {
                each["number"]: _bucket(each, f"groups.{number}.{each['number']}", self._arrays, retention)
                for each in state["buckets"]
            }
        progress.history = tuple(Action(kind, frozenset(ids), start) for kind, ids, start in saved["history"])
        progress.first = saved["first"]
        progress.kept = {each["index"]: _kept(each, "kept", self._arrays) for each in saved["kept"]}
        progress.added = frozenset(saved["added"])
        progress.checked = None if saved["checked"] is None else tuple(saved["checked"])
        progress.underway = _underway(saved["underway"], self._arrays, pixels)
        processor.progress = progress


def _described(processor: VideoProcessor, arrays: Arrays) -> dict[str, Any]:
    """A session as JSON; its tensors are added to the arrays."""
    progress = processor.progress
    return {
        "format": _FORMAT,
        "model": model_digest(processor.model.manifest),
        "keep": processor.keeps,
        "length": processor.frames.length,
        "checked": _checked(processor),
        "prompts": [_described_prompt(prompt) for prompt in progress.detector.prompts],
        "prompted": progress.detector.prompted,
        "boxes_of": list(progress.detector.boxes_of.items()),
        "groups": [_described_group(group, f"groups.{i}", arrays) for i, group in enumerate(progress.groups)],
        "history": [(each.kind, sorted(each.objects), each.start) for each in progress.history],
        "first": progress.first,
        "kept": [_described_kept(each, "kept", arrays) for each in progress.kept.values()],
        "added": sorted(progress.added),
        "underway": _described_underway(progress.underway, arrays),
    }


def _checked(processor: VideoProcessor) -> tuple[int, str] | None:
    """The last frame whose pixels are known, with their SHA-256; one that is held back if encoding was interrupted."""
    latest, underway = processor.latest, processor.progress.underway
    known = [] if underway is None else [(kept.index, pixels) for kept, pixels in (*underway.ready, *underway.held)]
    if latest is not None:
        known.append((latest.index, latest.image.pixels))
    if not known:
        return processor.progress.checked
    index, pixels = known[-1]
    return index, hashlib.sha256(pixels.tobytes()).hexdigest()


def _described_prompt(prompt: Prompt) -> dict[str, Any]:
    boxes = None if prompt.boxes is None else np.asarray(prompt.boxes, np.float64).tolist()
    return {"text": prompt.text, "boxes": boxes}


def _described_group(group: Masklets, name: str, arrays: Arrays) -> dict[str, Any]:
    state = group.state
    return {
        "objects": [asdict(each) for each in state.objects],
        "next_id": state.next_id,
        "next_bucket": state.next_bucket,
        "removed": sorted(state.removed),
        "duplicates": [(*pair, count) for pair, count in state.duplicates.items()],
        "buckets": [
            {"number": number} | _described_bucket(each, f"{name}.{number}", arrays)
            for number, each in group.buckets.items()
        ],
    }


def _state(saved: Mapping[str, Any]) -> VideoState:
    return VideoState(
        objects=tuple(TrackedObject(**each) for each in saved["objects"]),
        next_id=saved["next_id"],
        next_bucket=saved["next_bucket"],
        removed=frozenset(saved["removed"]),
        duplicates={(older, younger): count for older, younger, count in saved["duplicates"]},
    )


def _described_bucket(bucket: Bucket, name: str, arrays: Arrays) -> dict[str, Any]:
    bank = bucket.bank
    arrays |= {f"{name}.shown.{frame}": logits for frame, logits in bucket.shown.items()}
    return {
        "objects": bank.objects,
        "born": bank.born,
        "inputs": [(frame, sorted(ids)) for frame, ids in bank.inputs.items()],
        "conditioning": _described_entries(bank.conditioning, f"{name}.conditioning", arrays),
        "tracked": _described_entries(bank.tracked, f"{name}.tracked", arrays),
        "shown": list(bucket.shown),
        "by_user": sorted(bucket.by_user),
        "cleared": sorted(bucket.cleared),
    }


def _bucket(saved: Mapping[str, Any], name: str, arrays: Arrays, retention: Retention) -> Bucket:
    bank = MemoryBank(
        objects=tuple(saved["objects"]),
        retention=retention,
        conditioning=_entries(saved["conditioning"], f"{name}.conditioning", arrays),
        tracked=_entries(saved["tracked"], f"{name}.tracked", arrays),
        inputs={frame: frozenset(ids) for frame, ids in saved["inputs"]},
        born=saved["born"],
    )
    return Bucket(
        bank,
        {frame: arrays[f"{name}.shown.{frame}"] for frame in saved["shown"]},
        frozenset((frame, number) for frame, number in saved["by_user"]),
        frozenset(saved["cleared"]),
    )


def _described_entries(entries: Mapping[int, Entry], name: str, arrays: Arrays) -> list[tuple[int, float | None]]:
    for frame, entry in entries.items():
        parts = {part: getattr(entry, part) for part in _PARTS}
        arrays |= {f"{name}.{frame}.{part}": array for part, array in parts.items() if array is not None}
    return [(frame, None if entry.score is None else float(entry.score)) for frame, entry in entries.items()]


def _entries(saved: Sequence[tuple[int, float | None]], name: str, arrays: Arrays) -> dict[int, Entry]:
    return {
        frame: Entry(
            memory=arrays.get(f"{name}.{frame}.memory"),
            pointer=arrays.get(f"{name}.{frame}.pointer"),
            object_logits=arrays[f"{name}.{frame}.object_logits"],
            iou=arrays[f"{name}.{frame}.iou"],
            score=None if score is None else np.float32(score),
        )
        for frame, score in saved
    }


def _described_kept(kept: KeptFrame, name: str, arrays: Arrays) -> dict[str, Any]:
    if kept.bits:
        arrays[f"{name}.{kept.index}"] = np.stack(list(kept.bits.values()))
    scores = [(each, kept.tracker_scores[each]) for each in kept.bits]
    return {"index": kept.index, "size": kept.size, "scores": scores, "whole": kept.whole}


def _kept(saved: Mapping[str, Any], name: str, arrays: Arrays) -> KeptFrame:
    ids = [number for number, _ in saved["scores"]]
    bits = dict(zip(ids, arrays[f"{name}.{saved['index']}"], strict=True)) if ids else {}
    return KeptFrame(saved["index"], tuple(saved["size"]), bits, dict(saved["scores"]), saved["whole"])


def _described_underway(underway: Underway | None, arrays: Arrays) -> dict[str, Any] | None:
    if underway is None:
        return None
    order = underway.order
    return {
        "asked": underway.asked,
        "kind": underway.what.kind,
        "objects": sorted(underway.what.objects),
        "order": (order.start, order.stop, order.step),
        "held": [_described_kept(kept, "held", arrays) for kept, _ in underway.held],
        "ready": [_described_kept(kept, "ready", arrays) for kept, _ in underway.ready],
    }


def _underway(saved: Mapping[str, Any] | None, arrays: Arrays, pixels: Mapping[int, Pixels]) -> Underway | None:
    if saved is None:
        return None
    start, limit, reverse = saved["asked"]
    held, ready = (
        tuple((_kept(each, name, arrays), pixels[each["index"]]) for each in saved[name]) for name in ("held", "ready")
    )
    what = Propagation(saved["kind"], frozenset(saved["objects"]))
    return Underway((start, limit, reverse), what, range(*saved["order"]), held, ready)


def _waiting(saved: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The outputs of a propagation that were not given out."""
    if saved["underway"] is not None:
        yield from (*saved["underway"]["held"], *saved["underway"]["ready"])


def _digest(text: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
