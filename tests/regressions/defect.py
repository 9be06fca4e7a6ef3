"""A defect that was mended once, and the change of a few lines that brings it back."""

from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Defect:
    """A defect, how to bring it back, and the tests of which at least one must fail then.

    Attributes:
        title: What was wrong, in one sentence.
        file: The file to change, from the project's root.
        old: Text that occurs in it exactly once.
        new: What stands there with the defect.
        tests: Node ids of pytest, as few as catch it, that run within a minute.
    """

    title: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def broken(self) -> str:
        """Return the file's text with the defect.

        Raises:
            ValueError: The change no longer applies.
        """
        text = (PROJECT / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.title!r} cannot be brought back: expected the old text once in "
                f"{self.file}, got {count} times. Where the code has changed, change the entry"
            )
        return text.replace(self.old, self.new)
