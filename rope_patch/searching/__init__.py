"""Search for the best rotation for one checkpoint by measuring candidates on it."""

from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.pipeline import search
from rope_patch.searching.search_result import SearchResult
from rope_patch.utils.lazy_exports import export_lazily

__all__ = ["Candidate", "SearchResult", "SearchSpace", "search"]

export_lazily(
    __name__,
    {
        "fitness": "Evaluation Fitness predicted_deficit",
        "journal": "SearchJournal",
        "plot": "draw_search",
        "published_factors": "read_factors",
        "search_result": "compare_on_held_out",
        "strategies.evolution": "PopulationSizes",
        "strategies.longrope": "FactorOperators",
        "strategies.longrope2": "CriticalDimensionOperators",
        "strategies.registry": "STRATEGIES",
        "strategies.trust_region": "TrustRegion",
    },
)
