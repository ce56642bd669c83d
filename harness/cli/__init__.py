"""The `sam3-tvm` command."""
