"""What a model's code does with its rotation, read from the live model."""
