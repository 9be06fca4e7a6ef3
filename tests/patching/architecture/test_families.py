"""Test that patched logits equal those of a transformers model with the scaling in its config.

The native configs are written by hand, after transformers' documentation of `rope_parameters`.
A separate test checks the configs that patching writes.
"""

import copy

import pytest
import torch
import transformers
from helpers.tiny_models import (
    FACTOR,
    FAMILIES,
    LONG,
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT,
    SHORT_FACTOR,
    TARGET,
    TRAINED,
    assert_close,
    assert_differs,
    forward,
    logits,
    make_config,
    make_model,
    make_native,
    make_other,
    step_by_step,
    tokens,
)

import rope_patch

R = 16  # rotated dimensions
THETA = {"gemma3": 1e6}  # of its full-attention layers; all others have 1e4
ORIGIN = {"original_max_position_embeddings": TRAINED}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGIN}
LONGROPE = {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}

# name: (method, its options, transformers' `rope_parameters` for the same rotation)
REQUESTS = {
    "linear": ("linear", {}, {"rope_type": "linear", "factor": 4.0}),
    "yarn": ("yarn", {}, YARN),
    "llama3": (
        "llama3",
        {},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            **ORIGIN,
        },
    ),
    "longrope": (
        "longrope",
        LONGROPE,
        {"rope_type": "longrope", **LONGROPE, "factor": 4.0, **ORIGIN},
    ),
}
OPTIONS = {
    "yarn-truncate": ("yarn", {"truncate": False}, {**YARN, "truncate": False}),
    "yarn-betas": (
        "yarn",
        {"beta_fast": 4, "beta_slow": 0.5},
        {**YARN, "beta_fast": 4.0, "beta_slow": 0.5},
    ),
    "yarn-mscale": (
        "yarn",
        {"mscale": 0.707, "mscale_all_dim": 1.2},
        {**YARN, "mscale": 0.707, "mscale_all_dim": 1.2},
    ),
    "yarn-attention": ("yarn", {"attention_factor": 1.5}, {**YARN, "attention_factor": 1.5}),
    "ntk-by-parts": ("ntk-by-parts", {}, {**YARN, "attention_factor": 1.0}),
    "ntk": ("ntk", {}, {"rope_type": "default", "rope_theta": 1e4 * 4 ** (R / (R - 2))}),
    "abf": ("abf", {"new_theta": 5e6}, {"rope_type": "default", "rope_theta": 5e6}),
    "llama3-ramp": (
        "llama3",
        {"low_freq_factor": 0.5, "high_freq_factor": 8},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 0.5,
            "high_freq_factor": 8.0,
            **ORIGIN,
        },
    ),
    "longrope-attention": (
        "longrope",
        {**LONGROPE, "attention_factor": 1.3},
        {"rope_type": "longrope", **LONGROPE, "attention_factor": 1.3, "factor": 4.0, **ORIGIN},
    ),
    "proportional": (
        "proportional",
        {"partial_rotary_factor": 0.5},
        {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    ),
}


# Every family with the common methods, and Llama with all options.
CASES = [(family, name) for family in FAMILIES for name in REQUESTS]
ALIKE = ("qwen2", "gemma", "gemma2")  # families whose rotation is Llama's
CASES += [("llama", name) for name in OPTIONS]
# Nested scalings without a config by hand, because transformers reads `truncate` elsewhere.
NESTED = [("gemma3", name) for name in ("yarn-truncate", "ntk", "abf", "proportional")]


def is_broken_in_transformers(family, name):
    # 5.0 validates nested scalings like flat ones, and cannot switch a nested longrope.
    nested = family == "gemma3" and name.split("-")[0] in ("yarn", "longrope")
    return OLD_TRANSFORMERS and (nested or name == "proportional")


def mark(family, name):
    reason = "transformers 5.0 itself cannot build this"
    marks = [pytest.mark.skipif(is_broken_in_transformers(family, name), reason=reason)]
    if family in ALIKE and name != "yarn":
        marks.append(pytest.mark.slow)
    return pytest.param(family, name, id=f"{family}-{name}", marks=marks)


def native_parameters(family, name):
    full = {"rope_theta": THETA.get(family, 1e4), **{**REQUESTS, **OPTIONS}[name][2]}
    if family != "gemma3":
        return full
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": full,
    }


def apply(model, name):
    method, options, _ = {**REQUESTS, **OPTIONS}[name]
    return rope_patch.patch(model, method, factor=FACTOR, **options)


@pytest.mark.parametrize(("family", "name"), [mark(*case) for case in CASES])
def test_patched_logits_match_the_native_model(family, name):
    model = make_model(family)
    native = make_native(
        model,
        family,
        max_position_embeddings=TARGET,
        rope_parameters=native_parameters(family, name),
    )
    apply(model, name)
    for length in (SHORT, LONG, SHORT):  # longrope switches both ways
        assert_close(logits(model, length), logits(native, length))


@pytest.mark.parametrize(("family", "name"), [mark(*case) for case in CASES + NESTED])
def test_patched_config_builds_the_same_model(family, name):
    model = make_model(family)
    apply(model, name)
    native = make_native(
        model,
        family,
        max_position_embeddings=model.config.max_position_embeddings,
        rope_parameters=copy.deepcopy(model.config.rope_parameters),
    )
    for length in (SHORT, LONG):
        assert_close(logits(model, length), logits(native, length))


@pytest.mark.parametrize("family", FAMILIES)
def test_longrope_switches_factors_after_the_trained_length(family):
    model, short, long = (make_model(family) for _ in range(3))
    apply(model, "longrope")
    for fixed, factors in ((short, SHORT_FACTOR), (long, LONG_FACTOR)):
        both = {"long_factor": factors, "short_factor": factors}
        rope_patch.patch(fixed, "longrope", factor=FACTOR, **both)
    for length in (TRAINED + 1, TRAINED, TRAINED + 1):
        same, other = (long, short) if length > TRAINED else (short, long)
        assert logits(model, length).equal(logits(same, length))
        assert_differs(logits(model, length), logits(other, length))


def test_length_and_factor_give_the_same_patch():
    by_factor, by_length = make_model(), make_model()
    rope_patch.patch(by_factor, "yarn", factor=FACTOR)
    rope_patch.patch(by_length, "yarn", length=TARGET)
    assert logits(by_length).equal(logits(by_factor))


def test_trained_length_overrides_the_config():
    model = make_model("llama")
    handle = rope_patch.patch(model, "yarn", length=TARGET, trained_length=TRAINED // 2)
    assert (handle.trained_length, handle.factor) == (TRAINED // 2, 2 * FACTOR)
    native = make_native(
        model,
        "llama",
        max_position_embeddings=TARGET,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": TRAINED // 2,
        },
    )
    assert_close(logits(model), logits(native))


@pytest.mark.parametrize(
    "layer_types",
    [["sliding_attention"], ["full_attention"], ["sliding_attention", "full_attention"]],
)
def test_layer_types_select_the_scaled_layers(layer_types):
    model = make_model("gemma3")
    rope_patch.patch(model, "linear", factor=FACTOR, layer_types=layer_types)
    parameters = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    for kind in layer_types:
        parameters[kind] |= {"rope_type": "linear", "factor": 4.0}
    native = make_native(
        model, "gemma3", max_position_embeddings=TARGET, rope_parameters=parameters
    )
    assert_close(logits(model), logits(native))


# -- nope, which transformers has as cos 1 and sin 0 -----------------------------------------------

SHAPES = ["llama", "qwen3", "gemma3"]
KERNELS = ["auto", "reference", "hf"]
TEMPERATURE = "drope:0.412"


def without_rotation(model):
    """Return an unpatched copy whose rotary module returns cos = 1 and sin = 0."""
    model = copy.deepcopy(model)
    rotary = model.base_model.rotary_emb
    forward = rotary.forward

    def forward_without_rotation(x, position_ids, layer_type=None):
        cos, sin = forward(x, position_ids, *([] if layer_type is None else [layer_type]))
        if layer_type is not None and "sliding" in layer_type:
            return cos, sin
        return torch.ones_like(cos), torch.zeros_like(sin)

    rotary.forward = forward_without_rotation
    return model


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", SHAPES)
def test_nope_matches_cos_1_and_sin_0(family, kernels):
    model = make_model(family)
    unrotated, plain = without_rotation(model), logits(model)
    rope_patch.patch(model, "nope", kernels=kernels)
    for length in (SHORT, TRAINED, LONG):
        assert_close(logits(model, length), logits(unrotated, length))
    assert_differs(logits(model), plain)
    ids = tokens(TRAINED + 3)
    assert_close(step_by_step(model, ids, TRAINED - 3), forward(unrotated, ids))


@pytest.mark.parametrize("kernels", KERNELS)
def test_positions_do_not_change_logits_of_nope(kernels):
    model, ids = make_model(), tokens(LONG)
    generator = torch.Generator().manual_seed(0)
    random_positions = torch.randint(0, 10**6, (1, LONG), generator=generator)
    mask = torch.ones_like(ids)  # else transformers takes jumps for document borders
    plain = forward(model, ids, attention_mask=mask)
    assert_differs(forward(model, ids, attention_mask=mask, position_ids=random_positions), plain)
    rope_patch.patch(model, "nope", kernels=kernels)
    expected = logits(model)
    for positions in (random_positions, 3 * torch.arange(LONG)[None] + 7, torch.zeros_like(ids)):
        assert_close(forward(model, ids, attention_mask=mask, position_ids=positions), expected)


def test_nope_changes_only_full_attention_in_gemma3():
    model = make_model("gemma3")
    handle = rope_patch.patch(model, "nope")
    assert list(handle.frequencies) == ["full_attention"]
    assert "sliding_attention: unchanged" in handle.summary()
    sliding = model.config.rope_parameters["sliding_attention"]
    assert sliding == make_config("gemma3").rope_parameters["sliding_attention"]


def test_partly_rotated_heads_lose_their_rotation():
    model = make_other("StableLm")
    unrotated = without_rotation(model)
    rope_patch.patch(model, "nope")
    assert_close(logits(model), logits(unrotated))


@pytest.mark.parametrize(
    ("request_", "length", "config_length"),
    [
        ({}, None, TRAINED),
        ({"factor": 4}, TARGET, TARGET),
        ({"length": TARGET}, TARGET, TARGET),
        ({"temperature": TEMPERATURE}, None, TRAINED),
        ({"temperature": TEMPERATURE, "length": TARGET}, TARGET, TARGET),
    ],
)
def test_length_of_nope_is_optional(request_, length, config_length):
    model = make_model()
    handle = rope_patch.patch(model, "nope", **request_)
    assert handle.length == length
    assert model.config.max_position_embeddings == config_length


def test_summary_and_diagnosis_of_nope_name_the_effect():
    model = make_model()
    plain = rope_patch.patch(model, "nope").summary()
    assert plain.startswith("nope, 64 → any length")
    assert "8 of 8 pairs changed (slowest: no longer rotates), attention factor 1\n" in plain
    scaled = rope_patch.patch(model, "nope", temperature=TEMPERATURE, length=TARGET).summary()
    assert scaled.startswith("nope, 64 → 256 tokens")
    assert "attention logits ×1 + 0.412 ln(n / 64) beyond 64 tokens" in scaled
    assert "stopped" in str(rope_patch.diagnose(make_model(), "nope"))


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="it has no proportional rotation")
def test_native_config_without_rotating_pairs_can_be_patched(tmp_path):
    """The native form has partial_rotary_factor 0, but the head still has pairs."""
    model = make_model()
    rope_patch.patch(model, "nope", length=TARGET)
    rope_patch.save(model, tmp_path)
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert native.config.max_position_embeddings == TARGET
    assert native.config.rope_parameters["partial_rotary_factor"] == 0
    handle = rope_patch.patch(native, "linear", factor=2, start="unscaled", trained_length=64)
    assert handle.frequencies[None].inv_freq.all()
