"""Plan the memory of a training step."""
