"""The results of a lab run, and what is asked of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.lab.interval import Scores
from rope_patch.lab.measurement import PLAIN
from rope_patch.lab.results_schema import FORMAT
from rope_patch.lab.settings import RECALL, TEXT
from rope_patch.utils.checksums import unseal

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
