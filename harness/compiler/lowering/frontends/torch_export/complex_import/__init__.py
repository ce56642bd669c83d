"""Imports complex numbers by TVM's importer: a complex tensor is a real Relax tensor with a last dimension of 2."""
