"""Where compiled code runs: on this machine, on another one, or emulated."""
