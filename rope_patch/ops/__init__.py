"""Rotation of queries and keys."""
