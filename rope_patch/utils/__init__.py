"""Helpers for the whole package: files, errors, checksums, progress and processes."""
