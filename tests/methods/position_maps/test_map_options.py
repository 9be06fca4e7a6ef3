"""Test what options of position maps are refused, and that messages say how to go on."""

import pytest
import torch

import rope_patch
from rope_patch import Refused
from rope_patch.methods import Geometry, PositionMap, build, registered_methods

MAPS = [name for name, cls in registered_methods().items() if issubclass(cls, PositionMap)]
REACH = 64


def build_map(name, **options):
    return build(name, **({"groups": [2, 4]} if name == "dpe" else {}), **options)


@pytest.mark.parametrize(
    ("name", "options", "limit"),
    [
        ("rerope", {"window": 64}, "window must be below 64"),
        ("leaky-rerope", {"window": 65}, "window must be below 64"),
        ("jet-long", {"window": 64}, "window must be below 64"),
        ("self-extend", {"window": 64, "group": 2}, "window must be below 64"),
        ("self-extend", {"window": 42}, "window must be below 42"),
        ("dpe", {"window": 64}, "window must be below 64"),
        ("dca", {"chunk": 64}, "chunk must be below 64"),
        ("dca", {"top": 64}, "top must be below 64"),
        ("dca", {"chunk": 20, "top": 18}, "19, got 18"),
        ("string", {"offset": 64}, "offset must be below 64"),
        ("string", {"offset": 8, "local": 8}, "local must be below the offset, 8"),
        ("lampe", {"head": 64}, "head must be below 64"),
        ("lampe", {"mapped": 56}, "mapped must be below 56"),
        ("lm-infinite", {"limit": 64}, "limit must be below 64"),
        ("lm-infinite", {"window": 64}, "window must be below 64"),
        ("streaming", {"window": 61}, r"sinks \+ window must be below 65"),
    ],
)
def test_positions_beyond_the_reach_are_refused(name, options, limit):
    with pytest.raises(Refused, match=limit):
        build_map(name, **options).longest_text(REACH)


@pytest.mark.parametrize("name", MAPS)
def test_defaults_fit_every_trained_length(name):
    for trained_length in (64, 2048, 8192, 131_072):
        method = build_map(name)
        assert method.longest_text(trained_length) > trained_length or name == "lm-infinite"
        assert 1 <= method.map_start(trained_length) <= trained_length


@pytest.mark.parametrize(
    ("name", "options", "error", "fact"),
    [
        ("rerope", {"on": "yarn"}, ValueError, "'yarn:4'"),
        ("rerope", {"on": "yarn:0.5"}, ValueError, "at least 1"),
        ("rerope", {"on": "yarn:four"}, ValueError, "yarn:four"),
        ("rerope", {"on": "yarn:inf"}, ValueError, "finite"),
        ("rerope", {"on": "yran:4"}, ValueError, "'yran'.*yarn"),
        ("rerope", {"on": "dynamic-yarn:4"}, ValueError, "dynamic-yarn has no fixed factor"),
        ("rerope", {"on": "rerope:4"}, ValueError, "rerope has no fixed factor"),
        ("rerope", {"on": "mixed-yarn:4"}, ValueError, "mixed-yarn depend on the sequence"),
        ("rerope", {"on": "longrope:4"}, ValueError, "'long_factor'"),
        ("rerope", {"on": 4}, TypeError, "'yarn:4'"),
        ("leaky-rerope", {"k": 0}, ValueError, "k must be above 0 .* got 0"),
        ("leaky-rerope", {"k": -1}, ValueError, "k must be above 0"),
        ("dpe", {"groups": "2,4"}, TypeError, "groups"),
        ("dpe", {"groups": []}, TypeError, "groups"),
        ("dpe", {"groups": 4}, TypeError, "groups"),
    ],
)
def test_options_of_maps_are_refused(name, options, error, fact):
    with pytest.raises(error, match=fact):
        build(name, **options)


def test_groups_divide_the_pairs():
    geometry = Geometry(head_dim=64, theta=1e4, trained_length=4096)
    with pytest.raises(Refused, match="32 rotated pairs"):
        build("dpe", groups=[2, 4, 8]).frequencies(geometry)


@pytest.mark.parametrize("name", MAPS)
def test_a_map_has_no_factor(name):
    with pytest.raises(Refused, match="on='yarn:4'"):
        build_map(name, factor=4)


@pytest.mark.parametrize("name", MAPS)
def test_two_temperatures_are_refused(name):
    with pytest.raises(Refused, match="temperature='none'"):
        build_map(name, on="yarn:4", temperature="log-n")
    for on, temperature in (("yarn:4", None), ("yarn:4", "none"), ("", "none")):
        assert build_map(name, on=on, temperature=temperature).query_temperature is None
    assert build_map(name, on="abf:4", temperature="log-n").query_temperature.kind == "log-n"


def test_maps_that_see_all_tokens_have_log_n_by_default():
    kinds = {name: getattr(build_map(name).query_temperature, "kind", None) for name in MAPS}
    without = {"string", "lm-infinite", "streaming"}
    assert kinds == {name: None if name in without else "log-n" for name in MAPS}


@pytest.mark.parametrize("name", MAPS)
def test_frequencies_are_those_below_the_map(name):
    numbers = {"head_dim": 64, "theta": 1e4, "trained_length": 4096}
    geometry = Geometry(**numbers)
    for on, inner in (("", ("default", 1)), ("yarn:4", ("yarn", 4))):
        method = build_map(name, on=on)
        expected = rope_patch.frequencies(inner[0], factor=inner[1], **numbers)
        frequencies = method.frequencies(geometry)
        assert torch.equal(frequencies.inv_freq, expected.inv_freq)
        assert frequencies.attention_factor == expected.attention_factor
        assert method.reach(4096) == 4096 * inner[1]
