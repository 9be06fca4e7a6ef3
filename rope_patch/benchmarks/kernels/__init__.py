"""How fast queries and keys are rotated, and normed, by us and by others: kernels, not methods."""
