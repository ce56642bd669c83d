"""What the schedules of CPUs and GPUs share."""
