"""Evidence: an engine's log-probabilities beside those that each hypothesis predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rope_patch.verifying.engine import Observation

LEAST = -15.0  # nats; below it, log-probabilities are noise of 16-bit logits
_BLOCK = 32  # neighbouring tokens, whose noise may be common
_FREEDOM = 4.0  # of Student's t, whose tails forgive a few odd tokens


@dataclass(frozen=True)
class Rival:
    """How a hypothesis compares with the one that is closest to the engine.

    Attributes:
        distance: Mean difference from the engine, in nats a token.
        margin: Log-likelihood that the closest hypothesis has more, in nats.
        apart: Root of the mean squared difference of both predictions, in nats.
        place: Where the engine lies on the line from the closest hypothesis (0) to this one (1).
        uncertainty: Standard error of `place`.
    """

    distance: float
    margin: float
    apart: float
    place: float
    uncertainty: float


@dataclass
class Evidence:
    """Log-probabilities of tokens: an engine's, and those that each hypothesis predicts.

    Attributes:
        observed: The engine's, a tensor a prompt.
        predicted: The hypotheses', by name and prompt.
        kinds: The prompts' kinds.
    """

    observed: list[torch.Tensor] = field(default_factory=list)
    predicted: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)

    def add(self, observation: Observation, predictions: Mapping[str, torch.Tensor]) -> None:
        """Add a prompt.

        Args:
            observation: What the engine says.
            predictions: What each hypothesis predicts for the tokens that the engine answered for.
        """
        self.kinds.append(observation.prompt.kind)
        self.observed.append(_clamp(torch.tensor(observation.log_probs, dtype=torch.float64)))
        for name, values in predictions.items():
            self.predicted.setdefault(name, []).append(_clamp(values))

    @property
    def tokens(self) -> int:
        """Return how many tokens were compared."""
        return sum(map(len, self.observed))

    def distance(self, name: str) -> float:
        """Return a hypothesis's mean difference from the engine, in nats a token."""
        return float(torch.cat(self._residuals(name)).abs().mean())

    def closest(self) -> str:
        """Return the hypothesis closest to the engine."""
        return min(self.predicted, key=self.distance)

    def compare(self, name: str, closest: str) -> Rival:
        """Compare a hypothesis with the closest one."""
        residuals, differences = self._residuals(closest), self._differences(name, closest)
        ours, theirs = torch.cat(residuals), torch.cat(self._residuals(name))
        scale = max(1.4826 * float(ours.abs().median()), 1e-3)
        margin = (_surprise(theirs, scale) - _surprise(ours, scale)).sum()
        place, uncertainty = _place(residuals, differences)
        apart = float(torch.cat(differences).square().mean().sqrt())
        distance = float(theirs.abs().mean())
        return Rival(distance, float(margin), apart, place, uncertainty)

    def separation(self, kind: str, names: Sequence[str], closest: str) -> float:
        """Return how far the least distinct of some hypotheses is, on prompts of one kind."""
        mine = [i for i, each in enumerate(self.kinds) if each == kind]
        distances = [
            float(torch.cat([self._differences(name, closest)[i] for i in mine]).square().mean())
            for name in names
        ]
        return min(distances, default=0.0)

    def _residuals(self, name: str) -> list[torch.Tensor]:
        return [e - p for e, p in zip(self.observed, self.predicted[name], strict=True)]

    def _differences(self, name: str, closest: str) -> list[torch.Tensor]:
        pairs = zip(self.predicted[name], self.predicted[closest], strict=True)
        return [theirs - ours for theirs, ours in pairs]


def _clamp(log_probs: torch.Tensor) -> torch.Tensor:
    return log_probs.clamp(min=LEAST)


def _surprise(residuals: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the negative log-likelihood of residuals under Student's t, up to a constant."""
    return (_FREEDOM + 1) / 2 * torch.log1p((residuals / scale).square() / _FREEDOM)


def _place(
    residuals: Sequence[torch.Tensor], differences: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """Return the least-squares share of `differences` in `residuals`, and its standard error.

    The error is the jackknife's over blocks of neighbouring tokens.
    """
    numerators, denominators = [], []
    for residual, difference in zip(residuals, differences, strict=True):
        for r, d in zip(residual.split(_BLOCK), difference.split(_BLOCK), strict=True):
            numerators.append(float((r * d).sum()))
            denominators.append(float((d * d).sum()))
    n, d = torch.tensor(numerators).double(), torch.tensor(denominators).double()
    if len(d) < 2 or not (d.sum() - d > 0).all():  # all in one block, or no difference at all
        return (float(n.sum() / d.sum()) if d.sum() > 0 else 0.0), float("inf")
    without = (n.sum() - n) / (d.sum() - d)
    spread = (without - without.mean()).square().sum() * (len(d) - 1) / len(d)
    return float(n.sum() / d.sum()), float(spread.sqrt())
