"""Rows of the short tasks: questions with a few choices, one of them right."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ChoiceQuestion:
    """One question of a short task.

    Attributes:
        context: The text before the choices; a space follows it.
        right: The right choice.
        wrong: The wrong choices, all different.
    """

    context: str
    right: str
    wrong: list[str]


def build(
    questions: Callable[[random.Random], Iterator[ChoiceQuestion]],
    task: str,
    *,
    samples: int = 100,
    seed: int = 42,
    **_: Any,
) -> dict[str, Any]:
    """Build the rows of a task, as lm-eval's `custom_dataset`.

    Args:
        questions: The task's: as many questions as are asked for, all chance from its argument.
        task: The task's name.
        samples: How many; the first ones are the same in any number.
        seed: Another seed makes other questions.

    Returns:
        `{"test": dataset}` with the columns id, task, input, choices, gold (the index of the right
        choice; indices take turns).
    """
    from datasets import Dataset

    rng = random.Random(f"{seed}/{task}")
    rows = []
    for i, question in enumerate(islice(questions(rng), int(samples))):
        gold = i % (1 + len(question.wrong))
        choices = [*question.wrong[:gold], question.right, *question.wrong[gold:]]
        row = {"id": f"{seed}/{task}/{i}", "task": task, "input": question.context}
        rows.append(row | {"choices": choices, "gold": gold})
    return {"test": Dataset.from_list(rows)}
