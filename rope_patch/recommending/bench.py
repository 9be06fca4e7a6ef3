"""Rotations measured on blocks of samples, each once, and the time that this takes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rope_patch.inference.samples import Sample
from rope_patch.recommending.scores import Scores
from rope_patch.recommending.variants import VariantRotation
from rope_patch.searching.candidates import SearchSpace
from rope_patch.searching.journal import SharedJournal
from rope_patch.searching.measure.fitness import Fitness
from rope_patch.utils.processes import Processes
from rope_patch.utils.progress import progress_bar

BLOCK_SIZE = 6  # samples that are measured together: the fewest texts that give an interval
CLOCK_KEY = "clock"  # the key under which the time spent is kept


class MeasurementFailed(Exception):
    """A rotation could not be measured; says why."""


class TimeBudget:
    """A budget of minutes, what it was spent on, and what things cost.

    Args:
        minutes: In all, with those of earlier runs.
        spent: Seconds of earlier runs.
        processes: Everybody goes by the main process's clock.
        progress: Whether to show a bar on stderr.
    """

    def __init__(
        self, minutes: float, spent: float, processes: Processes, progress: bool = True
    ) -> None:
        self._total = 60 * minutes
        self._started = time.monotonic() - spent
        self._processes = processes
        self._costs: dict[str, list[float]] = {}
        self._bar = progress_bar(
            total=round(self._total),
            disable=not (progress and processes.is_main),
            bar_format="{desc} {percentage:3.0f}% of the budget|{bar}| {postfix}",
        )

    def spent(self) -> float:
        """Seconds, the same in all processes."""
        return self._processes.broadcast(time.monotonic() - self._started)

    def left(self) -> float:
        """Seconds, the same in all processes."""
        return self._total - self.spent()

    def left_in_process(self) -> float:
        """Seconds that are left by the clock of this process alone."""
        return self._total - (time.monotonic() - self._started)

    def record_cost(self, kind: str, seconds: float) -> None:
        """Remembers what one block of a kind took."""
        self._costs.setdefault(kind, []).append(seconds)

    def has_cost(self, kind: str) -> bool:
        """Whether a block of that kind was measured."""
        return kind in self._costs

    def cost(self, kind: str) -> float:
        """Seconds that one block of a kind takes, from those that were measured; 0 if none was."""
        seconds = self._costs.get(kind, [])
        return self._processes.broadcast(sum(seconds) / len(seconds) if seconds else 0.0)

    def set_status(self, what: str) -> None:
        """Says what runs now, and how much time is left."""
        now = time.monotonic() - self._started
        self._bar.set_description_str(what, refresh=False)
        self._bar.set_postfix_str(
            f"{_format_duration(max(self._total - now, 0))} left", refresh=False
        )
        self._bar.n = min(round(now), self._bar.total)
        self._bar.refresh()

    def log(self, line: str) -> None:
        """A line on stderr, above the bar."""
        if not self._bar.disable:
            self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        """Ends the bar."""
        self._bar.close()


class Bench:
    """Measures rotations on blocks of samples and keeps the results.

    Args:
        model: Not patched.
        space: What is extended, and how far.
        sets: By kind of samples a function that makes the samples of a block, and how many blocks
            there can be.
        asked: `trained_length`, `layer_types` and `start` of `rope_patch.patch`.
        kept: Where results are kept.
        clock: Told what they cost.
        processes: Those that share the work.
    """

    def __init__(
        self,
        model: Any,
        space: SearchSpace,
        sets: Mapping[str, tuple[Callable[[int], Sequence[Sample]], int]],
        asked: Mapping[str, Any],
        kept: SharedJournal,
        clock: TimeBudget,
        processes: Processes,
    ) -> None:
        self._model, self._space, self._sets = model, space, dict(sets)
        self._patch_arguments, self._journal, self._clock = asked, kept, clock
        self._processes = processes
        self._samples: dict[tuple[str, int], list[Sample]] = {}
        self._seen: set[str] = set()
        self.samples_scored = 0  # samples, in this run and earlier ones
        self.candidates_searched = 0  # candidates of the search that the clock counts

    def block_count(self, kind: str) -> int:
        """How many blocks of a kind there can be."""
        return self._sets[kind][1] if kind in self._sets else 0

    def drop_kind(self, kind: str) -> None:
        """Take away all blocks of a kind."""
        del self._sets[kind]

    def samples(self, kind: str, block: int) -> list[Sample]:
        """A block of samples, made when it is asked for first."""
        if (kind, block) not in self._samples:
            self._samples[kind, block] = list(self._sets[kind][0](block))
        return self._samples[kind, block]

    def has(self, rotation: VariantRotation, kind: str, blocks: int) -> bool:
        """Whether the first blocks of a kind were measured."""
        return all(
            self._journal.get(_block_key(rotation, kind, n)) is not None for n in range(blocks)
        )

    def scores(self, rotation: VariantRotation, kind: str, blocks: int, name: str = "") -> Scores:
        """What a rotation makes of the first blocks of a kind.

        Raises:
            Failed: It cannot be measured.
        """
        found = [self._measure_block(rotation, kind, number, name) for number in range(blocks)]
        return sum(found[1:], found[0])

    def fitness(self, kind: str, blocks: Sequence[int], factor: float | None = None) -> Fitness:
        """What measures candidates on some blocks."""
        return Fitness(
            self._model,
            [sample for block in blocks for sample in self.samples(kind, block)],
            factor=factor or self._space.factor,
            processes=self._processes,
            **self._patch_arguments,
        )

    def save_clock(self) -> None:
        """Keeps what was spent, for a run that goes on from here."""
        self._journal.put(
            CLOCK_KEY,
            {"spent": self._clock.spent(), "searched": self.candidates_searched},
        )

    def _measure_block(
        self, rotation: VariantRotation, kind: str, number: int, name: str
    ) -> Scores:
        key = _block_key(rotation, kind, number)
        kept = self._journal.get(key)
        if kept is None:
            self._clock.set_status(
                f"{name or rotation.key}: {kind}, {number * BLOCK_SIZE + 1} and on"
            )
            started = time.monotonic()
            fitness = self.fitness(kind, [number], rotation.factor if rotation.candidate else None)
            found = fitness.measure(rotation.candidate)
            if found.error is not None:
                raise MeasurementFailed(found.error)
            kept = {
                "nll": list(found.nll),
                "hits": [list(hits) for hits in found.hits],
                "groups": fitness.groups,
                "seconds": time.monotonic() - started,
            }
            self._journal.put(key, kept)
            self.save_clock()
        if key not in self._seen:
            self._seen.add(key)
            self.samples_scored += len(kept["nll"])
            self._clock.record_cost(kind, kept["seconds"])
        return Scores(
            tuple(kept["nll"]), tuple(tuple(hits) for hits in kept["hits"]), tuple(kept["groups"])
        )


def earlier_usage(kept: SharedJournal) -> tuple[float, int]:
    """Seconds of earlier runs, and how many candidates of a search they have measured."""
    said = kept.get(CLOCK_KEY) or {"spent": 0.0, "searched": 0}
    spent, number = said["spent"], 0
    while (found := kept.get(f"search/{number}")) is not None:
        if number >= said["searched"]:  # killed before the search's time was kept
            spent += found["evaluation"]["seconds"]
        number += 1
    return spent, number


def _block_key(rotation: VariantRotation, kind: str, number: int) -> str:
    return f"{kind}/{number}/{rotation.key}"


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
