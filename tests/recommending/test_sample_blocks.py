"""Test the samples of a recommendation: disjoint blocks, and the user's samples by length."""

import pytest
from helpers.search_fixtures import ASSETS, TRAINED, questions
from transformers import AutoTokenizer

from rope_patch.recommending import from_user_samples, needle_blocks

LENGTH = 1024


@pytest.mark.slow
def test_sample_blocks_share_nothing():
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny-llama")
    by_kind = needle_blocks(tokenizer, 1600, 1500, 12, 42, ["persuasion"]).by_kind
    blocks = [by_kind[kind][0](n) for kind in ("long", "search") for n in (0, 1)]
    assert [len(block) for block in blocks] == [6] * 4
    assert len({sample.ids for block in blocks for sample in block}) == 24
    assert len({sample.group for block in blocks for sample in block}) == 24
    control = by_kind["long, control"][0](1)
    assert {s.group for s in control} == {s.group for s in blocks[1]}
    assert not {s.ids for s in control} & {s.ids for s in blocks[1]}
    prose, count = by_kind["prose"]
    assert count == 2
    assert len({sample.ids for n in (0, 1) for sample in prose(n)}) == 12
    assert {len(sample.ids) for sample in prose(0)} == {1500}


def test_user_samples_are_split_by_length_and_between_search_and_comparison():
    long, short = questions(LENGTH, 36, seed=1), questions(TRAINED, 13, seed=2)
    mixed = [sample for pair in zip(long, short, strict=False) for sample in pair] + long[13:]
    user_samples = from_user_samples(mixed, TRAINED, None, 128, 96, 42, None)
    sets = user_samples.by_kind
    assert {kind: sets[kind][1] for kind in ("long", "search", "short")} == {
        "long": 4,
        "search": 2,
        "short": 2,
    }
    compared = {s.ids for n in range(4) for s in sets["long"][0](n)}
    searched = {s.ids for n in range(2) for s in sets["search"][0](n)}
    assert compared | searched == {sample.ids for sample in long}
    assert not compared & searched
    assert "perplexity" in user_samples.not_measured[0]
