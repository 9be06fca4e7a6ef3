"""A question to the model, and batches of short ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Question:
    """One question: its key among the answers, its prompt, and what to compute for it."""

    key: str
    ids: list[int]
    target: list[int]
    max_new_tokens: int = 0
    until: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.ids) + max(len(self.target), self.max_new_tokens)

    @property
    def pass_tokens(self) -> int:
        """Return the pass's tokens: the prompt's, and the target's unless text is generated."""
        return len(self.ids) + (0 if self.max_new_tokens else len(self.target) - 1)

    def is_settled_by(self, text: str) -> bool:
        """Return whether more text cannot change the score of a generated one.

        All answers are in it, with enough after them: `12` may become `125` or `12.5`.
        """
        lower = text.lower()
        return bool(self.answers) and all(a.lower() in lower[:-2] for a in self.answers)


def make_batches(questions: list[Question], tokens: int) -> Iterator[list[Question]]:
    """Yield questions on one prompt together, and single ones in batches of `tokens` with padding.

    Args:
        questions: Ordered by prompts.
        tokens: Of a batch, if it is of more than one prompt.
    """
    single: list[Question] = []
    for _, group in groupby(questions, key=lambda q: q.ids):
        same = list(group)
        if len(same) > 1:
            yield same
            continue
        longest = max((q.tokens for q in [*single, *same]), default=0)
        if single and (len(single) + 1) * longest > tokens:
            yield single
            single = []
        single += same
    if single:
        yield single
