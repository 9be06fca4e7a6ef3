"""Test mixed windows against their definition: the original or the inner method's rotation."""

import math

import pytest
import torch
from test_options import GEOMETRIES, frequencies, plain, required_options

from rope_patch.methods import Geometry, Mixed, build, registered_methods

MIXED = [name for name, method in registered_methods().items() if issubclass(method, Mixed)]
INNER = ["linear", "ntk", "ntk-by-parts", "yarn", "abf", "longrope"]


def test_inner_covers_all_mixed_methods():
    assert [f"mixed-{name}" for name in INNER] == MIXED
    assert not any(registered_methods()[name].is_dynamic for name in MIXED)


@pytest.mark.parametrize("model", GEOMETRIES)
@pytest.mark.parametrize("inner", INNER)
def test_short_sequences_are_unscaled_and_long_ones_get_the_inner_method(inner, model):
    options, trained = {"factor": 4, **required_options(inner, model)}, GEOMETRIES[model][3]
    static = frequencies(inner, model, **options)
    for length in (1, trained):
        short = frequencies(f"mixed-{inner}", model, seq_len=length, **options)
        torch.testing.assert_close(short.inv_freq, plain(model), rtol=1e-14, atol=0)
        assert short.attention_factor == 1
    for length in (trained + 1, 4 * trained, None):
        long = frequencies(f"mixed-{inner}", model, seq_len=length, **options)
        assert long.inv_freq.equal(static.inv_freq)
        assert long.attention_factor == static.attention_factor


@pytest.mark.parametrize("method", MIXED)
def test_mixed_methods_change_once_at_the_trained_length(method):
    mixed = build(method, factor=4, **required_options(method, "llama-2"))
    assert [mixed.valid_until(n, 64) for n in (1, 64, 65, 1000)] == [64, 64, math.inf, math.inf]
    assert mixed.is_length_dependent(64)


@pytest.mark.parametrize(
    ("method", "options", "native"),
    [
        ("mixed-linear", {}, True),
        ("mixed-ntk", {}, True),
        ("mixed-ntk-by-parts", {}, True),
        ("mixed-abf", {}, True),
        ("mixed-yarn", {}, False),
        ("mixed-yarn", {"attention_factor": 1.0}, True),
        ("mixed-yarn", {"mscale": 1.0, "mscale_all_dim": 1.0}, True),
        ("mixed-longrope", {}, False),
        ("mixed-longrope", {"attention_factor": 1.0}, True),
        ("mixed-longrope", {"attention_factor": 1.1}, False),
        ("mixed-longrope", {"factor": 1.0}, True),  # its default attention factor is 1
    ],
)
def test_only_attention_factor_1_has_a_native_form(method, options, native):
    mixed = build(method, **{"factor": 4.0, **required_options(method, "llama-2"), **options})
    geometry = Geometry(head_dim=128, theta=1e4, trained_length=4096)
    assert mixed.has_config_form is native
    assert (mixed.frequencies(geometry).attention_factor == 1) is native
    parameters = mixed.rope_parameters(geometry)
    assert parameters["rope_type"] == ("longrope" if native else "default")
