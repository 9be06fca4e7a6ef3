"""Give an untrained decoder another positional encoding."""
