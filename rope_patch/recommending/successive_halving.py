"""Who is measured on what, in which order, while the budget lasts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rope_patch.recommending import budget, variants
from rope_patch.recommending.bench import BLOCK, Bench, Clock, Failed
from rope_patch.recommending.budget import Costs
from rope_patch.recommending.decision_rule import Choice, choose
from rope_patch.recommending.sample_sets import CONTROL, LONG, PROSE, SEARCH, SHORT
from rope_patch.recommending.scoreboard import Row, contender
from rope_patch.recommending.scores import answers, gap
from rope_patch.recommending.timed_search import look
from rope_patch.recommending.variants import OWN, PLAIN, Entry, Rotation
from rope_patch.searching.candidates import Space
from rope_patch.searching.journal import Kept
from rope_patch.searching.measure.sanity_check import MOST, unigram_loss

_CHEAP = 0.1  # of what is left: prices of methods that are out are measured for the table


class Judge:
    """Measures within a budget, drops what is hopeless, and applies the rule to the rest.

    Args:
        model: Not patched.
        space: What is extended, and how far.
        asked: `trained_length`, `layer_types` and `start` of `rope_patch.patch`.
        bench: Measures.
        clock: The budget.
        kept: Results.
        seed: Of the search.
        search: Whether to search.

    Attributes:
        rows: All methods, in the order of tables.
        not_measured: What was not, and why, a sentence each.
        searched: The search's result, None without one.
    """

    def __init__(
        self,
        model: Any,
        space: Space,
        asked: Mapping[str, Any],
        bench: Bench,
        clock: Clock,
        kept: Kept,
        seed: int,
        search: bool,
    ) -> None:
        self.model, self.space, self.asked = model, space, asked
        self.bench, self.clock, self._kept = bench, clock, kept
        self._seed, self._search = seed, search
        self.not_measured: list[str] = []
        self.searched: Any = None
        self.blocks = 0
        self.rows: dict[str, Row] = {}
        self._everywhere = variants.engines(model, Entry(PLAIN), space, asked)
        self._add(variants.known(space))

    def run(self) -> Choice:
        """Measures and decides."""
        if (unable := self._gate()) is not None:
            return unable
        self._least()
        plan = self._plan()
        self._first(plan.first)
        self._look(plan)
        self._rounds()
        return self._decide()

    def _gate(self) -> Choice | None:
        """What to say where the plain model cannot answer within its own trained length."""
        try:
            plain = self.bench.scores(OWN, SHORT, 1, PLAIN)
            control = self.bench.scores(OWN, CONTROL[SHORT], 1, PLAIN)
        except Failed as error:
            raise ValueError(
                f"the model as it is fails within its trained length: {error}"
            ) from None
        self._plain.short = plain
        informed = answers(plain, control)
        if informed.low > 0 and plain.mean <= MOST * control.mean:
            self._leave_out_prose()
            return None
        reason = (
            f"within its trained length a token of a true answer costs the plain model "
            f"{plain.mean:.3f} nats, one that the text does not say {control.mean:.3f}: "
            f"{informed.estimate:+.3f} ({informed.low:+.3f} to {informed.high:+.3f})"
        )
        return Choice(None, "cannot answer", informed=informed, reasons=(reason,))

    def _leave_out_prose(self) -> None:
        """Leave prose out where the plain model does not read it: its prices would be noise."""
        if not self.bench.blocks(PROSE):
            return
        try:
            plain = self.bench.scores(OWN, PROSE, 1, PLAIN).mean
        except Failed:
            return  # said of the plain model later
        frequencies = unigram_loss(self.bench.samples(PROSE, 0))
        control = sum(frequencies) / len(frequencies)
        if plain >= control:
            self.bench.leave_out(PROSE)
            self.not_measured.append(
                f"perplexity of documents: a token of prose costs the plain model {plain:.2f} nats "
                f"within its trained length, and {control:.2f} by how frequent each token is"
            )

    def _least(self) -> None:
        """The plain model and one method, or an error that says what budget they need."""
        if not self.bench.has(OWN, LONG, 1):
            short = max(len(sample.ids) for sample in self.bench.samples(SHORT, 0))
            guess = self.clock.cost(SHORT) * self.space.length / short  # at least as much
            self._require(Costs(guess, 2 * self.clock.cost(SHORT)), 0)
        self._measure(self._plain, 1)
        for row in self._open():
            if row.entry.method is not None and not row.entry.dynamic:
                if not self.bench.has(row.entry.long, LONG, 1):
                    self._require(self._costs(), 1)
                self._measure(row, 1)
                if row.long is not None:
                    break
        else:
            reasons = {row.status for row in self.rows.values() if row.status}
            raise ValueError(f"not one method can be measured: {'; '.join(sorted(reasons))}")
        self.blocks = 1

    def _require(self, costs: Costs, done: int) -> None:
        needed = budget.least(costs, self.clock.cost(SHORT), done)
        if needed > self.clock.left():
            minutes = (needed + self.clock.spent()) / 60
            raise ValueError(
                f"the budget is too small: the plain model and one method, {BLOCK} samples each at "
                f"{self.space.length:,} tokens and within the trained length, take about "
                f"{1.1 * minutes:.2g} minutes here; give at least that, or a shorter length"
            )

    def _plan(self) -> budget.Plan:
        waiting = self._waiting()
        searchable = self.bench.blocks(SEARCH) if self._search else 0
        plan = budget.make(
            self.clock.left(),
            self._costs(),
            len(waiting),
            self.bench.blocks(LONG),
            searchable,
            known=2,
        )
        costs = self._costs()
        self.clock.say(
            f"{costs.long / BLOCK:.3g} s for a sample of {self.space.length:,} tokens; "
            f"{2 + plan.first} of {2 + len(waiting)} rotations fit, the best of them with about "
            f"{plan.samples} samples"
            + (f", and a search of about {plan.evaluations} evaluations" if plan.search else "")
        )
        return plan

    def _first(self, fits: int) -> None:
        """One block for every rotation, then prices for those that may still be chosen."""
        for number, row in enumerate(self._waiting()):
            late = self._costs().both > self.clock.left() - self._reserve()
            if not (number >= fits and late) or self.bench.has(row.entry.long, LONG, 1):
                self._long(row, 1)
        for row in self._open():
            if row.long is None:
                self._out(row, "the budget ended before it was measured")
        self._drop(len(self.rows))
        for row in self._open():
            self._within(row, 1)
        for row in self.rows.values():
            cheap = self._costs().within < _CHEAP * self.clock.left() / len(self.rows)
            cheap = cheap or self.bench.has(row.entry.within, SHORT, 1)
            if row.status and row.long is not None and row.short is None and cheap:
                self._within(row, 1)

    def _look(self, plan: budget.Plan) -> None:
        """The search, and its result among the others."""
        if not self._search:
            self.not_measured.append("a search: it was not asked for")
            return
        if not self.bench.blocks(SEARCH):
            return
        found, why = look(self.bench, self.clock, self._kept, self._seed, plan, self._reserve())
        if found is None:
            self.not_measured.append(f"a search: {why}")
            return
        self.searched = found
        known = {
            variants.numbers(self.space, row.entry.long): name for name, row in self.rows.items()
        }
        entries = variants.searched(self.space, found.strategy, found.candidate)
        if twin := known.get(variants.numbers(self.space, entries[0].long)):
            self.not_measured.append(
                f"a searched method apart: of {len(found.history)} candidates none was better than "
                f"{twin}"
            )
            return
        self._add(entries)
        for entry in entries:
            row = self.rows[entry.name]
            if not row.status:
                self._measure(row, 1)

    def _rounds(self) -> None:
        """More samples for the best, again and again."""
        most = min(
            self.bench.blocks(kind) for kind in (LONG, SHORT, PROSE) if self.bench.blocks(kind)
        )
        while self.blocks < most:
            alive = len({row.entry.long.key for row in self._open()})
            if self.blocks > 1 or alive > budget.KEPT:
                self._drop(budget.halved(alive))
                alive = len({row.entry.long.key for row in self._open()})
            left = self.clock.left() - self._reserve()
            new = budget.more(left, self._costs(), alive, self.blocks, most)
            new = max(new, self._kept_blocks(min(2 * self.blocks, most)))
            if new <= self.blocks:
                return
            self._within(self._plain, new)
            for row in self._open():
                self._measure(row, new)
            self.blocks = new

    def _decide(self) -> Choice:
        plain = contender(self._plain, self._everywhere)
        left = [contender(row, self._everywhere) for row in self._open() if row.short is not None]
        best = min(left, key=lambda one: one.long.mean)
        try:
            control = self.bench.scores(
                self.rows[best.name].entry.long, CONTROL[LONG], 1, best.name
            )
        except Failed:
            control = None
        return choose(left, plain, control)

    def _drop(self, keep: int) -> None:
        """Takes out what is told from the best, and all but the best `keep` rotations."""
        left = [row for row in self._open() if row.long is not None]
        best = min(left, key=lambda row: row.long.mean)  # type: ignore[union-attr]
        assert best.long is not None
        order = {row.entry.long.key: row.long.mean for row in left if row.long is not None}
        stay = sorted(order, key=lambda key: order[key])[:keep]
        for row in left:
            assert row.long is not None
            if gap(row.long, best.long).worse:
                self._out(row, f"dropped after {len(row.long)} samples: worse at the length")
            elif row.entry.long.key not in stay:
                after = f"after {len(row.long)} samples, which could be chance"
                self._out(row, f"not among the best {keep} {after}")

    def _measure(self, row: Row, blocks: int) -> None:
        self._long(row, blocks)
        if not row.status:
            self._within(row, blocks)

    def _long(self, row: Row, blocks: int) -> None:
        """Scores a rotation at the length, for all methods that have it."""
        try:
            found = self.bench.scores(row.entry.long, LONG, blocks, row.entry.name)
        except Failed as error:
            for other in self._like(row.entry.long):
                self._out(other, f"failed: {error}")
            return
        for other in self._like(row.entry.long):
            other.long = found

    def _within(self, row: Row, blocks: int) -> None:
        name = row.entry.name
        try:
            row.short = self.bench.scores(row.entry.within, SHORT, blocks, name)
            if self.bench.blocks(PROSE):
                row.prose = self.bench.scores(row.entry.within, PROSE, blocks, name)
        except Failed as error:
            self._out(row, f"failed: {error}")

    def _add(self, entries: list[Entry]) -> None:
        for entry in entries:
            row = self.rows[entry.name] = Row(entry)
            why = variants.refusal(self.model, entry, self.space, self.asked)
            if why is not None:
                self._out(row, f"refused: {why}")
            else:
                row.engines = variants.engines(self.model, entry, self.space, self.asked)

    def _out(self, row: Row, why: str) -> None:
        row.status = row.status or why

    def _open(self) -> list[Row]:
        return [row for row in self.rows.values() if not row.status]

    def _waiting(self) -> list[Row]:
        """A row for each rotation that was not measured at the length."""
        found = {row.entry.long.key: row for row in reversed(self._open()) if row.long is None}
        return list(reversed(found.values()))

    def _like(self, rotation: Rotation) -> list[Row]:
        return [row for row in self._open() if row.entry.long.key == rotation.key]

    def _kept_blocks(self, most: int) -> int:
        """How many blocks an earlier run has measured of all that are left."""
        rotations = [row.entry.long for row in self._open()]
        found = self.blocks
        while found < most and all(self.bench.has(one, LONG, found + 1) for one in rotations):
            found += 1
        return found

    def _costs(self) -> Costs:
        within = self.clock.cost(SHORT) + self.clock.cost(PROSE)
        return Costs(self.clock.cost(LONG), within)

    def _reserve(self) -> float:
        """Seconds for the control of the best, in the end."""
        return self._costs().long

    @property
    def _plain(self) -> Row:
        return self.rows[PLAIN]
