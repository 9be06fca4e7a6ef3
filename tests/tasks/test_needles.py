"""Test the needle tasks: prompts equal to RULER's, depths, keys and values."""

import itertools
import re
from collections import Counter
from types import SimpleNamespace

import pytest
from helpers import built_tasks
from helpers.tokenizers import load

from rope_patch import tasks

PROSE = ("single_2", "single_3", "multikey_1", "multivalue", "multiquery")
LINES = ("single_1", "multikey_2", "multikey_3")
ALL = (*PROSE, *LINES)
NEEDLE = re.compile(r"One of the special magic (?:number|uuid)s for (.+?) is: ([\w-]+)\.")


@pytest.fixture(scope="module")
def ruler():
    with built_tasks.ruler_modules() as modules:
        yield modules


def rows(task, length=1024, **kwargs):
    return built_tasks.rows(f"rp_niah_{task}", length=length, **kwargs)


def haystack(row):
    """Return the text between the prompt's first and last line."""
    return row["input"].partition("\n")[2].rpartition("\n")[0]


def pieces(row):
    """Return the texts around the planted needles, and these needles."""
    text = haystack(row)
    matches = [
        m for m in NEEDLE.finditer(text) if row["task"][8:] in PROSE or m[2] in row["answers"]
    ]
    edges = [0, *itertools.chain.from_iterable(m.span() for m in matches), len(text)]
    around = [text[a:b].strip() for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return around, [(m[1], m[2]) for m in matches]


def build_by_ruler(ruler, monkeypatch, row):
    """Return what RULER's builder makes of the row's words, needles, places and questions."""
    niah, name = ruler.prepare_niah, row["task"].removeprefix("rp_")
    generator_arguments: dict = {}
    monkeypatch.setattr(ruler.niah_utils, "get_tokenizer", lambda _: None)
    monkeypatch.setattr(ruler.niah_utils, "get_haystack", lambda type_haystack: type_haystack)
    monkeypatch.setattr(
        ruler.niah_utils,
        "generate_samples",
        lambda _, **k: generator_arguments.update(k) or [{"row": 0}],
    )
    getattr(ruler.niah_utils, name)()
    names = ("type_haystack", "type_needle_k", "type_needle_v", "template")
    parameters = {key: generator_arguments[key] for key in names}
    parameters["num_needle_v"] = generator_arguments.get("num_needle_v", 1)
    parameters["num_needle_q"] = generator_arguments.get("num_needle_q", 1)
    parameters["num_needle_k"] = max(
        generator_arguments.get("num_needle_k", 1), parameters["num_needle_q"]
    )

    around, needles_found = pieces(row)
    keys = list(dict.fromkeys(key for key, _ in needles_found))
    draw_values = []
    for key in keys:
        draw_values += [key, *(value for k, value in needles_found if k == key)]
    places = [100 * (i + 1) / len(around) + 0.01 for i in range(len(needles_found))]
    units, source = len(around), around
    if parameters["type_haystack"] != "essay":
        lines = [line for piece in around for line in piece.split("\n")]
        draw_values += itertools.chain.from_iterable(NEEDLE.findall("\n".join(lines)))
        places = [around[0].count("\n") + 1]
        units, source = len(lines), niah.get_haystack(parameters["type_haystack"])
    owners = {value: keys.index(key) for key, value in needles_found}
    questions = list(dict.fromkeys(owners[answer] for answer in row["answers"]))

    draws, samples = iter(draw_values), iter([places, questions])
    fixed = SimpleNamespace(
        sample=lambda _, __: next(samples),
        Random=lambda _: SimpleNamespace(shuffle=lambda __: None),
    )
    monkeypatch.setattr(niah, "random", fixed)
    monkeypatch.setattr(niah, "generate_random", lambda _: next(draws))
    monkeypatch.setattr(niah, "cached_sent_tokenize", lambda _: around)
    text, answers, query = niah.generate_input_output(units, source, **parameters)
    assert next(draws, None) is None  # it used all keys and values

    monkeypatch.setattr(niah, "generate_input_output", lambda *_, **__: (text, answers, query))
    nothing = SimpleNamespace(input_ids=[])
    generator_arguments |= {"TOKENIZER": lambda _: nothing, "num_samples": 1, "max_seq_length": 0}
    (whole,) = niah.generate_samples(source, **(generator_arguments | {"tokens_to_generate": 0}))
    return {"input": text, "answers": answers, "gen_prefix": whole["gen_prefix"]}


@pytest.mark.parametrize("task", ALL)
def test_samples_equal_those_that_ruler_builds_from_the_same_parts(ruler, monkeypatch, task):
    (row,) = rows(task, 2048, depths=(40,), seed=3)
    around, _ = pieces(row)
    assert all(around)  # no two needles in one place, where RULER would write two spaces
    theirs = build_by_ruler(ruler, monkeypatch, row)
    assert {key: row[key] for key in theirs} == theirs


@pytest.mark.parametrize("per_text", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("task", ALL)
def test_the_needle_is_at_its_depth_after_a_sentence(task, per_text):
    depths = (0, 35, 100)
    built = rows(task, 8192, depths=depths, per_text=per_text)
    assert [row["depth"] for row in built] == list(depths)
    for row in built:
        text = haystack(row)
        # If the question is about several values, one of them is at the sample's depth.
        answers = row["answers"] if task == "multivalue" else row["answers"][:1]
        spans = [m.span() for m in NEEDLE.finditer(text) if m[2] in answers]
        assert len(spans) == len(answers)
        depth = min((100 * a / (len(text) - b + a) for a, b in spans), key=row_distance(row))
        assert depth == pytest.approx(row["depth"], abs=4)
        if task in PROSE:
            before = [text[:a].rstrip() for a, _ in spans]
            assert all(b == "" or b.endswith((".", "!", "?", '"')) for b in before)


def row_distance(row):
    return lambda depth: abs(depth - row["depth"])


@pytest.mark.parametrize("task", ["single_1", "single_2", "single_3", "multivalue"])
def test_samples_of_one_text_are_the_same_up_to_the_shallower_needle(task):
    tokenizer, built = load("tiny"), rows(task, 2048, per_text=3, seed=5)
    own_answers = [{*row["answers"]} for row in built]
    own_answers = [
        answers - {*itertools.chain(*(o for o in own_answers if o is not answers))}
        for answers in own_answers
    ]
    assert [len(answers) for answers in own_answers] == [1, 1, 1]
    assert len({NEEDLE.sub("", haystack(row)).replace("  ", " ") for row in built}) == (
        3 if task == "single_1" else 1  # its lines leave an empty one where the needle was
    )
    for a, b in itertools.combinations(range(3), 2):
        one, other = built[a]["input"], built[b]["input"]
        first = one.index(next(m[0] for m in NEEDLE.finditer(one) if m[2] in own_answers[a]))
        second = other.index(next(m[0] for m in NEEDLE.finditer(other) if m[2] in own_answers[b]))
        # "One" begins the needle, so the token before it is whole.
        shared = tokenizer(one[: min(first, second)].rstrip()).input_ids
        assert tokenizer(one).input_ids[: len(shared)] == shared
        assert tokenizer(other).input_ids[: len(shared)] == shared


@pytest.mark.parametrize("task", ["multikey_1", "multiquery"])
@pytest.mark.parametrize("per_text", [1, 4, 5, pytest.param(12, marks=pytest.mark.slow)])
def test_a_text_has_four_needles_however_many_samples_share_it(task, per_text):
    built = rows(task, 2048, per_text=per_text, samples=6)
    assert {len(NEEDLE.findall(haystack(row))) for row in built} == {4}
    assert max(Counter(row["text"] for row in built).values()) == min(per_text, 4)


@pytest.mark.parametrize("task", ALL)
def test_samples_of_a_text_ask_different_questions_even_at_equal_depths(task):
    built = rows(task, 4096, per_text=6, samples=6)
    assert len({row["target"] for row in built}) == 6
    count = len(NEEDLE.findall(haystack(built[0])))
    expected = {"multikey_1": 4, "multiquery": 4, "multivalue": 4}
    assert count == expected.get(task, 1) or task in ("multikey_2", "multikey_3")
    assert len(built[0]["answers"]) == (4 if task in ("multivalue", "multiquery") else 1)
    keys, values = zip(*NEEDLE.findall(haystack(built[0])), strict=True)
    assert len({*values}) == len(values)
    assert len({*keys}) == (1 if task == "multivalue" else len(keys))


def test_keys_are_an_adjective_and_a_noun_or_version_4_uuids():
    from wonderwords import RandomWord

    words = RandomWord()._categories
    (row,) = rows("multikey_2", 4096, samples=1)
    for key, value in NEEDLE.findall(haystack(row)):
        cuts = [(key[:i], key[i + 1 :]) for i, letter in enumerate(key) if letter == "-"]
        assert any(a in words["adjectives"] and b in words["nouns"] for a, b in cuts), key
        assert re.fullmatch(r"[1-9]\d{6}", value)
    (row,) = rows("multikey_3", 4096, samples=1)
    for uuid in itertools.chain(*NEEDLE.findall(haystack(row))):
        assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-\w{12}", uuid)


@pytest.mark.parametrize("per_text", [1, 3])
@pytest.mark.parametrize("task", ALL)
def test_the_control_has_no_needle_but_those_that_no_question_is_about(task, per_text):
    for row in rows(task, 2048, per_text=per_text, planted=False):
        count = len(NEEDLE.findall(row["input"]))
        if task in ("multikey_2", "multikey_3"):
            assert count > 10
        else:
            assert count == (4 - per_text if task == "multikey_1" else 0)


def test_needles_do_not_follow_titles(tmp_path):
    file = tmp_path / "titles.txt"
    file.write_text("Mr. Hurst met Mrs. Long and Dr. Grant of St. Mary there!")
    for row in rows("single_2", depths=tuple(range(5, 96, 10)), text=str(file)):
        assert NEEDLE.split(haystack(row))[0].endswith("there! ")


def test_few_tokenisations_find_the_length():
    """Tokenisation takes most of the building time; a long sample needs about six."""
    tokenizer, calls = load("tiny"), []

    def counting_tokenizer(text, **kwargs):
        calls.append(text)
        return tokenizer(text, **kwargs)

    for task, (per_text, most) in itertools.product(
        ("single_2", "multikey_2", "multivalue"), ((1, 12), (3, 8))
    ):
        calls.clear()
        build = tasks.config(f"rp_niah_{task}")["custom_dataset"]
        build(tokenizer=counting_tokenizer, length=9999, samples=3, per_text=per_text)
        assert len(calls) < most * 3, (task, per_text)
