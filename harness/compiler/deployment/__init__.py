"""Compiles a whole model into a folder that runs without PyTorch; importing it needs neither torch nor tvm."""
