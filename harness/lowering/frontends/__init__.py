"""Frontends: from a PyTorch module to a Relax module, one package each."""
