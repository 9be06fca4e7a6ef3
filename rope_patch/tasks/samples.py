"""Samples of any retrieval task: token-exact, built offline, the same on every run.

A task's own file says what stands in a prompt (`SampleDraft`); here prompts get their length.
Samples may share one text, asked another question or with the needle elsewhere: the model reads
what they share once, and statistics count them as the cluster that they are.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import cycle, islice
from typing import Any, NamedTuple

from rope_patch.tasks import chat_template, texts

DEPTHS = (10, 50, 90)

# Tasks that ask about the same texts, by the name that the texts are drawn under.
_SHARED_TEXTS = {
    "rp_v2_mk_niah": ("rp_v2_mk_niah_easy", "rp_v2_mk_niah_medium", "rp_v2_mk_niah_hard"),
    "rp_v2_mv_niah": ("rp_v2_mv_niah_easy", "rp_v2_mv_niah_medium", "rp_v2_mv_niah_hard"),
    "rp_v2_qa": ("rp_v2_qa_basic", "rp_v2_qa_easy", "rp_v2_qa_medium", "rp_v2_qa_hard"),
    "rp_oolong_lines": (
        "rp_oolong_count",
        "rp_oolong_topic",
        "rp_oolong_compare",
        "rp_oolong_user",
        "rp_oolong_date",
    ),
    "rp_oolong_labelled_lines": (
        "rp_oolong_count_labelled",
        "rp_oolong_topic_labelled",
        "rp_oolong_compare_labelled",
    ),
    "rp_oolong_sessions": ("rp_oolong_rolls", "rp_oolong_spells"),
}
TEXTS_OF = {task: texts for texts, names in _SHARED_TEXTS.items() for task in names}


class TooShort(ValueError):
    """Error: a length has no room for a task's own words.

    Attributes:
        least: Tokens that they take, with the answer.
    """

    def __init__(self, length: int, task: str, least: int) -> None:
        super().__init__(
            f"a length of {length} tokens is too short for {task}: the prompt's own words and the "
            f"room for an answer take {least} with this tokenizer"
        )
        self.length, self.task, self.least = length, task, least

    def __reduce__(self) -> Any:  # other processes raise it, too
        return TooShort, (self.length, self.task, self.least)


@dataclass(frozen=True, kw_only=True)
class SampleDraft:
    """One sample before it has its length.

    Attributes:
        prompt: Returns the prompt with a number of units of filler, such as words or lines.
        prefix: The start of the answer; the model continues it.
        answers: References; the task's scoring requires all or any of them.
        target: The right answer as it follows the prefix; likelihood tasks score it.
        depth: The answer's position in percent of the filler; None if it is everywhere.
        decoys: Wrong answers of the same kind in the same text, besides the other samples' answers.
        chance: The expected score of a guesser who knows the form of answers but has not read the
            text, given the units of filler; None where that is 0.
        target_chance: The same where the target's likelihood is scored, which takes all of it.
        columns: Further columns of the sample's row.
        widest: The longest draft of any task that asks about this text: it is fitted to the length,
            so that all of these tasks get as much text. None where no other task does.
    """

    prompt: Callable[[int], str]
    prefix: str
    answers: list[str]
    target: str
    depth: int | None = None
    decoys: tuple[str, ...] = ()
    chance: Callable[[int], float] | None = None
    target_chance: Callable[[int], float] | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    widest: SampleDraft | None = None


class LadderStep(NamedTuple):
    """A task of a ladder: the same text and question as in its other tasks, asked otherwise.

    Attributes:
        name: The task's name.
        room: Tokens of the answer.
        rule: What the prompt begins with.
        ask: The question, with fields for `str.format`.
        prefix: The start of the answer.
    """

    name: str
    room: int
    rule: str
    ask: str
    prefix: str


@dataclass(frozen=True, kw_only=True)
class TextContext:
    """What a task's draft function gets: one text and how many samples to draw from it.

    Attributes:
        rng: Everything random comes from here; no other generator is touched.
        length: Tokens that a sample will have.
        depths: One for each sample wanted, in percent.
        planted: False for the controls: the same question, of a text without its answer, not even
            by chance.
        texts: Names or files that filler comes from.
        options: Further metadata of the task.
        tokenizer: The model's.
    """

    rng: random.Random
    length: int
    depths: list[int]
    planted: bool
    texts: tuple[str, ...]
    options: dict[str, Any]
    tokenizer: Any = None

    def count_tokens(self, words: str) -> int:
        """Return how many tokens a text has by itself."""
        return _count_tokens(self.tokenizer, words)

    def word_source(self, without: Collection[str] = ()) -> Callable[[int], list[str]]:
        """Return a function of n: n words from a random place in a random text, cyclic.

        Args:
            without: Words in small letters to leave out, whatever marks stand around them.
        """
        words = texts.split_words(self.rng.choice(self.texts))
        start = self.rng.randrange(len(words))
        rotated = words[start:] + words[:start]
        if unwanted := set(without):
            rotated = [w for w in rotated if unwanted.isdisjoint(re.findall(r"\w+", w.lower()))]
        return lambda n: rotated[:n] if n <= len(rotated) else list(islice(cycle(rotated), n))


def build(
    draw: Callable[[TextContext], list[SampleDraft]],
    task: str,
    room: int,
    *,
    shared_room: int | None = None,
    tokenizer: Any = None,
    length: int = 4096,
    samples: int | None = None,
    depths: Sequence[int] = DEPTHS,
    seed: int = 42,
    per_text: int = 1,
    planted: bool = True,
    closed_book: bool = False,
    choices: bool = False,
    chat: bool = False,
    text: str | Sequence[str] | None = None,
    pretrained: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Build the samples of one task and length, as lm-eval's `custom_dataset`.

    Args:
        draw: The task's: drafts of as many samples as `TextContext.depths` has, all of one text.
        task: The task's name.
        room: Tokens that the answer may take; they count towards the length.
        shared_room: The most that the answer may take in any task that asks about the same texts.
        tokenizer: The model's tokenizer or its name; `pretrained` is taken if there is none.
        length: Tokens of prompt, answer prefix and room together, in all: as many as fit.
        samples: The number of samples; one for each depth unless given. Depths take turns, so the
            first few samples cover all of them.
        depths: The answers' positions in percent of the filler.
        seed: Another seed makes other samples.
        per_text: Samples that share a text.
        planted: False builds the control "no answer", whose texts lack the answer.
        closed_book: Whether to build the control "closed book": the question without the text. Of a
            text that is more than filler, what tells nothing of the answer stays, such as examples.
        choices: Whether the right answer is to be chosen among those to all of the text's
            questions, and decoys.
        chat: Whether the prompt will stand in the tokenizer's chat template (lm-eval's
            `--apply_chat_template`), whose tokens then count towards the length.
        text: Names or files that filler is taken from; all that come with the package if None.
        pretrained: The model's name, which lm-eval passes along.
        trust_remote_code: Whether to execute Python code that the tokenizer brings, as lm-eval
            passes it along.
        **options: Further metadata, for the task.

    Returns:
        `{"test": dataset}` with the columns id, task, length, tokens, depth, text (samples with the
        same number share one), input, gen_prefix, answers, target, target_tokens; and with choices
        choices and gold (the right one's number). Some tasks add chance and target_chance (see
        `SampleDraft`) and columns of their own.

    Raises:
        ValueError: A length too short for the prompt's own words, or no depth or one outside
            0 to 100.
    """
    from datasets import Dataset

    if tokenizer is None or isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            tokenizer or pretrained, trust_remote_code=trust_remote_code
        )
    if not depths:
        raise ValueError("depths must have at least one depth in percent, got none")
    if wrong := [depth for depth in depths if not 0 <= depth <= 100]:
        raise ValueError(f"depths are percentages from 0 to 100, got {wrong}")
    if int(per_text) < 1:
        raise ValueError(f"per_text must be at least 1 sample a text, got {per_text}")
    length, count = int(length), len(depths) if samples is None else int(samples)
    if chat:
        chat_template.resolve("on", tokenizer)
    prompt_tokens = partial(_prompt_tokens, tokenizer, chat)
    sources = (text,) if isinstance(text, str) else tuple(text or texts.names())
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        first, number = len(rows), len(rows) // int(per_text)
        # Whole texts, also where the last is not used up: a sample is the same in any number.
        numbers = f"{seed}/{TEXTS_OF.get(task, task)}/{length}/{number}"
        context = TextContext(
            rng=random.Random(numbers),
            length=length,
            depths=[int(depths[i % len(depths)]) for i in range(first, first + int(per_text))],
            planted=planted,
            texts=sources,
            options=options,
            tokenizer=tokenizer,
        )
        asked = drafts = draw(context)
        if closed_book:
            asked = draw(replace(context, rng=random.Random(numbers), planted=False))
        # All of a text's samples get the same filler, or they would not share it.
        units: int | None = None
        if (widest := drafts[0].widest) is not None:
            most = room if shared_room is None else shared_room
            units = _fit_to_length(partial(prompt_tokens, widest), length, most, task, None)
        sizes = [cache(partial(prompt_tokens, draft)) for draft in drafts]
        for size in sizes:
            units = _fit_to_length(size, length, room, task, units)
        assert units is not None, f"{task} drew no samples"
        shown = units
        if closed_book:  # chance stays that of the text, which is not shown
            shown = 0
            sizes = [cache(partial(prompt_tokens, draft)) for draft in asked]
        for i, (draft, ask, size) in enumerate(zip(drafts, asked, sizes, strict=True), first):
            row = {"id": f"{seed}/{task}/{length}/{i}", "task": task, "length": length}
            row |= {"tokens": size(shown) + room, "depth": draft.depth}
            row |= {"text": number, "input": ask.prompt(shown), "gen_prefix": draft.prefix}
            row |= {"answers": draft.answers, "target": draft.target}
            row["target_tokens"] = _count_tokens(tokenizer, f" {draft.target}", special=False)
            row |= draft.columns
            if draft.chance is not None:
                row["chance"] = draft.chance(units)
            if draft.target_chance is not None:
                row["target_chance"] = draft.target_chance(units)
            if choices:
                row |= _choices(draft, drafts, task)
            rows.append(row)
    return {"test": Dataset.from_list(rows[:count])}


def build_step(
    draw: Callable[[TextContext], dict[LadderStep, list[SampleDraft]]],
    step: LadderStep,
    ladder: Collection[LadderStep],
    **metadata: Any,
) -> dict[str, Any]:
    """Build the samples of a task of a ladder.

    Tasks whose prompts begin alike get the same text: what the longest of them leaves room for.

    Args:
        draw: The ladder's: the drafts of each of these tasks.
        step: The task.
        ladder: All of its tasks.
        **metadata: As of `build`.

    Returns:
        As `build`.

    Raises:
        ValueError: As `build`.
    """
    alike = [each for each in ladder if each.rule == step.rule]

    def draw_step(text: TextContext) -> list[SampleDraft]:
        drafts = draw(text)
        widest = max(
            (draft for each in alike for draft in drafts[each]),
            key=lambda draft: text.count_tokens(f"{draft.prompt(0)} {draft.prefix}"),
        )
        return [replace(draft, widest=widest) for draft in drafts[step]]

    room = max(each.room for each in alike)
    return build(draw_step, step.name, step.room, shared_room=room, **metadata)


def scattered(rng: random.Random) -> Callable[[int], list[int]]:
    """Return a function of n: the numbers below n in a random order, which a larger n keeps."""
    own = random.Random(rng.random())  # so that it does not matter who draws when
    keys: list[float] = []

    def order(n: int) -> list[int]:
        keys.extend(own.random() for _ in range(n - len(keys)))
        return sorted(range(n), key=keys.__getitem__)

    return order


def _choices(draft: SampleDraft, drafts: list[SampleDraft], task: str) -> dict[str, Any]:
    """Return the answers to all questions of a text, sorted, so that positions give no hint."""
    answers = sorted({*(other.target for other in drafts), *draft.decoys})
    if len(answers) < 2:
        raise ValueError(
            f"{task} chooses among the answers to several questions of a text, got one question: "
            "give per_text of at least 2"
        )
    return {"choices": answers, "gold": answers.index(draft.target)}


def _fit_to_length(
    prompt_tokens: Callable[[int], int], length: int, room: int, task: str, most: int | None
) -> int:
    """Return the most units of filler, up to `most`, with which a prompt fits."""
    available = length - room
    smallest = prompt_tokens(0)
    if smallest > available:
        raise TooShort(length, task, smallest + room)
    most = available if most is None else most  # a unit takes at least a token
    # `most` usually fits if it is given; else 64 units measure the tokens of a unit.
    guess = 64 if most == available else most
    fits, fails, tries = 0, most + 1, 0
    while fails - fits > 1:
        tries += 1
        # Sizes are almost linear in units, so a few guesses replace twenty halvings.
        guess = min(max(guess, fits + 1), fails - 1) if tries < 12 else (fits + fails) // 2
        tokens = prompt_tokens(guess)
        fits, fails = (guess, fails) if tokens <= available else (fits, guess)
        rate = max((tokens - smallest) / guess, 0.1)
        guess += int((available - tokens) // rate)  # from the last guess, be it too low or too high
    return fits


def _prompt_tokens(tokenizer: Any, chat: bool, draft: SampleDraft, units: int) -> int:
    if not chat:
        return _count_tokens(tokenizer, f"{draft.prompt(units)} {draft.prefix}")
    text = chat_template.render(tokenizer, draft.prompt(units), draft.prefix)
    # As in lm-eval, a template's own first token takes the place of the tokenizer's.
    first = getattr(tokenizer, "bos_token", None)
    return _count_tokens(tokenizer, text, special=not (first and text.startswith(first)))


def _count_tokens(tokenizer: Any, text: str, special: bool = True) -> int:
    return len(tokenizer(text, add_special_tokens=special, verbose=False).input_ids)
