"""Rotation that follows the length of a sequence, under a key-value cache."""
