"""RULER's variable tracking: follow one chain of assignments, spread over noise."""

from __future__ import annotations

import random
from string import ascii_uppercase
from typing import Any

from rope_patch.tasks import samples

ROOM = 30  # tokens that generation may take; they count towards the length
HOPS = 4

# RULER's wording (NVIDIA/RULER, Apache-2.0).
PROMPT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {value} in the text above."
)
PREFIX = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables "
    "are assigned the value {value}, they are:"
)
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
# RULER's example has 500 tokens: with usual tokenizers, ten lines of noise.
_EXAMPLE_NOISE = 10 * len(NOISE)


def variable_tracking(**metadata: Any) -> dict[str, Any]:
    """Return samples of rp_vt (RULER, arXiv:2404.06654).

    RULER's prompt has one chain and so one question: samples never share a text, and `per_text` is
    1 whatever the metadata say.

    Args:
        **metadata: As of `samples.build`.

    Raises:
        ValueError: As `samples.build`, or a control (`planted=False`), which this task has not.
    """
    return samples.build(_generate, "rp_vt", ROOM, **metadata | {"per_text": 1})


def _generate(text: samples.TextContext) -> list[samples.SampleDraft]:
    if not text.planted:
        raise ValueError(
            "rp_vt has no control: without its chain there is nothing to ask; take planted=False "
            "and closed_book=True for other tasks"
        )
    rng = text.rng
    example_value, value = (str(value) for value in rng.sample(range(10_000, 100_000), 2))
    shown, names = _variable_names(rng, letters=3), _variable_names(rng, letters=5)
    example = _hide_chain(shown, example_value, _assignment_places(rng), _EXAMPLE_NOISE)
    example = PROMPT.format(context=example, value=example_value)
    example += f" {PREFIX.format(count=HOPS + 1, value=example_value)} {' '.join(shown)}\n\n"
    spread = _assignment_places(rng)

    def prompt(units: int) -> str:
        context = _hide_chain(names, value, spread, units)
        return example + PROMPT.format(context=context, value=value)

    prefix = PREFIX.format(count=HOPS + 1, value=value)
    return [
        samples.SampleDraft(prompt=prompt, prefix=prefix, answers=names, target=" ".join(names))
    ]


def _variable_names(rng: random.Random, letters: int) -> list[str]:
    """Return different names for the chain's variables."""
    names: dict[str, None] = {}
    while len(names) <= HOPS:
        names["".join(rng.choices(ascii_uppercase, k=letters))] = None
    return list(names)


def _assignment_places(rng: random.Random) -> list[float]:
    """Return the places of the assignments, from 0 to 1, ascending."""
    return sorted(rng.random() for _ in range(HOPS + 1))


def _hide_chain(names: list[str], value: str, spread: list[float], sentences: int) -> str:
    """Return `sentences` sentences of noise around the chain, each assignment on its own line."""
    noise = [NOISE[i % len(NOISE)] for i in range(sentences)]
    lines = [" ".join(noise[i : i + len(NOISE)]) for i in range(0, sentences, len(NOISE))]
    # Since May 2025 NVIDIA/RULER gives each assignment a line of its own, too; before, assignments
    # were in the middle of lines.
    # Insert assignments between lines, or between sentences if there are too few lines.
    pieces = lines if len(lines) >= len(names) else noise
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    spare = max(len(pieces) - len(names), 0)
    for i, (name, source, at) in enumerate(zip(names, sources, spread, strict=True)):
        # The first i assignments come before this one, each after a piece of noise.
        pieces.insert(2 * i + int(at * (spare + 1)), f"VAR {name} = {source}")
    return "\n".join(pieces)
