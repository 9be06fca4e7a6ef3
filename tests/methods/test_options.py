"""Test properties of every method on real geometries, and effects of options."""

import math

import pytest
import torch

import rope_patch
from rope_patch.methods import Geometry, PositionMap, build, registered_methods

# head_dim, rotary_dim, theta, trained_length
GEOMETRIES = {
    "llama-2": (128, 128, 1e4, 4096),
    "llama-3": (128, 128, 5e5, 8192),
    "smollm2": (64, 64, 1e5, 8192),
    "qwen-2.5": (128, 128, 1e6, 32768),
    "gemma-3": (256, 256, 1e6, 32768),
    "phi-2": (80, 32, 1e4, 2048),
}
FACTORS = (1.5, 4, 32)


def frequencies(method, model, **options):
    head_dim, rotary_dim, theta, trained_length = GEOMETRIES[model]
    return rope_patch.frequencies(
        method,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        theta=theta,
        trained_length=trained_length,
        **options,
    )


def plain(model):
    _, rotary_dim, theta, _ = GEOMETRIES[model]
    pairs = range(rotary_dim // 2)
    return torch.tensor([theta ** (-2 * i / rotary_dim) for i in pairs], dtype=torch.float64)


def required_options(method, model):
    pairs = GEOMETRIES[model][1] // 2
    if method == "dpe":
        return {"groups": [2] * 8}
    return {"long_factor": [1 + i / 8 for i in range(pairs)]} if "longrope" in method else {}


def stretched(method, factor):
    """Return the options that stretch a method's frequencies by a factor."""
    is_map = issubclass(registered_methods()[method], PositionMap)
    return {"on": f"yarn:{factor}"} if is_map else {"factor": factor}


@pytest.mark.parametrize("model", GEOMETRIES)
@pytest.mark.parametrize("method", rope_patch.list_methods())
def test_every_method_slows_pairs_down_in_order(method, model):
    options = {**stretched(method, 4), **required_options(method, model)}
    got = frequencies(method, model, **options)
    unscaled = plain(model)
    assert got.inv_freq.dtype == torch.float64
    assert got.inv_freq.shape == unscaled.shape
    assert (got.inv_freq.diff() <= 0).all()
    assert (got.inv_freq <= unscaled * (1 + 1e-12)).all()
    assert (got.inv_freq >= 0).all()
    assert got.attention_factor >= 1


@pytest.mark.parametrize("model", GEOMETRIES)
@pytest.mark.parametrize(
    "method", ["default", "linear", "ntk", "ntk-by-parts", "yarn", "llama3", "abf"]
)
def test_factor_one_is_the_plain_rotation(method, model):
    got = frequencies(method, model, factor=1)
    torch.testing.assert_close(got.inv_freq, plain(model), rtol=1e-13, atol=0)
    assert got.attention_factor == 1


def test_another_base_stretches_a_scaled_rotation_as_an_unscaled_one():
    """Each pair of a config's own scaling is stretched further, and none goes back to theta's."""
    theta, new_theta, pairs = 1e4, 8e6, 16
    own = [theta ** (-k / pairs) / (1 + k) for k in range(pairs)]
    for base in (None, tuple(own)):
        geometry = Geometry(head_dim=2 * pairs, theta=theta, trained_length=4096, base=base or ())
        got = build("abf", factor=4, new_theta=new_theta).frequencies(geometry).inv_freq
        before = own if base else [theta ** (-k / pairs) for k in range(pairs)]
        expected = [f * (new_theta / theta) ** (-k / pairs) for k, f in enumerate(before)]
        expected = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("model", GEOMETRIES)
def test_abf_derives_the_critical_base(model, factor):
    _, rotary_dim, theta, trained_length = GEOMETRIES[model]
    got = frequencies("abf", model, factor=factor)
    # The (fractional) pair whose wavelength is exactly the trained length ...
    critical = rotary_dim * math.log(trained_length / (2 * math.pi)) / (2 * math.log(theta))
    assert 2 * math.pi * theta ** (2 * critical / rotary_dim) == pytest.approx(trained_length)
    # ... has exactly the target length as wavelength under the new base.
    new_theta = float(got.inv_freq[-1]) ** (-rotary_dim / (rotary_dim - 2))
    wavelength = 2 * math.pi * new_theta ** (2 * critical / rotary_dim)
    assert wavelength == pytest.approx(factor * trained_length, rel=1e-9)


def test_yarn_mscale_without_mscale_all_dim_changes_nothing():
    default = frequencies("yarn", "llama-2", factor=4)
    with_mscale = frequencies("yarn", "llama-2", factor=4, mscale=0.707)
    assert with_mscale.attention_factor == default.attention_factor == 0.1 * math.log(4) + 1


@pytest.mark.parametrize("method", ["yarn", "longrope"])
def test_attention_factor_option_replaces_the_default(method):
    options = required_options(method, "llama-2")
    got = frequencies(method, "llama-2", factor=4, attention_factor=1.25, **options)
    assert got.attention_factor == 1.25
    default = frequencies(method, "llama-2", factor=4, **options)
    torch.testing.assert_close(got.inv_freq, default.inv_freq, rtol=0, atol=0)


def test_longrope_without_short_factors_leaves_short_sequences_alone():
    options = {"factor": 4, **required_options("longrope", "llama-2")}
    at_border = frequencies("longrope", "llama-2", seq_len=4096, **options)
    beyond = frequencies("longrope", "llama-2", seq_len=4097, **options)
    torch.testing.assert_close(at_border.inv_freq, plain("llama-2"), rtol=1e-14, atol=0)
    stretch = torch.tensor(options["long_factor"], dtype=torch.float64)
    torch.testing.assert_close(beyond.inv_freq, plain("llama-2") / stretch, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("share", "rotating"), [(1.0, 64), (0.75, 48), (0.5, 32), (0.01, 0)])
def test_proportional_stops_the_slowest_pairs(share, rotating):
    got = frequencies("proportional", "llama-2", factor=4, partial_rotary_factor=share).inv_freq
    torch.testing.assert_close(got[:rotating], plain("llama-2")[:rotating], rtol=1e-14, atol=0)
    assert not got[rotating:].any()


def test_clipped_leaves_the_fast_pairs_and_stops_the_slowest():
    """Of 64 pairs, the authors' code clips 20: the first of them and all before are unchanged."""
    got, unscaled = frequencies("clipped", "llama-2").inv_freq, plain("llama-2")
    torch.testing.assert_close(got[:45], unscaled[:45], rtol=1e-14, atol=0)
    assert (got[45:] < unscaled[45:]).all()
    assert got[-1] == 0
    # The middle of an odd number of pairs is halved.
    got = frequencies("clipped", "llama-2", clipped_pairs=21).inv_freq
    assert got[53] / unscaled[53] == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize(("method", "inner"), [("clipped-abf", "abf"), ("clipped-yarn", "yarn")])
@pytest.mark.parametrize("model", GEOMETRIES)
def test_clipping_comes_after_the_inner_method(method, inner, model):
    got, unclipped = (frequencies(name, model, factor=4) for name in (method, inner))
    clip = frequencies("clipped", model).inv_freq / plain(model)
    torch.testing.assert_close(got.inv_freq, unclipped.inv_freq * clip, rtol=1e-12, atol=0)
    assert got.attention_factor == unclipped.attention_factor


@pytest.mark.parametrize(
    ("method", "options", "error", "fact"),
    [
        ("yarn", {"beta_fast": 1, "beta_slow": 32}, ValueError, "beta_fast"),
        ("yarn", {"beta_slow": 0}, ValueError, "beta_slow"),
        ("yarn", {"attention_factor": 0}, ValueError, "attention_factor"),
        ("yarn", {"mscale": "0.7"}, TypeError, "mscale"),
        ("llama3", {"low_freq_factor": 4}, ValueError, "high_freq_factor"),
        ("abf", {"new_theta": 1}, ValueError, "new_theta"),
        ("proportional", {"partial_rotary_factor": 0}, ValueError, "partial_rotary_factor"),
        ("proportional", {"partial_rotary_factor": 1.5}, ValueError, "partial_rotary_factor"),
        ("longrope", {"long_factor": [1.0] * 63}, ValueError, "64"),
        ("longrope", {"long_factor": [0.0] * 64}, ValueError, "above 0"),
        ("longrope", {"long_factor": "1,2"}, TypeError, "list"),
        ("mixed-longrope", {"long_factor": [1.0] * 63}, ValueError, "64"),
        (
            "mixed-longrope",
            {"long_factor": [2.0], "short_factor": [1.0]},
            ValueError,
            "short_factor must be left out",
        ),
        ("clipped", {"clipped_pairs": 1}, ValueError, "clipped_pairs"),
        ("clipped", {"clipped_pairs": 2.5}, ValueError, "clipped_pairs"),
        ("clipped", {"clipped_pairs": "all"}, TypeError, "clipped_pairs"),
        ("clipped-yarn", {"clipped_pairs": 65}, ValueError, "64"),
        ("nope", {"temperature": 0.4}, ValueError, "temperature"),
        ("nope", {"temperature": "warm"}, ValueError, "temperature"),
        ("nope", {"growth": "exact"}, ValueError, "growth"),
        ("linear", {"factor": 0.5}, ValueError, "at least 1"),
        ("linear", {"factor": math.nan}, ValueError, "finite"),
        ("linear", {"factor": True}, TypeError, "factor"),
        ("dynamic-yarn", {"growth": "fast"}, ValueError, "growth must be one of stepped, exact"),
        ("dynamic-yarn", {"growth": None}, ValueError, "growth"),
        ("dynamic-yarn", {"beta_fst": 3}, ValueError, "did you mean 'beta_fast'"),
        ("yarn", {"facter": 4}, ValueError, "did you mean 'factor'"),
        ("dynamic_yarn", {}, ValueError, "did you mean 'dynamic-yarn'"),
    ],
)
def test_options_out_of_range_are_refused(method, options, error, fact):
    with pytest.raises(error, match=fact):
        frequencies(method, "llama-2", **{"factor": 4, **options})


@pytest.mark.parametrize(
    ("bad", "fact"),
    [
        ({"head_dim": 63}, "rotary_dim"),
        ({"rotary_dim": 66}, "rotary_dim"),
        ({"theta": 1}, "theta"),
        ({"trained_length": 0}, "trained_length"),
    ],
)
def test_invalid_geometry_is_refused(bad, fact):
    with pytest.raises(ValueError, match=fact):
        rope_patch.frequencies(
            "linear", **{"head_dim": 64, "theta": 1e4, "trained_length": 2048, "factor": 2, **bad}
        )


def test_no_rotary_dimensions_are_not_the_whole_head():
    with pytest.raises(ValueError, match="rotary_dim=0"):
        rope_patch.frequencies(
            "yarn", head_dim=64, theta=1e4, trained_length=2048, factor=2, rotary_dim=0
        )


@pytest.mark.parametrize("seq_len", [None, 1, 100_000])
def test_nope_has_no_frequency_at_any_length(seq_len):
    got = frequencies("nope", "phi-2", factor=4, seq_len=seq_len)
    assert got.inv_freq.shape == (16,)
    assert not got.inv_freq.any()
    assert got.attention_factor == 1
    for temperature, is_native in (("none", True), ("drope:0.4", False)):
        nope = build("nope", temperature=temperature)
        assert nope.is_native is is_native
        assert nope.valid_until(1000, 64) == math.inf


def test_list_methods_describes_every_name_in_one_line():
    methods = rope_patch.list_methods()
    assert list(methods)[:2] == ["default", "linear"]
    assert all(line and "\n" not in line for line in methods.values())
