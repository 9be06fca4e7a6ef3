"""Test the options of position maps, and what they refuse."""

import pytest

import rope_patch
from rope_patch.methods import build
from rope_patch.utils.errors import Refused


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("rerope", {"window": 64}, r"window must be below the 64 positions .* got 64"),
        ("self-extend", {"window": 50}, r"window must be below the 42 positions .* got 50"),
        ("self-extend", {"window": 64, "group": 2}, "window must be below the 64 positions"),
        ("jet-long", {"window": 70}, "window must be below"),
        ("dca", {"chunk": 50, "top": 48}, "top must be at least chunk - 1, .* 49, got 48"),
        ("dca", {"top": 64}, "top must be below"),
        ("string", {"offset": 10, "local": 10}, "local must be below the offset, 10"),
        ("lampe", {"mapped": 60}, "mapped must be below the 56 positions"),
        ("lm-infinite", {"limit": 64}, "limit must be below"),
        ("streaming", {"window": 61}, r"sinks \+ window must be below the 65 .* got 65"),
    ],
)
def test_positions_beyond_the_reach_are_refused(method, options, message):
    with pytest.raises(Refused, match=message):
        build(method, **options).longest_text(64)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("leaky-rerope", {"k": 0.5}, "k must be at least 1"),
        ("rerope", {"window": 0}, "window must be a whole number of tokens, at least 1, got 0"),
        ("rerope", {"factor": 4.0}, r"stretches no frequencies.*leave factor out"),
        ("dca", {"sizes": "papr"}, "did you mean 'paper'"),
        ("rerope", {"on": "yarn"}, "on must name a method and a factor .* got 'yarn'"),
        ("rerope", {"on": "yarn:0.5"}, "a factor of at least 1"),
        ("rerope", {"on": "yrn:4"}, "unknown method 'yrn'"),
        ("rerope", {"on": "dynamic-yarn:4"}, "dynamic-yarn has no fixed factor"),
        ("rerope", {"on": "mixed-yarn:4"}, "frequencies of mixed-yarn depend on the sequence"),
        ("rerope", {"on": "self-extend:2"}, "self-extend has no fixed factor"),
        ("rerope", {"on": "yarn:4", "temperature": "log-n"}, "which is a temperature already"),
        ("rerope", {"temperature": "logn"}, "did you mean 'log-n'"),
        ("self-extend", {"scale": 2}, "no option 'scale'"),
    ],
)
def test_wrong_options_are_refused(method, options, message):
    with pytest.raises(Refused, match=message):
        build(method, **options)


@pytest.mark.parametrize("groups", ["2,4", [], 3])
def test_groups_are_whole_numbers(groups):
    with pytest.raises(TypeError, match="groups must be whole numbers"):
        build("dpe", groups=groups)


def test_groups_divide_the_pairs():
    with pytest.raises(Refused, match="divide the 32 rotated pairs into equal parts, got 5"):
        rope_patch.frequencies(
            "dpe", head_dim=64, theta=1e4, trained_length=4096, groups=[2, 2, 2, 2, 2]
        )


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("rerope", {}, "log-n"),
        ("rerope", {"temperature": "none"}, None),
        ("rerope", {"on": "yarn:4"}, None),
        ("rerope", {"on": "linear:4"}, "log-n"),
        ("rerope", {"on": "yarn:4", "temperature": "none"}, None),
        ("string", {}, None),
        ("streaming", {}, None),
        ("lm-infinite", {"temperature": "log-n"}, "log-n"),
    ],
)
def test_one_temperature_at_most(method, options, expected):
    temperature = build(method, **options).query_temperature
    assert (None if temperature is None else temperature.kind) == expected


@pytest.mark.parametrize("on", ["", "yarn:4", "abf:2", "linear:3.5"])
def test_frequencies_are_those_below_the_map(on):
    shape = {"head_dim": 64, "theta": 1e4, "trained_length": 4096}
    got = rope_patch.frequencies("rerope", **shape, on=on)
    name, _, factor = (on or "default:1").partition(":")
    expected = rope_patch.frequencies(name, **shape, factor=float(factor))
    assert got.same_as(expected)
    assert build("rerope", on=on).reach(4096) == round(4096 * float(factor))
