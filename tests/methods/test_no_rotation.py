"""Test `nope` (DroPE): zero frequencies, and the paper's temperature for logits."""

import math

import pytest
from test_options import GEOMETRIES, frequencies

from rope_patch.methods import build

WHOLE = [name for name, (head_dim, rotary_dim, *_) in GEOMETRIES.items() if head_dim == rotary_dim]


@pytest.mark.parametrize("seq_len", [None, 1, 100_000])
@pytest.mark.parametrize("model", GEOMETRIES)
def test_frequencies_are_zero_at_any_length(model, seq_len):
    got = frequencies("nope", model, factor=4, seq_len=seq_len)
    assert got.inv_freq.shape == (GEOMETRIES[model][1] // 2,)
    assert not got.inv_freq.any()
    assert got.attention_factor == 1


@pytest.mark.parametrize("temperature", [0.103, 0.412])
@pytest.mark.parametrize("model", WHOLE)
def test_temperature_matches_the_paper(model, temperature):
    """Check beta = 1 + c ln(n / trained_length), which is applied to q and to k."""
    trained = GEOMETRIES[model][3]
    for length, beta in [
        (1, 1),
        (trained, 1),
        (2 * trained, 1 + temperature * math.log(2)),
        (8 * trained, 1 + temperature * math.log(8)),
    ]:
        got = frequencies("nope", model, seq_len=length, temperature=temperature)
        assert got.attention_factor**2 == pytest.approx(beta, rel=1e-12)
        assert not got.inv_freq.any()


def test_missing_length_means_the_factor():
    at_factor = frequencies("nope", "llama-3", factor=4, temperature=0.4)
    at_length = frequencies("nope", "llama-3", seq_len=4 * 8192, temperature=0.4)
    assert at_factor.attention_factor == at_length.attention_factor


def test_temperature_grows_in_the_steps_of_dynamic_methods():
    assert build("nope").valid_until(1000, 64) == math.inf
    lengths = (1, 64, 65, 100, 128, 300)
    for growth in ("stepped", "exact"):
        with_temperature = build("nope", temperature=0.4, growth=growth)
        dynamic = build("dynamic-yarn", growth=growth)
        assert [with_temperature.valid_until(n, 64) for n in lengths] == [
            dynamic.valid_until(n, 64) for n in lengths
        ]


def test_temperature_is_refused_for_partly_rotated_heads():
    with pytest.raises(ValueError, match="32 of 80 dimensions"):
        frequencies("nope", "phi-2", seq_len=10_000, temperature=0.4)
    assert frequencies("nope", "phi-2", temperature=0.0).attention_factor == 1


def test_temperature_has_no_native_form():
    assert build("nope").has_config_form
    assert not build("nope", temperature=0.4).has_config_form
    assert (str(build("nope")), str(build("nope", temperature=0.4))) == (
        "nope",
        "nope, temperature 0.4",
    )
