"""Facts about a model's rotation, read from its modules and their source code."""
