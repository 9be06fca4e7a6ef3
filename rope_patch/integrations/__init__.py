"""Hooks for the trainers of other packages."""
