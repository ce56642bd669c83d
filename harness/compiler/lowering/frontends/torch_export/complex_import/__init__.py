"""Imports complex numbers by TVM's importer: a complex tensor is a real Relax tensor with a last dimension of 2."""

from harness.compiler.lowering.frontends.torch_export.complex_import.importer import ComplexImporter

__all__ = ["ComplexImporter"]
