"""Defines the `sam3-tvm` command."""
