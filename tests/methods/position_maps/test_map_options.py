"""Test what options of position maps are refused, and that messages say how to go on."""

import re

import pytest
import torch

import rope_patch
from rope_patch.geometry import Geometry
from rope_patch.methods import build, registered_methods
from rope_patch.methods.position_map import PositionMap
from rope_patch.utils.errors import Refused

MAPS = [name for name, cls in registered_methods().items() if issubclass(cls, PositionMap)]
REACH = 64


def build_map(name, **options):
    return build(name, **({"groups": [2, 4]} if name == "dpe" else {}), **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rerope", {"window": 64}, "window must be below 64, the positions"),
        ("leaky-rerope", {"window": 65}, "window must be below 64, the positions"),
        ("jet-long", {"window": 64}, "window must be below 64, the positions"),
        ("self-extend", {"window": 64, "group": 2}, "window must be below 64, the positions"),
        ("self-extend", {"window": 42}, "window must be below 42, two thirds of the positions"),
        ("dpe", {"window": 64}, "window must be below 64, the positions"),
        ("dca", {"chunk": 64}, "chunk must be below 64, the positions"),
        ("dca", {"top": 64}, "top must be below 64, the positions"),
        ("dca", {"chunk": 20, "top": 18}, "top must be at least chunk - 1, .* 19, got 18"),
        ("string", {"offset": 64}, "offset must be below 64, the positions"),
        ("string", {"offset": 8, "local": 8}, "local must be below the offset, 8, .* got 8"),
        ("lampe", {"head": 64}, "head must be below 64, the positions"),
        ("lampe", {"mapped": 56}, "mapped must be below 56, .* less head, got 56"),
        ("lm-infinite", {"limit": 64}, "limit must be below 64, the positions"),
        ("lm-infinite", {"window": 64}, "window must be below 64, the positions"),
        ("streaming", {"window": 61}, r"sinks \+ window must be below 65, one above .* got 65"),
    ],
)
def test_positions_beyond_the_reach_are_refused(name, options, message):
    with pytest.raises(Refused, match=message):
        build_map(name, **options).longest_text(REACH)


@pytest.mark.parametrize("name", MAPS)
def test_defaults_fit_every_trained_length(name):
    for trained_length in (64, 2048, 8192, 131_072):
        method = build_map(name)
        assert method.longest_text(trained_length) > trained_length or name == "lm-infinite"
        assert 1 <= method.map_start(trained_length) <= trained_length


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ("yarn", "on must name a method and a factor of at least 1, such as 'yarn:4', got 'yarn'"),
        ("yarn:0.5", "a factor of at least 1, such as 'yarn:4', got 'yarn:0.5'"),
        ("yarn:four", "a factor of at least 1, such as 'yarn:4', got 'yarn:four'"),
        ("yarn:inf", "factor must be finite"),
        ("yran:4", "unknown method 'yran'.*yarn"),
        ("dynamic-yarn:4", "dynamic-yarn has no fixed factor; expected a method whose"),
        ("rerope:4", "rerope has no fixed factor; expected a method whose"),
        ("mixed-yarn:4", "frequencies of mixed-yarn depend on the sequence; expected a method"),
        ("longrope:4", "longrope needs the option 'long_factor'.*expected a method with a factor"),
    ],
)
def test_frequencies_below_a_map_must_stay(on, message):
    with pytest.raises(Refused, match=message):
        build("rerope", on=on)


def test_frequencies_below_a_map_are_given_as_text():
    with pytest.raises(TypeError, match="on must be a text such as 'yarn:4', got 4"):
        build("rerope", on=4)


@pytest.mark.parametrize("name", MAPS)
def test_a_map_has_no_factor(name):
    message = "no factor of its own, got 4: leave factor out, or write on='yarn:4'"
    with pytest.raises(Refused, match=re.escape(message)):
        build_map(name, factor=4)


@pytest.mark.parametrize("name", MAPS)
def test_two_temperatures_are_refused(name):
    with pytest.raises(Refused, match=r"attention factor, .* expected temperature='none', or none"):
        build_map(name, on="yarn:4", temperature="log-n")
    for on, temperature in (("yarn:4", None), ("yarn:4", "none"), ("", "none")):
        assert build_map(name, on=on, temperature=temperature).query_temperature is None
    assert build_map(name, on="abf:4", temperature="log-n").query_temperature.kind == "log-n"


def test_maps_that_see_all_tokens_have_log_n_by_default():
    kinds = {name: getattr(build_map(name).query_temperature, "kind", None) for name in MAPS}
    without = {"string", "lm-infinite", "streaming"}
    assert kinds == {name: None if name in without else "log-n" for name in MAPS}


@pytest.mark.parametrize("k", [0, -1])
def test_leaky_distances_grow(k):
    with pytest.raises(Refused, match=f"k must be above 0 .* got {k}"):
        build("leaky-rerope", k=k)


@pytest.mark.parametrize("groups", ["2,4", [], 4])
def test_groups_are_a_list(groups):
    with pytest.raises(TypeError, match="groups must be whole numbers, such as"):
        build("dpe", groups=groups)


def test_groups_divide_the_pairs():
    geometry = Geometry(head_dim=64, theta=1e4, trained_length=4096)
    with pytest.raises(Refused, match=r"must divide the 32 rotated pairs .* got 3 group sizes"):
        build("dpe", groups=[2, 4, 8]).frequencies(geometry)


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
