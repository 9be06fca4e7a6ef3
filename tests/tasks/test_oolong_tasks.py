"""Test the tasks of rp_oolong: answers are found anew by reading prompts back."""

import json
import lzma
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from helpers import built_tasks
from helpers.built_tasks import build_rows, score_of
from helpers.oolong_answers import FILE, KINDS, PER_KIND

from rope_patch import tasks

DATA = json.loads(Path(tasks.__file__).with_name("labelled_examples.json").read_text())
TOPIC_OF = {
    f"{subject} {predicate}": topic
    for topic, parts in DATA.items()
    if topic != "endings"
    for subject in parts[0]
    for predicate in parts[1]
}
LINES, SESSIONS = (names := tasks.groups()["rp_oolong"])[:8], names[8:]


def words_rows(name, length=3000, **request):
    return built_tasks.rows(name, "words", length=length, **request)


# --- Lines ----------------------------------------------------------------------------------------


def topic_of(sentence):
    """Return the topic of a sentence by its subject and predicate, without its ending."""
    bare = sentence.removesuffix(".")
    (ending,) = [end for end in DATA["endings"] if bare.endswith(f" {end}")]
    return TOPIC_OF[bare.removesuffix(f" {ending}")]


def lines_of(row):
    """Return date, user and topic of each line; a topic that is written is the sentence's."""
    lines = []
    for line in row["input"].split("\n")[1:-1]:
        date, user, sentence, *written = line.split(" | ")
        topic = topic_of(sentence)
        assert written == ([topic] if row["task"].endswith("_labelled") else [])
        lines.append((date, re.fullmatch(r"user (\d{5})", user)[1], topic))
    return lines


def asked_topics(row):
    listed = re.search(r"sentences on (.+); others", row["input"])[1]
    return re.split(", | or ", listed)


def scope_of(row):
    """Return the lines on the six topics that the question is about."""
    question = row["input"].rsplit("\nAmong ", 1)[1]
    lines = [line for line in lines_of(row) if line[2] in asked_topics(row)]
    if match := re.match(r"the lines of user (\d+),", question):
        return "user", [line for line in lines if line[1] == match[1]]
    if match := re.match(r"the lines before (\S+),", question):
        return "date", [line for line in lines if line[0] < match[1]]
    if match := re.match(r"the lines of (\S+) or later,", question):
        return "date", [line for line in lines if line[0] >= match[1]]
    assert question.startswith("all lines, ")
    return "all", lines


def likeliest_answer(row, scope):
    """Return the answer that some lines give, and of several equal ones any."""
    question = row["input"].rsplit("\nAmong ", 1)[1]
    topics = Counter(dict.fromkeys(asked_topics(row), 0))
    topics.update(topic for _, _, topic in scope)
    if match := re.search(r"how many are on (\w+)\?", question):
        return str(topics[match[1]])
    if match := re.search(r"is the (most|least) frequent\?", question):
        return topics.most_common()[0 if match[1] == "most" else -1][0]
    if match := re.search(r"those on (\w+) .* those on (\w+)\?", question):
        a, b = topics[match[1]], topics[match[2]]
        return f"{'more' if a > b else 'less'} common than" if a != b else "same frequency as"
    what, topic = re.search(r"which (user|date) has the most on (\w+)\?", question).groups()
    column = {"date": 0, "user": 1}[what]
    busy = Counter(line[column] for line in scope if line[2] == topic).most_common()
    return busy[0][0] if busy else ""


def numbers_of(row, scope):
    """Return how many lines each answer stands for, where one must have the most or the fewest."""
    if match := re.search(r"which (user|date) has the most on (\w+)\?", row["input"]):
        column = {"date": 0, "user": 1}[match[1]]
        return Counter(line[column] for line in scope if line[2] == match[2])
    numbers = Counter(dict.fromkeys(asked_topics(row), 0))
    numbers.update(line[2] for line in scope)
    return numbers


@pytest.mark.parametrize("name", LINES)
def test_the_answer_is_what_reading_every_line_gives(name):
    for row in words_rows(name, samples=24, per_text=6):
        kind, scope = scope_of(row)
        assert likeliest_answer(row, scope) == row["target"]
        assert row["answers"] == [row["target"]]
        assert (row["question"], row["aggregated"]) == (kind, len(scope))
        assert row["depth"] is None
        if not name.startswith(("rp_oolong_count", "rp_oolong_compare")):
            numbers = numbers_of(row, scope)
            equals = [n for n in numbers.values() if n == numbers[row["target"]]]
            assert len(equals) == 1  # nobody else has the most or the fewest


@pytest.mark.parametrize("planted", [True, False])
@pytest.mark.parametrize("group", [LINES[:5], LINES[5:], SESSIONS], ids=lambda names: names[0])
def test_tasks_ask_about_the_same_text(group, planted):
    each = [words_rows(name, samples=6, per_text=3, planted=planted) for name in group]
    for rows in zip(*each, strict=True):
        assert len({row["input"].rpartition("\n")[0] for row in rows}) == 1
        assert len({row["input"] for row in rows}) == len(group)
        assert len({tasks.text_of(row["task"]) for row in rows}) == 1


def test_no_sentence_names_its_topic():
    for whole, topic in TOPIC_OF.items():
        assert not re.search(rf"\b{topic}\b", f"{whole} {' '.join(DATA['endings'])}", re.I)


@pytest.mark.parametrize("name", ["rp_oolong_count", "rp_oolong_topic_labelled"])
@pytest.mark.parametrize("aggregated", [12, 31])
def test_as_many_lines_count_as_are_asked_for(name, aggregated):
    for length in (2000, 4000):
        for row in words_rows(name, length, samples=4, per_text=2, aggregated=aggregated):
            counting = [line for line in lines_of(row) if line[2] in asked_topics(row)]
            assert len(counting) == aggregated
            places = [i for i, line in enumerate(lines_of(row)) if line[2] in asked_topics(row)]
            assert places[-1] - places[0] > len(lines_of(row)) / 3


def test_nearly_all_lines_count_unless_said_otherwise():
    shares = {}
    for length in (2000, 16_000):
        (row,) = words_rows("rp_oolong_count", length, samples=1)
        counting = [line for line in lines_of(row) if line[2] in asked_topics(row)]
        shares[length] = len(counting) / len(lines_of(row))
    assert shares[2000] > 0.7
    assert 0.9 < shares[16_000] < 1


def test_answers_are_balanced_and_chance_is_the_score_of_the_best_constant():
    """A guesser knows the question, and takes one place in its list, or one comparison."""
    places = Counter()
    for row in words_rows("rp_oolong_topic", 1200, samples=300):
        end = re.search(r"is the (most|least) frequent\?", row["input"])[1]
        places[end, asked_topics(row).index(row["target"])] += 1
        assert row["chance"] == row["target_chance"] == 1 / 6
    comparisons = Counter()
    for row in words_rows("rp_oolong_compare", 1500, samples=900, per_text=3):
        comparisons[row["question"], row["target"]] += 1
        assert row["chance"] == row["target_chance"] == 1 / 3
    # Four standard deviations of a share around an even one.
    for counts, choices, kinds in ((places, 6, 2), (comparisons, 3, 3)):
        assert len(counts) == choices * kinds
        each = counts.total() / kinds
        noise = (1 / choices * (1 - 1 / choices) / each) ** 0.5
        for count in counts.values():
            assert count / each == pytest.approx(1 / choices, abs=4 * noise)
    by_kind, chances = defaultdict(list), defaultdict(set)
    for row in words_rows("rp_oolong_count", 1500, samples=900, per_text=3, aggregated=20):
        by_kind[row["question"]].append(int(row["target"]))
        chances[row["question"]].add((row["chance"], row["target_chance"]))
    for kind, numbers in by_kind.items():
        ((chance, exact),) = chances[kind]
        best = max(sum(0.75 ** abs(n - guess) for n in numbers) for guess in range(21))
        assert best / len(numbers) == pytest.approx(chance, abs=0.06)
        assert max(Counter(numbers).values()) / len(numbers) == pytest.approx(exact, abs=0.06)


@pytest.mark.parametrize(("name", "most"), [("topic", 0.9), ("compare", 0.8), ("user", 0.8)])
def test_a_reader_of_the_first_half_of_the_lines_is_often_wrong(name, most):
    right = 0
    for row in words_rows(f"rp_oolong_{name}", 4000, samples=100, per_text=4):
        first, *lines, question = row["input"].split("\n")
        half = {**row, "input": "\n".join([first, *lines[: len(lines) // 2], question])}
        right += likeliest_answer(half, scope_of(half)[1]) == row["target"]
    assert right / 100 < most


@pytest.mark.parametrize(("name", "answers"), [("topic", 6), ("compare", 3)])
def test_choices_are_all_that_could_be_right(name, answers):
    for row in build_rows(f"rp_oolong_{name}_mc", "words", length=2000, samples=4, per_text=2):
        assert len(row["choices"]) == answers
        assert row["choices"][row["gold"]] == row["target"]
        if name == "topic":
            assert row["choices"] == sorted(asked_topics(row))


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("rp_oolong_count", {"aggregated": 11}, "at least 12 lines that count, got 11"),
        ("rp_oolong_rolls", {"aggregated": 23}, "at least 24 lines that count, got 23"),
        ("rp_oolong_topic", {"per_text": 60}, "different questions .* got per_text 60"),
        ("rp_oolong_rolls", {"per_text": 14}, "13 different questions .* got per_text 14"),
        ("rp_oolong_user", {"aggregated": 500}, "2000 tokens is too short for rp_oolong_user"),
    ],
)
def test_options_beyond_what_there_is_are_refused(name, options, named):
    with pytest.raises(ValueError, match=named):
        build_rows(name, "words", length=2000, **options)


# --- Sessions -------------------------------------------------------------------------------------

ROLL = re.compile(r"(?:For (\w+) I rolled a|makes a) (\d+)(?: on my (\w+) roll)?\.")
TRY = re.compile(r"I try (\w+), and the die shows a (\d+)\.")
CAST = re.compile(r"I cast (\w+ \w+)\.|Then (\w+ \w+) is what I cast|and cast (\w+ \w+)\.")


def session(row):
    """Return rolls as player, skill and value, and spells as player and name."""
    rolls, spells = [], []
    for line in row["input"].split("\n")[1:-1]:
        player, words = line.split(": ", 1)
        if match := TRY.search(words):
            rolls.append((player, match[1], int(match[2])))
        elif match := ROLL.search(words):
            rolls.append((player, match[1] or match[3], int(match[2])))
        elif (match := CAST.search(words)) and "might" not in words:
            spells.append((player, next(filter(None, match.groups()))))
    return rolls, spells


def events_by_reading(row):
    rolls, spells = session(row)
    question = row["input"].rsplit("\nIn this session, ", 1)[1]
    if "spell" not in question:
        if match := re.search(r"did (\w+) make", question):
            rolls = [roll for roll in rolls if roll[0] == match[1]]
        elif match := re.search(r"were (\d+) or more", question):
            rolls = [roll for roll in rolls if roll[2] >= int(match[1])]
        elif match := re.search(r"were for (\w+)", question):
            rolls = [roll for roll in rolls if roll[1] == match[1]]
        return [str(len(rolls))]
    end, number, who = re.search(
        r"the (first|last) ?(\d*) spells? that (\w+) cast", question
    ).groups()
    names = [name for player, name in spells if who in (player, "anybody")]
    count = int(number or 1)
    return names[:count] if end == "first" else names[-count:]


@pytest.mark.parametrize("name", SESSIONS)
def test_the_answer_is_what_reading_every_turn_gives(name):
    for row in words_rows(name, samples=30, per_text=10):
        assert events_by_reading(row) == row["answers"]
        assert row["target"] == ", ".join(row["answers"])
    (row,) = words_rows(name, samples=1, aggregated=40)
    rolls, spells = session(row)
    assert len(rolls) + len(spells) == 40
    assert len(row["input"].split("\n")) > 60


def test_in_a_control_nobody_rolls_or_casts():
    for name in ("rp_oolong_rolls", "rp_oolong_spells"):
        for row in words_rows(name, samples=2, per_text=2, planted=False):
            assert session(row) == ([], [])
            assert "roll" in row["input"].partition("\n")[2]  # players speak of it


def test_the_chance_of_a_number_is_the_score_of_the_best_constant():
    numbers, chances = defaultdict(list), {}
    for row in words_rows("rp_oolong_rolls", 1500, samples=1200, per_text=4, aggregated=24):
        numbers[row["question"]].append(int(row["target"]))
        chances[row["question"]] = row["chance"]
    for kind, right in numbers.items():
        best = max(sum(0.75 ** abs(n - guess) for n in right) for guess in range(25))
        assert best / len(right) == pytest.approx(chances[kind], abs=0.06)


# --- Scores ---------------------------------------------------------------------------------------

RULES = {"number": "count", "comparison": "compare", "events_number": "rolls"}
RULES |= {"events_name": "spells", "events_list": "spells"}


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_made_up_answers_are_those_of_their_scorer(kind):
    """The vectors' file names the scorer, its commit and the command.

    Two differences are meant. Theirs fails on a number whose distance is no float; ours is 0. Of a
    list, ours counts as many names as are asked for, or naming all spells would be right.
    """
    recorded = json.loads(lzma.decompress(FILE.read_bytes()))["rows"][kind]
    assert len(recorded) == PER_KIND
    task = f"rp_oolong_{RULES.get(kind, kind)}"
    others = 0
    for right, words, theirs in recorded:
        doc = {"target": right, "answers": right.split(", ")}
        for response in (words, f"\n {words}\n\nAnswer: 12"):
            if not words.strip() and response != words:
                continue
            ours = score_of(task, doc, response)
            if kind == "events_number" and theirs is None:
                assert ours == 0
            elif kind == "events_list" and ours != pytest.approx(theirs, abs=1e-8):
                others += 1
                assert ours < theirs
                assert words.count(",") > right.count(",")
            else:
                assert ours == pytest.approx(theirs, abs=1e-8), (right, words)
    assert others < PER_KIND / 10
    # The vectors tell rules apart.
    assert {0.0, 1.0} <= {score for _, _, score in recorded}
