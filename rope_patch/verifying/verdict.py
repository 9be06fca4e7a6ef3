"""The verdict: which hypotheses explain an engine's log-probabilities, and which are ruled out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rope_patch.verifying.clients import Observation
from rope_patch.verifying.hypotheses import RIGHT
from rope_patch.verifying.probe_prompts import ProbePrompt

ROTATES_AS_ASKED, ROTATES_OTHERWISE, CANNOT_TELL = "as-asked", "another", "cannot-tell"
EXIT_CODES = {ROTATES_AS_ASKED: 0, ROTATES_OTHERWISE: 1, CANNOT_TELL: 3}  # 2 is an error

# Float32 tables of two libraries differ by up to 6e-4 nats in a token.
_SAME_PREDICTION = 2e-3  # nats; predictions that differ by less count as the same
_LEAST_MARGIN = 10.0  # nats of likelihood by which a hypothesis must lose to be ruled out
_CERTAIN_ERRORS = 4.0  # standard errors by which a comparison must be certain
_NEGLIGIBLE_REST = 5e-3  # nats a token; a smaller rest needs no explanation
_MAX_REST_OVER_NOISE = 4.0  # times the noise without rotation that the rest may be
_MAX_REST_SHARE = 0.1  # share of the difference to the next hypothesis that the rest may be
_MAX_LEAN = 0.25  # most that the engine may lean towards a hypothesis that is ruled out, 0 to 1


@dataclass(frozen=True)
class Verdict:
    """What the evidence says.

    Attributes:
        status: "as-asked", "another" or "cannot-tell".
        explains: The hypotheses that explain the engine; several cannot be told apart.
        ruled_out: Those that are ruled out.
        rivals: Comparison of each hypothesis with the closest one.
        closest: The closest hypothesis.
        rest: Mean difference between engine and closest hypothesis, in nats a token.
        noise: The same where rotation has no influence.
        reason: Why nothing can be told; empty otherwise.
    """

    status: str
    explains: tuple[str, ...]
    ruled_out: tuple[str, ...]
    rivals: dict[str, Rival]
    closest: str
    rest: float
    noise: float
    reason: str = ""

    @property
    def margin(self) -> float:
        """Return the log-likelihood over `runner_up`, in nats; NaN without one."""
        return math.nan if self.runner_up is None else self.rivals[self.runner_up].margin

    @property
    def runner_up(self) -> str | None:
        """Return the ruled-out hypothesis that is closest to the engine, of those read longest."""
        return min(
            self.ruled_out,
            key=lambda name: (-self.rivals[name].tokens, self.rivals[name].distance),
            default=None,
        )

    @property
    def is_final(self) -> bool:
        """Return whether more prompts would change nothing."""
        return self.status != CANNOT_TELL and len(self.explains) == 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "status": self.status,
            "explains": list(self.explains),
            "ruled_out": list(self.ruled_out),
            "runner_up": self.runner_up,
            "margin_nats": None if math.isnan(self.margin) else self.margin,
            "noise_floor_nats": self.rest,
            "noise_without_rotation_nats": self.noise,
            "reason": self.reason,
        }


def judge(evidence: Evidence, noise: float) -> Verdict:
    """Return the verdict.

    Args:
        evidence: Predictions and observations.
        noise: Mean difference between engine and reference where rotation has no influence, in
            nats a token.
    """
    closest = evidence.closest()
    rest = evidence.distance(closest)
    rivals = {name: evidence.compare(name, closest) for name in evidence.predicted}
    explains = tuple(
        name for name, rival in rivals.items() if name == closest or not _is_ruled_out(rival)
    )
    ruled_out = tuple(name for name in rivals if name not in explains)
    status, reason = ROTATES_OTHERWISE, ""
    if not _is_explained(rest, noise, rivals, closest):
        status = CANNOT_TELL
        reason = (
            f"no hypothesis explains the engine: {closest} is closest and {rest:.2g} nats a token "
            f"away, where {noise:.2g} are noise; its rotation is another one, or its weights, its "
            "attention window or its numerics differ"
        )
        explains, ruled_out = (), ()
    elif set(explains).issubset(RIGHT):
        status = ROTATES_AS_ASKED
    elif not set(explains).isdisjoint(RIGHT):
        status = CANNOT_TELL
        reason = (
            f"{', '.join(explains)} cannot be told apart: on these prompts they differ by "
            f"{max(rivals[name].apart for name in explains):.2g} nats a token, and the noise floor "
            f"is {rest:.2g}"
        )
    return Verdict(status, explains, ruled_out, rivals, closest, rest, noise, reason)


def needs_no_more(rival: Rival) -> bool:
    """Return whether more prompts would not bring a hypothesis back.

    It is ruled out, and the engine certainly leans towards it no more than a right one may.
    """
    is_off_line = abs(rival.place) + _CERTAIN_ERRORS * rival.uncertainty <= _MAX_LEAN
    return _is_ruled_out(rival) and is_off_line


def _is_ruled_out(rival: Rival) -> bool:
    return (
        rival.apart >= _SAME_PREDICTION
        and rival.margin >= _LEAST_MARGIN
        and rival.place + _CERTAIN_ERRORS * rival.uncertainty < 0.5
    )


def _is_explained(rest: float, noise: float, rivals: dict[str, Rival], closest: str) -> bool:
    """Return whether what is left is noise, and leans towards no other hypothesis."""
    others = [
        rival
        for name, rival in rivals.items()
        if name != closest and rival.apart >= _SAME_PREDICTION
    ]
    nearest = min((rival.apart for rival in others), default=0.0)
    if rest > max(_NEGLIGIBLE_REST, _MAX_REST_OVER_NOISE * noise, _MAX_REST_SHARE * nearest):
        return False
    return all(abs(each.place) - _CERTAIN_ERRORS * each.uncertainty <= _MAX_LEAN for each in others)


LEAST = -15.0  # nats; lower log-probabilities are noise of 16-bit logits
_BLOCK = 32  # neighbouring tokens whose noise may be common
_FREEDOM = 4.0  # degrees of freedom of Student's t, whose tails forgive a few odd tokens


@dataclass(frozen=True)
class Rival:
    """How a hypothesis compares with the one that is closest to the engine.

    Attributes:
        distance: Mean difference from the engine, in nats a token.
        margin: Log-likelihood that the closest hypothesis has more, in nats.
        apart: Root of the mean squared difference of both predictions, in nats.
        place: Where the engine lies on the line from the closest hypothesis (0) to this one (1).
        uncertainty: Standard error of `place`.
        tokens: Tokens compared: fewer than the closest hypothesis has, if ruled out early.
    """

    distance: float
    margin: float
    apart: float
    place: float
    uncertainty: float
    tokens: int


@dataclass
class Evidence:
    """Log-probabilities of tokens: an engine's, and those that each hypothesis predicts.

    A hypothesis that is ruled out early predicts the first prompts only, and is compared on them.

    Attributes:
        observed: The engine's, a tensor a prompt.
        predicted: The hypotheses', by name and prompt.
        prompts: The prompts, with the tokens that the engine answered for.
    """

    observed: list[torch.Tensor] = field(default_factory=list)
    predicted: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    prompts: list[ProbePrompt] = field(default_factory=list)

    def observe(self, observation: Observation) -> None:
        """Add what the engine says of a prompt."""
        self.prompts.append(observation.prompt)
        self.observed.append(_clamp(torch.tensor(observation.log_probs, dtype=torch.float64)))

    def predict(self, name: str, log_probs: torch.Tensor) -> None:
        """Add what a hypothesis predicts for the next prompt that it has not read.

        Args:
            name: The hypothesis.
            log_probs: Those of the answered tokens, `[N]`.
        """
        predicted = self.predicted.setdefault(name, [])
        if len(log_probs) != len(self.observed[len(predicted)]):
            raise ValueError(f"expected a number for each answered token, got {len(log_probs)}")
        predicted.append(_clamp(log_probs))

    def unread(self, name: str) -> list[ProbePrompt]:
        """Return the prompts that a hypothesis has not read."""
        return self.prompts[len(self.predicted.get(name, [])) :]

    @property
    def readings(self) -> int:
        """Return how often a prompt was read under a hypothesis."""
        return sum(map(len, self.predicted.values()))

    @property
    def tokens(self) -> int:
        """Return how many tokens were compared."""
        return sum(map(len, self.observed))

    def distance(self, name: str) -> float:
        """Return a hypothesis's mean difference from the engine, in nats a token."""
        return float(torch.cat(self._residuals(name)).abs().mean())

    def closest(self) -> str:
        """Return the hypothesis closest to the engine, of those that have read all prompts."""
        names = [name for name in self.predicted if not self.unread(name)]
        return min(names, key=self.distance)

    def compare(self, name: str, closest: str) -> Rival:
        """Compare a hypothesis with the closest one, on the prompts that both have read."""
        differences = self._differences(name, closest)
        residuals = self._residuals(closest)[: len(differences)]
        ours, theirs = torch.cat(residuals), torch.cat(self._residuals(name))
        scale = max(1.4826 * float(ours.abs().median()), 1e-3)
        margin = (_surprise(theirs, scale) - _surprise(ours, scale)).sum()
        place, uncertainty = _place(residuals, differences)
        apart = float(torch.cat(differences).square().mean().sqrt())
        distance = float(theirs.abs().mean())
        return Rival(distance, float(margin), apart, place, uncertainty, len(theirs))

    def separation(self, kind: str, names: Sequence[str], closest: str) -> float:
        """Return how far the least distinct of some hypotheses is, on prompts of one kind."""
        mine = [i for i, each in enumerate(self.prompts) if each.kind == kind]
        distances = []
        for name in names:
            by_prompt = self._differences(name, closest)
            both = [by_prompt[i] for i in mine if i < len(by_prompt)]
            if both:
                distances.append(float(torch.cat(both).square().mean()))
        return min(distances, default=0.0)

    def _residuals(self, name: str) -> list[torch.Tensor]:
        return [e - p for e, p in zip(self.observed, self.predicted[name], strict=False)]

    def _differences(self, name: str, closest: str) -> list[torch.Tensor]:
        pairs = zip(self.predicted[name], self.predicted[closest], strict=False)
        return [theirs - ours for theirs, ours in pairs]


def _clamp(log_probs: torch.Tensor) -> torch.Tensor:
    return log_probs.clamp(min=LEAST)


def _surprise(residuals: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the negative log-likelihood of residuals under Student's t, up to a constant."""
    return (_FREEDOM + 1) / 2 * torch.log1p((residuals / scale).square() / _FREEDOM)


def _place(
    residuals: Sequence[torch.Tensor], differences: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """Return the least-squares share of `differences` in `residuals`, and its standard error."""
    numerators, denominators = [], []
    for residual, difference in zip(residuals, differences, strict=True):
        for r, d in zip(residual.split(_BLOCK), difference.split(_BLOCK), strict=True):
            numerators.append(float((r * d).sum()))
            denominators.append(float((d * d).sum()))
    n, d = torch.tensor(numerators).double(), torch.tensor(denominators).double()
    if len(d) < 2 or not (d.sum() - d > 0).all():  # all in one block, or no difference at all
        return (float(n.sum() / d.sum()) if d.sum() > 0 else 0.0), float("inf")
    # The jackknife over blocks of neighbouring tokens.
    without = (n.sum() - n) / (d.sum() - d)
    spread = (without - without.mean()).square().sum() * (len(d) - 1) / len(d)
    return float(n.sum() / d.sum()), float(spread.sqrt())
