"""Test the extension of checkpoints that were trained under the YaRN of their config.

The truth is transformers: the same config with its factor multiplied.
"""

import pytest
import torch
from helpers.published_yarn import (
    ATTENTION,
    FOLLOWED,
    PUBLISHED,
    kind_of,
    logits,
    make_model,
    multiplied,
    present_length,
)
from helpers.tiny_models import OLD_TRANSFORMERS
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import rope_patch

pytestmark = pytest.mark.skipif(OLD_TRANSFORMERS, reason="needs nested YaRN and new model types")


@pytest.mark.parametrize("start", ["auto", "running"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_factor_continues_one_yarn(name, start):
    handle = rope_patch.patch(make_model(name), "yarn", factor=4, start=start)
    present = present_length(name)
    assert (handle.trained_length, handle.length) == (present, 4 * present)
    expected, mscales = multiplied(name, 4)
    got = handle.frequencies[kind_of(name)]
    assert got.close_to(expected)
    assert got.attention_factor == pytest.approx(ATTENTION[name], rel=1e-9)
    assert handle.softmax_mscale == pytest.approx(next(iter(mscales), 1.0), rel=1e-9)
    assert "trained in" in handle.summary()
    again = rope_patch.patch(make_model(name), handle.extension)
    assert again.frequencies[kind_of(name)].same_as(got)
    assert again.length == handle.length


@pytest.mark.parametrize("name", PUBLISHED)
def test_shorter_request_is_refused_with_both_lengths(name):
    model, present = make_model(name), present_length(name)
    before = logits(model)
    with pytest.raises(ValueError, match=rf"{present:,}.*{present // 2:,}.*unscaled"):
        rope_patch.patch(model, "yarn", length=present // 2)
    assert logits(model).equal(before)
    original = PUBLISHED[name][2]["original_max_position_embeddings"]
    handle = rope_patch.patch(model, "yarn", factor=2, start="unscaled")
    assert (handle.trained_length, handle.length) == (original, 2 * original)
    with pytest.raises(ValueError, match="would change nothing"):
        rope_patch.patch(make_model(name), "yarn", factor=1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_options_of_the_request_replace_the_constants(name):
    handle = rope_patch.patch(make_model(name), "yarn", factor=2, beta_fast=16, beta_slow=2)
    expected, _ = multiplied(name, 2, beta_fast=16.0, beta_slow=2.0)
    assert handle.frequencies[kind_of(name)].close_to(expected)


@pytest.mark.parametrize("name", ["gpt-oss", "Olmo 3", "Ministral 3", "Laguna", "DeepSeek-V3"])
def test_given_attention_factor_is_the_whole_one(name):
    """In DeepSeek's softmax scale, where it is."""
    handle = rope_patch.patch(make_model(name), "yarn", factor=2, attention_factor=1.25)
    in_softmax = name == "DeepSeek-V3"
    assert handle.frequencies[kind_of(name)].attention_factor == (1.0 if in_softmax else 1.25)
    assert handle.softmax_mscale == (1.25 if in_softmax else 1.0)


@pytest.mark.parametrize("own", [(None, None), (0.707, 0.9), (1.0, 1.0)])
@pytest.mark.parametrize("given", [None, (1.2, 0.5)])
def test_deepseeks_two_scales_follow_transformers(own, given):
    names = ("mscale", "mscale_all_dim")
    model = make_model("DeepSeek-V3", **dict(zip(names, own, strict=True)))
    options = dict(zip(names, given, strict=True)) if given else {}
    handle = rope_patch.patch(model, "yarn", factor=2, **options)
    expected, (mscale,) = multiplied(
        "DeepSeek-V3", 2, **dict(zip(names, given or own, strict=True))
    )
    assert handle.frequencies[None].close_to(expected)
    assert handle.softmax_mscale == pytest.approx(mscale, rel=1e-9)


@pytest.mark.parametrize("method", ["yarn", "linear", "ntk", "dynamic-yarn"])
def test_temperature_of_positions_starts_where_it_did(method):
    """Ministral 3's queries grow beyond original_max_position_embeddings, which stays."""
    model = make_model("Ministral 3")
    rope_patch.patch(model, method, factor=2)
    parameters = model.config.rope_parameters
    assert parameters["original_max_position_embeddings"] == 16384
    assert parameters["llama_4_scaling_beta"] == 0.1


OTHERS = ["dynamic", "dynamic-linear", "dynamic-ntk-by-parts", "mixed-yarn"]


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, "dynamic-yarn") for name in FOLLOWED),
        *(("gpt-oss", method) for method in OTHERS),
        *(
            pytest.param(name, method, marks=pytest.mark.slow)
            for name in FOLLOWED
            for method in OTHERS
            if name != "gpt-oss"
        ),
    ],
)
def test_dynamic_methods_leave_the_present_length_alone(name, method):
    """The lengths are those of the checkpoint with 16 original tokens."""
    present = round(16 * PUBLISHED[name][2]["factor"])
    model = make_model(name, original_max_position_embeddings=16, length=present)
    lengths = (17, present, present + 40)
    before = [logits(model, length) for length in lengths]
    handle = rope_patch.patch(model, method, **({"factor": 2} if method == "mixed-yarn" else {}))
    assert handle.trained_length == present
    after = [logits(model, length) for length in lengths]
    assert [one.equal(other) for one, other in zip(before, after, strict=True)] == [1, 1, 0]


@pytest.mark.parametrize("name", FOLLOWED)
def test_dynamic_yarn_is_one_yarn_at_every_length(name):
    handle = rope_patch.patch(make_model(name), "dynamic-yarn", growth="exact")
    for ratio in (1.5, 4):
        got = handle.frequencies_at(ratio * present_length(name))[kind_of(name)]
        assert got.close_to(multiplied(name, ratio)[0])


@pytest.mark.parametrize("name", FOLLOWED)
def test_dynamic_yarn_sharpens_attention_as_static_yarn_does(name):
    """At twice the present length, in cos and sin or, with latent attention, in the softmax."""
    present = round(16 * PUBLISHED[name][2]["factor"])
    lengths = {"original_max_position_embeddings": 16, "length": present}
    static, dynamic = make_model(name, **lengths), make_model(name, **lengths)
    rope_patch.patch(static, "yarn", factor=2)
    rope_patch.patch(dynamic, "dynamic-yarn", growth="exact")
    expected, got = logits(static, 2 * present), logits(dynamic, 2 * present)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in FOLLOWED])
def test_expanded_keys_of_latent_attention_are_refused(name):
    with pytest.raises(ValueError, match="newer release"):
        rope_patch.patch(make_model(name), "dynamic-yarn")


BARE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


def make_llama(parameters, length):
    config = CONFIG_MAPPING["llama"](
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=1,
        vocab_size=128,
        max_position_embeddings=length,
        rope_parameters={**parameters, "rope_theta": 1e4},
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("parameters", "length", "evidence"),
    [
        (BARE, 32768, None),  # the recipe of Qwen's model cards
        ({**BARE, "truncate": False}, 32768, "truncate"),
        ({**BARE, "beta_fast": 32, "beta_slow": 1}, 32768, "beta_fast, beta_slow"),
        ({**BARE, "beta_fast": None}, 32768, None),
        ({**BARE, "truncate": False}, 8192, None),  # the config claims no more than before
        ({**BARE, "finetuned": True}, 32768, "finetuned"),  # as in Yarn-Llama-2
        ({**BARE, "factor": 1.0, "truncate": False}, 8192, None),
    ],
)
def test_evidence_of_the_configs_shape(parameters, length, evidence):
    handle = rope_patch.patch(make_llama(parameters, length), "yarn", length=65536)
    assert handle.trained_length == (8192 if evidence is None else 32768)
    assert ("put on" if evidence is None else f"{evidence})") in handle.summary()


@pytest.mark.parametrize("scaling", ["linear", "dynamic"])
def test_other_scalings_put_on_stay_replaceable(scaling):
    """By a shorter request, too."""
    model = make_llama({**BARE, "rope_type": scaling}, length=32768)
    handle = rope_patch.patch(model, "yarn", factor=2)
    assert (handle.trained_length, handle.length) == (8192, 16384)
    plain = make_llama({"rope_type": "default"}, length=8192)
    expected = rope_patch.patch(plain, "yarn", factor=2)
    assert handle.frequencies[None].same_as(expected.frequencies[None])


@pytest.mark.parametrize("length", [8192, 32768])
def test_yarn_put_on_is_replaced_but_never_shortened(length):
    """Also where the config claims no more than before (the recipe of Qwen's model cards)."""
    model = make_llama(BARE, length=length)
    with pytest.raises(ValueError, match=r"32,768.*16,384"):
        rope_patch.patch(model, "yarn", factor=2)
    handle = rope_patch.patch(model, "yarn", length=65536)
    assert handle.trained_length == 8192
    assert "put on" in handle.summary()
