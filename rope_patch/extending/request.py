"""The request of `extend`, with everything that results depend on, and its result."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rope_patch.pretrained import demo
from rope_patch.tasks import texts
from rope_patch.training.data import readers
from rope_patch.units import parse_target
from rope_patch.utils.checksums import digest
from rope_patch.utils.errors import Refused, text_html

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}  # seconds
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
_MIN_BUDGET = 1.0  # seconds
_NOT_COMPARED = ("out", "command", "anyway")


@dataclass(frozen=True, kw_only=True)
class ExtendRequest:
    """What to extend, how far, and within which time.

    Attributes:
        model: A folder, a name on the Hub, or `demo`.
        to: The target: a factor such as `4x`, or tokens such as `32768` or `32k`; see
            `rope_patch.units` for a number without a unit.
        out: The folder of everything that is written.
        budget: Seconds of wall time for all steps together.
        train: Whether to fine-tune, too, where memory and time allow it.
        data: Documents to train on; the package's novels that are not for measuring, if empty.
        recipe: Keys of a recipe, as text, for training.
        texts: What questions and documents are made of; the package's novels if empty.
        search: Whether the recommendation searches, too.
        samples: Samples of each kind at most.
        engines: Engines that run what is published without this package; any method if empty.
        trained_length: Tokens of pretraining, if the config gives another number.
        start: Where the config scales already: see `patch`.
        anyway: See `patch`.
        dtype: As in `recommend`.
        device_map: As in `recommend`.
        trust_remote_code: As in `recommend`.
        seed: Seed of samples, search and training.
        command: The command line, to record.
    """

    model: str
    to: str
    out: Path
    budget: float
    train: bool = False
    data: tuple[str, ...] = ()
    recipe: dict[str, str] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    search: bool = True
    samples: int = 96
    engines: tuple[str, ...] = ()
    trained_length: int | None = None
    start: str = "auto"
    anyway: bool = False
    dtype: str = "auto"
    device_map: str | None = None
    trust_remote_code: bool = False
    seed: int = 42
    command: str = ""

    def __post_init__(self) -> None:
        if not self.train and (self.data or self.recipe):
            option = "data" if self.data else "recipe"
            raise Refused(f"{option} is for training: give train (--train) with it, or neither")
        if self.samples < 6:
            raise Refused(f"samples must be at least 6, got {self.samples}")

    def identity(self) -> dict[str, Any]:
        """Return everything that results depend on, as JSON data."""
        values = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in _NOT_COMPARED
        }
        for name in ("trust_remote_code", "engines"):  # so that runs of earlier releases go on
            if not values[name]:
                del values[name]
        path = Path(demo.resolve_model_path(self.model))
        values["model"] = self.model if not path.is_dir() else str(path.resolve())
        values["checkpoint"] = _checkpoint_digest(path)
        if contents := _contents(self):
            values["contents"] = contents
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def target_length(to: str, trained: int) -> int:
    """Return a target in tokens.

    Args:
        to: A factor such as `4x` or `4`, or tokens such as `32768` or `32k` (`rope_patch.units`).
        trained: The trained length in tokens.

    Raises:
        ValueError: It is neither, or not above the trained length.
    """
    factor, tokens = parse_target("to", to)
    length = round(factor * trained) if tokens is None and factor is not None else tokens or 0
    if length <= trained:
        raise Refused(
            f"to must be above the {trained:,} tokens that the model was trained on, got {to} "
            f"({length:,.0f} tokens): expected for example 2x or {2 * trained}"
        )
    return length


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as `8h`, `90m`, `1h30m` or `45s`.

    Raises:
        ValueError: It is none, or less than a second.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or not any(match.groups()):
        raise Refused(
            f"budget must be a time with its unit, such as 8h, 90m or 1h30m, got {text!r}"
        )
    seconds = sum(
        float(number) * unit
        for number, unit in zip(match.groups(), _UNITS.values(), strict=True)
        if number
    )
    if seconds < _MIN_BUDGET:
        raise Refused(f"budget must be at least a second, got {text!r}")
    return seconds


def _checkpoint_digest(path: Path) -> str | None:
    """Return a digest of a folder's files, large ones by samples; None for a name."""
    if not path.is_dir():
        return None
    # Weights that were trained on keep their names and sizes, so their bytes are digested, too.
    hasher = hashlib.sha256()
    for file in sorted(each for each in path.iterdir() if each.is_file()):
        hasher.update(file.name.encode())
        readers.digest_file(file, hasher)
    return hasher.hexdigest()[:32]


def _contents(request: ExtendRequest) -> dict[str, str]:
    """Return digests of what the request names to train on and to measure by."""
    texts_by_name = {name: digest(texts.read_text(name), 32) for name in request.texts}
    return texts_by_name | {name: readers.fingerprint(name) for name in request.data}


PUBLISHED, NOT_SHOWN = "published", "nothing is shown to help"


@dataclass(frozen=True, kw_only=True)
class Extended:
    """What became of an extension; print it to read it.

    Attributes:
        outcome: "published", or "nothing is shown to help".
        sentence: The outcome in a sentence or two, with its numbers.
        model: The model as it was requested.
        trained_length: Tokens of pretraining.
        length: The target in tokens.
        method: The published method, with its factor; None if nothing was published.
        folder: The folder to publish; None if nothing was published.
        report: The page of the evidence; None if it did not come to a comparison.
        page: The page of the steps.
        left_out: What was left out or not measured, and why.
        exports: By engine that the request names, the file with what it is given.
        seconds: Wall time of all steps, with runs that were killed.
    """

    outcome: str
    sentence: str
    model: str
    trained_length: int
    length: int
    method: str | None
    folder: Path | None
    report: Path | None
    page: Path
    left_out: tuple[str, ...]
    seconds: float
    exports: dict[str, Path] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        data = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
        }
        return {**data, "exports": {name: str(path) for name, path in self.exports.items()}}

    def __str__(self) -> str:
        lines = [self.sentence, *(f"- {each}" for each in self.left_out), ""]
        if self.folder is not None:
            lines.append(f"to publish: {self.folder}")
        lines += [f"for {engine + ':':<8}{path}" for engine, path in self.exports.items()]
        if self.report is not None:
            lines.append(f"evidence:   {self.report}")
        return "\n".join([*lines, f"steps:      {self.page}"])

    def _repr_html_(self) -> str:
        return text_html(str(self))
