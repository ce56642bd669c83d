"""Adapts SAM 3 to any machine: the unmodified `sam3` package, its scales, weights, checkpoints and inputs."""

from harness.compiler.lowering.rotation import register_rotary_attention
from harness.models.sam3.rotary import TRACKER, TRUNK
from harness.parity.initial_tables import register_tables

register_rotary_attention(TRUNK, TRACKER)
register_tables("PositionEmbeddingSine", {"cache": {}})
register_tables(
    "TransformerDecoder", {"compilable_cord_cache": None, "compilable_stored_size": None, "coord_cache": {}}
)
