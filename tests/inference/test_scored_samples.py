"""Test samples: which tokens are scored, controls, and malformed sample files."""

import json
from dataclasses import replace

import pytest
import torch
from helpers.search_fixtures import questions
from helpers.tokenizers import load
from train_tiny import recall_batch

from rope_patch.inference import (
    Sample,
    document_samples,
    from_labelled_tensors,
    needle_samples,
    permuted_answers,
    read_samples,
    samples_digest,
)
from rope_patch.tasks import read_text

LENGTH = 1400  # the tiny vocabulary takes many tokens for the questions' own words


@pytest.fixture(scope="module")
def tokenizer():
    return load("tiny")


@pytest.fixture(scope="module")
def needles(tokenizer):
    return needle_samples(tokenizer, LENGTH, 5, seed=1, texts=["persuasion"])


def test_needle_answers_are_values_of_the_text(tokenizer, needles):
    for sample in needles:
        assert LENGTH - 250 < len(sample.ids) <= LENGTH
        text = tokenizer.decode(sample.ids)
        values = [tokenizer.decode(sample.ids[a:b]).strip() for a, b in sample.answers]
        assert len({*values}) == 4
        for value in values:
            assert value.isdigit()
            assert len(value) == 7
            assert text.count(f"is: {value}.") == 1  # in the haystack
            assert text.count(value) == 2  # and in the answer
        assert text.endswith(f" {values[0]}, {values[1]}, {values[2]}, and {values[3]}")


def test_needles_lie_at_different_depths(tokenizer, needles):
    first = []
    for sample in needles:
        text = tokenizer.decode(sample.ids)
        value = tokenizer.decode(sample.ids[slice(*sample.answers[0])]).strip()
        first.append(text.index(value) / len(text))
    assert first[0] < 0.35
    assert first == sorted(first)
    assert first[-1] > 0.5


def test_controls_ask_the_same_questions_about_texts_without_the_answers(tokenizer, needles):
    controls = needle_samples(tokenizer, LENGTH, 5, seed=1, texts=["persuasion"], planted=False)
    for sample, control in zip(needles, controls, strict=True):
        answer_ids = [[s.ids[a:b] for a, b in s.answers] for s in (sample, control)]
        assert answer_ids[0] == answer_ids[1]
        text = tokenizer.decode(control.ids)
        for a, b in control.answers:
            assert text.count(tokenizer.decode(control.ids[a:b])) == 1


def test_seeds_and_texts_make_other_needles(tokenizer, needles):
    again = needle_samples(tokenizer, LENGTH, 5, seed=1, texts=["persuasion"])
    other = needle_samples(tokenizer, LENGTH, 5, seed=2, texts=["persuasion"])
    assert samples_digest(again) == samples_digest(needles) != samples_digest(other)
    assert len({sample.group for sample in [*needles, *other]}) == 10


def test_a_text_shorter_than_the_length_is_refused(tokenizer, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("Some words only. " * 20)
    for make in (needle_samples, document_samples):
        with pytest.raises(ValueError, match=r"short.txt' has \d+ tokens, 1,400 are needed"):
            make(tokenizer, LENGTH, 2, 1, [str(path)])


def test_the_last_eighth_of_a_document_is_scored(tokenizer, tmp_path):
    ids = {}
    for name in ("northanger_abbey", "persuasion"):
        (tmp_path / name).write_text(read_text(name)[:14_000])
        ids[str(tmp_path / name)] = tokenizer(read_text(name)[:14_000]).input_ids
    samples = document_samples(tokenizer, 800, 12, seed=1, texts=[*ids])
    assert all(len(s.ids) == 800 and s.answers == ((700, 800),) and s.prose for s in samples)
    assert len({s.group for s in samples}) == 12
    for sample in samples:
        name, _, number = sample.group.partition(" ")
        excerpt = int(number or 1) - 1
        assert list(sample.ids) == ids[name][800 * excerpt : 800 * (excerpt + 1)]


def test_recalled_values_are_single_tokens():
    ids, labels = recall_batch(torch.Generator().manual_seed(0), 3, 128, 4)
    for row, row_labels, sample in zip(
        ids, labels, from_labelled_tensors(ids, labels), strict=True
    ):
        assert sample.positions == (row_labels != -100).nonzero().flatten().tolist()
        assert list(sample.ids) == row.tolist()
        assert len(sample.answers) == 4


def test_training_data_is_read_as_samples(tmp_path):
    path = tmp_path / "samples.jsonl"
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, 8, -100], "group": "a"},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]},
    ]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    assert read_samples(path) == [
        Sample((5, 6, 7, 8, 9), ((2, 4),), "a"),
        Sample((5, 6, 7), ((1, 2),), "3"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no samples"),
        ("{", "line 1: .*JSON"),
        ('{"input_ids": [1, 2]}', "line 1: .*no 'labels'"),
        ('{"input_ids": [1, 2], "labels": [-100]}', "2 input_ids and 1 labels"),
        ('{"input_ids": [1, 2], "labels": [-100, 3]}', "position 1 is 3, its token 2"),
        ('{"input_ids": [1, 2], "labels": [1, -100]}', "first token"),
        ('{"input_ids": [1, 2], "labels": [-100, -100]}', "spans"),
        ('{"input_ids": [1, "a"], "labels": [-100, -100]}', "whole numbers"),
        ("[1]", "line 1"),
    ],
)
def test_malformed_sample_files_are_refused(tmp_path, content, message):
    path = tmp_path / "samples.jsonl"
    with pytest.raises(ValueError, match=r"cannot read .*samples\.jsonl"):
        read_samples(path)
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_samples(path)


def test_permuted_answers_replace_every_answer_and_nothing_else():
    samples = questions(count=4)
    for sample, control in zip(samples, permuted_answers(samples), strict=True):
        assert control.answers == sample.answers
        answer_tokens = {sample.ids[p] for p in sample.positions}
        assert not answer_tokens & {control.ids[p] for p in control.positions}
        other_positions = set(range(len(sample.ids))) - set(sample.positions)
        assert all(sample.ids[p] == control.ids[p] for p in other_positions)
    assert permuted_answers(samples[:1]) == []


def test_permuted_answers_are_not_those_of_the_same_text():
    """Three texts of one answer each; the second text has the third's answer by chance."""
    first = Sample(ids=(1, 2, 3, 11), answers=((3, 4),), group="a")
    second = replace(first, ids=(1, 13, 3, 12), group="b")
    third = replace(first, ids=(1, 2, 3, 13), group="c")
    for seed in range(8):
        for sample in permuted_answers([first, second, third], seed):
            assert sample.ids[3] not in sample.ids[:3]
    # Where all other answers stand in the text, as labels of examples do, one of them is taken.
    labels = [replace(first, ids=(11, 12, 3, answer)) for answer in (11, 12)]
    assert [sample.ids[3] for sample in permuted_answers(labels)] == [12, 11]
