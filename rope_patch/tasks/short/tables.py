"""Tables of word pairs, by relation."""

from __future__ import annotations

import csv
import random
from functools import lru_cache
from importlib.resources import files


@lru_cache(maxsize=2)
def read_table(name: str) -> dict[str, dict[str, str]]:
    """Return the relations of a table of this package, each a dict of first to second words."""
    relations: dict[str, dict[str, str]] = {}
    with (files(__package__) / f"{name}.csv").open(encoding="utf-8") as stream:
        _, *rows = csv.reader(stream)
    for relation, first, second in rows:
        relations.setdefault(relation, {})[first] = second
    return relations


def shuffled_rows(
    table: dict[str, dict[str, str]], rng: random.Random
) -> list[tuple[str, str, str]]:
    """Return all rows of a table shuffled: relation, first word, second word."""
    rows = [(name, *pair) for name, pairs in table.items() for pair in pairs.items()]
    return rng.sample(rows, len(rows))
