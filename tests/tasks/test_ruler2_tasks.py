"""Test RULERv2's ladders: scores of its own code, answers found anew, what steps have in common."""

import csv
import gzip
import json
import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import nltk
import pytest
from helpers.built_tasks import build_rows, rows, score_of

from rope_patch import tasks

SCORES = Path(__file__).parents[1] / "assets" / "ruler2_scores" / "scores.json.gz"
SHORT = Path(tasks.__file__).parent / "short"
NAMES = tasks.groups()["rp_ruler2"]
SINGLE = [f"rp_v2_mk_niah_{step}" for step in ("easy", "medium", "hard")]
GROUPS = [f"rp_v2_mv_niah_{step}" for step in ("easy", "medium", "hard")]
DOCUMENTS = [f"rp_v2_qa_{step}" for step in ("basic", "easy", "medium", "hard")]
LADDERS = pytest.mark.parametrize("ladder", [SINGLE, GROUPS, DOCUMENTS], ids=lambda names: names[0])


def built(name, length=4096, samples=8, **metadata):
    """Return samples in tokens of words, two texts of four unless told otherwise."""
    request = {"per_text": 4, "depths": (10, 50, 90), **metadata}
    return rows(name, "words", length=length, samples=samples, **request)


def questions(row):
    """Return the numbered questions of a text, in order."""
    text = row["input"].split("\n\nHere are some examples")[0]
    return re.findall(r"^Question (\d+): (.*)$", text, re.MULTILINE)


def documents(row):
    """Return the numbered documents of a text, in order."""
    return re.findall(r"^Document (\d+):\n(.*)$", row["input"], re.MULTILINE)


def asked_number(row):
    return re.findall(r"Question (\d+) ", row["input"])[-1]


# --- Scores ---------------------------------------------------------------------------------------


@cache
def their_scores():
    return json.loads(gzip.decompress(SCORES.read_bytes()))


def their_rule(name):
    """Return the rule by which the authors' `prepare.py` scores a task."""
    if name in SINGLE[1:]:
        return "multichoice"
    return {"rp_v2_mv_niah_medium": "2steps", **dict.fromkeys(DOCUMENTS, "part")}.get(name, "all")


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_made_up_answers_are_those_of_the_authors_code(name):
    scored = their_scores()[their_rule(name)]
    assert len(scored) == 1000
    assert {0.0, 1.0} < {score for *_, score in scored} or name in SINGLE
    differ = [
        (answer, expected)
        for answer, references, expected in scored
        if score_of(name, {"answers": [*references]}, answer) != expected
    ]
    assert differ == []


# --- Numbered questions ---------------------------------------------------------------------------


@cache
def facts():
    table = {}
    for name in ("facts", "induction"):
        for _, subject, answer in csv.reader((SHORT / f"{name}.csv").open(encoding="utf-8")):
            table.setdefault(subject, set()).add(answer)
    return table


def solution(text):
    """Return the letter of the right choice, found by other means than it was made by."""
    stem, *choices = re.split(r" [A-D]\. ", text)
    assert len({*choices}) == 4
    numbers = [int(n) for n in re.findall(r"\d+", stem)]
    if "buys" in stem:
        right = {str(sum(numbers))}
    elif "are left" in stem:
        right = {str(numbers[0] - numbers[1])}
    elif "boxes, each" in stem:
        right = {str(numbers[0] * numbers[1])}
    elif "series" in stem:
        steps = {b - a for a, b in pairwise(numbers)}
        assert len(steps) == 1
        right = {str(numbers[-1] + steps.pop())}
    elif match := re.search(r"(smallest|largest|first|last)\b", stem):
        pick = min if match[1] in ("smallest", "first") else max
        right = {pick(choices)}  # all numbers have four digits
    else:
        named = (name for name in facts() if re.search(rf"\b{re.escape(name)}\b", stem))
        right = set().union(*(facts()[name] for name in named))
    (place,) = (i for i, choice in enumerate(choices) if choice in right)
    return "ABCD"[place]


@pytest.mark.parametrize("name", SINGLE)
def test_the_number_stands_once_before_the_question_that_is_asked_for(name):
    for row in built(name):
        numbered = questions(row)
        texts = dict(numbered)
        assert len(texts) == len(numbered) == len({*texts.values()})
        number = asked_number(row)
        place = [n for n, _ in numbered].index(number)
        assert 100 * place / (len(numbered) - 1) == pytest.approx(row["depth"], abs=4)
        text, letter = texts[number], solution(texts[number])
        box = f"\\boxed{{{letter}}}"
        right = {"easy": text, "medium": f"{text}\nSolution: {box}", "hard": box}
        assert row["target"] == right[name.rsplit("_", 1)[1]]
        assert row["answers"] == [text if name == SINGLE[0] else letter]


def test_examples_are_solved_questions_of_the_text():
    for name in SINGLE[1:]:
        row = built(name)[0]
        texts, examples = dict(questions(row)), row["input"].split("Here are some examples")[1]
        assert len(re.findall("Solution: ", examples)) == 5
        solved = r"Question (\d+) from the context.*\n((?:Question .*\n)?)Solution: \\boxed{(.)}"
        for number, between, letter in re.findall(solved, examples):
            assert solution(texts[number]) == letter
            assert between == (f"Question {number}: {texts[number]}\n" if name == SINGLE[1] else "")


def test_no_letter_and_no_rank_of_a_number_is_right_more_often():
    hard = built("rp_v2_mk_niah_hard", samples=40)
    assert Counter(row["answers"][0] for row in hard) == dict.fromkeys("ABCD", 10)
    (row,) = built("rp_v2_mk_niah_easy", 100_000, samples=1, per_text=1)
    texts = [text for _, text in questions(row)]
    letters, ranks = Counter(map(solution, texts)), Counter()
    for text in texts:
        stem, *choices = re.split(r" [A-D]\. ", text)
        if "How many" in stem or "series" in stem:
            order = sorted(choices, key=int)
            ranks[order.index(choices["ABCD".index(solution(text))])] += 1
    assert len(texts) > 2500
    for counts in (letters, ranks):  # four standard deviations
        mean, total = sum(counts.values()) / 4, sum(counts.values())
        assert len(counts) == 4
        assert max(abs(n - mean) for n in counts.values()) < 4 * (total * 3 / 16) ** 0.5


@pytest.mark.parametrize("name", GROUPS)
def test_each_number_has_four_questions_and_the_kth_is_asked_for(name):
    for row in built(name):
        numbered = questions(row)
        times = Counter(number for number, _ in numbered)
        assert len([number for number, n in times.items() if n != 4]) <= 1
        number = asked_number(row)
        copies = [text for n, text in numbered if n == number]
        assert len({*copies}) == 4
        order = re.findall(r"the (\d)\w\w \(1 indexed\)", row["input"])
        kth = [copies[int(k) - 1] for k in order]
        written = {GROUPS[0]: copies, GROUPS[1]: [*copies, *kth], GROUPS[2]: kth}[name]
        assert f"Question {number}: {row['target']}".split("\n\n") == [
            f"Question {number}: {text}" for text in written
        ]
        assert row["answers"] == (copies if name == GROUPS[0] else kth)
        if kth:
            place = [text for _, text in numbered].index(kth[0])
            assert 100 * place / len(numbered) == pytest.approx(row["depth"], abs=12)


def test_every_rank_is_asked_for_at_every_depth():
    asked = Counter(
        (row["depth"], re.findall(r"the (\d)\w\w \(1", row["input"])[0])
        for row in built("rp_v2_mv_niah_hard", 2048, samples=96, depths=(0, 50, 100))
    )
    assert len(asked) == 12
    assert sum(asked.values()) == 96
    ranks = Counter()
    for (_, rank), count in asked.items():
        ranks[rank] += count
    assert ranks == dict.fromkeys("1234", 24)


def test_groups_of_a_number_are_spread_over_the_text():
    """The four of a number stand as far apart as four random places: 60% of the text."""
    (row,) = built("rp_v2_mv_niah_easy", 30_000, samples=1, per_text=1)
    places = {}
    for i, (number, _) in enumerate(questions(row)):
        places.setdefault(number, []).append(i)
    spans = [at[-1] - at[0] for at in places.values() if len(at) == 4]
    assert sum(spans) / len(spans) / len(questions(row)) == pytest.approx(0.6, abs=0.05)


def test_each_key_has_four_values_and_all_are_asked_for():
    needle = re.compile(r"One of the special magic numbers for (.+) is: (\d{10})\.\n")
    for row in built("rp_v2_mv_niah_basic"):
        needles = needle.findall(row["input"])
        assert len([n for n in Counter(key for key, _ in needles).values() if n != 4]) <= 1
        key = re.search(r"numbers for (.+) mentioned", row["gen_prefix"])[1]
        assert row["answers"] == [value for k, value in needles if k == key]
        assert len({value for _, value in needles}) == len(needles)


@pytest.mark.parametrize("name", ["rp_v2_mk_niah_easy", *GROUPS])
def test_chance_is_what_a_random_question_scores(name):
    (row,) = built(name, samples=1, per_text=1)
    others = [text for _, text in questions(row) if text not in row["target"]]
    rates = []
    for answer in row["answers"]:
        words = answer.lower().split()
        for text in others:
            edits = nltk.edit_distance(text.lower().split(), words)
            rates.append(max(0, 1 - edits / len(words)))
    assert 0.1 < row["chance"] < 0.4
    assert row["chance"] == pytest.approx(sum(rates) / len(rates), abs=0.05)


# --- Documents ------------------------------------------------------------------------------------


def told(row, document):
    """Return how many of the three things of the question a document tells."""
    question = row["input"].rsplit("Question: ")[-1]
    studied, company, instrument = re.search(
        r"studied (.+), worked for (.+) and played the (.+)\?", question
    ).groups()
    patterns = rf"\b{studied}\b", rf"\b{company}\b", rf"\bthe {instrument}\b"
    return sum(re.search(pattern, document) is not None for pattern in patterns)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_one_document_answers_and_others_tell_two_of_the_three_things(name):
    shares = Counter()
    for row, asked in zip(built(name, 20_000), built("rp_v2_qa_hard", 20_000), strict=True):
        numbered = documents(row)
        assert len({number for number, _ in numbered}) == len(numbered)
        counts = [told(asked, document) for _, document in numbered]
        shares.update(counts)
        place = counts.index(3)
        number, document = numbered[place]
        assert 100 * place / (len(numbered) - 1) == pytest.approx(row["depth"], abs=3)
        town = re.search(r"born in (?:the town of )?(\w+)", document)[1]
        medium = f"Document {number}:\n{document}\n\nAnswer: {town}"
        right = dict(zip(DOCUMENTS, (number, number, medium, town), strict=True))[name]
        assert row["target"] == right
        assert row["answers"] == [town if name in DOCUMENTS[2:] else number]
        if name == DOCUMENTS[0]:
            assert row["input"].endswith(f"\n\nText: {document}")
    assert shares[3] == 8
    assert shares[2] > 40


# --- Ladders --------------------------------------------------------------------------------------


@LADDERS
def test_steps_of_a_ladder_ask_about_the_same_in_the_same_text(ladder):
    """One that begins otherwise has a little more or less of the same filler."""
    numbered = questions if ladder is not DOCUMENTS else documents
    for samples in zip(*map(built, ladder), strict=True):
        if ladder is DOCUMENTS:
            contents = [[n for n, _ in documents(row)] for row in samples]
            easy, medium, hard = samples[1:]
            assert samples[0]["target"] == easy["target"]
            assert easy["target"] in medium["target"]
            assert hard["answers"] == medium["answers"]
        else:
            contents = [numbered(row) for row in samples]
            assert len({asked_number(row) for row in samples}) == 1
        sizes = [len(content) for content in contents]
        smallest = contents[sizes.index(min(sizes))]
        assert all({*smallest} <= {*content} for content in contents)
        assert min(sizes) > 0.6 * max(sizes)
        medium, hard = (row["input"].split("\n\n") for row in samples[-2:])
        assert medium[: 1 + sizes[-1]] == hard[: 1 + sizes[-1]]


@pytest.mark.parametrize("name", ["rp_v2_qa_basic", "rp_v2_qa_easy", "rp_v2_qa_hard"])
def test_choices_are_answers_in_the_text(name):
    for row, likelihood in zip(built(f"{name}_mc"), built(f"{name}_ll"), strict=True):
        assert row["choices"][row["gold"]] == row["target"] == likelihood["target"]
        assert len(row["choices"]) == 4
        assert all(choice in row["input"] for choice in row["choices"])


def test_the_choices_of_a_letter_are_all_four():
    for row in built("rp_v2_mk_niah_hard_mc", samples=2, per_text=1):
        assert row["choices"] == [f"\\boxed{{{letter}}}" for letter in "ABCD"]
        assert row["choices"][row["gold"]] == row["target"]


# --- Files ----------------------------------------------------------------------------------------


def write(path, entries):
    path.write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")
    return str(path)


def mmlu(count, longest=8):
    """Return rows as MMLU's."""
    return [
        {
            "question": f"What  is\nthing {i}?{' indeed' * (i % longest)}",
            "subject": "things",
            "choices": [f"a{i}", f"b {i}", f"c{i}", f"d{i}"],
            "answer": i % 4,
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("name", [*SINGLE, *GROUPS])
def test_a_file_of_mmlu_gives_the_questions(name, tmp_path):
    entries = mmlu(60)
    path = write(tmp_path / "mmlu.jsonl", entries)
    texts = {
        " ".join(f"{e['question']} A. {c[0]} B. {c[1]} C. {c[2]} D. {c[3]}".split()): "ABCD"[i % 4]
        for i, e in enumerate(entries)
        for c in [e["choices"]]
    }
    length = 2500  # more than 60 questions: those that are not asked for repeat
    request = {"length": length, "samples": 8, "per_text": 4, "questions": path}
    for row in build_rows(name, "words", **request):
        numbered = questions(row)
        assert {text for _, text in numbered} <= texts.keys()
        wanted = [text for number, text in numbered if number == asked_number(row)]
        assert len(wanted) == (1 if name in SINGLE else 4)
        assert all([t for _, t in numbered].count(text) == 1 for text in wanted)
        if name in SINGLE[1:]:
            assert row["answers"] == [texts[wanted[0]]]
    for row in build_rows(name, "words", planted=False, **request):
        assert asked_number(row) not in dict(questions(row))
        assert row["target"].split("\n")[0] not in row["input"] or name == SINGLE[2]


def test_questions_too_long_to_be_copied_are_not_asked_for(tmp_path):
    path = write(tmp_path / "mmlu.jsonl", mmlu(80, longest=160))
    for row in build_rows("rp_v2_mk_niah_easy", "words", samples=6, questions=path):
        assert row["target_tokens"] <= 100
    path = write(tmp_path / "long.jsonl", [e | {"question": "Is it? " * 60} for e in mmlu(40)])
    with pytest.raises(ValueError, match="at most 100 tokens"):
        build_rows("rp_v2_mk_niah_easy", "words", questions=path)


GOOD = mmlu(1)[0]


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (GOOD | {"question": " "}, "'question'.* got ' '"),
        (GOOD | {"choices": ["a", "b", "c"]}, "'choices'.* got .*'c'"),
        (GOOD | {"choices": ["a", "b", "c", 4]}, "'choices'.* got .*4"),
        (GOOD | {"answer": 4}, "'answer'.* got 4"),
        (GOOD | {"answer": True}, "'answer'.* got True"),
        (GOOD | {"answer": "AB"}, "'answer'.* got 'AB'"),
        ([1], "'question'.* got None"),
    ],
)
def test_a_malformed_file_is_refused_with_the_line(entry, named, tmp_path):
    path = write(tmp_path / "bad.jsonl", [GOOD, entry])
    with pytest.raises(ValueError, match=rf"bad\.jsonl, line 2: .*{named}"):
        build_rows("rp_v2_mk_niah_hard", "words", questions=path)


@pytest.mark.parametrize(
    ("content", "named"),
    [("", "no question"), ("{", "line 1 is not JSON"), (None, "cannot read questions")],
)
def test_a_file_without_questions_is_refused(content, named, tmp_path):
    path = tmp_path / "empty.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=named):
        build_rows("rp_v2_mv_niah_hard", "words", questions=str(path))


def test_a_file_gives_the_documents(tmp_path):
    entries = [
        {
            "question": f"How high is tower{i}?",
            "answers": [f"{i + 100} metres"],
            "context": [f"City{i} has tower{i}.", f"The tower{i} is {i + 100} metres high."],
        }
        for i in range(30)
    ]
    entries.append({"question": "Long?", "answers": ["yes"], "context": "long " * 251})
    path = write(tmp_path / "hotpot.jsonl", entries)
    for name in DOCUMENTS:
        for row in build_rows(name, "words", length=1024, samples=6, per_text=3, questions=path):
            numbers = {document: number for number, document in documents(row)}
            ask = row["input"].rsplit("\n", 1)[1]
            (wanted,) = (
                entry
                for entry in entries
                if ask in (f"Question: {entry['question']}", f"Text: {entry['context'][-1]}")
            )
            own = [numbers[document] for document in wanted["context"]]
            by_name = [own[1:], own[::-1], wanted["answers"], wanted["answers"]]
            assert row["answers"] == by_name[DOCUMENTS.index(name)]
            copied = [f"Document {numbers[d]}:\n{d}" for d in wanted["context"]]
            if name == DOCUMENTS[2]:
                end = f"Answer: {wanted['answers'][0]}"
                assert row["target"] == "\n\n".join([*copied, end])
    path = write(tmp_path / "long.jsonl", entries[-1:])
    with pytest.raises(ValueError, match="at most 250 words"):
        build_rows("rp_v2_qa_hard", "words", questions=path)
