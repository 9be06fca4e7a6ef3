"""Kernel benchmark: norm and rotation of queries and keys, by us and by others."""
