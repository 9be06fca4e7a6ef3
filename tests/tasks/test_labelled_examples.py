"""Labelled examples, read back from the prompt; a classifier of words learns from them."""

import random
import re
from collections import Counter, defaultdict

import pytest
from helpers.tokenizers import KINDS, check_length, check_lm_eval, load

from rope_patch import tasks
from rope_patch.tasks import labelled_examples, scoring


def rows(length=2000, tokenizer="tiny", name="rp_icl", **kwargs):
    build = tasks.config(name)["custom_dataset"]
    return build(tokenizer=load(tokenizer), length=length, **kwargs)["test"].to_list()


def examples(row):
    return re.findall(r"^Sentence: (.+) Label: (\d+)$", row["input"], re.M)


def asked(row):
    return row["input"].split("\nSentence: ")[-1]


def classify(row):
    """The label of the examples that share most content with the question, by naive Bayes."""
    counts, words_of = Counter(), defaultdict(Counter)
    for sentence, label in examples(row):
        counts[label] += 1
        words_of[label].update(set(re.findall(r"\w+", sentence.lower())))
    words = set(re.findall(r"\w+", asked(row).lower()))
    everywhere = Counter(word for found in words_of.values() for word in found)
    share = {
        label: sum(
            words_of[label][w] / counts[label] / everywhere[w] for w in words if everywhere[w]
        )
        for label in counts
    }
    return max(share, key=share.get)


def test_the_label_can_be_learned_from_the_examples_alone():
    built = rows(6000, "words", samples=32, per_text=16)
    right = [classify(row) == row["target"] for row in built]
    assert sum(right) >= 31
    control = rows(6000, "words", samples=32, per_text=16, planted=False)
    assert [asked(row) for row in control] == [asked(row) for row in built]
    assert [row["target"] for row in control] == [row["target"] for row in built]
    assert sum(classify(row) == row["target"] for row in control) < 10


@pytest.mark.parametrize("classes", [8, 11, 16])
def test_labels_are_arbitrary_and_each_class_has_as_many_examples(classes):
    seen = set()
    for row in rows(3000, samples=6, classes=classes):
        counts = Counter(label for _, label in examples(row))
        assert len(counts) == classes
        assert max(counts.values()) - min(counts.values()) <= 1
        assert row["target"] in counts
        assert row["answers"] == [row["target"]]
        assert row["depth"] is None
        assert asked(row) not in {sentence for sentence, _ in examples(row)}
        assert row["chance"] == row["target_chance"] == 1 / classes
        seen |= set(counts)
    assert len(seen) > 2 * classes  # other labels in every text


def test_sentences_of_a_class_share_their_topic_and_no_two_classes_a_predicate():
    data = labelled_examples._data()
    assert len(labelled_examples._topics()) == labelled_examples.CLASSES
    parts = [part for topic in labelled_examples._topics() for half in data[topic] for part in half]
    assert len(parts) == len(set(parts)) == 16 * 14
    texts = rows(3000, samples=3)
    for row in texts:
        by_label = defaultdict(set)
        for sentence, label in examples(row):
            (topic,) = (
                t
                for t in labelled_examples._topics()
                if any(sentence.startswith(f"{subject} ") for subject in data[t][0])
                and any(f" {predicate} " in sentence for predicate in data[t][1])
            )
            by_label[label].add(topic)
        assert all(len(topics) == 1 for topics in by_label.values())
        assert len({next(iter(topics)) for topics in by_label.values()}) == 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("planted", [True, False])
def test_prompts_fill_the_length_to_less_than_an_example(kind, planted):
    for length in (1024, 3000):
        built = rows(length, kind, samples=4, per_text=4, planted=planted)
        check_length(
            built, load(kind), labelled_examples.ROOM, length, 90 if kind == "tiny" else 50
        )


def test_samples_are_the_same_however_many_are_built_and_share_their_text():
    random.seed(8)
    state = random.getstate()
    built = rows(samples=5, per_text=3)
    assert random.getstate() == state
    assert rows(samples=3, per_text=3) == built[:3]
    assert rows(samples=3, per_text=3, seed=1) != built[:3]
    assert len({str(examples(row)) for row in built[:3]}) == 1
    assert len({row["target"] for row in built[:3]}) == 3


def test_the_choice_is_among_all_labels_of_the_text():
    built = rows(name="rp_icl_mc", samples=3, per_text=1, choices=True)
    for row, same in zip(built, rows(samples=3), strict=True):
        assert set(row["choices"]) == {label for _, label in examples(row)}
        assert row["choices"][row["gold"]] == row["target"] == same["target"]
        assert row["input"] == same["input"]


@pytest.mark.parametrize(
    ("written", "score"), [(" 37\nSentence:", 1), ("It is 37.", 1), ("73", 0), ("3", 0), ("", 0)]
)
def test_the_first_number_must_be_the_label(written, score):
    assert scoring.first_number({"answers": ["37"]}, [written])["score"] == score


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"classes": 7}, "classes must be 8 to 16, got 7"),
        ({"classes": 17}, "classes must be 8 to 16, got 17"),
        ({"classes": 8, "per_text": 9}, "each of 8 classes at most once, got per_text 9"),
    ],
)
def test_more_classes_or_questions_than_there_are_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        rows(**wrong)


def test_plain_lm_eval_builds_the_same_samples():
    check_lm_eval(["rp_icl", "rp_icl_ll"], rows(1500, samples=2), 1500, samples=2)
    chosen = rows(1500, samples=2, per_text=5, choices=True)
    check_lm_eval(["rp_icl_mc"], chosen, 1500, samples=2)
