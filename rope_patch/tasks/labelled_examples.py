"""Many-shot classification: labelled sentences, and a new one whose label is wanted.

After the many-shot in-context learning of HELMET (arXiv:2410.02694), which maps the labels of TREC,
banking77 and other data sets to arbitrary numbers, so that only the examples tell them. The
differences: sentences are made from lists of subjects and of predicates, whose 16 classes differ by
their topic (HELMET's data are questions of real users), so the new sentence shares words with
examples of its class once there are many; prompts are made to the token, and several questions may
share their examples.
"""

from __future__ import annotations

import json
import random
from functools import lru_cache
from importlib.resources import files
from typing import Any

from rope_patch.tasks import samples

ROOM = 16  # a number, and some words around it

PROMPT = (
    "Each of the sentences below has a label. The label depends on what the sentence is about. "
    "Label the last sentence in the same way; answer with the number.\n{examples}\nSentence: "
    "{question}"
)
# Worded like the question with its prefix and answer.
EXAMPLE = "Sentence: {sentence} Label: {label}"
PREFIX = "Label:"

CLASSES = 16
_LEAST_CLASSES = 8


def build(**metadata: Any) -> dict[str, Any]:
    """Build rp_icl; the arguments are those of `samples.build` and `classes`.

    `classes` (16 unless given, 8 at least) is the number of different labels. Every text has an
    example of each, and prompts grow by whole examples. The control's labels are random, and other
    numbers than those that are asked for: chance is what is left to a model there.
    """
    return samples.build(generate, "rp_icl", ROOM, **metadata)


def generate(text: samples.TextContext) -> list[samples.SampleDraft]:
    """Return drafts of samples of one text: each asks for a sentence of another class.

    Raises:
        ValueError: A number of classes that there is not, or more questions than classes.
    """
    rng, count = text.rng, len(text.depths)
    classes = int(text.options.get("classes", CLASSES))
    if not _LEAST_CLASSES <= classes <= CLASSES:
        raise ValueError(f"classes must be {_LEAST_CLASSES} to {CLASSES}, got {classes}")
    if count > classes:
        raise ValueError(
            f"rp_icl asks for a sentence of each of {classes} classes at most once, got per_text "
            f"{count}: take fewer"
        )
    asked = rng.sample(topics(), classes)
    labels = dict(zip(asked, (str(n) for n in rng.sample(range(10, 100), classes)), strict=True))
    questions = [(topic, draw_sentence(rng, topic)) for topic in rng.sample(asked, count)]
    others = [] if text.planted else [str(n) for n in range(10, 100)]
    others = [label for label in others if label not in labels.values()]
    held_out = {sentence for _, sentence in questions}
    examples: list[str] = []

    def prompt(n: int, question: str) -> str:
        while len(examples) < classes + n:  # only the fitting of the length knows how many
            # In rounds, as HELMET's: no class is more frequent than another.
            for topic in rng.sample(asked, classes):
                while (sentence := draw_sentence(rng, topic)) in held_out:
                    pass
                label = labels[topic] if text.planted else rng.choice(others)
                examples.append(EXAMPLE.format(sentence=sentence, label=label))
        return PROMPT.format(examples="\n".join(examples[: classes + n]), question=question)

    def draft(topic: str, question: str) -> samples.SampleDraft:
        return samples.SampleDraft(
            prompt=lambda n: prompt(n, question),
            prefix=PREFIX,
            answers=[labels[topic]],
            target=labels[topic],
            decoys=tuple(labels.values()),
            chance=lambda n: 1 / classes,
            target_chance=lambda n: 1 / classes,
        )

    return [draft(*question) for question in questions]


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    """Return what each class's sentences begin with and go on with, and what all may end in."""
    path = files(__package__) / "labelled_examples.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


def topics() -> list[str]:
    """Return the classes' names; no sentence has the name of its own."""
    return sorted(name for name in _data() if name != "endings")


def draw_sentence(rng: random.Random, topic: str) -> str:
    """Return a sentence of a class: one of 784."""
    subjects, predicates = _data()[topic]
    return f"{rng.choice(subjects)} {rng.choice(predicates)} {rng.choice(_data()['endings'])}."
