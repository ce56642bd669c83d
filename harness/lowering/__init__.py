"""From PyTorch modules to what is compiled."""
