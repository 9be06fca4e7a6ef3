"""Test dynamic methods against their definition and their static forms."""

import math

import pytest
import torch
from test_options import GEOMETRIES, frequencies, plain

from rope_patch.methods import Dynamic, PositionMap, build, registered_methods

INNER = {
    "dynamic": "ntk",
    "dynamic-linear": "linear",
    "dynamic-yarn": "yarn",
    "dynamic-ntk-by-parts": "ntk-by-parts",
    "dynamic-llama3": "llama3",
    "dynamic-abf": "abf",
    "dynamic-ntk-by-parts-2023-06": "ntk-by-parts-2023-06",
}


def trained_length(model):
    return GEOMETRIES[model][3]


def test_inner_covers_all_dynamic_methods():
    dynamic = {name for name, method in registered_methods().items() if method.is_dynamic}
    assert set(INNER) == {
        name for name in dynamic if issubclass(registered_methods()[name], Dynamic)
    }
    maps = {n for n, method in registered_methods().items() if issubclass(method, PositionMap)}
    assert dynamic - set(INNER) - maps == {"nope"}  # zeros at any length


@pytest.mark.parametrize("model", GEOMETRIES)
@pytest.mark.parametrize("method", INNER)
def test_sequences_get_the_static_method_at_their_factor_or_the_plain_rotation(method, model):
    for ratio in (1.01, 7.3):
        length = round(ratio * trained_length(model))
        got = frequencies(method, model, seq_len=length)
        static = frequencies(INNER[method], model, factor=length / trained_length(model))
        torch.testing.assert_close(got.inv_freq, static.inv_freq, rtol=1e-14, atol=0)
        assert got.attention_factor == pytest.approx(static.attention_factor, rel=1e-14)
    for length in (1, trained_length(model)):
        got = frequencies(method, model, seq_len=length)
        torch.testing.assert_close(got.inv_freq, plain(model), rtol=1e-14, atol=0)
        assert got.attention_factor == 1
    if method != "dynamic":  # whose factor is transformers'; of others, it stands in for a length
        missing = frequencies(method, model, factor=4)
        assert missing.inv_freq.equal(frequencies(INNER[method], model, factor=4).inv_freq)


def test_custom_attention_factor_applies_beyond_the_trained_length_only():
    options = {"attention_factor": 1.5}
    assert frequencies("dynamic-yarn", "smollm2", seq_len=8192, **options).attention_factor == 1
    assert frequencies("dynamic-yarn", "smollm2", seq_len=8193, **options).attention_factor == 1.5


@pytest.mark.parametrize("length", [4097, 6000, 16384, 131072])
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_factor_of_dynamic_ntk_matches_transformers_formula(factor, length):
    """Check base * (f n / L - (f - 1))^(d / (d - 2))."""
    got = frequencies("dynamic", "llama-2", factor=factor, seq_len=length)
    theta = 1e4 * (factor * length / 4096 - (factor - 1)) ** (128 / 126)
    assert got.inv_freq[-1].item() == pytest.approx(theta ** (-126 / 128), rel=1e-12)


@pytest.mark.parametrize("trained_length", [64, 2048, 8192, 1000])
def test_growth_is_stepped_on_quarter_powers_of_two(trained_length):
    method = build("dynamic-yarn")
    ends = [
        method.valid_until(length, trained_length) for length in range(1, 9 * trained_length, 7)
    ]
    assert ends == sorted(ends)
    for length, end in zip(range(1, 9 * trained_length, 7), ends, strict=True):
        assert end >= length
        if end == trained_length:
            assert length <= trained_length
            continue
        step = 4 * math.log2(end / trained_length)
        assert step == pytest.approx(round(step), abs=1e-9)
        assert (
            trained_length * 2 ** ((round(step) - 1) / 4) < length
        )  # the step before is too short


def test_growth_step_includes_its_end():
    method = build("dynamic")
    for step in range(1, 40):
        end = 8192 * 2 ** (step / 4)
        assert method.valid_until(end, 8192) == end
        assert method.valid_until(math.floor(end) + 1, 8192) > end


def test_other_growths():
    exact = build("dynamic-linear", growth="exact")
    assert [exact.valid_until(n, 64) for n in (1, 64, 65, 66)] == [64, 64, 65, 66]
    admission, grown = build("dynamic-yarn", growth="admission"), build("dynamic-yarn")
    for length in (1, 64, 65, 100, 300, 5000):
        assert admission.valid_until(length, 64) == grown.valid_until(length, 64)
    assert admission.fixed_at_admission
    assert not grown.fixed_at_admission


def test_static_methods_are_valid_forever_and_longrope_up_to_the_trained_length():
    assert build("yarn", factor=4).valid_until(10, 64) == math.inf
    longrope = build("longrope", factor=4, long_factor=[1.0, 2.0])
    assert [longrope.valid_until(n, 64) for n in (1, 64, 65)] == [64, 64, math.inf]
    equal_sets = build("longrope", factor=4, long_factor=[1.0, 2.0], short_factor=[1.0, 2.0])
    assert equal_sets.valid_until(1, 64) == math.inf
