"""GPU kernels on the CPU: the source that was generated for a GPU, compiled by clang over a header of built-ins."""
