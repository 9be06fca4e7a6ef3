"""The registry of strategies by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from rope_patch.searching.strategies import critical_dimension, curve, longrope, longrope2
from rope_patch.searching.strategies.base import Proposals

__all__ = ["STRATEGIES", "Proposals", "Strategy"]


@dataclass(frozen=True)
class Strategy:
    """A search strategy.

    Attributes:
        propose: Takes a space, a budget, a seed and the strategy's own options; yields candidates
            and is sent the fitness of each. Deterministic, given the fitnesses.
        description: One line for help texts.
        paper: The source.
        searches_attention_factor: Whether the attention factor is searched; else it follows a law.
        resumable: Whether a larger budget begins with the same candidates, so that a search can
            continue a smaller one.
    """

    propose: Callable[..., Proposals]
    description: str
    paper: str
    searches_attention_factor: bool
    resumable: bool

    @property
    def options(self) -> list[str]:
        """Return the names of the strategy's own options."""
        parameters = inspect.signature(self.propose).parameters.values()
        return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


STRATEGIES = {
    "curve": Strategy(
        curve.propose,
        "a smooth monotone curve of four numbers and the attention factor, by Bayesian "
        "optimisation: the fewest evaluations",
        "this package's own; samples by optuna, arXiv:1907.10902",
        searches_attention_factor=True,
        resumable=True,
    ),
    "longrope2": Strategy(
        longrope2.propose,
        "LongRoPE2's evolution: a critical pair, stretches from it on, NTK before it",
        "LongRoPE2, arXiv:2502.20082",
        searches_attention_factor=False,
        resumable=False,
    ),
    "longrope": Strategy(
        longrope.propose,
        "LongRoPE's evolution: a stretch for every pair, and start tokens that keep theirs",
        "LongRoPE, arXiv:2402.13753",
        searches_attention_factor=False,
        resumable=False,
    ),
    "yarn-rcd": Strategy(
        critical_dimension.propose_yarn,
        "YaRN with about ten critical pairs from the theoretical one down: the cheapest",
        "LongRoPE2, arXiv:2502.20082; YaRN, arXiv:2309.00071",
        searches_attention_factor=False,
        resumable=True,
    ),
    "ntk-rcd": Strategy(
        critical_dimension.propose_ntk,
        "NTK with about ten critical pairs from the theoretical one down",
        "LongRoPE2, arXiv:2502.20082",
        searches_attention_factor=False,
        resumable=True,
    ),
}
