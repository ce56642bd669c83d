"""Compiling the whole model into a folder that runs without PyTorch; needs torch and tvm, but not to be imported."""
