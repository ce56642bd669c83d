"""SAM 3, compiled: photographs and prompts in, masks out."""
