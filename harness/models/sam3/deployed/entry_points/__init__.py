"""Defines the functions of the compiled model: their inputs, their outputs and how they are built."""
