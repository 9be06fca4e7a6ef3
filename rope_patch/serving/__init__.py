"""Rotation by length inside serving engines: what rope_patch adds to an engine's own process."""
