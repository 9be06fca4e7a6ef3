"""The best rotation for one checkpoint, found by measuring candidates on it."""

from rope_patch.searching.candidates import Candidate, Space
from rope_patch.searching.found import Found
from rope_patch.searching.running import search

__all__ = ["Candidate", "Found", "Space", "search"]
