"""Test which rotation a request of vLLM gets for its length, and its tables; needs no vLLM."""

import json
import math

import pytest
import torch
from helpers.tiny_models import LONG_FACTOR, SHORT_FACTOR, TARGET, TRAINED, make_model

import rope_patch
from rope_patch.methods import build
from rope_patch.serving import (
    ProfileLengths,
    admitted_length,
    make_profiles,
    our_parameters,
    profile_salt,
    read_request,
    stack_tables,
)

LONGEST = TARGET


def lengths(name, longest=LONGEST, **options):
    return ProfileLengths.of_method(build(name, **options), TRAINED, longest)


def test_a_dynamic_method_has_a_profile_for_each_step_of_its_growth():
    grid = [math.floor(TRAINED * 2 ** (step / 4)) for step in range(9)]
    assert list(lengths("dynamic-yarn").longest) == grid


def test_the_last_profile_ends_at_the_engines_longest_request():
    assert lengths("dynamic-yarn", 200).longest == (64, 76, 90, 107, 128, 152, 181, 200)
    assert lengths("dynamic-yarn", 50).longest == (50,)


@pytest.mark.parametrize(
    ("name", "options", "longest"),
    [
        ("yarn", {"factor": 4}, (LONGEST,)),
        ("mixed-yarn", {"factor": 4}, (TRAINED, LONGEST)),
        ("longrope", {"factor": 4, "long_factor": LONG_FACTOR}, (TRAINED, LONGEST)),
        ("longrope", {"long_factor": LONG_FACTOR, "short_factor": LONG_FACTOR}, (LONGEST,)),
    ],
)
def test_static_methods_have_one_profile_and_mixed_ones_two(name, options, longest):
    assert lengths(name, **options).longest == longest


def test_growth_with_every_token_has_too_many_profiles():
    with pytest.raises(rope_patch.Refused, match="leave growth out"):
        lengths("dynamic-yarn", growth="exact")


def test_a_request_gets_the_smallest_profile_that_serves_it():
    of = lengths("dynamic-yarn")
    for length in range(1, LONGEST + 1):
        index = of.index(length)
        assert length <= of.longest[index]
        assert index == 0 or length > of.longest[index - 1]
    with pytest.raises(rope_patch.Refused, match="longer than the 256"):
        of.index(LONGEST + 1)


def test_tables_are_stacked_without_gap_or_overlap():
    of = lengths("dynamic-yarn")
    ends = [start + rows for start, rows in zip(of.start_rows(), of.longest, strict=True)]
    assert of.start_rows() == (0, *ends[:-1])


def test_layer_types_with_lengths_of_their_own_share_the_finer_division():
    merged = ProfileLengths.merge([lengths("mixed-ntk", factor=4), lengths("dynamic-yarn", 100)])
    assert merged.longest == (64, 76, 90, 100, 256)


def test_profiles_have_the_frequencies_of_patch():
    parameters = {
        "rope_type": "dynamic-yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": TRAINED,
        "beta_fast": 16.0,
    }
    for profile in make_profiles(read_request(parameters), 16, 16, LONGEST):
        longest = build("dynamic-yarn").valid_until(profile.longest, TRAINED)
        expected = rope_patch.frequencies(
            "yarn",
            head_dim=16,
            theta=1e4,
            trained_length=TRAINED,
            factor=longest / TRAINED,
            beta_fast=16.0,
        )
        torch.testing.assert_close(
            profile.frequencies.inv_freq, expected.inv_freq, rtol=1e-12, atol=0
        )
        assert profile.frequencies.attention_factor == expected.attention_factor
        assert profile.is_unscaled == (profile.longest == TRAINED)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "length"),
    [(10, 5, 14), (10, None, 10), (10, 1, 10), (10, 1000, 256), (255, 1, 255)],
)
def test_a_request_counts_for_its_prompt_and_what_may_be_read_of_its_answer(
    prompt, max_tokens, length
):
    assert admitted_length(prompt, max_tokens, LONGEST) == length


def test_no_users_salt_can_name_the_blocks_of_another_profile():
    users = [None, "a", "1:", "1:a", ":", "0:1:"]
    salts = {(i, user or ""): profile_salt(i, user) for i in range(12) for user in users}
    assert len(set(salts.values())) == len(salts)
    assert profile_salt(0, None) == profile_salt(0, "")
    assert all(salts.values())  # vLLM takes an empty salt for none


# -- tables against the live model, over checkpoints with scalings of their own --------------------

THETA, HEAD = 1e4, 16
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED // 4}
CHECKPOINTS = {
    "default": {"rope_type": "default"},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED // 4,
    },
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": YARN,
    "yarn without a factor in attention": {**YARN, "attention_factor": 1.0},
}
STRETCHES = {"factor": 4, "long_factor": LONG_FACTOR}
METHODS = {
    "dynamic": {"length": TARGET},
    "dynamic-linear": {"length": TARGET},
    "dynamic-yarn": {"length": TARGET},
    "mixed-linear": {"factor": 4},
    "mixed-ntk": {"factor": 4},
    "mixed-yarn": {"factor": 4},
    "longrope": STRETCHES,
    "longrope of two sets": {**STRETCHES, "short_factor": SHORT_FACTOR},
    "longrope with start tokens": {**STRETCHES, "start_tokens": 4},
    "longrope of two sets, with start tokens": {
        **STRETCHES,
        "short_factor": SHORT_FACTOR,
        "start_tokens": 4,
    },
}


def plain_table(rows):
    """Return vLLM's own table for theta alone, by its own arithmetic."""
    inv_freq = 1.0 / (THETA ** (torch.arange(0, HEAD, 2, dtype=torch.float) / HEAD))
    angles = torch.outer(torch.arange(rows, dtype=torch.float), inv_freq)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def live_table(model, length):
    """Return cos and sin of a text of `length` tokens in the live model, `[length, R]`."""
    cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 4), torch.arange(length)[None])
    return torch.cat([table[0, :, : HEAD // 2] for table in (cos, sin)], dim=-1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_tables_rotate_each_request_as_the_live_model(checkpoint, method):
    """Compare start tokens, too, which keep the rotation of the checkpoint, not of theta."""
    parameters = {"rope_theta": THETA, **CHECKPOINTS[checkpoint]}
    model = make_model(num_hidden_layers=1, rope_parameters=parameters)
    start = "running" if checkpoint != "default" else "auto"
    rope_patch.patch(model, method.split(" ")[0], start=start, **METHODS[method])
    if checkpoint == "yarn" or (checkpoint.startswith("yarn") and "yarn" in method):
        with pytest.raises(ValueError, match=r"start='unscaled'"):
            rope_patch.export(model, "vllm")
        return
    export = rope_patch.export(model, "vllm")
    (exported,) = our_parameters(json.loads(export.arguments[1])["rope_parameters"])
    request = read_request(exported)
    profiles = make_profiles(request, HEAD, HEAD, TARGET)
    geometry = request.geometry(HEAD, HEAD)
    tables = stack_tables(request.method, geometry, profiles, plain_table(TARGET), 1)
    lengths = ProfileLengths(tuple(profile.longest for profile in profiles))
    for length in (2, 40, TRAINED, TRAINED + 1, 100, 200, TARGET):
        first = lengths.start_rows()[lengths.index(length)]
        got = tables[first : first + length]
        torch.testing.assert_close(got, live_table(model, length), rtol=0, atol=5e-5)
