"""Test `nope` (DroPE): zero frequencies at every length."""

import math

import pytest
from test_options import GEOMETRIES, frequencies

from rope_patch.methods import build


@pytest.mark.parametrize("seq_len", [None, 1, 100_000])
@pytest.mark.parametrize("model", GEOMETRIES)
def test_frequencies_are_zero_at_any_length(model, seq_len):
    got = frequencies("nope", model, factor=4, seq_len=seq_len)
    assert got.inv_freq.shape == (GEOMETRIES[model][1] // 2,)
    assert not got.inv_freq.any()
    assert got.attention_factor == 1


def test_one_rotation_serves_all_lengths():
    assert build("nope").valid_until(1000, 64) == math.inf
    assert build("nope", temperature="drope:0.4").valid_until(1000, 64) == math.inf


def test_temperature_has_no_native_form():
    assert build("nope").is_native
    assert not build("nope", temperature="drope:0.4").is_native
