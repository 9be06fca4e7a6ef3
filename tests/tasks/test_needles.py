"""Test the needle tasks: prompts equal to RULER's, lengths, depths, controls and scores."""

import importlib
import importlib.util
import itertools
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from rope_patch import tasks
from rope_patch.tasks import needles, scoring

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
PROSE = ("single_2", "single_3", "multikey_1", "multivalue", "multiquery")
LINES = ("single_1", "multikey_2", "multikey_3")
ALL = (*PROSE, *LINES)
SAME_TEXT = ("multikey_1", "multikey_2", "multikey_3", "multiquery")  # only the question differs
NEEDLE = re.compile(r"One of the special magic (?:number|uuid)s for (.+?) is: ([\w-]+)\.")


@pytest.fixture(scope="module")
def ruler():
    """Return lm-eval's RULER modules, imported without downloads and without six million keys."""
    words = SimpleNamespace(_categories={"nouns": ["dog"], "adjectives": ["big"], "verbs": []})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytest.importorskip("nltk"), "download", lambda *_, **__: True)
        patch.setattr(pytest.importorskip("wonderwords"), "RandomWord", lambda: words)
        names = ("common_utils", "prepare_niah", "niah_utils")
        try:
            modules = [importlib.import_module(f"lm_eval.tasks.ruler.{name}") for name in names]
        except ImportError as error:
            pytest.skip(f"lm-eval's RULER does not import: {error}")
    for name in names:  # later imports get all keys
        sys.modules.pop(f"lm_eval.tasks.ruler.{name}", None)
    return SimpleNamespace(**dict(zip(names, modules, strict=True)))


def rows(tokenizer, task, length=1024, **kwargs):
    build = getattr(needles, task)
    return build(tokenizer=tokenizer, length=length, **kwargs)["test"].to_list()


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
def test_samples_equal_those_that_ruler_builds_from_the_same_parts(
    tokenizer, ruler, monkeypatch, task
):
    (row,) = rows(tokenizer, task, 2048, depths=(40,), seed=3)
    around, _ = pieces(row)
    assert all(around)  # no two needles in one place, where RULER would write two spaces
    theirs = build_by_ruler(ruler, monkeypatch, row)
    assert {key: row[key] for key in theirs} == theirs


@pytest.mark.parametrize("length", [512, 1024, 4096])
@pytest.mark.parametrize("task", ALL)
def test_a_sample_fills_its_length_to_a_unit(tokenizer, task, length):
    if (task, length) == ("multiquery", 512):
        with pytest.raises(ValueError, match="too short for rp_niah_multiquery"):
            rows(tokenizer, task, length)
        return
    for row in rows(tokenizer, task, length, depths=(0, 50, 100)):
        used = len(tokenizer(f"{row['input']} {row['gen_prefix']}").input_ids) + 128
        words = haystack(row).split("\n") if task in LINES else ["a word of so many letters"]
        unit = max(len(tokenizer(f"\n{word}").input_ids) for word in words)
        assert length - unit < used <= length
        assert row["tokens"] == used
        assert row["length"] == length
        assert row["target_tokens"] == len(tokenizer(f" {row['target']}").input_ids) <= 128


@pytest.mark.parametrize("task", ALL)
def test_samples_depend_neither_on_their_number_nor_on_global_random_state(tokenizer, task):
    random.seed(7)
    some = rows(tokenizer, task, samples=2, per_text=2)
    random.seed(8)
    state = random.getstate()
    assert rows(tokenizer, task, samples=5, per_text=2)[:2] == some
    assert random.getstate() == state
    other = rows(tokenizer, task, samples=2, per_text=2, seed=1)
    assert {row["target"] for row in other}.isdisjoint(row["target"] for row in some)


@pytest.mark.parametrize("per_text", [1, 3])
@pytest.mark.parametrize("task", ALL)
def test_the_needle_is_at_its_depth_after_a_sentence(tokenizer, task, per_text):
    depths = (0, 35, 100)
    built = rows(tokenizer, task, 8192, depths=depths, per_text=per_text)
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


@pytest.mark.parametrize("task", SAME_TEXT)
def test_samples_of_one_text_differ_only_in_the_question(tokenizer, task):
    built = rows(tokenizer, task, 2048, per_text=3)
    assert {row["text"] for row in built} == {0}
    assert len({haystack(row) for row in built}) == 1
    assert len({row["target"] for row in built}) == 3
    shared = tokenizer(built[0]["input"].rpartition("\n")[0] + "\nWhat").input_ids
    for row in built:
        assert tokenizer(row["input"]).input_ids[: len(shared)] == shared


@pytest.mark.parametrize("task", sorted({*ALL} - {*SAME_TEXT}))
def test_samples_of_one_text_are_the_same_up_to_the_shallower_needle(tokenizer, task):
    built = rows(tokenizer, task, 2048, per_text=3, seed=5)
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
@pytest.mark.parametrize("per_text", [1, 3, 4, 5, 12])
def test_a_text_has_four_needles_however_many_samples_share_it(tokenizer, task, per_text):
    built = rows(tokenizer, task, 2048, per_text=per_text, samples=6)
    assert {len(NEEDLE.findall(haystack(row))) for row in built} == {4}
    assert max(Counter(row["text"] for row in built).values()) == min(per_text, 4)


@pytest.mark.parametrize("task", ALL)
def test_samples_of_a_text_ask_different_questions_even_at_equal_depths(tokenizer, task):
    built = rows(tokenizer, task, 4096, per_text=6, samples=6)
    assert len({row["target"] for row in built}) == 6
    count = len(NEEDLE.findall(haystack(built[0])))
    expected = {"multikey_1": 4, "multiquery": 4, "multivalue": 4}
    assert count == expected.get(task, 1) or task in ("multikey_2", "multikey_3")
    assert len(built[0]["answers"]) == (4 if task in ("multivalue", "multiquery") else 1)


@pytest.mark.parametrize("task", ALL)
def test_keys_and_values_of_a_text_are_unique(tokenizer, task):
    (row,) = rows(tokenizer, task, 8192, samples=1)
    keys, values = zip(*NEEDLE.findall(haystack(row)), strict=True)
    assert len({*values}) == len(values)
    assert len({*keys}) == (1 if task == "multivalue" else len(keys))


def test_keys_are_an_adjective_and_a_noun_or_version_4_uuids(tokenizer):
    from wonderwords import RandomWord

    random_word = RandomWord()
    pairs = {
        "adjectives": random_word._categories["adjectives"],
        "nouns": random_word._categories["nouns"],
    }
    (row,) = rows(tokenizer, "multikey_2", 4096, samples=1)
    for key, value in NEEDLE.findall(haystack(row)):
        cuts = [(key[:i], key[i + 1 :]) for i, letter in enumerate(key) if letter == "-"]
        assert any(a in pairs["adjectives"] and b in pairs["nouns"] for a, b in cuts), key
        assert re.fullmatch(r"[1-9]\d{6}", value)
    (row,) = rows(tokenizer, "multikey_3", 4096, samples=1)
    for uuid in itertools.chain(*NEEDLE.findall(haystack(row))):
        assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-\w{12}", uuid)


@pytest.mark.parametrize("per_text", [1, 3])
@pytest.mark.parametrize("task", ALL)
def test_the_control_asks_the_same_question_about_a_text_without_the_answers(
    tokenizer, task, per_text
):
    planted = rows(tokenizer, task, 2048, per_text=per_text)
    control = rows(tokenizer, task, 2048, per_text=per_text, planted=False)
    for row, without in zip(planted, control, strict=True):
        for same in ("id", "depth", "gen_prefix", "answers", "target", "text"):
            assert without[same] == row[same]
        assert without["input"].rpartition("\n")[2] == row["input"].rpartition("\n")[2]
        assert not any(answer in without["input"] for answer in row["answers"])
        needle_count = len(NEEDLE.findall(without["input"]))
        if task == "multikey_1":
            assert needle_count == 4 - per_text  # the further needles stay
        else:
            assert (
                (needle_count > 10) if task in ("multikey_2", "multikey_3") else (needle_count == 0)
            )


def test_needles_do_not_follow_titles(tokenizer, tmp_path):
    file = tmp_path / "titles.txt"
    file.write_text("Mr. Hurst met Mrs. Long and Dr. Grant of St. Mary there!")
    for row in rows(tokenizer, "single_2", depths=range(5, 96, 10), text=str(file)):
        assert NEEDLE.split(haystack(row))[0].endswith("there! ")


def test_a_short_text_is_repeated(tokenizer, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("A few words only. They are soon over.")
    (row,) = rows(tokenizer, "single_2", 1024, samples=1, text=str(short))
    assert 1024 - 12 < row["tokens"] <= 1024
    assert row["input"].count("soon over") > 10


def test_few_tokenisations_find_the_length(tokenizer):
    """Tokenisation takes most of the building time; a long sample needs about six."""
    calls = []

    def counting_tokenizer(text, **kwargs):
        calls.append(text)
        return tokenizer(text, **kwargs)

    for task, length in itertools.product(("single_2", "multikey_2", "multivalue"), (4096, 9999)):
        for per_text, most in ((1, 12), (3, 8)):
            calls.clear()
            rows(counting_tokenizer, task, length, samples=3, per_text=per_text)
            assert len(calls) < most * 3, (task, length, per_text)


GENERATIONS = [
    " 1234567, and 7654321.",
    "It is 7654321",
    "\n123456 7",
    "1234567" * 3 + "\n\t7654321",
    "",
    "ABCDEF01-aa",
]


@pytest.mark.parametrize("answers", [["1234567"], ["1234567", "7654321"], ["abcdef01-AA", "0"]])
@pytest.mark.parametrize("generated", GENERATIONS)
def test_scores_equal_those_of_ruler(ruler, generated, answers):
    theirs = ruler.common_utils.process_results(
        {"max_length": 4096, "outputs": answers}, [generated]
    )
    assert scoring.all_answers({"answers": answers}, [generated]) == {"score": theirs["4096"]}


@pytest.mark.parametrize("ending", ["", "_ll"])
@pytest.mark.parametrize("task", ALL)
def test_lm_eval_requests_the_built_samples(tokenizer, task, ending):
    from lm_eval.tasks import TaskManager

    name = f"rp_niah_{task}{ending}"
    manager = TaskManager(
        include_path=str(tasks_folder()),
        include_defaults=False,
        metadata={"pretrained": str(TINY), "length": 1024, "samples": 2},
    )
    loaded = manager.load([name])["tasks"][name]
    expected = rows(tokenizer, task, 1024, samples=2)
    assert list(loaded.test_docs()) == expected
    loaded.build_all_requests(rank=0, world_size=1)
    assert len(loaded.instances) == 2
    for instance, row in zip(loaded.instances, expected, strict=True):
        prompt = f"{row['input']} {row['gen_prefix']}"
        assert instance.args[0] == prompt
        if ending:
            assert instance.args[1] == f" {row['target']}"
        else:
            assert instance.args[1]["max_gen_toks"] == 128
            assert instance.args[1]["until"] == []


def tasks_folder():
    return tasks.FOLDER


def test_plain_lm_eval_runs_a_task_from_the_folder(tmp_path):
    metadata = json.dumps({"length": 512, "samples": 1})
    command = [sys.executable, "-m", "lm_eval", "--include_path", str(tasks_folder())]
    command += ["--tasks", "rp_niah_single_2", "--metadata", metadata, "--model", "hf"]
    command += ["--model_args", f"pretrained={TINY},max_length=512", "--device", "cpu"]
    command += ["--output_path", str(tmp_path), "--log_samples"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    (results,) = tmp_path.rglob("results_*.json")
    # The tiny model knows no English, and lm-eval's own model reports no likelihood.
    assert json.loads(results.read_text())["results"]["rp_niah_single_2"]["score,none"] == 0
    (log,) = tmp_path.rglob("samples_*.jsonl")
    (sample,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert 512 - 12 < sample["doc"]["tokens"] <= 512


@pytest.mark.parametrize("group", ["rp_ruler", "rp_ruler_ll"])
def test_the_group_has_the_13_tasks_of_ruler(group):
    """The reference is lm-eval's group, in which two tasks have other names."""
    import yaml

    (folder,) = importlib.util.find_spec("lm_eval.tasks.ruler").submodule_search_locations
    theirs = yaml.safe_load((Path(folder) / "ruler.yaml").read_text())["task"]
    renamed = {"ruler_qa_squad": "qa_1", "ruler_qa_hotpot": "qa_2"}
    ours = [f"rp_{renamed.get(name, name.removeprefix('ruler_'))}" for name in theirs]
    ending = group.removeprefix("rp_ruler")
    assert sorted(tasks.groups()[group]) == sorted(f"{name}{ending}" for name in ours)
