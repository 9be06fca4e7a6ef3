"""Facts of the world, each after examples of the same relation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from rope_patch.tasks.short import choices, tables

EXAMPLES = 5
WORDING = {
    "author": "{} was written by",
    "capital": "The capital of {} is",
    "class": "In zoology, the {} is one of the",
    "continent": "The continent on which {} lies is",
    "currency": "The currency of {} is called the",
    "element": "The chemical symbol of {} is",
    "language": "The language that most people speak in {} is",
}


def build(**metadata: Any) -> dict[str, Any]:
    """Build lm-eval's `custom_dataset`; its metadata is what `choices.build` takes."""
    return choices.build(questions, "rp_short_facts", **metadata)


def questions(rng: random.Random) -> Iterator[choices.ChoiceQuestion]:
    """Yield questions without end: every fact once, then again with other examples."""
    table = tables.read_table("facts")
    while True:
        for relation, subject, answer in tables.shuffled_rows(table, rng):
            wording = WORDING[relation]
            others = [(other, its) for other, its in table[relation].items() if other != subject]
            examples = rng.sample(others, EXAMPLES)
            lines = [f"{wording.format(other)} {its}." for other, its in examples]
            wrong = sorted(set(table[relation].values()) - {answer})
            yield choices.ChoiceQuestion(
                context="\n".join([*lines, wording.format(subject)]),
                right=f"{answer}.",  # the stop, so that no choice begins another
                wrong=[f"{choice}." for choice in rng.sample(wrong, 3)],
            )
