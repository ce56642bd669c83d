"""Adapts SAM 3 to any machine: the unmodified `sam3` package, its scales, weights, checkpoints and inputs."""

from harness.compiler.lowering.rotation import register_rotary_attention
from harness.models.sam3.rotary import TRACKER, TRUNK

register_rotary_attention(TRUNK, TRACKER)
