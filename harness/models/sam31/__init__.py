"""Adds SAM 3.1 (Object Multiplex): its modules around those of the `sam3` package, its components and checkpoints."""

from harness.compiler.lowering.rotation import register_rotary_attention
from harness.models.sam31.rotary import TRACKER

register_rotary_attention(TRACKER)
