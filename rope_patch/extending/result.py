"""The result of `extend`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rope_patch.utils.notebook import text_html

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

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
        }

    def __str__(self) -> str:
        lines = [self.sentence, *(f"- {each}" for each in self.left_out), ""]
        if self.folder is not None:
            lines.append(f"to publish: {self.folder}")
        if self.report is not None:
            lines.append(f"evidence:   {self.report}")
        return "\n".join([*lines, f"steps:      {self.page}"])

    def _repr_html_(self) -> str:
        return text_html(str(self))
