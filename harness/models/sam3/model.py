"""Registers SAM 3 as a model that the harness verifies."""

from __future__ import annotations

from harness.core.settings import FIXTURES, Settings
from harness.models.model import Model
from harness.models.sam3.checkpoints.loading import describe_checkpoint
from harness.models.sam3.deployed.deployable import DEPLOYABLE
from harness.models.sam3.inspection import inspect_checkpoint
from harness.models.sam3.subjects import SUBJECTS
from harness.runtime.sam3.description import NAME


def _import_libraries() -> None:
    from tqdm import tqdm

    from harness.models.sam3.source import Source  # noqa: F401
    from harness.models.sam3.upstream import import_sam3

    tqdm.monitor_interval = 0  # the progress bars that the import makes would start a thread
    import_sam3()


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
    prepare=_import_libraries,
    check=_check,
    describe_checkpoint=describe_checkpoint,
    inspect_checkpoint=inspect_checkpoint,
    expectations=FIXTURES / "expectations.toml",
)
