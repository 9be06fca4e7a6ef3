"""Aggregation over lines: count, compare and rank topics of dated sentences by several users.

After OOLONG-synth (arXiv:2511.02817): each line has a date, a user and a text whose label is not
written, and no single line has the answer. Its answers to comparisons and its score are OOLONG's.
The differences: sentences come from the grammar of rp_icl instead of ten data sets, so that
a reader tells their topics at once; lines about ten further topics count for nothing; answers are
unique, and balanced over texts; prompts are made to the token; the answer follows a prefix at once,
without reasoning before it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, timedelta
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

from rope_patch.tasks import labelled_examples, samples, scoring

ROOM = 24  # a comparison, even where a syllable is a token

PROMPT = (
    "Each line below has a date, the number of a user, and a sentence. {rule} I will ask about "
    "sentences on {topics}; others count for nothing.\n{lines}\nAmong {question}"
)
_RULE = "A sentence is on one topic, which you can tell from its words."
_LABELLED_RULE = "A sentence is on one topic, which stands behind it."
LINE = "{date} | user {user} | {sentence}"
_LABELLED_LINE = "{date} | user {user} | {sentence} | {topic}"
PREFIX = "Answer:"

TOPICS = 6  # topics that questions are about
USERS = 6
DATES = 12
_DAYS = 730  # dates are drawn from so many days
_FIRST_DAY = date(2023, 1, 1)
_LEAST = (
    2 * TOPICS
)  # lines in which one topic is the most frequent, another the least, two the same
COMPARISONS = ("more common than", "less common than", "same frequency as")  # OOLONG's words
_PARTIAL_CREDIT = 0.75  # to the power of the distance from the right number (OOLONG)
_SPARE = 256  # tokens left to a chat template and to the question
_SIMULATED = 4_000  # lines that are drawn to find the best constant answer


class Line(NamedTuple):
    """A line that counts."""

    date: str
    user: str
    topic: str


class Scope(NamedTuple):
    """The lines that a question is about."""

    kind: str  # all, user or date
    words: str
    lines: list[Line]


class Question(NamedTuple):
    """A question about a text, after its "Among"."""

    kind: str  # its scope, as a column
    words: str
    answer: str
    aggregated: int  # lines that the answer depends on


# Lists the questions about a scope, as words and answers.
_Ask = Callable[[Scope, list[str]], list[tuple[str, str]]]


def count(**metadata: Any) -> dict[str, Any]:
    """Build rp_oolong_count: how many lines are on a topic.

    The arguments are those of `samples.build` and `aggregated`, the number of lines on one of the
    six topics: as many as fit unless given, 12 at least. All other lines are on other topics, and
    prompts grow by them. The column `aggregated` says on how many lines an answer depends, and
    `question` which ones: all, those of a user, or those before or since a date.
    """
    return _build("rp_oolong_count", _counts, **metadata)


def count_labelled(**metadata: Any) -> dict[str, Any]:
    """Build rp_oolong_count_labelled: `count` with the topic written in each line."""
    return _build("rp_oolong_count_labelled", _counts, labelled=True, **metadata)


def topic(**metadata: Any) -> dict[str, Any]:
    """Build rp_oolong_topic: the most or the least frequent topic; arguments as of `count`."""
    return _build("rp_oolong_topic", _extremes, **metadata)


def topic_labelled(**metadata: Any) -> dict[str, Any]:
    """Build rp_oolong_topic_labelled: `topic` with the topic written in each line."""
    return _build("rp_oolong_topic_labelled", _extremes, labelled=True, **metadata)


def compare(**metadata: Any) -> dict[str, Any]:
    """Build rp_oolong_compare: which of two topics is more frequent, or neither; as `count`."""
    return _build("rp_oolong_compare", _comparisons, **metadata)


def compare_labelled(**metadata: Any) -> dict[str, Any]:
    """Build rp_oolong_compare_labelled: `compare` with the topic written in each line."""
    return _build("rp_oolong_compare_labelled", _comparisons, labelled=True, **metadata)


def user(**metadata: Any) -> dict[str, Any]:
    """Build rp_oolong_user: the user with the most lines on a topic; arguments as of `count`."""
    return _build("rp_oolong_user", _users, **metadata)


def day(**metadata: Any) -> dict[str, Any]:
    """Build rp_oolong_date: the date with the most lines on a topic; arguments as of `count`."""
    return _build("rp_oolong_date", _dates, **metadata)


def _build(task: str, ask: _Ask, labelled: bool = False, **metadata: Any) -> dict[str, Any]:
    return samples.build(partial(_generate, task, ask, labelled), task, ROOM, **metadata)


def _generate(
    task: str, ask: _Ask, labelled: bool, text: samples.TextContext
) -> list[samples.SampleDraft]:
    """Return drafts of samples of one text: each asks for something else."""
    rng = text.rng
    every = labelled_examples.topics()
    rng.shuffle(every)
    topics, others = every[:TOPICS], every[TOPICS:]
    users = _draw_users(rng, USERS)
    dates = sorted(map(_date, rng.sample(range(_DAYS), DATES)))
    template = _LABELLED_LINE if labelled else LINE
    # In the alphabet's order, because `topics` go by their frequency.
    *most, last = sorted(topics)
    frame = partial(
        PROMPT.format,
        rule=_LABELLED_RULE if labelled else _RULE,
        topics=f"{', '.join(most)} or {last}",
    )

    def write(line: Line) -> str:
        sentence = labelled_examples.draw_sentence(rng, line.topic)
        return template.format(sentence=sentence, **line._asdict())

    sample_lines = [write(Line(dates[0], users[0], topics[i % TOPICS])) for i in range(32)]
    aggregated = fitting_units(
        text, ROOM, _LEAST, lambda n: frame(lines="\n".join(sample_lines[:n]), question="")
    )
    plan = draw_lines(rng, topics, users, dates, aggregated)
    planted = sorted((rng.random(), write(line)) for line in plan)
    scopes = list(_scopes(plan, users, dates))
    options = {each: _options(each, scopes, topics) for each in _ASKS}
    questions = choose_of_each(text, options, ask, task)
    # The control has other topics alone, and no user, date or number that is an answer.
    answers = (
        () if text.planted else [each.answer for asked in questions.values() for each in asked]
    )
    if not text.planted:
        planted, dates = [], list(map(_date, range(_DAYS)))
        users = _draw_users(rng, 2 * USERS, without=answers)
    filler: list[str] = []

    def lines(n: int) -> str:
        while len(filler) < n:  # only the fitting of the length knows how many
            line = write(Line(rng.choice(dates), rng.choice(users), rng.choice(others)))
            if not set(answers) & {line[:10], *line[:10].split("-")}:
                filler.append(line)
        return "\n".join(insert_at_shares(filler[:n], planted))

    def prompt(n: int, question: str) -> str:
        return frame(lines=lines(n), question=question)

    widest = samples.SampleDraft(
        prompt=partial(prompt, question=longest_words(text, options)),
        prefix=PREFIX,
        answers=[],
        target="",
    )

    def draft(question: Question) -> samples.SampleDraft:
        guess = partial(_chance, ask, question.kind, len(plan))
        decoys: dict[_Ask, tuple[str, ...]] = {_extremes: tuple(topics), _comparisons: COMPARISONS}
        return samples.SampleDraft(
            prompt=partial(prompt, question=question.words),
            prefix=PREFIX,
            answers=[question.answer],
            target=question.answer,
            widest=widest,
            decoys=decoys.get(ask, ()),
            chance=lambda n: guess()[0],
            target_chance=lambda n: guess()[1],
            columns={"question": question.kind, "aggregated": question.aggregated},
        )

    return [draft(question) for question in questions[ask]]


def fitting_units(
    text: samples.TextContext, room: int, least: int, prompt: Callable[[int], str]
) -> int:
    """Return how many units count: as many as the option `aggregated` says, or as fit.

    Args:
        text: The text that is made.
        room: Tokens that the answer may take.
        least: The fewest units that questions can be asked about.
        prompt: Returns the prompt with a number of units up to 32, without a question.

    Raises:
        ValueError: Fewer than the fewest.
    """
    given = text.options.get("aggregated")
    if given is not None:
        if int(given) < least:
            raise ValueError(f"aggregated must be at least {least} lines that count, got {given}")
        return int(given)
    own, with_units = text.count_tokens(prompt(0)), text.count_tokens(prompt(32))
    # Lines differ in their tokens, so that a twentieth is left to filler.
    available = text.length - text.length // 20 - room - _SPARE - own
    fitting = available * 32 // (with_units - own)
    # Texts of one length share few numbers, so that few chances are computed.
    step = 10 ** max(len(str(fitting)) - 2, 0)
    return max(fitting // step * step, least)


def insert_at_shares(lines: list[str], insertions: list[tuple[float, str]]) -> list[str]:
    """Return lines with further ones at shares of their number, which are sorted."""
    whole = list(lines)
    for share, line in reversed(insertions):
        whole.insert(round(share * len(lines)), line)  # from the back: no place moves
    return whole


# --- Lines and their scopes -----------------------------------------------------------------------


def draw_lines(
    rng: random.Random, topics: list[str], users: list[str], dates: list[str], total: int
) -> list[Line]:
    """Return the lines that count, rarer topics first; two have the same users and dates."""
    counts, twin = _topic_counts(rng, len(topics), total)
    lines: list[Line] = []
    for i, (name, number) in enumerate(zip(topics, counts, strict=True)):
        if i == twin + 1:
            # The same users on the same dates, so that the two are equal in every scope.
            lines += [line._replace(topic=name) for line in lines[-number:]]
            continue
        # Each topic has its own busy users and dates: the most lines say little about a topic's.
        by = rng.choices(users, [rng.random() for _ in users], k=number)
        on = rng.choices(dates, [rng.random() for _ in dates], k=number)
        lines += [Line(when, who, name) for when, who in zip(on, by, strict=True)]
    return lines


def _topic_counts(rng: random.Random, topics: int, total: int) -> tuple[list[int], int]:
    """Return ascending counts that add up to `total`, and the index of the first of two equals."""
    while True:
        # Any counts are as likely as any others, so one topic's spread from none to most of all.
        cuts = sorted(rng.randrange(total + 1) for _ in range(topics - 1))
        counts = sorted(end - start for start, end in pairwise([0, *cuts, total]))
        twin = rng.randrange(1, topics - 2)
        both = counts[twin] + counts[twin + 1]
        counts[twin] = counts[twin + 1] = both // 2
        counts[-1] += both % 2
        if counts[0] < counts[1] and counts[-2] < counts[-1]:
            return counts, twin


def _scopes(lines: list[Line], users: list[str], dates: list[str]) -> Iterator[Scope]:
    yield Scope("all", "all lines", lines)
    for who in users:
        yield Scope("user", f"the lines of user {who}", [x for x in lines if x.user == who])
    for when in dates[DATES // 4 : -DATES // 4]:
        before = [line for line in lines if line.date < when]
        yield Scope("date", f"the lines before {when}", before)
        since = [line for line in lines if line.date >= when]
        yield Scope("date", f"the lines of {when} or later", since)


def _draw_users(rng: random.Random, number: int, without: Iterable[str] = ()) -> list[str]:
    """Return numbers of five digits, so that their length gives no hint."""
    return [str(n) for n in rng.sample(range(10_000, 100_000), number) if str(n) not in without]


def _date(days: int) -> str:
    return (_FIRST_DAY + timedelta(days)).isoformat()


# --- Questions ------------------------------------------------------------------------------------


def _options(ask: _Ask, scopes: list[Scope], topics: list[str]) -> list[Question]:
    """Return all questions of a task about some scopes."""
    return [
        Question(scope.kind, f"{scope.words}, {words}", answer, len(scope.lines))
        for scope in scopes
        if (ask, scope.kind) not in _NO_SCOPES
        for words, answer in ask(scope, topics)
    ]


def choose_of_each(
    text: samples.TextContext, options: dict[Any, list[Question]], ask: Any, task: str
) -> dict[Any, list[Question]]:
    """Return different questions of each kind of task that asks about a text.

    Args:
        text: The text that is made.
        options: All questions of each kind of task.
        ask: The kind of the task whose samples are made.
        task: Its name.

    Raises:
        ValueError: There are not so many of that kind.
    """
    count = len(text.depths)
    if len(options[ask]) < count:
        raise ValueError(
            f"{task} finds {len(options[ask])} different questions about this text, got per_text "
            f"{count}: take fewer"
        )
    # Each of its own, so that the text behind does not depend on how many are drawn.
    own = {each: random.Random(text.rng.random()) for each in options}
    return {
        each: choose_questions(own[each], of_kind, min(count, len(of_kind)))
        for each, of_kind in options.items()
    }


def longest_words(text: samples.TextContext, options: dict[Any, list[Question]]) -> str:
    """Return the question of the most tokens, of those with the most characters."""
    words = {question.words for of_kind in options.values() for question in of_kind}
    longest = sorted(words, key=lambda each: (len(each), each))[-16:]
    return max(longest, key=text.count_tokens)


def choose_questions(rng: random.Random, options: list[Question], count: int) -> list[Question]:
    """Return different questions; their kinds take turns, and answers of a kind are as likely."""
    kinds = list(dict.fromkeys(option.kind for option in options))
    start, left = rng.randrange(len(kinds)), list(options)
    questions: list[Question] = []
    for i in range(count):
        turn = [kinds[(start + i + k) % len(kinds)] for k in range(len(kinds))]
        kind = next(kind for kind in turn if any(option.kind == kind for option in left))
        same_kind = [option for option in left if option.kind == kind]
        answer = rng.choice(sorted({option.answer for option in same_kind}))
        questions.append(rng.choice([o for o in same_kind if o.answer == answer]))
        left.remove(questions[-1])
    return questions


def _counts(scope: Scope, topics: list[str]) -> list[tuple[str, str]]:
    numbers = Counter(line.topic for line in scope.lines)
    words = "how many are on {}? Answer with the number alone."
    return [(words.format(name), str(numbers[name])) for name in topics]


def _extremes(scope: Scope, topics: list[str]) -> list[tuple[str, str]]:
    numbers = Counter(line.topic for line in scope.lines)
    words = "which of the topics {} is the {} frequent? Answer with the topic alone."
    ends = (("most", max), ("least", min))
    return [
        (words.format(", ".join(sorted(topics)), word), only)
        for word, end in ends
        if (only := _only_one({name: numbers[name] for name in topics}, end)) is not None
    ]


def _comparisons(scope: Scope, topics: list[str]) -> list[tuple[str, str]]:
    numbers = Counter(line.topic for line in scope.lines)
    words = (
        'are those on {} "more common than", "less common than", or "same frequency as" those on '
        "{}? Answer with these words."
    )
    seen = [name for name in topics if numbers[name]]
    return [
        (words.format(a, b), COMPARISONS[0 if x > y else 1 if x < y else 2])
        for a in seen
        for b in seen
        if a != b
        for x, y in [(numbers[a], numbers[b])]
    ]


def _users(scope: Scope, topics: list[str]) -> list[tuple[str, str]]:
    words = "which user has the most on {}? Answer with the user's number alone."
    return _busiest(words, scope, topics, lambda line: line.user)


def _dates(scope: Scope, topics: list[str]) -> list[tuple[str, str]]:
    words = "which date has the most on {}? Answer with the date alone."
    return _busiest(words, scope, topics, lambda line: line.date)


def _busiest(
    words: str, scope: Scope, topics: list[str], key: Callable[[Line], str]
) -> list[tuple[str, str]]:
    options = []
    for name in topics:
        numbers = Counter(key(line) for line in scope.lines if line.topic == name)
        if (only := _only_one(numbers, max)) is not None:
            options.append((words.format(name), only))
    return options


def _only_one(numbers: dict[str, int], end: Callable[[Iterable[int]], int]) -> str | None:
    """Return the only key with the most or the fewest; None if several have as many."""
    best = end(numbers.values()) if numbers else 0
    keys = [key for key, number in numbers.items() if number == best]
    return keys[0] if len(keys) == 1 else None


_ASKS = (_counts, _extremes, _comparisons, _users, _dates)
_NO_SCOPES = {(_users, "user"), (_dates, "date")}


# --- Chance ---------------------------------------------------------------------------------------


def _chance(ask: _Ask, kind: str, total: int) -> tuple[float, float]:
    """Return the expected score of the best guess of one who has not read, and its hits."""
    if ask is _counts:
        return _number_chances(total)[kind]
    choices: dict[_Ask, int] = {_comparisons: len(COMPARISONS), _users: USERS, _dates: DATES}
    return 1 / choices.get(ask, TOPICS), 1 / choices.get(ask, TOPICS)


@lru_cache(maxsize=64)
def _number_chances(total: int) -> dict[str, tuple[float, float]]:
    """Return both chances of each kind of count, from texts that are drawn for it."""
    rng, names = random.Random(f"chance/{total}"), [str(i) for i in range(DATES)]
    texts = []
    for _ in range(2 * max(_SIMULATED // total, 8)):
        lines = draw_lines(rng, names[:TOPICS], names[:USERS], names, total)
        texts.append(_options(_counts, list(_scopes(lines, names[:USERS], names)), names[:TOPICS]))
    return {kind: best_constant(texts, kind) for kind in ("all", "user", "date")}


def best_constant(texts: list[list[Question]], kind: str) -> tuple[float, float]:
    """Return the expected partial credit of the best constant guess, and of the best exact one.

    Args:
        texts: The questions that `choose_questions` chooses from, for each of several texts.
        kind: The kind of question; answers are numbers.
    """
    # The guess is chosen on one half of the texts, and scored on the other: it must not fit noise.
    halves: list[dict[int, float]] = [{}, {}]
    for i, options in enumerate(texts):
        numbers, shares = {int(o.answer) for o in options if o.kind == kind}, halves[i % 2]
        for number in numbers:
            shares[number] = shares.get(number, 0.0) + 2 / len(numbers) / len(texts)

    def credit(shares: dict[int, float], guess: int) -> float:
        return sum(share * _PARTIAL_CREDIT ** abs(right - guess) for right, share in shares.items())

    chosen, scored = halves
    guess = max(chosen, key=lambda number: credit(chosen, number))
    return credit(scored, guess), scored.get(max(chosen, key=chosen.__getitem__), 0.0)


# --- Scores ---------------------------------------------------------------------------------------


def same_words(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return 1 if the first line is the answer, or says OOLONG's words of a comparison."""
    return scoring.all_answers(doc, results) | {"score": _same(written(results[0]), doc["target"])}


def near_number(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return 0.75 to the power of the first line's distance from the number; 0 if it is none."""
    response = written(results[0])
    score = _same(response, doc["target"]) or partial_credit(response, int(doc["target"]))
    return scoring.all_answers(doc, results) | {"score": score}


def same_date(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return 1 if the first line is the date, in any form."""
    from dateutil import parser

    response, right = written(results[0]), datetime.fromisoformat(doc["target"])
    try:
        # The parser takes what is missing from a default, so that a part of a date is two dates.
        dates = {parser.parse(response, default=datetime(n, n, n)) for n in (1, 2)}
    except (ValueError, OverflowError):
        dates = set()
    return scoring.all_answers(doc, results) | {"score": float(dates == {right})}


def first_line(response: Any) -> str:
    """Return the first line of an answer that has more than blanks."""
    return str(response).lstrip().split("\n", 1)[0]


def written(response: Any) -> str:
    """Return an answer as OOLONG's scorer reads it behind "Answer:", in the first line."""
    answer = first_line(response).split(":")[-1].strip()
    for mark in "*[]":
        answer = answer.replace(mark, "")
    if len(answer) >= 20:  # a whole sentence
        cores = [words.rpartition(" ")[0] for words in COMPARISONS]
        answer = next((core for core in cores if core in answer), answer)
    return answer


def partial_credit(response: str, right: int) -> float:
    """Return 0.75 to the power of the distance of a whole number from the right one."""
    try:
        return _PARTIAL_CREDIT ** abs(right - int(response))
    except (ValueError, OverflowError):  # no number, or a far too large one
        return 0.0


def _same(response: str, target: str) -> float:
    cores = [words.rpartition(" ")[0] for words in COMPARISONS]
    return float(response == target or (response in cores and response in target))
