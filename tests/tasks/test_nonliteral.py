"""Test needles that share no word with their question, and what all tasks of rp_hard share."""

import random
import re
from itertools import takewhile
from pathlib import Path

import pytest

from rope_patch import tasks
from rope_patch.tasks import nonliteral, texts

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
HARD = ["rp_nonliteral", "rp_count", "rp_json_kv", "rp_copy"]
# Words without content.
STOP_WORDS = {
    *("a", "an", "the", "of", "in", "at", "on", "to", "for", "from", "with", "by", "as", "and"),
    *("is", "was", "are", "be", "been", "has", "had", "have", "or", "not", "one"),
    *("must", "should", "would", "can", "cannot"),
}


def rows(tokenizer, task="rp_nonliteral", length=1024, **kwargs):
    build = tasks.config(task)["custom_dataset"]
    return build(tokenizer=tokenizer, length=length, **kwargs)["test"].to_list()


def common_prefix_length(prompts):
    """Return the number of characters in the common prefix of some prompts."""
    same = (len(set(column)) == 1 for column in zip(*prompts, strict=False))
    return sum(takewhile(bool, same))


def stems(sentence):
    return {word[:5] for word in re.findall(r"\w+", sentence.lower())} - STOP_WORDS


# --- Needles and questions ------------------------------------------------------------------------


def test_questions_share_no_content_word_with_any_needle():
    pairs = nonliteral.facts()["facts"]
    assert len(pairs) >= 40
    assert (
        len({fact for fact, _ in pairs}) == len({question for _, question in pairs}) == len(pairs)
    )
    prompt_stems = stems(nonliteral.PROMPT.partition("{story}")[2] + nonliteral.PREFIX)
    needles = set().union(*(stems(fact) for fact, _ in pairs))
    for _, question in pairs:
        assert stems(question), question
        assert not (stems(question) | prompt_stems) & needles, question


def test_no_name_is_in_a_novel_a_fact_or_another_name():
    data = nonliteral.facts()
    names = [name.lower() for name in data["names"]]
    novels_and_facts = [texts.read_text(novel) for novel in texts.names()] + [str(data["facts"])]
    assert len(names) >= 100
    for name in names:
        assert not any(name in text.lower() for text in novels_and_facts), name
        assert [other for other in names if name in other] == [name]


@pytest.mark.parametrize("per_text", [1, 4])
def test_the_answer_is_the_only_name_with_the_fact_in_question(tokenizer, per_text):
    fact_of_question = {question: fact for fact, question in nonliteral.facts()["facts"]}
    for row in rows(tokenizer, samples=8, per_text=per_text):
        (name,) = row["answers"]
        question = re.search(r"Which of the strangers (.*)\? Answer", row["input"]).group(1)
        assert f"{name} {fact_of_question[question]}." in row["input"]
        assert row["input"].lower().count(name.lower()) == 1
        assert row["target"] == name


@pytest.mark.parametrize("depth", [0, 30, 60, 100])
def test_the_needle_is_at_its_depth_between_two_sentences(tokenizer, depth):
    (row,) = rows(tokenizer, length=8192, depths=(depth,), distractors=0)
    head, tail = nonliteral.PROMPT.split("{story}")
    story = row["input"].removeprefix(head).split(tail.partition("{")[0])[0]
    before, name, after = story.partition(row["target"])
    assert name
    after = after.partition(".")[2]
    assert 100 * len(before) / len(before + after) == pytest.approx(depth, abs=3)
    assert before == "" or before.rstrip().endswith((".", "!", "?", '"'))
    assert not before.endswith(("Mr. ", "Mrs. "))


def test_the_control_has_the_distractors_and_not_the_answer(tokenizer):
    planted = rows(tokenizer, samples=6, distractors=3)
    control = rows(tokenizer, samples=6, distractors=3, planted=False)
    names = nonliteral.facts()["names"]
    for with_it, without in zip(planted, control, strict=True):
        text_names = {name for name in names if name in with_it["input"]}
        assert len(text_names) == 4
        assert {name for name in names if name in without["input"]} == text_names - {
            with_it["target"]
        }
        assert (without["target"], without["gen_prefix"]) == (
            with_it["target"],
            with_it["gen_prefix"],
        )
        assert without["input"].splitlines()[-1] == with_it["input"].splitlines()[-1]


def test_names_in_the_users_text_are_not_used(tokenizer, tmp_path):
    names = nonliteral.facts()["names"]
    story = tmp_path / "story.txt"
    story.write_text("They met. " + " ".join(f"{name} came." for name in names[5:]))
    built = rows(tokenizer, samples=9, text=str(story), distractors=0)
    assert {row["target"] for row in built} <= set(names[:5])


def test_sentences_are_inserted_at_the_nearest_sentence_end():
    words = ["Mr.", "A", "went.", "Then", "he", "ate.", "It", "rained", "all", "day", "long."]
    insertions = [(40, "X."), (50, "Y."), (0, "Z."), (100, "W.")]
    assert nonliteral.between_sentences(words, insertions) == (
        "Z. Mr. A went. X. Then he ate. Y. It rained all day long. W."
    )
    assert nonliteral.between_sentences([], insertions[:2]) == "X. Y."


@pytest.mark.parametrize("options", [{"distractors": -1}, {"distractors": 64}, {"per_text": 63}])
def test_more_strangers_than_facts_are_refused(tokenizer, options):
    with pytest.raises(ValueError, match="64 strangers a text"):
        rows(tokenizer, **options)


# --- All of rp_hard -------------------------------------------------------------------------------


def test_the_groups_have_the_four_tasks():
    assert tasks.groups()["rp_hard"] == HARD
    assert tasks.groups()["rp_hard_ll"] == [f"{task}_ll" for task in HARD]


@pytest.mark.parametrize("task", HARD)
@pytest.mark.parametrize("planted", [True, False])
@pytest.mark.parametrize("length", [777, 4096])
def test_prompt_prefix_and_room_fill_the_length(tokenizer, task, planted, length):
    room = tasks.config(task)["generation_kwargs"]["max_gen_toks"]
    # The most tokens of a unit: a word, or a pair of two UUIDs.
    unit = 90 if task == "rp_json_kv" else 12
    for row in rows(tokenizer, task, length, depths=(0, 50, 100), planted=planted):
        used = len(tokenizer(f"{row['input']} {row['gen_prefix']}").input_ids) + room
        assert length - unit <= used <= length
        assert row["tokens"] == used
        assert row["target_tokens"] <= room


@pytest.mark.parametrize("task", HARD)
def test_samples_depend_neither_on_their_number_nor_on_global_random_state(tokenizer, task):
    random.seed(7)
    some = rows(tokenizer, task, samples=2, per_text=2)
    random.seed(8)
    state = random.getstate()
    assert rows(tokenizer, task, samples=5, per_text=2)[:2] == some
    assert random.getstate() == state
    assert rows(tokenizer, task, samples=2, per_text=2, seed=1) != some


@pytest.mark.parametrize("task", HARD)
@pytest.mark.parametrize("planted", [True, False])
def test_samples_of_one_text_differ_only_in_the_question(tokenizer, task, planted):
    built = rows(tokenizer, task, 2048, samples=6, per_text=3, planted=planted)
    assert [row["text"] for row in built] == [0, 0, 0, 1, 1, 1]
    prompts = [f"{row['input']} {row['gen_prefix']}" for row in built]
    assert common_prefix_length(prompts[:3]) > 0.9 * len(prompts[0])
    assert len(set(prompts)) == 6
    assert common_prefix_length(prompts) < 300  # the second text differs


@pytest.mark.parametrize("task", HARD)
def test_plain_lm_eval_loads_both_yamls_and_builds_the_same_samples(tokenizer, task):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(
        include_path=tasks.FOLDER,
        include_defaults=False,
        metadata={"pretrained": str(TINY), "length": 800, "samples": 2},
    )
    expected = rows(tokenizer, task, 800, samples=2)
    for name in (task, f"{task}_ll"):
        assert list(manager.load([name])["tasks"][name].test_docs()) == expected
