"""The schema of a lab run's results: what its `report.json` holds, beside its format and digest.

Infinities and NaN are texts, which `float()` reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, final

from rope_patch.evaluation.results_schema import Number
from rope_patch.utils.provenance import Hardware

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
