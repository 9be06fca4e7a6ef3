"""Search for the best rotation for one checkpoint by measuring candidates on it."""

from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.pipeline import search
from rope_patch.searching.result.search_result import SearchResult

__all__ = ["Candidate", "SearchResult", "SearchSpace", "search"]
