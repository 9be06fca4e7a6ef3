"""Test what diagnose says of checkpoints that were trained under the YaRN of their config."""

import json

import pytest
import torch
from helpers.published_yarn import (
    ATTENTION,
    PUBLISHED,
    kind_of,
    make_config,
    make_model,
    multiplied,
    present_length,
)
from helpers.tiny_models import OLD_TRANSFORMERS

import rope_patch

pytestmark = pytest.mark.skipif(OLD_TRANSFORMERS, reason="needs nested YaRN and new model types")


@pytest.mark.parametrize("name", PUBLISHED)
def test_trained_yarn_is_healthy_and_long_enough(name):
    diagnosis = rope_patch.diagnose(make_config(name))
    assert diagnosis.healthy
    assert diagnosis.length == present_length(name)
    assert diagnosis.advice.summary == "no extension is needed"
    table = diagnosis.rotations[kind_of(name)]
    assert table.geometry.trained_length == present_length(name)
    original = PUBLISHED[name][2]["original_max_position_embeddings"]
    assert f"from {original:,} tokens, trained in" in table.own_yarn
    assert table.own_yarn in str(diagnosis)
    assert json.dumps(table.own_yarn) in json.dumps(diagnosis.to_dict())


@pytest.mark.parametrize("name", PUBLISHED)
def test_table_shows_the_frequencies_of_the_patch(name):
    """The truth is transformers with the config's factor multiplied."""
    table = rope_patch.diagnose(make_model(name), "yarn", factor=4).rotations[kind_of(name)]
    assert table.attention_factor == pytest.approx(ATTENTION[name], rel=1e-9)
    length = 4 * present_length(name)
    now = [2 * torch.pi * pair.turns_at_length / length for pair in table.pairs]
    assert now == pytest.approx(multiplied(name, 4)[0].inv_freq.tolist(), rel=1e-5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_shorter_request_is_refused_as_patch_refuses_it(name):
    present = present_length(name)
    with pytest.raises(ValueError, match=rf"{present:,}.*ends at {present // 2:,}.*unscaled"):
        rope_patch.diagnose(make_config(name), "yarn", length=present // 2)


@pytest.mark.parametrize("name", PUBLISHED)
def test_advice_for_a_longer_text_starts_at_the_present_length(name):
    present = present_length(name)
    diagnosis = rope_patch.diagnose(make_config(name), length=2 * present)
    assert "was trained in" in str(diagnosis.advice.reasons)
    assert f"{present:,}" in str(diagnosis.advice.reasons)
    handle = rope_patch.patch(make_model(name), diagnosis.advice.method, length=2 * present)
    assert handle.trained_length == present
