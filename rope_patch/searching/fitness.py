"""The fitness of a candidate: the model is patched with it, scored on samples, and unpatched."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rope_patch.entry_points import check, patch
from rope_patch.extension import Extension
from rope_patch.inference.samples import Sample
from rope_patch.inference.scorer import Score, Scorer
from rope_patch.patching import current
from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.utils.errors import describe_error
from rope_patch.utils.processes import Processes

ALPHA = 0.005  # error rate of each look: how often an equally good candidate is stopped
MIN_GROUPS = 6  # fewer groups show nothing; see `statistics.mean_test`
_ROUNDS = 4  # rounds of a measurement; each may end it early


@dataclass(frozen=True)
class Evaluation:
    """The measurements of one candidate.

    Attributes:
        nll: Mean nats for a scored token, by sample; None if the sample was not reached.
        hits: By sample, which answers greedy decoding would write.
        fitness: The mean of `nll`, where answers and prose have equal weight if there are both. An
            estimate worse than the incumbent's if the candidate was stopped early; infinite if it
            failed.
        tokens: Tokens that went through the model.
        seconds: Time taken.
        complete: Whether all samples were scored.
        error: Why the candidate failed, or None.
    """

    nll: tuple[float | None, ...]
    hits: tuple[tuple[bool, ...], ...]
    fitness: float
    tokens: int
    seconds: float
    complete: bool
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the evaluation as plain data."""
        return {**vars(self), "nll": list(self.nll), "hits": [list(hits) for hits in self.hits]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Evaluation:
        """Return the evaluation that `to_dict` wrote, through JSON or not."""
        hits = tuple(tuple(hits) for hits in data["hits"])
        return cls(**{**data, "nll": tuple(data["nll"]), "hits": hits})


class Fitness:
    """Measures candidates on the same samples and the same model, which is loaded once.

    Only the logits before scored tokens are computed. Short samples of one length are read in
    batches; others in chunks, common prefixes once. Several processes that accelerate or torchrun
    started share the samples of each candidate and return what one process would.

    A candidate that is compared with a complete evaluation is stopped early once its lag is beyond
    chance; see `predicted_deficit` for the rule and its risk. A stopped candidate is
    never complete, so it cannot become a result.

    Args:
        model: A transformers decoder, not patched.
        samples: Samples that candidates are scored on.
        extension: The request; each candidate has its own method and options instead of these.
        processes: Processes that share the work; those of accelerate unless given.

    Attributes:
        space: The space of the candidates.
        scorer: Scores samples, and counts the tokens that this process read.

    Raises:
        ValueError: The model is patched, cannot be extended as requested, or has several rotations
            to search.
    """

    def __init__(
        self,
        model: Any,
        samples: Sequence[Sample],
        extension: Extension,
        processes: Processes | None = None,
    ) -> None:
        self.model = model
        self._require_unpatched()
        self.space = make_space(model, extension)
        self._extension = replace(extension, factor=self.space.factor, length=None)
        # Samples of a group stay neighbours. Groups are shuffled, so that the first ones are
        # representative of all, whatever their depths and texts.
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group, []).append(sample)
        names = sorted(groups)
        random.Random(0).shuffle(names)
        self.samples = [sample for name in names for sample in groups[name]]
        self.processes = processes or Processes()
        self.scorer = Scorer(model, self.samples)
        prose = sum(sample.prose for sample in self.samples)
        share = {True: prose, False: len(self.samples) - prose}
        self._weights = [1 / share[sample.prose] for sample in self.samples]
        units = self.scorer.units
        edges = [round(k * len(units) / _ROUNDS) for k in range(_ROUNDS + 1)]
        self._rounds = [units[a:b] for a, b in pairwise(edges) if a < b]

    def measure(self, candidate: Candidate | None, against: Evaluation | None = None) -> Evaluation:
        """Score one candidate; the model is unpatched afterwards.

        Args:
            candidate: The candidate to patch with; None is the unpatched model.
            against: A complete evaluation on these samples, usually the best one so far; enables
                early stopping.

        Returns:
            The evaluation. If the candidate cannot be patched or fails, its `error` says why.

        Raises:
            ValueError: The model was patched meanwhile.
        """
        self._require_unpatched()
        started, tokens_before = time.monotonic(), self.scorer.tokens_read
        scores: dict[int, Score] = {}
        fitness = math.inf
        with self._patched(candidate) as error:
            for units in self._rounds:
                if error is None:
                    scores, error = self._score_round(units, scores)
                if error is not None or len(scores) == len(self.samples):
                    break
                deficit = None if against is None else self._predicted_deficit(scores, against)
                if against is not None and deficit is not None:
                    fitness = against.fitness + deficit
                    break
        complete = error is None and len(scores) == len(self.samples)
        if complete:
            fitness = self._weighted_mean({i: score.nll for i, score in scores.items()})
        order = range(len(self.samples))
        return Evaluation(
            nll=tuple(scores[i].nll if i in scores else None for i in order),
            hits=tuple(scores[i].hits if i in scores else () for i in order),
            fitness=fitness,
            tokens=sum(self._gather(self.scorer.tokens_read - tokens_before)),
            seconds=time.monotonic() - started,
            complete=complete,
            error=error,
        )

    @property
    def groups(self) -> list[str]:
        """Return the groups of the samples, in the order of an evaluation's numbers."""
        return [sample.group for sample in self.samples]

    @contextlib.contextmanager
    def _patched(self, candidate: Candidate | None) -> Iterator[str | None]:
        """Patch the model for the context; yield None, or why it cannot be patched."""
        handle, error = None, None
        if candidate is not None:
            try:
                options = self._patch_options(candidate)
                request = replace(self._extension, method=candidate.method, options=options)
                if not candidate.takes_factor:
                    request = replace(request, factor=None, length=self.space.length)
                handle = patch(self.model, request)
            except Exception as problem:
                error = describe_error(problem)
        try:
            yield error
        finally:
            if handle is not None:
                handle.undo()

    def _patch_options(self, candidate: Candidate) -> dict[str, Any]:
        """Return a candidate's options; static ones if all samples exceed the trained length."""
        options = candidate.options
        shortest = min(sample.answers[-1][1] - 1 for sample in self.samples)
        if "long_factor" not in options or shortest <= self.space.geometry.trained_length:
            return options
        return {**options, "short_factor": options["long_factor"]}

    def _score_round(
        self, units: list[list[int]], scores: dict[int, Score]
    ) -> tuple[dict[int, Score], str | None]:
        """Score units among the processes; return all scores, and the first error or None."""
        own_scores: dict[int, Score] = {}
        error = None
        try:
            for unit in self.processes.own_share(units, self.scorer.cost):
                own_scores |= self.scorer.score(unit)
            for i, score in own_scores.items():
                if not math.isfinite(score.nll):
                    raise ValueError(f"the loss of sample {i} is {score.nll}")
        except Exception as problem:
            error = describe_error(problem)
        scores = dict(scores)
        errors = []
        for part, failure in self._gather((own_scores, error)):
            scores |= part
            errors += [failure] if failure else []
        return scores, errors[0] if errors else None

    def _predicted_deficit(self, scores: dict[int, Score], against: Evaluation) -> float | None:
        """Return the predicted deficit if the candidate should be stopped, else None."""
        candidate_nll = {i: score.nll for i, score in scores.items()}
        best_nll = [_require_scored(nll) for nll in against.nll]
        return predicted_deficit(candidate_nll, best_nll, self._weights, self.groups)

    def _weighted_mean(self, nll: dict[int, float]) -> float:
        weight = sum(self._weights[i] for i in nll)
        return math.fsum(self._weights[i] * nll[i] for i in nll) / weight

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all processes in the order of their ranks."""
        if self.processes.size == 1:
            return [value]
        from accelerate.utils import gather_object

        return gather_object([value])

    def _require_unpatched(self) -> None:
        if (active_patch := current(self.model)) is not None:
            raise ValueError(
                f"the model is patched already ({active_patch}): candidates are measured on the "
                "model as it was, so call rope_patch.unpatch(model) first"
            )


def _require_scored(value: float | None) -> float:
    if value is None:
        raise ValueError("against must be a complete evaluation, got one that was given up")
    return value


def predicted_deficit(
    candidate_nll: Mapping[int, float],
    best_nll: Sequence[float],
    weights: Sequence[float],
    groups: Sequence[str],
) -> float | None:
    """Return the predicted final deficit if the candidate should be stopped, else None.

    The candidate is compared with the best complete one on the samples that both were scored on, so
    what makes a sample hard for both cancels. It is stopped if its mean loss is further behind than
    a one-sided Student's t-test at `ALPHA` allows. Groups are the units of the test, with the
    correction for a finite population: the more groups are scored, the less the rest can change.
    The best candidate must also lead by as much if the rest of the samples score as the first ones
    did, because the best one's remaining samples may be the hard ones. A candidate that would lose
    even with no loss at all on the rest is stopped at once.

    The risk: with three looks, a candidate that would have ended level with the best is stopped in
    at most about three searches of two hundred, one that would have ended ahead in fewer. The
    search then keeps its present best. Groups whose losses differ wildly make t a poor guide. Below
    six groups a candidate is stopped only if it cannot win.

    Args:
        candidate_nll: The candidate's nats, by sample, of those scored so far.
        best_nll: The best candidate's nats of all samples.
        weights: The weights of all samples.
        groups: The groups of all samples.

    Returns:
        The nats by which the candidate ends behind, pessimistic by one standard error.
    """
    from scipy import special

    scored_weight, total_weight = sum(weights[i] for i in candidate_nll), sum(weights)
    best_mean = (
        math.fsum(w * nats for w, nats in zip(weights, best_nll, strict=True)) / total_weight
    )
    candidate_sum = math.fsum(weights[i] * nats for i, nats in candidate_nll.items())
    mean_deficit = (
        candidate_sum - math.fsum(weights[i] * best_nll[i] for i in candidate_nll)
    ) / scored_weight
    residuals: dict[str, float] = {}
    for i, nats in candidate_nll.items():
        residual = weights[i] * (nats - best_nll[i] - mean_deficit)
        residuals[groups[i]] = residuals.get(groups[i], 0.0) + residual
    count = len(residuals)
    variance = math.fsum(part**2 for part in residuals.values()) * count / max(count - 1, 1)
    remaining_share = max(1 - scored_weight / total_weight, 1 / len(set(groups)))
    standard_error = math.sqrt(variance * remaining_share) / scored_weight
    if candidate_sum / total_weight > best_mean:
        return max(mean_deficit, candidate_sum / total_weight - best_mean) + standard_error
    if count < MIN_GROUPS:
        return None
    limit = float(special.stdtrit(count - 1, 1 - ALPHA)) * standard_error
    return (
        mean_deficit + standard_error
        if min(mean_deficit, candidate_sum / scored_weight - best_mean) > limit
        else None
    )


def make_space(model: Any, extension: Extension) -> SearchSpace:
    """Return the search space of a model: the rotation that `patch` would change, and the target.

    Args:
        model: A transformers decoder, with or without weights.
        extension: The request, with exactly one of `factor` and `length`; its method and options
            do not matter.

    Raises:
        ValueError: Not exactly one of `factor` and `length`, a request that `patch` refuses, or
            layer types that rotate differently.
    """
    factor, length = extension.factor, extension.length
    if (factor is None) == (length is None):
        received = "neither" if factor is None else f"factor={factor} and length={length}"
        raise ValueError(f"give exactly one of factor and length, got {received}")
    plan = check(model, replace(extension, method="linear", options={}))
    if len(plan.geometries) > 1:
        kinds = ", ".join(str(layer_type) for layer_type in plan.geometries)
        raise ValueError(
            "a search is for one rotation, and these layer types have one each: "
            f"{kinds}; name one of them in layer_types"
        )
    (geometry,) = plan.geometries.values()
    return SearchSpace(geometry, plan.method.factor)
