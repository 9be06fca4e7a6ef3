"""Test that each listed disagreement exists, that our choice is as listed, and live modules too."""

import math

import hf_rotation
import pytest
import stateful
import torch
import transformers
from comparison import Pair, difference, ours
from engines import mlx_proportional
from formulas import default, ntk, proportional, yarn_attention_factor
from packaging.version import Version
from page import GROUPS
from published import DEEPSEEK3, GEMMA3_FULL, LLAMA2, SMOLLM2

ENTRIES = [entry for group in GROUPS.values() for entry in group]
INSTALLED = Version(transformers.__version__)
OLD = Version("5.1") > INSTALLED
NEW = Version("5.23") <= INSTALLED
old_or_new = pytest.mark.skipif(not (OLD or NEW), reason="known of transformers 5.0 and from 5.23")


def number_of(entry, pair):
    return pair.of_frequency() if entry.of == "frequency" else pair.of_attention()


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_implementations_disagree(entry):
    number = entry.number()
    assert math.isfinite(number)
    assert number > 1e-3, f"{entry.who}: do they agree by now? Then it is no disagreement any more"


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.followed], ids=str)
def test_our_rotation_matches_the_listed_choice(entry):
    assert number_of(entry, Pair(entry.ours(), entry.followed())) < 2e-6


def test_entries_have_names_choices_and_links():
    assert len({entry.about for entry in ENTRIES}) == len(ENTRIES) > 30
    for entry in ENTRIES:
        assert entry.of in ("frequency", "attention factor", "softmax scale")
        assert entry.who
        assert entry.choice
        assert all("](https://" in link for link in entry.links)
        assert entry.links or "we do" in entry.who


@old_or_new
def test_transformers_keeps_frequencies_after_a_longer_text():
    longer, between, short = 16384, 4200, 2048
    previous = ntk(LLAMA2, longer / 4096)
    after = stateful.rotation_after(LLAMA2, longer, between)
    assert Pair(ntk(LLAMA2, between / 4096) if OLD else previous, after).difference() < 2e-6
    after = stateful.rotation_after(LLAMA2, longer, short)
    assert Pair(previous if OLD else default(LLAMA2), after).difference() < 2e-6
    at_the_length = stateful.rotation_after(LLAMA2, longer, 4096)
    assert Pair(previous, at_the_length).difference() < 2e-6


@old_or_new
def test_transformers_scales_deepseek_v2_softmax_in_new_versions():
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2

    scaling = {**DEEPSEEK3.scaling, "mscale": 0.707, "mscale_all_dim": 0.707}
    config = v2.DeepseekV2Config(
        hidden_size=32, num_attention_heads=2, q_lora_rank=None, kv_lora_rank=8, v_head_dim=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, max_position_embeddings=163840,
        rope_theta=10000, rope_scaling=scaling,
    )  # fmt: skip
    attention = v2.DeepseekV2Attention(config, 0)
    expected = 1.0 if OLD else yarn_attention_factor(40, 0.707) ** 2
    assert attention.scaling * attention.qk_head_dim**0.5 == pytest.approx(expected)


def test_our_frequencies_do_not_depend_on_earlier_calls():
    before = ours("dynamic", LLAMA2, seq_len=2048)
    ours("dynamic", LLAMA2, seq_len=16384)
    assert before == ours("dynamic", LLAMA2, seq_len=2048)


@old_or_new
def test_transformers_ignores_a_flat_scaling_with_layer_types():
    flat = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    make = type(GEMMA3_FULL.config())
    if OLD:
        with pytest.raises(KeyError):
            hf_rotation.rotary_class(GEMMA3_FULL)(make(**GEMMA3_FULL.fields, rope_parameters=flat))
        return
    module = hf_rotation.rotary_class(GEMMA3_FULL)(make(**GEMMA3_FULL.fields, rope_parameters=flat))
    inv_freq = module.full_attention_inv_freq.double().tolist()
    assert difference(default(GEMMA3_FULL)[0], inv_freq) < 2e-6


@old_or_new
def test_transformers_5_0_fails_as_listed():
    assert hf_rotation.has("proportional") is NEW
    config = hf_rotation.scaled_config(
        GEMMA3_FULL, "longrope", factor=2.0, long_factor=[2.0] * 128, short_factor=[1.0] * 128
    )
    module = hf_rotation.rotary_class(GEMMA3_FULL)(config)
    long_text = torch.zeros(1), torch.tensor([[0, 40000]]), "full_attention"
    module(*long_text)
    flat = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    make = type(GEMMA3_FULL.config())
    if OLD:
        with pytest.raises(UnboundLocalError):
            module(*long_text)
        with pytest.raises(KeyError):
            make(**GEMMA3_FULL.fields, rope_scaling=flat)
    else:
        module(*long_text)
        make(**GEMMA3_FULL.fields, rope_scaling=flat)


@pytest.mark.skipif(not hf_rotation.has("proportional"), reason="transformers has no proportional")
def test_transformers_divides_proportional_by_its_factor():
    inv_freq, _ = hf_rotation.rotation(
        SMOLLM2, "proportional", factor=4.0, partial_rotary_factor=0.75
    )
    assert difference([f / 4 for f in proportional(SMOLLM2, 0.75)[0]], inv_freq) < 2e-6
    inv_freq, _ = hf_rotation.rotation(SMOLLM2, "proportional", partial_rotary_factor=0.3)
    assert [f > 0 for f in inv_freq] == [f > 0 for f in proportional(SMOLLM2, 0.3)[0]]
    assert [f > 0 for f in inv_freq] != [f > 0 for f in mlx_proportional(SMOLLM2, 0.3)[0]]
