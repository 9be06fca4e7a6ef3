"""Settings of a lab run, and the cells that it consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rope_patch.encodings.replacement.entry_point import list_encodings
from rope_patch.units import parse_tokens
from rope_patch.utils.errors import Refused, did_you_mean

TEXT, RECALL = "text", "recall"
TASKS = (TEXT, RECALL)
PLAIN = "plain"  # no extension
LOG_N, SCALE = "log-n", "scale-1.2"  # extensions by a temperature
LENGTH = 256  # tokens
QUICK_LENGTH = 64
MULTIPLES = (1, 2, 4, 8)  # tested lengths over the trained one
TEXT_STEPS, RECALL_STEPS = 400, 1200
QUICK_TEXT_STEPS = 200
_T5_EXACT, _T5_DISTANCE = 16, 128  # buckets of one distance each; T5's own last bucket
LEAST_LENGTH = 32  # two excerpts of a repeated segment and four pairs with their queries fit


@dataclass(frozen=True)
class Cell:
    """One training run: an encoding, a task and a seed.

    Attributes:
        task: "text" or "recall".
        seed: Of the first weights and of the data; all encodings share both.
        encoding: A name of `rope_patch.list_encodings()`.
    """

    task: str
    seed: int
    encoding: str

    @property
    def key(self) -> str:
        """Return a name for files and logs, such as `text-0-alibi`."""
        return f"{self.task}-{self.seed}-{self.encoding}"


@dataclass(frozen=True, kw_only=True)
class LabSettings:
    """What is trained and measured.

    Attributes:
        encodings: Names of encodings.
        tasks: "text", "recall" or both.
        length: Trained length, in tokens.
        tests: Test lengths in tokens, ascending, each at least the trained length.
        text_steps: Optimizer steps on text.
        recall_steps: Optimizer steps on recall.
        seeds: How many; they are 0, 1, 2, ...
        excerpts: Held-out excerpts of text, each as long as the longest test.
        sequences: Recall sequences at each test length.
    """

    encodings: tuple[str, ...]
    tasks: tuple[str, ...] = TASKS
    length: int = LENGTH
    tests: tuple[Any, ...] = ()
    text_steps: int = TEXT_STEPS
    recall_steps: int = RECALL_STEPS
    seeds: int = 1
    excerpts: int = 16
    sequences: int = 48

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", parse_tokens("length", self.length))
        tests = tuple(parse_tokens("test", each) for each in self.tests)
        object.__setattr__(self, "tests", tests)
        known = list_encodings()
        _require_names("encodings", self.encodings, known)
        _require_names("tasks", self.tasks, TASKS)
        for name in ("text_steps", "recall_steps", "seeds"):
            _require_at_least(name, getattr(self, name), 1)
        _require_at_least("excerpts", self.excerpts, 2)
        _require_at_least("sequences", self.sequences, 2)
        _require_at_least("length", self.length, LEAST_LENGTH)
        if not self.tests:
            object.__setattr__(self, "tests", tuple(self.length * m for m in MULTIPLES))
        tests = self.tests
        if list(tests) != sorted(set(tests)) or tests[0] != self.length:
            raise Refused(
                f"test must be ascending lengths that begin with the trained one, {self.length}, "
                f"got {', '.join(map(str, tests))}: such as "
                f"{','.join(str(self.length * m) for m in MULTIPLES)}"
            )

    def steps(self, task: str) -> int:
        """Return the optimizer steps of a task."""
        return self.text_steps if task == TEXT else self.recall_steps

    def cells(self) -> list[Cell]:
        """Return all cells: text before recall, and all encodings of a seed before the next."""
        return [
            Cell(task, seed, encoding)
            for task in TASKS
            if task in self.tasks
            for seed in range(self.seeds)
            for encoding in self.encodings
        ]

    def identity(self, cell: Cell) -> dict[str, Any]:
        """Return everything that a cell's results depend on, as JSON keeps it."""
        samples = self.excerpts if cell.task == TEXT else self.sequences
        identity = {
            **asdict(cell),
            "length": self.length,
            "tests": list(self.tests),
            "steps": self.steps(cell.task),
            "samples": samples,
        }
        options = encoding_options(cell.encoding, self.length)
        return {**identity, "options": options} if options else identity


def encoding_options(encoding: str, length: int) -> dict[str, Any]:
    """Return the options of `rope_patch.encode` that depend on the trained length.

    T5's last bucket must begin within that length, as it does in models of this kind: beyond it,
    a text would be read with biases that were never trained.
    """
    if encoding != "t5":
        return {}
    return {"max_distance": max(_T5_EXACT + 1, min(_T5_DISTANCE, length // 2))}


def encoding_names(text: str) -> tuple[str, ...]:
    """Return the encodings that a text names by commas; `all` names every one."""
    if text.strip() == "all":
        return tuple(list_encodings())
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def _require_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    if not names:
        raise Refused(f"{what} must name at least one of {', '.join(known)}, got none")
    for name in names:
        if name not in known:
            raise Refused(
                f"{what} must be among {', '.join(known)}, got {name!r}"
                f"{did_you_mean(name, known, 0.5)}"
            )


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise Refused(f"{name} must be at least {least}, got {value}")
