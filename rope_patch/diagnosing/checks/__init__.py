"""Checks of a diagnosis, grouped by their subject."""
