"""A compiled model on a device, with the calls of `harness.runtime.artifact.Artifact`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.execution.remote.client import Content, DeviceSession, RemoteTensor
from harness.runtime.artifact import Tensors, check_inputs
from harness.runtime.checking import check_files
from harness.runtime.manifest import LIBRARY, MANIFEST, read_manifest, weights_file


class RemoteArtifact:
    """A compiled model whose folder is here and which runs on a device; tensors stay there until they are fetched.

    Attributes:
        folder: Where it is, on this machine.
        manifest: What it says about itself.
    """

    def __init__(self, session: DeviceSession, folder: str | Path) -> None:
        """Sends what the device lacks of the folder, and loads it there.

        Args:
            session: Where.
            folder: Written by `sam3-tvm compile`; sizes are checked here, checksums as it arrives there.

        Raises:
            ArtifactError: It is no artifact, incomplete, damaged, or of another version.
            LoadError: The device cannot run it.
            DeviceLostError: The session ended.
        """
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        check_files(self.folder, self.manifest.files, contents=False)
        weighted = [weights_file(name) for name, entry in self.manifest.entries.items() if entry.weights]
        names = (LIBRARY, self.manifest.vocabulary, *weighted)
        files = {name: self.manifest.files[name] for name in names}
        session.keep([Content(file.sha256, file.bytes, self.folder / name) for name, file in files.items()])
        self._session = session
        self._read_once: Counter[str] = Counter()
        self._loaded = session.load(
            {
                "files": {name: file.sha256 for name, file in files.items()},
                "manifest": (self.folder / MANIFEST).read_text(encoding="utf-8"),
            }
        )

    def call(self, entry: str, **inputs: Any) -> Tensors:
        """Runs an entry point; see `harness.runtime.artifact.Artifact.call`.

        Raises:
            Sam3Error: An input is missing, has another shape or dtype than the manifest says, or an index out of range.
            RemoteError: It raised.
            DeviceLostError: The session ended.
        """
        signature = self.manifest.entries[entry]
        check_inputs(entry, signature, inputs, self.fetch)
        given = [inputs[spec.name] for spec in signature.inputs]
        tensors = [value if isinstance(value, RemoteTensor) else self._session.put(value) for value in given]
        once = self._read_once[entry] > 0
        results, _seconds = self._session.call(self._loaded, entry, tensors, reading_once=once)
        return {spec.name: tensor for spec, tensor in zip(signature.outputs, results, strict=True)}

    def fetch(self, tensor: RemoteTensor) -> npt.NDArray[np.generic]:
        """Returns a tensor's values, on this machine."""
        return self._session.fetch(tensor)

    @contextmanager
    def reading_once(self, entry: str) -> Iterator[None]:
        """Gives back the memory of an entry point's weights over there as its calls in the context read them."""
        self._read_once[entry] += 1
        try:
            yield
        finally:
            self._read_once[entry] -= 1
