"""Test the short tasks: right and wrong choices by independent rules, chance and prompts."""

import csv
import random
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import make_model
from helpers.tokenizers import load
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from rope_patch import tasks
from rope_patch.tasks import short

NAMES = short.names()


@cache
def rows(name, **metadata):
    config = short.config(f"rp_short_{name}")
    return config["custom_dataset"](**config["metadata"] | metadata)["test"].to_list()


def right_choice(row):
    return row["choices"][row["gold"]]


def wrong_choices(row):
    return [choice for i, choice in enumerate(row["choices"]) if i != row["gold"]]


def test_the_group_has_every_task_file():
    assert sorted({f.stem for f in short.FOLDER.glob("*.yaml")} - {short.GROUP}) == NAMES


def test_an_unknown_task_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no short task 'rp_short_poems': expected .*cloze"):
        short.config("rp_short_poems")


@pytest.mark.parametrize("name", NAMES)
def test_choices_are_distinct_and_chance_is_what_the_metadata_says(name):
    built = rows(name.removeprefix("rp_short_"))
    assert len(built) == 100
    chance = short.config(name)["metadata"]["chance"]
    for row in built:
        assert len(set(row["choices"])) == len(row["choices"]) == 1 / chance
    places = [row["gold"] for row in built]
    assert {places.count(place) for place in range(round(1 / chance))} == {100 * chance}


@pytest.mark.parametrize("name", NAMES)
def test_questions_are_unique_and_no_choice_is_a_prefix_of_another(name):
    built = rows(name.removeprefix("rp_short_"))
    assert len({(row["input"], right_choice(row)) for row in built}) == len(built)
    if name != "rp_short_arithmetic":  # 5 is a prefix of 52
        for row in built:
            for choice in row["choices"]:
                assert not any(c != choice and c.startswith(choice) for c in row["choices"])


@pytest.mark.parametrize("name", NAMES)
def test_questions_depend_neither_on_their_number_nor_on_global_random_state(name):
    task = name.removeprefix("rp_short_")
    random.seed(7)
    some = rows(task, samples=9)
    random.seed(8)
    state = random.getstate()
    assert rows(task, samples=20)[:9] == some
    assert random.getstate() == state
    assert rows(task, samples=9, seed=1) != some


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_short(name):
    """The tiny tokenizer splits words into many more tokens than a real one."""
    for row in rows(name.removeprefix("rp_short_")):
        words = len(row["input"].split())
        assert 10 <= words <= 200
        assert 30 <= len(load("tiny")(row["input"]).input_ids) <= 512


def test_sums_are_right_and_wrong_choices_are_near():
    for row in rows("arithmetic"):
        *solved, question = row["input"].splitlines()
        for line in solved:
            problem, result = line.split(" = ")
            assert eval(problem) == int(result)
        problem = question.removesuffix(" =")
        assert problem not in "\n".join(solved)
        assert eval(problem) == int(right_choice(row))
        assert all(0 < abs(int(miss) - int(right_choice(row))) <= 10 for miss in wrong_choices(row))


def test_cloze_choices_are_words_of_a_passage_from_a_novel():
    novels = [path.name.split(".")[0] for path in tasks.FOLDER.parent.glob("data/*.txt.xz")]
    novels = [" ".join(tasks.read_text(name).split()) for name in novels]
    for row in rows("cloze", samples=40):
        passage, answer = row["input"], right_choice(row)
        assert any(f"{passage} {answer} " in novel for novel in novels)
        for choice in row["choices"]:
            assert re.search(rf"(?<!\w){choice[:-1]}(?!\w)", passage)
            assert choice[-1] == answer[-1]


WOMEN = {"Mary", "Susan", "Julia", "Helen", "Laura", "Emma", "Alice", "Martha"}


def is_many(noun):
    return noun.endswith("s")


# A pattern for each kind of sentence, and the condition on its words that makes it grammatical.
GRAMMAR = {
    r"The (\w+) that belonged .* (was|were) very": lambda n, v: is_many(n) == (v == "were"),
    r"The (\w+) that the .* (is|are) always": lambda n, v: is_many(n) == (v == "are"),
    r".* said that (\w+) had .*(him|her)self": lambda n, s: (n in WOMEN) == (s == "her"),
    r"The (\w+), who .* (\w+)\.$": lambda n, s: is_many(n) and s == "themselves",
    r"(\w+), who .* (\w+)\.$": lambda n, s: s == ("herself" if n in WOMEN else "himself"),
    r".* sold (\w+) \w+ \w+ (\w+)": lambda d, n: is_many(n) == (d in ("these", "those")),
    r"(\w+) in .* has (ever) ": lambda n, _: n == "Nobody",
    r".* did not see (\w+) (\w+)": lambda q, n: is_many(n) == (q == "many"),
    r"The \w+( had)?, like .*, (\w+) the": lambda h, v: bool(h) == v.endswith("n"),
}


def sentence_pattern(sentence):
    return next(pattern for pattern in GRAMMAR if re.match(pattern, sentence))


def is_grammatical(sentence):
    return GRAMMAR[sentence_pattern(sentence)](
        *re.match(sentence_pattern(sentence), sentence).groups()
    )


def test_the_right_sentence_is_grammatical_and_the_other_is_not():
    built = rows("grammar")
    assert {sentence_pattern(right_choice(row)) for row in built} == set(GRAMMAR)
    for row in built:
        (error,) = wrong_choices(row)
        assert is_grammatical(right_choice(row))
        assert not is_grammatical(error)
        assert (
            sum(a != b for a, b in zip(right_choice(row).split(), error.split(), strict=True)) == 1
        )
        assert all(map(is_grammatical, re.findall(r"[A-Z].*?\.", row["input"])))


def test_an_attractor_has_the_other_number_than_the_subject():
    for row in rows("grammar"):
        if match := re.match(r"The (\w+) that .*?the (\w+)", right_choice(row)):
            assert is_many(match[1]) != is_many(match[2])


@cache
def read_table(name):
    """Return the relations of a table, each a dict of first to second words."""
    path = Path(short.__file__).with_name(f"{name}.csv")
    _, *lines = csv.reader(path.read_text(encoding="utf-8").splitlines())
    assert all(value == value.strip() and value for line in lines for value in line)
    assert len({tuple(line[:2]) for line in lines}) == len(lines)  # no duplicates
    assert len(lines) >= {"facts": 150, "induction": 100}[name]
    relations = defaultdict(dict)
    for relation, first, second in lines:
        relations[relation][first] = second
    return relations


def test_every_fact_is_asked_once_before_any_repeats_and_has_one_answer():
    table = read_table("facts")
    count = sum(map(len, table.values()))
    questions = set()
    for row in rows("facts", samples=count):
        *examples, question = row["input"].splitlines()
        answers = {choice.removesuffix(".") for choice in row["choices"]}
        (relation,) = [pairs for pairs in table.values() if answers <= set(pairs.values())]
        (subject,) = [s for s in relation if f" {s} " in f" {question} "]
        assert (
            right_choice(row) == f"{relation[subject]}."
        )  # one answer a subject: no other is right
        assert not any(line.startswith(question) for line in examples)
        questions.add(question)
    assert len(questions) == count


def test_wrong_inductions_are_the_word_a_shown_answer_and_an_unseen_one():
    for row in rows("induction", samples=161):
        *examples, question = [line.split(" ->") for line in row["input"].splitlines()]
        examples = {cue: answer.strip(" .") for cue, answer in examples}
        cue = question[0]
        (pairs,) = [p for p in read_table("induction").values() if examples.items() <= p.items()]
        assert right_choice(row) == f"{pairs[cue]}."
        copied, repeated, unseen = (choice.removesuffix(".") for choice in wrong_choices(row))
        assert copied == cue
        assert repeated in examples.values()
        assert unseen in set(pairs.values()) - set(examples.values()) - {pairs[cue]}
    for pairs in read_table("induction").values():
        assert len({*pairs, *pairs.values()}) == 2 * len(pairs)


def manager(**metadata):
    return TaskManager(include_path=short.FOLDER, include_defaults=False, metadata=metadata)


def test_plain_lm_eval_loads_the_group_and_builds_the_same_questions():
    loaded = manager(samples=5).load([short.GROUP])["tasks"]
    assert sorted(loaded) == NAMES
    for name, task in loaded.items():
        assert list(task.test_docs()) == rows(name.removeprefix("rp_short_"), samples=5)


def test_lm_eval_scores_the_likeliest_choice():
    """The reference is log-likelihoods computed here, one choice at a time."""
    model, tokenizer = make_model("llama", vocab_size=512), load("tiny")
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=1024)
    configs = [short.config(name) for name in NAMES]
    for config in configs:
        config["metadata"]["samples"] = 4
    results = simple_evaluate(
        lm, tasks=configs, task_manager=manager(), bootstrap_iters=0, verbosity="ERROR"
    )
    for name in NAMES:
        assert len(results["samples"][name]) == 4
        for sample in results["samples"][name]:
            row = sample["doc"]
            scores = [likelihood(model, tokenizer, row["input"], c) for c in row["choices"]]
            assert sample["acc"] == float(scores.index(max(scores)) == row["gold"])


def likelihood(model, tokenizer, context, choice):
    start = len(tokenizer(context).input_ids)
    ids = tokenizer(f"{context} {choice}", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].log_softmax(-1)
    return logits.gather(-1, ids[0, 1:, None])[start - 1 :].sum().item()
