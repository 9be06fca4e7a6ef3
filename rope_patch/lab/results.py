"""Read the results of a lab run: their schema, their scores, and intervals over seeds.

`LabResults` takes the results as `run_lab` returns them, and answers what report and statements ask
of them. The schema says what a run's `report.json` holds, beside its format and digest. Infinities
and NaN are texts, which `float()` reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, final

from rope_patch.evaluation.results_schema import Number
from rope_patch.lab.settings import PLAIN, RECALL, TEXT
from rope_patch.statistics import Interval, accuracy, clustered_mean
from rope_patch.utils.checksums import unseal
from rope_patch.utils.provenance import Hardware

LOSS, LAST_HALF, RIGHT, BY_POSITION = "loss", "last_half", "right", "by_position"


@dataclass(frozen=True)
class ScoreKey:
    """Names scores: a quantity of one encoding at one multiple of the trained length.

    Attributes:
        task: "text" or "recall".
        encoding: The encoding's name.
        multiple: Test length over trained length; several are averaged.
        method: "plain", or the method that extends to that length.
        quantity: "loss" or "last_half" of text, "loss" or "right" of recall.
    """

    task: str
    encoding: str
    multiple: int | tuple[int, ...]
    method: str = PLAIN
    quantity: str = LOSS


class LabResults:
    """Results of a run, as `run_lab` returns them.

    Attributes:
        results: The results themselves.
        encodings: Names, in the order asked for.
        tasks: Tasks that were measured.
        length: Trained length.
        tests: Test lengths.
        seeds: Number of seeds.
    """

    def __init__(self, results: Mapping[str, Any]) -> None:
        self.results = results
        settings = results["run"]["settings"]
        self.encodings: list[str] = settings["encodings"]
        self.tasks: list[str] = settings["tasks"]
        self.length: int = settings["length"]
        self.tests: list[int] = settings["tests"]
        self.seeds: int = settings["seeds"]
        self._cells: dict[tuple[str, str], list[Any]] = {}
        for record in results["cells"]:
            cell = record["cell"]
            self._cells.setdefault((cell["task"], cell["encoding"]), []).append(record)

    @classmethod
    def load(cls, path: Path) -> LabResults:
        """Return the results in the `report.json` of a lab run.

        Args:
            path: The file.

        Raises:
            OSError: It cannot be read.
            ValueError: It is no such file, of another version, or changed after it was written.
        """
        try:
            body = unseal(path.read_bytes(), format=FORMAT)
        except ValueError as error:
            raise ValueError(
                f"{path} is no report.json of rope-patch lab in the format {FORMAT}: {error}"
            ) from error
        return cls({key: value for key, value in body.items() if key != "format"})

    def records(self, task: str, encoding: str) -> list[Any]:
        """Return the cells of an encoding, a record a seed; empty if it was not measured."""
        return self._cells.get((task, encoding), [])

    def encodings_of(self, task: str) -> list[str]:
        """Return the encodings that a task was measured with."""
        return [name for name in self.encodings if self.records(task, name)]

    def methods(self, task: str, encoding: str) -> list[str]:
        """Return what was measured of an encoding: "plain", and its extensions."""
        records = self.records(task, encoding)
        return list(dict.fromkeys(score["method"] for score in records[0]["scores"]))

    def scores(
        self,
        task: str,
        encoding: str,
        length: int,
        method: str = PLAIN,
        quantity: str = LOSS,
    ) -> Any:
        """Return the scores of each seed, `[seeds][samples]`; None if there are none.

        Args:
            task: The task.
            encoding: The encoding.
            length: Tokens. At the trained length, an extension is the farthest one: its price.
            method: "plain" or an extension.
            quantity: What of the scores.
        """
        rows = []
        for record in self.records(task, encoding):
            for score in record["scores"]:
                if (score["method"], score["length"]) == (method, length) and quantity in score:
                    rows.append(score[quantity])
        return rows or None

    def find(self, key: ScoreKey) -> Scores | None:
        """Return the scores of a key; None unless all of them were measured."""
        multiples = key.multiple
        many = (multiples,) if isinstance(multiples, int) else multiples
        parts = [
            self.scores(
                key.task,
                key.encoding,
                self.length * multiple,
                key.method,
                key.quantity,
            )
            for multiple in many
        ]
        if any(part is None for part in parts):
            return None
        return [
            [math.fsum(values) / len(values) for values in zip(*rows, strict=True)]
            for rows in zip(*parts, strict=True)
        ]


def unit(task: str, quantity: str = LOSS) -> str:
    """Return the unit of a quantity."""
    if quantity == RIGHT:
        return "of answers"
    return {TEXT: "nats a character", RECALL: "nats an answer"}[task]


FORMAT = "rope_patch.lab/1"


class SettingsRecord(TypedDict):
    """The settings of a run.

    Attributes:
        encodings: Names of encodings.
        tasks: "text", "recall" or both.
        length: Trained length, in tokens.
        tests: Test lengths, in tokens.
        steps: Optimizer steps by task.
        seeds: How many; they are 0, 1, 2, ...
        samples: Held-out samples by task.
    """

    encodings: Sequence[str]
    tasks: Sequence[str]
    length: int
    tests: Sequence[int]
    steps: Mapping[str, int]
    seeds: int
    samples: Mapping[str, int]


class LabMetadata(TypedDict):
    """Where and how a run ran.

    Attributes:
        command: The command line; None if it was called from Python.
        date: When it ended, ISO 8601 in UTC.
        versions: Versions by package.
        hardware: The machine.
        settings: The settings.
    """

    command: str | None
    date: str
    versions: Mapping[str, str]
    hardware: Hardware
    settings: SettingsRecord


class OptionalCellKeys(TypedDict, total=False):
    """The keys that only some cells have.

    Attributes:
        options: Options of `rope_patch.encode` beside the encoding's name.
    """

    options: Mapping[str, Any]


class CellIdentity(OptionalCellKeys):
    """Everything that a cell's results depend on.

    Attributes:
        task: "text" or "recall".
        seed: Of the first weights and of the data.
        encoding: The encoding's name.
        length: Trained length, in tokens.
        tests: Test lengths, in tokens.
        steps: Optimizer steps.
        samples: Held-out samples.
    """

    task: str
    seed: int
    encoding: str
    length: int
    tests: Sequence[int]
    steps: int
    samples: int


class OptionalScoreKeys(TypedDict, total=False):
    """The quantities that only one task has, or one length.

    Attributes:
        last_half: Of text: loss of the last half of each window, in nats a character.
        by_position: Of text at the longest test: loss by band of positions, `[samples][bands]`.
        right: Of recall: share of the values that are the likeliest token, 0 to 1.
    """

    last_half: Sequence[Number]
    by_position: Sequence[Sequence[Number]]
    right: Sequence[float]


class ScoreRecord(OptionalScoreKeys):
    """What a trained model scores at one length; lists have an entry for each sample.

    Attributes:
        method: "plain", or the extension method.
        length: Tokens of each window.
        target: The length that the method extends to; the trained one if plain.
        loss: Nats a character of text, or nats an answer of recall.
    """

    method: str
    length: int
    target: int
    loss: Sequence[Number]


class CellRecord(TypedDict):
    """One trained model.

    Attributes:
        cell: What it depends on.
        parameters: Trained parameters.
        encoding: What the encoding does after training, in words.
        training_loss: Mean loss of each stretch of steps, in nats a token.
        bands: Edges of the bands of positions; empty for recall.
        scores: What it scores, by method and length.
        cpu_seconds: Of training and of measuring.
    """

    cell: CellIdentity
    parameters: int
    encoding: str
    training_loss: Sequence[Number]
    bands: Sequence[int]
    scores: Sequence[ScoreRecord]
    cpu_seconds: Mapping[str, float]


class FindingRecord(TypedDict):
    """A published statement beside what came out.

    Attributes:
        paper: Authors and arXiv id.
        claim: The statement in words.
        numbers: The paper's two numbers, or where the finding is stated.
        setting: What the numbers are of.
        published: The paper's difference; None if it has no numbers in the same unit.
        bound: The statement says that the difference is below this.
        difference: Estimate, low and high end of its 95% interval; None if it was not measured.
        verdict: "agrees", "disagrees", "cannot tell" or "not measured".
    """

    paper: str
    claim: str
    numbers: str
    setting: str
    published: float | None
    bound: float
    difference: Sequence[Number] | None
    verdict: str


@final
class LabRecord(TypedDict):
    """The results of a lab run.

    Attributes:
        run: Where and how it ran.
        cells: The trained models.
        published: What papers found beside what came out.
    """

    run: LabMetadata
    cells: Sequence[CellRecord]
    published: Sequence[FindingRecord]


Scores = Sequence[Sequence[float]]  # `[seeds][samples]`


def seeded_mean(scores: Scores, *, is_share: bool = False) -> Interval:
    """Return the mean of scores, with an interval over samples and over seeds.

    The two are independent sources of chance, so the squares of their half widths add up (MOVER,
    Zou & Donner 2008): one half width is that of the samples' means over seeds, the other that of
    the seeds' means over samples, both by Student's t, or Wilson's for shares of samples. With
    three seeds t is 4.3, so their part is wide, as it should be. A single seed says nothing of
    others: its interval holds for the trained model alone.

    Args:
        scores: For each seed the score of each sample.
        is_share: Whether scores are shares of answers, from 0 to 1.

    Raises:
        ValueError: There are no scores, or seeds were measured on different samples.
    """
    if not scores or not scores[0] or len({len(row) for row in scores}) > 1:
        raise ValueError(
            f"expected scores of the same samples for each seed, got {[len(r) for r in scores]}"
        )
    by_sample = [math.fsum(column) / len(scores) for column in zip(*scores, strict=True)]
    over_samples = (
        accuracy([min(max(score, 0.0), 1.0) for score in by_sample])
        if is_share
        else clustered_mean(by_sample, range(len(by_sample))).mean
    )
    count = len(scores) * len(by_sample)
    mean = math.fsum(by_sample) / len(by_sample)
    low, high = mean - over_samples.low, over_samples.high - mean
    if len(scores) > 1:
        by_seed = [math.fsum(row) / len(row) for row in scores]
        half = clustered_mean(by_seed, range(len(by_seed))).mean.half_width
        low, high = math.hypot(low, half), math.hypot(high, half)
    bounds = [mean - low, mean + high]
    if is_share:
        bounds = [max(bounds[0], 0.0), min(bounds[1], 1.0)]
    return Interval(mean, bounds[0], bounds[1], count, len(by_sample))


def seeded_difference(first: Scores, second: Scores) -> Interval:
    """Return the mean difference of two sets of scores, paired by seed and sample.

    Seeds give the same data and first weights, and samples the same texts, so what both have in
    common cancels.

    Args:
        first: For each seed the score of each sample.
        second: What is subtracted; of the same seeds and as many samples.
    """
    return seeded_mean(
        [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)]
    )
