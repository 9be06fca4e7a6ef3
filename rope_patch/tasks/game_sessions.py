"""Aggregation over dialogue turns: rolls and spells in the transcript of a role-playing game.

After OOLONG-real (arXiv:2511.02817), which asks for numbers and lists of rolls and spells in
transcripts of a show, with its score: partial credit for numbers, overlap for lists. The
differences: turns come from a grammar, so that what happened is known; players also talk about
rolls and spells that do not happen; the wording is this project's own; prompts are made to the
token; the answer follows a prefix at once, and no box is asked for.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from rope_patch.tasks import dialogues, samples, scoring
from rope_patch.tasks.aggregated_lines import (
    Question,
    best_constant,
    choose_of_each,
    first_line,
    fitting_units,
    insert_at_shares,
    longest_words,
    partial_credit,
)

ROOM = 48  # five spells of two words, even where a word is several tokens

PROMPT = (
    "Below is the transcript of a game. The players say what they roll with a die of twenty sides, "
    "and which spells they cast. Only what they did counts, not what they consider or refuse.\n"
    "{turns}\nIn this session, {question}"
)
PREFIX = "Answer:"

SKILLS = ["stealth", "insight", "athletics", "persuasion", "survival", "history"]
PLAYERS = 5
_FIRST = ["Amber", "Hollow", "Silver", "Thorn", "Winter", "Ember", "Glass", "Moon"]
_SECOND = ["Veil", "Lance", "Whisper", "Shield", "Chain", "Mirror", "Gate", "Storm"]
SPELLS = [f"{first} {second}" for first in _FIRST for second in _SECOND]
LIST_LENGTHS = range(3, 6)  # spells in a list that is asked for
_DIE = range(1, 21)
_LEAST = 24  # rolls and spells, so that a player has some of each
_DENSITY = 3  # turns for each that counts, where nothing else is asked for
_SIMULATED = 3_000  # rolls that are drawn to find the best constant answer

_ROLLS = [
    "{player}: For {skill} I rolled a {value}.",
    "{player}: That makes a {value} on my {skill} roll.",
    "{player}: I try {skill}, and the die shows a {value}.",
]
_CASTS = [
    "{player}: I cast {spell}.",
    "{player}: Then {spell} is what I cast.",
    "{player}: I raise my hand, and cast {spell}.",
]
_NEAR_MISSES = [
    "{player}: Should I roll for {skill}?",
    "{player}: I had better not roll for {skill} here.",
    "{player}: Next time I might cast {spell}.",
    "{player}: I keep {spell} for later.",
]
_TALK = "{player}: {speech}"

_BOX = re.compile(r"\\boxed\{\\text\{([^}]*)\}\}|\\boxed\{+([^}]*)\}+")


class Event(NamedTuple):
    """A roll, or a spell that is cast."""

    player: str
    skill: str = ""
    value: int = 0
    spell: str = ""


_Ask = Callable[[random.Random, list[Event]], list[Question]]


def rolls(**metadata: Any) -> dict[str, Any]:
    """Build rp_oolong_rolls: how many rolls there are, in all or of some kind.

    The arguments are those of `samples.build` and `aggregated`, the number of rolls and spells: a
    third of the turns that fit unless given, 24 at least. Prompts grow by other turns. The column
    `aggregated` says on how many rolls an answer depends.
    """
    return samples.build(
        partial(_generate, "rp_oolong_rolls", _roll_questions), "rp_oolong_rolls", ROOM, **metadata
    )


def spells(**metadata: Any) -> dict[str, Any]:
    """Build rp_oolong_spells: the first or last spells, in order; arguments as of `rolls`."""
    return samples.build(
        partial(_generate, "rp_oolong_spells", _spell_questions),
        "rp_oolong_spells",
        ROOM,
        **metadata,
    )


def _generate(task: str, ask: _Ask, text: samples.TextContext) -> list[samples.SampleDraft]:
    """Return drafts of samples of one session: each asks for something else."""
    rng = text.rng
    players = dialogues.draw_names(rng, PLAYERS)
    trial = [_write(rng, event) for event in _draw_events(rng, players, 32)]
    # Given or not, `aggregated` is a number of turns that count.
    fitting = fitting_units(
        text, ROOM, _LEAST, lambda n: PROMPT.format(turns="\n".join(trial[:n]), question="")
    )
    is_given = text.options.get("aggregated") is not None
    events = _draw_events(rng, players, fitting if is_given else max(fitting // _DENSITY, _LEAST))
    shares = sorted(rng.random() for _ in events)
    planted = [(share, _write(rng, event)) for share, event in zip(shares, events, strict=True)]
    options = {each: each(rng, events) for each in (_roll_questions, _spell_questions)}
    questions = choose_of_each(text, options, ask, task)
    # In the control nobody rolls or casts, and no spell is named that is an answer.
    answers = {
        name
        for asked in questions.values()
        for question in asked
        for name in question.answer.split(", ")
    }
    named = [spell for spell in SPELLS if text.planted or spell not in answers]
    filler: list[str] = []

    def turns(n: int) -> str:
        while len(filler) < n:  # only the fitting of the length knows how many
            filler.append(_other_turn(rng, players, named))
        return "\n".join(insert_at_shares(filler[:n], planted if text.planted else []))

    def prompt(n: int, question: str) -> str:
        return PROMPT.format(turns=turns(n), question=question)

    widest = samples.SampleDraft(
        prompt=partial(prompt, question=longest_words(text, options)),
        prefix=PREFIX,
        answers=[],
        target="",
    )

    def draft(question: Question) -> samples.SampleDraft:
        return samples.SampleDraft(
            prompt=partial(prompt, question=question.words),
            prefix=PREFIX,
            widest=widest,
            answers=question.answer.split(", "),
            target=question.answer,
            chance=lambda n: _chance(question, len(events))[0],
            target_chance=lambda n: _chance(question, len(events))[1],
            columns={"question": question.kind, "aggregated": question.aggregated},
        )

    return [draft(question) for question in questions[ask]]


def _draw_events(rng: random.Random, players: list[str], total: int) -> list[Event]:
    """Return rolls and spells in order: any share of them rolls, by players who differ."""
    rolled = rng.randint(total // 4, total - total // 4)
    by, spoken = ([rng.random() for _ in players] for _ in range(2))
    skills = [rng.random() for _ in SKILLS]
    events = [
        Event(player, skill=skill, value=rng.choice(_DIE))
        for player, skill in zip(
            rng.choices(players, by, k=rolled), rng.choices(SKILLS, skills, k=rolled), strict=True
        )
    ]
    for player in rng.choices(players, spoken, k=total - rolled):
        events.append(Event(player, spell=rng.choice(SPELLS)))
    rng.shuffle(events)
    return events


def _write(rng: random.Random, event: Event) -> str:
    return rng.choice(_CASTS if event.spell else _ROLLS).format(**event._asdict())


def _other_turn(rng: random.Random, players: list[str], names: list[str]) -> str:
    """Return a turn in which nobody rolls or casts; in one of four somebody speaks of it."""
    template = rng.choice(_NEAR_MISSES) if rng.random() < 0.25 else _TALK
    return template.format(
        player=rng.choice(players),
        skill=rng.choice(SKILLS),
        spell=rng.choice(names),
        speech=dialogues.draw_speech(rng),
    )


# --- Questions ------------------------------------------------------------------------------------


def _roll_questions(rng: random.Random, events: list[Event]) -> list[Question]:
    rolled = [event for event in events if event.skill]
    edge = rng.randrange(6, 16)
    scopes = [
        ("all", "how many rolls were made?", rolled),
        ("value", f"how many rolls were {edge} or more?", [e for e in rolled if e.value >= edge]),
    ]
    for player in sorted({event.player for event in events}):
        own = [event for event in rolled if event.player == player]
        scopes.append(("player", f"how many rolls did {player} make?", own))
    for skill in SKILLS:
        own = [event for event in rolled if event.skill == skill]
        scopes.append(("skill", f"how many rolls were for {skill}?", own))
    return [
        Question(kind, f"{words} Answer with the number alone.", str(len(own)), len(rolled))
        for kind, words, own in scopes
    ]


def _spell_questions(rng: random.Random, events: list[Event]) -> list[Question]:
    cast = [event for event in events if event.spell]
    scopes = [("", "that anybody cast", [event.spell for event in cast])]
    for player in sorted({event.player for event in events}):
        own = [event.spell for event in cast if event.player == player]
        scopes.append((" of a player", f"that {player} cast", own))
    questions = []
    for whose, words, names in scopes:
        for end in ("first", "last"):
            for several in (False, True):
                number = rng.choice(LIST_LENGTHS) if several else 1
                listed = names[:number] if end == "first" else names[-number:]
                if len(set(listed)) < number:  # too few, or one of them twice
                    continue
                head = (
                    f"which are the {end} {number} spells"
                    if several
                    else f"which is the {end} spell"
                )
                tail = "s, in order and separated by commas" if several else " alone"
                question = f"{head} {words}? Answer with the name{tail}."
                kind = f"{end}{' few' if several else ''}{whose}"
                questions.append(Question(kind, question, ", ".join(listed), number))
    return questions


def _chance(question: Question, total: int) -> tuple[float, float]:
    """Return the expected score of the best guess of one who has not read, and its hits."""
    if question.answer.isdigit():
        return _best_number(question.kind, total)
    number = len(question.answer.split(", "))  # any spells that are as many as are asked for
    return number / len(SPELLS), 1 / len(SPELLS) if number == 1 else 0.0


@lru_cache(maxsize=64)
def _best_number(kind: str, total: int) -> tuple[float, float]:
    rng, players = random.Random(f"chance/{total}"), [str(i) for i in range(PLAYERS)]
    draws = 2 * max(_SIMULATED // total, 15)
    texts = [_roll_questions(rng, _draw_events(rng, players, total)) for _ in range(draws)]
    return best_constant(texts, kind)


# --- Score ----------------------------------------------------------------------------------------


def same_events(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    r"""Return how near the first line is to the answer: a number, a name, or a list's overlap.

    A box (`\boxed{...}`) is read alone, if there is one. Of a list, as many names count as are
    asked for.
    """
    response, right = first_line(results[0]), doc["target"]
    if (box := _BOX.search(response)) is not None:
        response = box[1] if box[1] is not None else box[2]
    if right.isdigit():
        score = partial_credit(response, int(right))
    elif ("," in right) != ("," in response):
        score = 0.0
    elif "," in right:
        names = right.split(", ")
        listed = [name.strip() for name in response.split(",") if name.strip()]
        score = len({*names} & {*listed[: len(names)]}) / len(names)
    else:
        score = float(response.strip().lower() == right.lower())
    return scoring.all_answers(doc, results) | {"score": score}
