"""Reads checkpoints of SAM 3: what files contain, whose names they have, and how the model takes them."""
