"""sam3-tvm: a conformance harness that takes Meta's SAM 3 through Apache TVM and proves the result with numbers."""

__version__ = "0.1.0"
