"""Takes Meta's SAM 3 through Apache TVM and proves the result with numbers: the conformance harness sam3-tvm."""

__version__ = "0.2.0"
