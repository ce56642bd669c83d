"""Running compiled components: NumPy in, NumPy out; imports tvm and numpy, never torch or sam3."""
