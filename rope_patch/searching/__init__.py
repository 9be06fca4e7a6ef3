"""Search for the best rotation for one checkpoint by measuring candidates on it."""

from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.pipeline import search
from rope_patch.searching.result.search_result import SearchResult
from rope_patch.utils.front import front

__all__ = ["Candidate", "SearchResult", "SearchSpace", "search"]

front(
    __name__,
    {
        "journal": "SearchJournal",
        "measure.early_stopping": "predicted_deficit",
        "measure.fitness": "Evaluation Fitness",
        "result.comparison": "compare_on_held_out",
        "result.plot": "draw_search",
        "result.published_factors": "read_factors",
        "strategies.evolution": "PopulationSizes",
        "strategies.longrope": "FactorOperators",
        "strategies.longrope2": "CriticalDimensionOperators",
        "strategies.registry": "STRATEGIES",
        "strategies.trust_region": "TrustRegion",
    },
)
