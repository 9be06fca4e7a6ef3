"""Test pictures of biases, head by head, before and after an extension."""

import math

import pytest
import torch

from rope_patch.pictures.biases import BIASES
from rope_patch.pictures.picture import make_picture

N = 24
AHEAD = torch.ones(N, N).triu(1).bool()


def values(**options):
    """Return the matrices as trained and extended, each head's."""
    shown = [panel.values for panel in make_picture("bias", length=N, heads=4, **options).panels]
    return shown[:4], shown[4:]


@pytest.mark.parametrize("encoding", BIASES)
def test_biases_are_causal_and_lowest_far_away(encoding):
    # T5's tail begins at 16 tokens, so the trained length must be longer.
    before, after = values(encoding=encoding, factor=1.2)
    # ALiBi leaves its first head alone.
    assert not torch.equal(before[1].nan_to_num(), after[1].nan_to_num())
    for matrix in (*before, *after):
        assert matrix[AHEAD].isnan().all()
        assert matrix.diagonal().eq(0).all()
        assert matrix[N - 1, 0] == matrix[N - 1].min() < 0


@pytest.mark.parametrize("method", ["ntk", "linear"])
def test_alibi_falls_by_its_slopes(method):
    before, after = values(method=method, factor=4.0)
    for head in range(4):
        slope = 2.0 ** (-8 * (head + 1) / 4)
        scale = 4.0 ** (-head / 3) if method == "ntk" else 0.25
        assert before[head][20, 5] == pytest.approx(-15 * slope)
        assert after[head][20, 5] == pytest.approx(-15 * slope * scale)


def test_kerple_and_sandwich_fall_as_published():
    kerple, _ = values(encoding="kerple")
    sandwich, squeezed = values(encoding="sandwich", factor=2.0)
    rates = [10000 ** (-2 * k / 128) for k in range(64)]
    for head in range(4):
        share = (head + 1) / 4
        assert kerple[head][20, 5] == pytest.approx(-2 * share * math.log(1 + share * 15))
        for matrix, distance in ((sandwich, 15), (squeezed, 7.5)):
            expected = (sum(math.cos(distance * w) for w in rates) - 64) / (8 * (head + 1) / 4)
            assert matrix[head][20, 5] == pytest.approx(expected)


def test_fire_takes_the_share_of_the_querys_position():
    panels = make_picture("bias", encoding="fire", length=700, heads=4, factor=2.0).panels
    for panel, scale in ((panels[3], 1), (panels[7], 2)):
        for query in (100, 699):
            longest = math.log(1 + 0.1 * max(512, query / scale))
            expected = -8 * math.log(1 + 0.1 * 50 / scale) / longest
            assert panel.values[query, query - 50] == pytest.approx(expected)
