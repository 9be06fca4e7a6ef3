"""Relations between words, to be learnt from examples in the prompt."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from rope_patch.tasks.short import choices, tables

EXAMPLES = 8


def build(**metadata: Any) -> dict[str, Any]:
    """Build lm-eval's `custom_dataset`; its metadata is what `choices.build` takes."""
    return choices.build(questions, "rp_short_induction", **metadata)


def questions(rng: random.Random) -> Iterator[choices.ChoiceQuestion]:
    """Yield questions without end: every pair once, then again with other examples.

    Wrong choices are the word itself, the answer to an example and an answer to a pair not shown:
    copying, or naming any word of the right kind, is not enough.
    """
    table = tables.read_table("induction")
    while True:
        for relation, cue, answer in tables.shuffled_rows(table, rng):
            others = [(other, its) for other, its in table[relation].items() if other != cue]
            *shown, (_, unseen) = rng.sample(others, EXAMPLES + 1)
            lines = [f"{other} -> {its}." for other, its in shown]
            yield choices.ChoiceQuestion(
                context="\n".join([*lines, f"{cue} ->"]),
                right=f"{answer}.",  # the stop, so that no choice begins another
                wrong=[f"{word}." for word in (cue, rng.choice(shown)[1], unseen)],
            )
