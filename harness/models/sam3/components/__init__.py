"""Lists the components of SAM 3 by name."""

from __future__ import annotations

from harness.models.sam3.components import image, tracker
from harness.models.sam3.components.component import Component

COMPONENTS: dict[str, Component] = {component.name: component for component in (*image.COMPONENTS, *tracker.COMPONENTS)}
"""The components by name, in the order in which they are listed."""
