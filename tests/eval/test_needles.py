"""The needle samples: exact lengths, the same every time, RULER's wording."""

import ast
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rope_patch.eval import tasks, texts
from rope_patch.eval.tasks import needles

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def rows(tokenizer, length=1024, **kwargs):
    return needles.build(tokenizer, length, **kwargs)["test"].to_list()


@pytest.mark.parametrize("length", [512, 777, 1024, 4096])
def test_prompt_prefix_and_answer_room_fill_the_length_and_never_exceed_it(tokenizer, length):
    for row in rows(tokenizer, length, depths=(0, 50, 100)):
        used = len(tokenizer(f"{row['input']} {row['gen_prefix']}").input_ids)
        assert length - 12 <= used + needles.ANSWER_ROOM <= length  # one more word did not fit


def test_samples_are_the_same_however_many_are_built_and_whatever_came_before(tokenizer):
    random.seed(7)
    some = rows(tokenizer, samples=2)
    random.seed(8)
    state = random.getstate()
    assert rows(tokenizer, samples=5)[:2] == some
    assert random.getstate() == state
    assert rows(tokenizer, samples=2, seed=1) != some


def test_the_first_samples_cover_every_depth(tokenizer):
    depths = (0, 25, 50, 75, 100)
    assert [row["depth"] for row in rows(tokenizer, depths=depths, samples=7)] == [*depths, 0, 25]


@pytest.mark.parametrize("depth", [0, 30, 60, 100])
def test_the_needle_stands_at_its_depth_once_after_a_sentence(tokenizer, depth):
    (row,) = rows(tokenizer, length=8192, depths=(depth,))
    needle = needles.NEEDLE.format(key=row["key"], answer=row["answer"])
    head, question = needles.PROMPT.format(haystack="|", key=row["key"]).split("|")
    haystack = row["input"].removeprefix(head).removesuffix(question)
    before, after = haystack.split(needle)
    assert row["input"].count(row["answer"]) == 1
    assert 100 * len(before) / len(before + after) == pytest.approx(depth, abs=3)
    assert before == "" or before.rstrip().endswith((".", "!", "?", '"'))


def test_a_haystack_longer_than_a_novel_is_filled_by_repeating_it(tokenizer, monkeypatch):
    monkeypatch.setattr(texts, "names", lambda: ["short"])
    monkeypatch.setattr(texts, "read", lambda name: "A few words only. They are soon over.")
    (row,) = rows(tokenizer, length=1024, samples=1)
    assert row["tokens"] > 1000
    assert row["input"].count("soon over") > 10


def test_the_wording_is_that_of_the_ruler_tasks_in_lm_eval():
    """Read from the source: importing it would download a tokenizer of sentences."""
    (folder,) = find_spec("lm_eval.tasks.ruler").submodule_search_locations
    template = _constant(Path(folder) / "niah_utils.py", "TEMPLATE")
    needle = _constant(Path(folder) / "prepare_niah.py", "NEEDLE")
    # As its builder changes it for one key with one value.
    single = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
    single = single.format(type_needle_v="number", context="{haystack}", query="{key}")
    assert single == needles.PROMPT
    assert needle.format(type_needle_v="numbers", key="{key}", value="{answer}") == needles.NEEDLE


def _constant(path, name):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} no longer has {name}")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"length": 64}, "too short for a needle"),
        ({"depths": (50, 101)}, "percentages from 0 to 100"),
    ],
)
def test_impossible_samples_are_refused(tokenizer, kwargs, message):
    with pytest.raises(ValueError, match=message):
        rows(tokenizer, **kwargs)


@pytest.mark.parametrize("name", tasks.names())
def test_plain_lm_eval_loads_the_yaml_and_builds_the_same_samples(tokenizer, name):
    from lm_eval.tasks import TaskManager

    folder = Path(next(iter(find_spec("rope_patch.eval.tasks").submodule_search_locations)))
    manager = TaskManager(
        include_path=str(folder),
        include_defaults=False,
        metadata={"pretrained": str(TINY), "length": 600, "samples": 2},
    )
    task = manager.load([name])["tasks"][name]
    assert list(task.test_docs()) == rows(tokenizer, 600, samples=2)


@pytest.mark.parametrize(
    ("answer", "hit"), [(" 1234567. Then", 1.0), ("The number is 1234567", 1.0), ("123456", 0.0)]
)
def test_a_generation_that_holds_the_answer_is_a_hit(answer, hit):
    assert needles.score_generation({"answer": "1234567"}, [answer])["hit"] == hit
