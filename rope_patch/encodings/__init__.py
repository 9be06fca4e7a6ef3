"""Positional encodings other than rotation, as pure functions in float64."""
