"""Successive halving over methods within a time budget: each round, more samples for fewer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from rope_patch.evaluation.decision_plan import PassTime, RunPlan, effect_sentence, try_plan
from rope_patch.exporting import ENGINES
from rope_patch.extension import Extension
from rope_patch.recommending import budget, variants
from rope_patch.recommending.bench import BlockScorer, MeasurementFailed, search_within
from rope_patch.recommending.budget import BlockCosts, TimeBudget
from rope_patch.recommending.decision_rule import (
    NATS,
    Choice,
    VariantScores,
    choose,
    gain_over_control,
    score_difference,
    to_measured_variant,
    verdicts_on_plain,
)
from rope_patch.recommending.sample_sets import BLOCK_SIZE, CONTROL, LONG, PROSE, SEARCH, SHORT
from rope_patch.recommending.variants import PLAIN, UNPATCHED, Variant, VariantRotation
from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.journal import SearchJournal
from rope_patch.searching.sample_sets import MAX_LOSS_RATIO, unigram_loss
from rope_patch.statistics import SIGNIFICANCE_LEVEL, least_texts
from rope_patch.utils.terminal import format_duration

# The time of a verdict is looked for in steps, up to so many times the smallest budget.
_STEP, _NEVER = 1.1, 1000
# Share of the time left that may go into the prices of eliminated methods, which only tables show.
_CHEAP_SHARE = 0.1


class SuccessiveHalving:
    """Measures variants within a budget, eliminates the worst, and decides between the rest.

    Args:
        model: The unpatched model.
        space: The rotation that is extended, and the target.
        extension: The request; each variant has its own method and options.
        scorer: Measures rotations.
        clock: The time budget.
        journal: Stores results.
        seed: The search's seed.
        search: Whether to search.
        engines: Engines that what is chosen must run in; any method may be chosen if empty.

    Attributes:
        rows: The scores of all variants by name, in the order of tables.
        not_measured: What was not measured, and why, a sentence each.
        search_outcome: The search's result, or None.
        block_count: Blocks that all remaining variants have been measured on.
    """

    def __init__(
        self,
        model: Any,
        space: SearchSpace,
        extension: Extension,
        scorer: BlockScorer,
        clock: TimeBudget,
        journal: SearchJournal,
        seed: int,
        search: bool,
        engines: Sequence[str] = (),
    ) -> None:
        self.model, self.space, self.extension = model, space, extension
        self.scorer, self.clock, self._journal = scorer, clock, journal
        self._seed, self._search_enabled = seed, search
        self.not_measured: list[str] = []
        self.search_outcome: Any = None
        self.block_count = 0
        self.rows: dict[str, VariantScores] = {}
        self._required = tuple(engines)
        self._engines = tuple(dict.fromkeys([*ENGINES, *engines]))
        self._add_variants(variants.standard_variants(space))

    def plan(self) -> RunPlan:
        """Return what the budget allows, by the time of one short pass."""
        times = PassTime(self.model, self.space.geometry.trained_length)
        short = max(len(sample.ids) for sample in self.scorer.samples(SHORT, 0))
        within = BLOCK_SIZE * times.seconds(short)
        costs = BlockCosts(
            BLOCK_SIZE * times.seconds(self.space.length),
            within * (2 if self.scorer.block_count(PROSE) else 1),
        )
        least_seconds = budget.minimum_seconds(costs, within)
        others = max(0, len(self._unmeasured()) - 2)  # but for the plain model and one method

        def fit(seconds: float) -> tuple[budget.BudgetPlan, int]:
            plan = self._plan_within(seconds - least_seconds, costs, others)
            return plan, 1 + plan.first_rotations + bool(plan.evaluations)

        def is_enough(seconds: float) -> bool:
            plan, compared = fit(seconds)
            return plan.samples >= least_texts(SIGNIFICANCE_LEVEL / compared)

        left = self.clock.left()
        plan, compared = fit(left)
        decides: tuple[str, ...] = ()
        missing = ""
        if left >= least_seconds and is_enough(left):
            decides = (effect_sentence(plan.samples, compared, self.space.length, "rotations"),)
        else:
            # Where no time is enough, there are too few samples.
            needed = least_seconds
            while not is_enough(needed) and needed < _NEVER * least_seconds:
                needed *= _STEP
            takes = f"it takes about {format_duration(needed + self.clock.spent())}"
            if not is_enough(needed):
                takes = "it takes more samples (--most, or more of your own)"
            has = "no method fits" if left < least_seconds else f"{plan.samples} texts fit"
            missing = f"{has}; {takes}"
        search = f", a search of about {plan.evaluations} evaluations" if plan.evaluations else ""
        measures = (
            f"the plain model and {1 + plan.first_rotations} of {1 + others} rotations on "
            f"{BLOCK_SIZE} samples of {self.space.length:,} tokens, the best on about "
            f"{plan.samples}{search}; as many within the trained length",
        )
        # The least has the control at the length, too.
        seconds = least_seconds + max(0.0, plan.seconds - costs.long)
        return RunPlan(
            measures=measures, seconds=seconds, budget=left, decides=decides, missing=missing
        )

    def run(self) -> Choice:
        """Measure the variants and return the decision.

        Raises:
            BudgetTooSmall: The plain model and one method do not fit, by one short pass or by what
                was measured.
        """
        if not self.scorer.has(UNPATCHED, SHORT, 1):
            expected = self.clock.share(try_plan(self.plan))
            for line in str(expected).splitlines() if expected is not None else ():
                self.clock.log(line)
            if expected is not None and expected.seconds > (expected.budget or 0.0):
                self._refuse_budget(expected.seconds, f": {expected.missing}")
        if (refusal := self._check_competence()) is not None:
            return refusal
        self._measure_minimum()
        plan = self._make_plan()
        self._first_round(plan.first_rotations)
        self._run_search(plan)
        self._halving_rounds()
        return self._decide()

    def _check_competence(self) -> Choice | None:
        """Return a choice if the plain model cannot answer within its trained length, else None."""
        try:
            plain = self.scorer.scores(UNPATCHED, SHORT, 1, PLAIN)
            control = self.scorer.scores(UNPATCHED, CONTROL[SHORT], 1, PLAIN)
        except MeasurementFailed as error:
            raise ValueError(
                f"the model as it is fails within its trained length: {error}"
            ) from None
        self._plain_row.short = plain
        gain = gain_over_control(plain, control)
        if gain.low > 0 and plain.mean <= MAX_LOSS_RATIO * control.mean:
            self._drop_unreadable_prose()
            return None
        reason = (
            f"within its trained length a token of a true answer costs the plain model "
            f"{plain.mean:.3f} nats, one that the text does not say {control.mean:.3f}: "
            f"{NATS.number(gain.estimate)} ({NATS.range(gain.low, gain.high)})"
        )
        return Choice(None, "cannot answer", information_gain=gain, reasons=(reason,))

    def _drop_unreadable_prose(self) -> None:
        """Drop prose if the plain model does not read it, because prices on it would be noise."""
        if not self.scorer.block_count(PROSE):
            return
        try:
            plain = self.scorer.scores(UNPATCHED, PROSE, 1, PLAIN).mean
        except MeasurementFailed:
            return  # `_measure_minimum` reports it
        frequencies = unigram_loss(self.scorer.samples(PROSE, 0))
        control = sum(frequencies) / len(frequencies)
        if plain >= control:
            self.scorer.drop_kind(PROSE)
            self.not_measured.append(
                f"perplexity of documents: a token of prose costs the plain model {plain:.2f} nats "
                f"within its trained length, and {control:.2f} by how frequent each token is"
            )

    def _measure_minimum(self) -> None:
        """Measure the plain model and one method; raise if the budget does not suffice."""
        if not self.scorer.has(UNPATCHED, LONG, 1):
            short = max(len(sample.ids) for sample in self.scorer.samples(SHORT, 0))
            guess = self.clock.cost(SHORT) * self.space.length / short  # a lower bound
            self._require_budget(BlockCosts(guess, 2 * self.clock.cost(SHORT)), 0)
        self._measure(self._plain_row, 1)
        for row in self._alive():
            if row.variant.method is not None and not row.variant.dynamic:
                if not self.scorer.has(row.variant.long_rotation, LONG, 1):
                    self._require_budget(self._costs(), 1)
                self._measure(row, 1)
                if row.long is not None:
                    break
        else:
            reasons = {row.status for row in self.rows.values() if row.status}
            raise ValueError(f"not one method can be measured: {'; '.join(sorted(reasons))}")
        self.block_count = 1

    def _require_budget(self, costs: BlockCosts, measured: int) -> None:
        needed_seconds = budget.minimum_seconds(costs, self.clock.cost(SHORT), measured)
        if needed_seconds > self.clock.left():
            self._refuse_budget(needed_seconds)

    def _refuse_budget(self, seconds: float, more: str = "") -> NoReturn:
        """Raise for a budget below these seconds."""
        minutes = (seconds + self.clock.spent()) / 60
        raise budget.BudgetTooSmall(
            f"the budget is too small: the plain model and one method, {BLOCK_SIZE} samples "
            f"each at {self.space.length:,} tokens and within the trained length, take about "
            f"{1.1 * minutes:.2g} minutes here; give at least that, or a shorter length{more}",
            1.1 * minutes,
        )

    def _plan_within(self, seconds: float, costs: BlockCosts, rotations: int) -> budget.BudgetPlan:
        """Return what fits once the plain model and one method are measured."""
        return budget.plan_budget(
            seconds,
            costs,
            rotations,
            self.scorer.block_count(LONG),
            self.scorer.block_count(SEARCH) if self._search_enabled else 0,
            measured_rotations=2,
        )

    def _make_plan(self) -> budget.BudgetPlan:
        unmeasured = self._unmeasured()
        plan = self._plan_within(self.clock.left(), self._costs(), len(unmeasured))
        costs = self._costs()
        self.clock.log(
            f"{costs.long / BLOCK_SIZE:.3g} s for a sample of {self.space.length:,} tokens; "
            f"{2 + plan.first_rotations} of {2 + len(unmeasured)} rotations fit, the best of them "
            f"with about {plan.samples} samples"
            + (
                f", and a search of about {plan.evaluations} evaluations"
                if plan.search_seconds
                else ""
            )
        )
        return plan

    def _first_round(self, fits: int) -> None:
        """Measure one block of each rotation, then prices of those that may still be chosen."""
        for number, row in enumerate(self._unmeasured()):
            over_budget = self._costs().both > self.clock.left() - self._reserved_seconds()
            if not (number >= fits and over_budget) or self.scorer.has(
                row.variant.long_rotation, LONG, 1
            ):
                self._score_long(row, 1)
        for row in self._alive():
            if row.long is None:
                self._mark_out(row, "the budget ended before it was measured")
        self._eliminate(len(self.rows))
        for row in self._alive():
            self._score_short(row, 1)
        for row in self.rows.values():
            cheap = self._costs().short < _CHEAP_SHARE * self.clock.left() / len(self.rows)
            cheap = cheap or self.scorer.has(row.variant.short_rotation, SHORT, 1)
            if row.status and row.long is not None and row.short is None and cheap:
                self._score_short(row, 1)

    def _run_search(self, plan: budget.BudgetPlan) -> None:
        """Search, and add the result to the variants."""
        if not self._search_enabled:
            self.not_measured.append("a search: it was not asked for")
            return
        if not self.scorer.block_count(SEARCH):
            return
        outcome, reason = search_within(
            self.scorer,
            self.clock,
            self._journal,
            self._seed,
            plan,
            self._reserved_seconds(),
            self._is_servable if self._required else None,
        )
        if outcome is None:
            self.not_measured.append(f"a search: {reason}")
            return
        self.search_outcome = outcome
        names_by_rotation = {
            variants.rotation_key(self.space, row.variant.long_rotation): name
            for name, row in self.rows.items()
        }
        new_variants = variants.search_variants(self.space, outcome.strategy, outcome.candidate)
        if twin_name := names_by_rotation.get(
            variants.rotation_key(self.space, new_variants[0].long_rotation)
        ):
            self.not_measured.append(
                f"a searched method apart: of {len(outcome.history)} candidates none was better "
                f"than {twin_name}"
            )
            return
        self._add_variants(new_variants)
        for variant in new_variants:
            row = self.rows[variant.name]
            if not row.status:
                self._measure(row, 1)

    def _halving_rounds(self) -> None:
        """Give more samples to the best half, again and again."""
        max_blocks = min(
            self.scorer.block_count(kind)
            for kind in (LONG, SHORT, PROSE)
            if self.scorer.block_count(kind)
        )
        while self.block_count < max_blocks:
            alive = len({row.variant.long_rotation.key for row in self._alive()})
            if self.block_count > 1 or alive > budget.FINALISTS:
                self._eliminate(budget.halve(alive))
                alive = len({row.variant.long_rotation.key for row in self._alive()})
            seconds_left = self.clock.left() - self._reserved_seconds()
            blocks = budget.next_block_count(
                seconds_left, self._costs(), alive, self.block_count, max_blocks
            )
            blocks = max(blocks, self._stored_blocks(min(2 * self.block_count, max_blocks)))
            if blocks <= self.block_count:
                return
            self._measure_plain(blocks)
            for row in self._alive():
                self._measure(row, blocks)
            self.block_count = blocks

    def _decide(self) -> Choice:
        # Where engines are required, what others run is no reason.
        engines = self._required or self._plain_row.engines
        plain = to_measured_variant(self._plain_row, engines)
        finalists = [
            to_measured_variant(row, engines) for row in self._alive() if row.short is not None
        ]
        best = min(finalists, key=lambda variant: variant.long.mean)
        try:
            control = self.scorer.scores(
                self.rows[best.name].variant.long_rotation, CONTROL[LONG], 1, best.name
            )
        except MeasurementFailed:
            control = None
        choice = choose(finalists, plain, control)
        return replace(choice, on_plain=verdicts_on_plain(list(self.rows.values()), plain.long))

    def _eliminate(self, keep: int) -> None:
        """Eliminate what is worse than the best beyond chance, and all but `keep` rotations."""
        rows = [row for row in self._alive() if row.long is not None]
        best = min(rows, key=lambda row: row.long.mean)  # type: ignore[union-attr]
        assert best.long is not None
        order = {
            row.variant.long_rotation.key: row.long.mean for row in rows if row.long is not None
        }
        remaining_keys = sorted(order, key=lambda key: order[key])[:keep]
        for row in rows:
            assert row.long is not None
            if score_difference(row.long, best.long).is_worse:
                self._mark_out(row, f"dropped after {len(row.long)} samples: worse at the length")
            elif row.variant.long_rotation.key not in remaining_keys:
                sample_note = f"after {len(row.long)} samples, which could be chance"
                self._mark_out(row, f"not among the best {keep} {sample_note}")

    def _measure(self, row: VariantScores, blocks: int) -> None:
        self._score_long(row, blocks)
        if not row.status:
            self._score_short(row, blocks)

    def _score_long(self, row: VariantScores, blocks: int) -> None:
        """Score a rotation at the target length, for all variants that have it."""
        try:
            scores = self.scorer.scores(row.variant.long_rotation, LONG, blocks, row.variant.name)
        except MeasurementFailed as error:
            for other in self._same_rotation(row.variant.long_rotation):
                self._mark_out(other, f"failed: {error}")
            return
        for other in self._same_rotation(row.variant.long_rotation):
            other.long = scores

    def _measure_plain(self, blocks: int) -> None:
        """Score the plain model though it may be dropped: verdicts are against it."""
        plain = self._plain_row
        with contextlib.suppress(MeasurementFailed):
            plain.long = self.scorer.scores(UNPATCHED, LONG, blocks, PLAIN)
        self._score_short(plain, blocks)

    def _score_short(self, row: VariantScores, blocks: int) -> None:
        name = row.variant.name
        try:
            row.short = self.scorer.scores(row.variant.short_rotation, SHORT, blocks, name)
            if self.scorer.block_count(PROSE):
                row.prose = self.scorer.scores(row.variant.short_rotation, PROSE, blocks, name)
        except MeasurementFailed as error:
            self._mark_out(row, f"failed: {error}")

    def _add_variants(self, new_variants: list[Variant]) -> None:
        for variant in new_variants:
            row = self.rows[variant.name] = VariantScores(variant)
            refusal = variants.refusal_reason(self.model, variant, self.extension)
            if refusal is not None:
                self._mark_out(row, f"refused: {refusal}")
                continue
            refusals = variants.export_refusals(self.model, variant, self.extension, self._engines)
            row.engines = tuple(engine for engine in self._engines if engine not in refusals)
            missing = [engine for engine in self._required if engine in refusals]
            if variant.method is not None and missing:
                row.is_servable = False
                self._mark_out(row, f"does not run in {', '.join(missing)}")

    def _is_servable(self, strategy: str, candidate: Candidate) -> bool:
        """Return whether all required engines run what a search would make of a candidate."""
        variant = variants.search_variants(self.space, strategy, candidate)[0]
        return not variants.export_refusals(self.model, variant, self.extension, self._required)

    def elsewhere(self, choice: Choice) -> str:
        """Return which methods were left out for the required engines, in one line; "" if none."""
        left_out = [row.variant for row in self.rows.values() if not row.is_servable]
        if not left_out:
            return ""
        names = ", ".join(variant.name for variant in left_out)
        text = f"{' or '.join(self._required)} cannot run {names} without this package"
        chosen = self.rows.get(choice.name or "")
        if chosen is None or chosen.variant.method is None:
            return text
        long, short = chosen.variant.long_rotation, chosen.variant.short_rotation
        for twin in left_out:
            if twin.long_rotation.key == long.key and twin.short_rotation == UNPATCHED != short:
                return (
                    f"{text}. {twin.name} rotates as {choice.name} at the length and leaves texts "
                    "within the trained length as they are"
                )
        return text

    def _mark_out(self, row: VariantScores, reason: str) -> None:
        row.status = row.status or reason

    def _alive(self) -> list[VariantScores]:
        return [row for row in self.rows.values() if not row.status]

    def _unmeasured(self) -> list[VariantScores]:
        """Return one row for each rotation that was not measured at the target length."""
        by_rotation = {
            row.variant.long_rotation.key: row
            for row in reversed(self._alive())
            if row.long is None
        }
        return list(reversed(by_rotation.values()))

    def _same_rotation(self, rotation: VariantRotation) -> list[VariantScores]:
        return [row for row in self._alive() if row.variant.long_rotation.key == rotation.key]

    def _stored_blocks(self, max_blocks: int) -> int:
        """Return how many blocks an earlier run has measured of all remaining rotations."""
        rotations = [row.variant.long_rotation for row in self._alive()]
        blocks = self.block_count
        while blocks < max_blocks and all(
            self.scorer.has(rotation, LONG, blocks + 1) for rotation in rotations
        ):
            blocks += 1
        return blocks

    def _costs(self) -> BlockCosts:
        short_seconds = self.clock.cost(SHORT) + self.clock.cost(PROSE)
        return BlockCosts(self.clock.cost(LONG), short_seconds)

    def _reserved_seconds(self) -> float:
        """Return the seconds reserved for the best one's control, which is measured last."""
        return self._costs().long

    @property
    def _plain_row(self) -> VariantScores:
        return self.rows[PLAIN]
