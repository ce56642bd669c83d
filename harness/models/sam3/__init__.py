"""SAM 3 on any machine: the unmodified `sam3` package, its scales, weights, checkpoints and inputs."""
