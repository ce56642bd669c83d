"""Saves a session to a file and restores it: tensors in safetensors' format, all other state as JSON metadata."""

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

from harness.runtime.errors import ModelError
from harness.runtime.sam3.prompts import Prompt
from harness.runtime.sam3.video.masklets import Bucket, Masklets
from harness.runtime.sam3.video.memory_bank import MemoryBank, MemoryEntry, Retention
from harness.runtime.sam3.video.outputs import FrameResult
from harness.runtime.sam3.video.processor import Action, Propagation, PropagationScope, VideoProcessor
from harness.runtime.sam3.video.rules import TrackedObject, VideoState

if TYPE_CHECKING:
    from harness.runtime.manifest import Manifest

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Pixels = npt.NDArray[np.uint8]

_FORMAT = 2
_PARTS = ("memory", "pointer", "object_logits", "iou")


def model_digest(manifest: Manifest) -> str:
    """Returns the SHA-256 of a model's manifest, which has the checksums of all its files."""
    return hashlib.sha256(manifest.to_json().encode()).hexdigest()


def save_session(processor: VideoProcessor, path: Path) -> None:
    """Writes a session to a file atomically.

    Raises:
        ModelError: The file cannot be written; an earlier file stays.
    """
    if not path.name:
        raise ModelError(f"{str(path)!r} is not the name of a file; give one to save the session in.")
    arrays: Arrays = {}
    text = json.dumps(_describe(processor, arrays))
    metadata = {"session": text, "sha256": _digest(text, arrays)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary, metadata)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be written ({error}); free some space or choose another folder.") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


class SessionFile:
    """A saved session's file."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Reads the file for a model.

        Raises:
            ModelError: The file cannot be read, is damaged, or was saved with another model.
        """
        self.path = path
        self._arrays: Arrays = {}
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                self._arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            text = metadata["session"]
            self._description = json.loads(text)
            is_intact = metadata["sha256"] == _digest(text, self._arrays) and self._description["format"] == _FORMAT
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelError(f"{path} cannot be read as a saved session ({error}); start a new one.") from error
        if not is_intact:
            raise ModelError(f"{path} is damaged or of another version; start a new session.")
        if self._description["model"] != model_digest(manifest):
            raise ModelError(f"{path} was saved with another model; load that one.")

    @property
    def keep(self) -> bool:
        """Returns whether the session keeps everything."""
        return bool(self._description["keep"])

    def restore(self, processor: VideoProcessor) -> None:
        """Restores the saved state in a session that has just been started.

        Raises:
            ModelError: The session has another video.
        """
        saved = self._description
        if saved["length"] != processor.frames.length:
            raise ModelError(f"{self.path} was saved with another video, whose length differs; give that one.")
        if saved["checked"] is not None:
            index, digest = saved["checked"]
            pending = [item["index"] for item in _pending_outputs(saved)]
            try:
                pixels = {item: processor.pixels(item) for item in sorted({index, *pending})}
            except ModelError as error:
                raise ModelError(f"{self.path} was saved with another video: {error}") from error
            if hashlib.sha256(pixels[index].tobytes()).hexdigest() != digest:
                raise ModelError(f"{self.path} was saved with another video; give that one.")
        else:
            pixels = {}
        prompts = [Prompt(item["text"], boxes=item["boxes"]) for item in saved["prompts"]]
        progress = processor.new_progress(prompts, saved["prompted"])
        progress.detector.box_frames = dict(saved["boxes_of"])
        for number, (group, state) in enumerate(zip(progress.groups, saved["groups"], strict=True)):
            group.state = _restore_state(state)
            retention = Retention.EVERYTHING if self.keep else Retention.FORWARD
            group.buckets = {
                item["number"]: _restore_bucket(item, f"groups.{number}.{item['number']}", self._arrays, retention)
                for item in state["buckets"]
            }
        progress.history = tuple(Action(kind, frozenset(ids), start) for kind, ids, start in saved["history"])
        progress.first_frame = saved["first"]
        progress.frame_results = {item["index"]: _restore_frame(item, "kept", self._arrays) for item in saved["kept"]}
        progress.user_objects = frozenset(saved["added"])
        progress.fingerprint = None if saved["checked"] is None else tuple(saved["checked"])
        progress.propagation = _restore_propagation(saved["underway"], self._arrays, pixels)
        processor.progress = progress


def _describe(processor: VideoProcessor, arrays: Arrays) -> dict[str, Any]:
    """Returns a session as JSON; its tensors are added to the arrays."""
    progress = processor.progress
    return {
        "format": _FORMAT,
        "model": model_digest(processor.model.manifest),
        "keep": processor.keeps,
        "length": processor.frames.length,
        "checked": _fingerprint(processor),
        "prompts": [_describe_prompt(prompt) for prompt in progress.detector.prompts],
        "prompted": progress.detector.prompt_frame,
        "boxes_of": list(progress.detector.box_frames.items()),
        "groups": [_describe_group(group, f"groups.{i}", arrays) for i, group in enumerate(progress.groups)],
        "history": [(item.kind, sorted(item.objects), item.start) for item in progress.history],
        "first": progress.first_frame,
        "kept": [_describe_frame(item, "kept", arrays) for item in progress.frame_results.values()],
        "added": sorted(progress.user_objects),
        "underway": _describe_propagation(progress.propagation, arrays),
    }


def _fingerprint(processor: VideoProcessor) -> tuple[int, str] | None:
    """Returns the last frame whose pixels are in memory, with their SHA-256.

    It is a delayed one if encoding was interrupted.
    """
    latest, propagation = processor.latest, processor.progress.propagation
    frames = (
        []
        if propagation is None
        else [(result.index, pixels) for result, pixels in (*propagation.outputs, *propagation.hotstart_buffer)]
    )
    if latest is not None:
        frames.append((latest.index, latest.image.pixels))
    if not frames:
        return processor.progress.fingerprint
    index, pixels = frames[-1]
    return index, hashlib.sha256(pixels.tobytes()).hexdigest()


def _describe_prompt(prompt: Prompt) -> dict[str, Any]:
    boxes = None if prompt.boxes is None else np.asarray(prompt.boxes, np.float64).tolist()
    return {"text": prompt.text, "boxes": boxes}


def _describe_group(group: Masklets, name: str, arrays: Arrays) -> dict[str, Any]:
    state = group.state
    return {
        "objects": [asdict(item) for item in state.objects],
        "next_id": state.next_id,
        "next_bucket": state.next_bucket,
        "removed": sorted(state.removed),
        "duplicates": [(*pair, count) for pair, count in state.duplicates.items()],
        "buckets": [
            {"number": number} | _describe_bucket(item, f"{name}.{number}", arrays)
            for number, item in group.buckets.items()
        ],
    }


def _restore_state(saved: Mapping[str, Any]) -> VideoState:
    return VideoState(
        objects=tuple(TrackedObject(**item) for item in saved["objects"]),
        next_id=saved["next_id"],
        next_bucket=saved["next_bucket"],
        removed=frozenset(saved["removed"]),
        duplicates={(older, younger): count for older, younger, count in saved["duplicates"]},
    )


def _describe_bucket(bucket: Bucket, name: str, arrays: Arrays) -> dict[str, Any]:
    bank = bucket.bank
    arrays |= {f"{name}.shown.{frame}": logits for frame, logits in bucket.mask_logits.items()}
    return {
        "objects": bank.objects,
        "born": bank.first_frame,
        "inputs": [(frame, sorted(ids)) for frame, ids in bank.inputs.items()],
        "conditioning": _describe_entries(bank.conditioning, f"{name}.conditioning", arrays),
        "tracked": _describe_entries(bank.tracked, f"{name}.tracked", arrays),
        "shown": list(bucket.mask_logits),
        "by_user": sorted(bucket.user_prompts),
        "cleared": sorted(bucket.cleared_frames),
    }


def _restore_bucket(saved: Mapping[str, Any], name: str, arrays: Arrays, retention: Retention) -> Bucket:
    bank = MemoryBank(
        objects=tuple(saved["objects"]),
        retention=retention,
        conditioning=_restore_entries(saved["conditioning"], f"{name}.conditioning", arrays),
        tracked=_restore_entries(saved["tracked"], f"{name}.tracked", arrays),
        inputs={frame: frozenset(ids) for frame, ids in saved["inputs"]},
        first_frame=saved["born"],
    )
    return Bucket(
        bank,
        {frame: arrays[f"{name}.shown.{frame}"] for frame in saved["shown"]},
        frozenset((frame, number) for frame, number in saved["by_user"]),
        frozenset(saved["cleared"]),
    )


def _describe_entries(entries: Mapping[int, MemoryEntry], name: str, arrays: Arrays) -> list[tuple[int, float | None]]:
    for frame, entry in entries.items():
        parts = {part: getattr(entry, part) for part in _PARTS}
        arrays |= {f"{name}.{frame}.{part}": array for part, array in parts.items() if array is not None}
    return [(frame, None if entry.score is None else float(entry.score)) for frame, entry in entries.items()]


def _restore_entries(saved: Sequence[tuple[int, float | None]], name: str, arrays: Arrays) -> dict[int, MemoryEntry]:
    return {
        frame: MemoryEntry(
            memory=arrays.get(f"{name}.{frame}.memory"),
            pointer=arrays.get(f"{name}.{frame}.pointer"),
            object_logits=arrays[f"{name}.{frame}.object_logits"],
            iou=arrays[f"{name}.{frame}.iou"],
            score=None if score is None else np.float32(score),
        )
        for frame, score in saved
    }


def _describe_frame(result: FrameResult, name: str, arrays: Arrays) -> dict[str, Any]:
    if result.bits:
        arrays[f"{name}.{result.index}"] = np.stack(list(result.bits.values()))
    scores = [(object_id, result.tracker_scores[object_id]) for object_id in result.bits]
    return {"index": result.index, "size": result.size, "scores": scores, "whole": result.is_complete}


def _restore_frame(saved: Mapping[str, Any], name: str, arrays: Arrays) -> FrameResult:
    ids = [number for number, _ in saved["scores"]]
    bits = dict(zip(ids, arrays[f"{name}.{saved['index']}"], strict=True)) if ids else {}
    return FrameResult(saved["index"], tuple(saved["size"]), bits, dict(saved["scores"]), saved["whole"])


def _describe_propagation(propagation: Propagation | None, arrays: Arrays) -> dict[str, Any] | None:
    if propagation is None:
        return None
    order = propagation.order
    return {
        "asked": propagation.request,
        "kind": propagation.scope.kind,
        "objects": sorted(propagation.scope.objects),
        "order": (order.start, order.stop, order.step),
        "held": [_describe_frame(result, "held", arrays) for result, _ in propagation.hotstart_buffer],
        "ready": [_describe_frame(result, "ready", arrays) for result, _ in propagation.outputs],
    }


def _restore_propagation(
    saved: Mapping[str, Any] | None, arrays: Arrays, pixels: Mapping[int, Pixels]
) -> Propagation | None:
    if saved is None:
        return None
    start, limit, reverse = saved["asked"]
    hotstart_buffer, outputs = (
        tuple((_restore_frame(item, name, arrays), pixels[item["index"]]) for item in saved[name])
        for name in ("held", "ready")
    )
    scope = PropagationScope(saved["kind"], frozenset(saved["objects"]))
    return Propagation((start, limit, reverse), scope, range(*saved["order"]), hotstart_buffer, outputs)


def _pending_outputs(saved: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the outputs of a propagation that were not returned yet."""
    if saved["underway"] is not None:
        yield from (*saved["underway"]["held"], *saved["underway"]["ready"])


def _digest(text: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
