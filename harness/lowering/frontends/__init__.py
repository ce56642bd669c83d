"""Routes from a PyTorch module to a Relax module, one folder each."""
