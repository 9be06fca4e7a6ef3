"""A question to the model, and batches of short ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

from rope_patch.tasks import settled


@dataclass(frozen=True)
class Question:
    """One question: its key among the answers, its prompt, and what to compute for it."""

    key: str
    ids: list[int]
    target: list[int]
    max_new_tokens: int = 0
    until: tuple[str, ...] = ()
    is_settled: Callable[[str], bool] | None = None

    @property
    def tokens(self) -> int:
        return len(self.ids) + max(len(self.target), self.max_new_tokens)

    @property
    def pass_tokens(self) -> int:
        """Return the pass's tokens: the prompt's, and the target's unless text is generated."""
        return len(self.ids) + (0 if self.max_new_tokens else len(self.target) - 1)

    def is_settled_by(self, text: str) -> bool:
        """Return whether more text cannot change the score of a generated one."""
        if self.is_settled is None:
            return False
        return self.is_settled(settled.decided_part(text, self.until))


def group_questions(questions: list[Question], chunk: int | None) -> list[list[Question]]:
    """Return neighbours that are answered together.

    Args:
        questions: Ordered by prompts.
        chunk: Neighbours share at least so many tokens and differ in the prompt; None groups the
            questions on one prompt.
    """
    groups: list[list[Question]] = []
    for question in questions:
        last = groups[-1][-1] if groups else None
        if last is not None and (
            last.ids == question.ids
            if chunk is None
            else last.ids[:chunk] == question.ids[:chunk] and len(question.ids) > chunk
        ):
            groups[-1].append(question)
        else:
            groups.append([question])
    return groups


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
