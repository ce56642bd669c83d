"""Saves a session to a file in safetensors' format and restores it: its arrays, and all other state in MessagePack."""

from __future__ import annotations

import hashlib
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from harness.runtime.arrays import Array
from harness.runtime.errors import ModelError
from harness.runtime.sam3.prompts import Prompt
from harness.runtime.sam3.video.masklets import Bucket
from harness.runtime.sam3.video.memory_bank import MULTIPLEX_RULES, RULES
from harness.runtime.sam3.video.outputs import FrameResult
from harness.runtime.sam3.video.processor import Action, Propagation, VideoProcessor
from harness.runtime.sam3.video.rules import VideoState

if TYPE_CHECKING:
    from harness.runtime.manifest import Manifest

_FORMAT = "3"
_STATE = "state"
"""Name of the array with the bytes of a `_State`; the other arrays have numbers as names."""


@dataclass(frozen=True, eq=False)
class _Group:
    """The objects of a text and their memories."""

    state: VideoState
    buckets: dict[int, Bucket]


@dataclass(frozen=True, eq=False)
class _Propagation:
    """A propagation that has not ended, without the pixels of its outputs."""

    request: tuple[int | None, int | None, bool]
    scope: Action
    order: tuple[int, int, int]
    hotstart_buffer: tuple[FrameResult, ...]
    outputs: tuple[FrameResult, ...]


@dataclass(frozen=True, eq=False)
class _State:
    """The state of a session; see `Progress`. A prompt is a text and its boxes."""

    model: str
    keep: bool
    length: int | None
    fingerprint: tuple[int, str] | None
    prompts: tuple[tuple[str | None, list[list[float]] | None], ...]
    prompt_frame: int
    box_frames: dict[int, int]
    groups: tuple[_Group, ...]
    history: tuple[Action, ...]
    first_frame: int | None
    frame_results: dict[int, FrameResult]
    user_objects: frozenset[int]
    propagation: _Propagation | None


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
    arrays: dict[str, Array] = {}

    def encode(value: Any) -> Any:
        if isinstance(value, np.float32):
            return float(value)
        name = str(len(arrays))
        arrays[name] = np.ascontiguousarray(value)
        return name

    state = msgspec.msgpack.encode(_state(processor), enc_hook=encode)
    arrays[_STATE] = np.frombuffer(state, np.uint8)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    try:
        save_file(arrays, temporary, {"format": _FORMAT, "sha256": _digest(arrays)})
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
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if (metadata["format"], metadata["sha256"]) != (_FORMAT, _digest(arrays)):
                raise ModelError(f"{path} is damaged or of another version; start a new session.")

            def decode(kind: type, value: Any) -> Any:
                with np.errstate(over="ignore"):
                    return np.float32(value) if kind is np.float32 else arrays[value]

            self._state = msgspec.msgpack.decode(arrays[_STATE].tobytes(), type=_State, dec_hook=decode)
            _check(self._state)
        except (
            OSError,
            SafetensorError,
            msgspec.MsgspecError,
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
        ) as error:
            raise ModelError(f"{path} cannot be read as a saved session ({error}); start a new one.") from error
        if self._state.model != model_digest(manifest):
            raise ModelError(f"{path} was saved with another model; load that one.")

    @property
    def keep(self) -> bool:
        """Returns whether the session keeps everything."""
        return self._state.keep

    def restore(self, processor: VideoProcessor) -> None:
        """Restores the saved state in a session that has just been started.

        Raises:
            ModelError: The session has another video.
        """
        state, saved = self._state, self._state.propagation
        if state.length != processor.frames.length:
            raise ModelError(f"{self.path} was saved with another video, whose length differs; give that one.")
        pending = () if saved is None else (*saved.hotstart_buffer, *saved.outputs)
        indices = {result.index for result in pending} | ({state.fingerprint[0]} if state.fingerprint else set())
        try:
            pixels = {index: processor.pixels(index) for index in sorted(indices)}
        except ModelError as error:
            raise ModelError(f"{self.path} was saved with another video: {error}") from error
        if state.fingerprint is not None and _pixel_digest(pixels[state.fingerprint[0]]) != state.fingerprint[1]:
            raise ModelError(f"{self.path} was saved with another video; give that one.")
        prompts = [Prompt(text, boxes=boxes) for text, boxes in state.prompts]
        progress = processor.new_progress(prompts, state.prompt_frame)
        progress.detector.box_frames = state.box_frames
        for group, saved_group in zip(progress.groups, state.groups, strict=True):
            group.state, group.buckets = saved_group.state, saved_group.buckets
        progress.history, progress.first_frame = state.history, state.first_frame
        progress.frame_results, progress.user_objects = state.frame_results, state.user_objects
        progress.fingerprint = state.fingerprint
        if saved is not None:
            hotstart_buffer, outputs = (
                tuple((result, pixels[result.index]) for result in results)
                for results in (saved.hotstart_buffer, saved.outputs)
            )
            progress.propagation = Propagation(
                saved.request, saved.scope, range(*saved.order), hotstart_buffer, outputs
            )
        processor.progress = progress


def _check(state: _State) -> None:
    """Checks what the types of a state do not say.

    Raises:
        ValueError: Its parts do not fit together.
    """
    saved = state.propagation
    if len(state.groups) != max(len(state.prompts), 1) or (saved is not None and abs(saved.order[2]) != 1):
        raise ValueError("its prompts or its frames are incomplete")
    for bucket in (bucket for group in state.groups for bucket in group.buckets.values()):
        bank = bucket.bank
        entries = (*bank.conditioning.values(), *bank.tracked.values())
        shared = [array for entry in entries for array in (entry.memory, entry.pointer) if array is not None]
        single = [
            *bucket.mask_logits.values(),
            *(array for entry in entries for array in (entry.object_logits, entry.iou)),
        ]
        buckets = len(bank.objects) if bank.slots is None else len(bank.slots.taken)
        rows = {len(array) for array in single}
        fitting = rows <= {len(bank.objects)} if bank.slots is None else max(rows, default=0) <= len(bank.slots.places)
        if not fitting or {len(array) for array in shared} - {buckets} or bank.rules not in (RULES, MULTIPLEX_RULES):
            raise ValueError("its memories are not those of its objects")
    for result in (*state.frame_results.values(), *((*saved.hotstart_buffer, *saved.outputs) if saved else ())):
        width, height = result.size
        forms = {(bits.dtype.name, bits.shape) for bits in result.bits.values()}
        if (
            not forms <= {("uint8", ((width * height + 7) // 8,))}
            or not result.bits.keys() <= result.tracker_scores.keys()
        ):
            raise ValueError(f"the masks of frame {result.index} are not those of {width} x {height} pixels")


def _state(processor: VideoProcessor) -> _State:
    progress, propagation = processor.progress, processor.progress.propagation
    return _State(
        model=model_digest(processor.model.manifest),
        keep=processor.keeps,
        length=processor.frames.length,
        fingerprint=_fingerprint(processor),
        prompts=tuple(
            (prompt.text, None if prompt.boxes is None else np.asarray(prompt.boxes, np.float64).tolist())
            for prompt in progress.detector.prompts
        ),
        prompt_frame=progress.detector.prompt_frame,
        box_frames=progress.detector.box_frames,
        groups=tuple(_Group(group.state, group.buckets) for group in progress.groups),
        history=progress.history,
        first_frame=progress.first_frame,
        frame_results=progress.frame_results,
        user_objects=progress.user_objects,
        propagation=None
        if propagation is None
        else _Propagation(
            propagation.request,
            propagation.scope,
            (propagation.order.start, propagation.order.stop, propagation.order.step),
            tuple(result for result, _ in propagation.hotstart_buffer),
            tuple(result for result, _ in propagation.outputs),
        ),
    )


def _fingerprint(processor: VideoProcessor) -> tuple[int, str] | None:
    """Returns the last frame whose pixels are in memory, with their SHA-256.

    It is a delayed one if encoding was interrupted.
    """
    latest, propagation = processor.latest, processor.progress.propagation
    if latest is not None:
        return latest.index, _pixel_digest(latest.image.pixels)
    delayed = () if propagation is None else propagation.pending
    if not delayed:
        return processor.progress.fingerprint
    result, pixels = delayed[-1]
    return result.index, _pixel_digest(pixels)


def _pixel_digest(pixels: npt.NDArray[np.uint8]) -> str:
    return hashlib.sha256(pixels.tobytes()).hexdigest()


def _digest(arrays: dict[str, Array]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
