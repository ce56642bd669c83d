"""Registers SAM 3 as a model that the harness verifies."""

from __future__ import annotations

from harness.core.case import TINY
from harness.core.settings import FIXTURES, Settings
from harness.models.model import Model
from harness.models.sam3.checkpoints.loading import describe_checkpoint
from harness.models.sam3.deployed.deployable import DEPLOYABLE
from harness.models.sam3.inspection import inspect_checkpoint
from harness.models.sam3.subjects import SUBJECTS
from harness.runtime.sam3.description import NAME


def _prepare() -> None:
    """Imports libraries, and builds a model: that computes the tables that all models of a process share."""
    import torch
    from tqdm import tqdm

    from harness.models.sam3.build import build_architecture
    from harness.models.sam3.source import Source  # noqa: F401
    from harness.models.sam3.upstream import import_sam3

    tqdm.monitor_interval = 0  # the progress bars that the import makes would start a thread
    import_sam3()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the others that a loop would start are missing in a fork
    build_architecture(TINY, interactive=True)
    torch.set_num_threads(threads)


def _check(settings: Settings) -> None:
    """Checks that the photograph to capture inputs from can be read."""
    from harness.runtime.sam3.images import load_image

    if settings.image is not None:
        load_image(settings.image)


MODEL = Model(
    name=NAME,
    subjects=SUBJECTS,
    deployable=DEPLOYABLE,
    context=DEPLOYABLE.context,
    prepare=_prepare,
    check=_check,
    describe_checkpoint=describe_checkpoint,
    inspect_checkpoint=inspect_checkpoint,
    expectations=FIXTURES / "expectations.toml",
)
