"""Compare encodings with vectors computed apart from them, and with transformers' own modules.

`golden.json` was computed with numpy in float64 (T5's logarithm in float32) from the formulas of
the papers. Those that transformers has were compared with its modules (release 5.23).
"""

import json
from pathlib import Path

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.ctrl.modeling_ctrl import positional_encoding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.whisper.modeling_whisper import sinusoids
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

from rope_patch import Refused, encodings

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
DISTANCES = torch.tensor([int(d) for d in GOLDEN["t5_causal_32_128"]])
TABLE = torch.tensor(GOLDEN["stretch_table"], dtype=torch.float64)


def span(*arguments):
    return torch.arange(*arguments)


def vector(name, at=DISTANCES):
    """Return golden numbers that are kept by distance."""
    return [GOLDEN[name][str(int(d))] for d in at]


COMPUTED = {
    "integer": lambda: encodings.integer_table(span(4), 3),
    "normalised": lambda: encodings.normalised_table(span(5), 4, 5),
    "normalised_by_10": lambda: encodings.normalised_table(span(3), 2, 10),
    "binary_lsb_first": lambda: encodings.digit_table(span(16), 4),
    "binary_signed_6_bits": lambda: encodings.digit_table(span(9), 6, signed=True),
    "binary_msb_252": lambda: encodings.digit_table(span(253), 8, largest_first=True)[252],
    "base_4": lambda: encodings.digit_table(span(18), 3, base=4),
    "sinusoidal_interleaved": lambda: encodings.sinusoidal_table(span(4), 8),
    "sinusoidal_concatenated_t2t": lambda: halves(span(4), law="tensor2tensor"),
    "whisper_sinusoids": lambda: halves(span(4), law="tensor2tensor"),
    "marian": lambda: halves(span(4)),
    "xglm": lambda: halves(span(2, 6), law="tensor2tensor"),
    "sinusoidal_at_halves": lambda: encodings.sinusoidal_table(span(4) / 2, 8),
    "shift_matrix_3_d4": lambda: encodings.shift_matrix(3, 4),
    "stretch_linear_positions": lambda: encodings.stretch_table(TABLE, 8),
    "stretch_cubic": lambda: encodings.stretch_table(TABLE, 8, "cubic"),
    "stretch_tile": lambda: encodings.stretch_table(TABLE, 8, "tile"),
    "alibi_4_heads_q3_k3": lambda: encodings.alibi_bias(
        encodings.alibi_slopes(4), span(3)[:, None] - span(3)
    ),
    "alibi_scaled_half_q1_k5_offset4": lambda: encodings.alibi_bias(
        encodings.linear_slopes(encodings.alibi_slopes(2), 2), 4 - span(5)[None]
    ),
    "ntk_alibi_slopes_8_x2": lambda: encodings.ntk_slopes(encodings.alibi_slopes(8), 2),
    "ntk_alibi_slopes_12_x4": lambda: encodings.ntk_slopes(encodings.alibi_slopes(12), 4),
    "kerple_log": lambda: encodings.kerple_log(DISTANCES, 1.5, 0.25),
    "kerple_power": lambda: encodings.kerple_power(DISTANCES, 0.1, 0.5),
    "sandwich_2_heads_d16": lambda: encodings.sandwich(torch.tensor([0, 1, 5, 50]), 2, 16),
    "fire_input_c0.1_L64": lambda: encodings.fire_progress(
        torch.tensor([0, 3, 63, 100, 100]), torch.tensor([0, 1, 0, 99, 0]), 0.1, 64
    ),
    "xpos_decay_d8": lambda: encodings.xpos_factors(torch.tensor([0, 64, 512]), 8),
}
BY_DISTANCE = {
    "dot_decay_d128": lambda: encodings.dot_products(DISTANCES, 128),
    "t5_causal_32_128": lambda: encodings.t5_bucket(-DISTANCES),
    "t5_causal_32_512": lambda: encodings.t5_bucket(-DISTANCES, max_distance=512),
    "t5_causal_distances_over_4": lambda: encodings.t5_bucket(-(DISTANCES // 4)),
    "log_tail_64_to_512": lambda: encodings.squeeze_tail(DISTANCES, trained=64, length=512),
}


def halves(positions, **arguments):
    return encodings.sinusoidal_table(positions, 8, layout="halves", **arguments)


@pytest.mark.parametrize("name", [*COMPUTED, *BY_DISTANCE])
def test_formulas_match(name):
    compute = COMPUTED.get(name) or BY_DISTANCE[name]
    expected = vector(name) if name in BY_DISTANCE else GOLDEN[name]
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(compute().double(), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("heads", GOLDEN["alibi_slopes"])
def test_slopes_match(heads):
    expected = torch.tensor(GOLDEN["alibi_slopes"][heads], dtype=torch.float64)
    torch.testing.assert_close(encodings.alibi_slopes(int(heads)), expected, atol=1e-9, rtol=0)


def test_digit_counts_and_bidirectional_buckets_match():
    counts = {n: encodings.digit_count(int(n)) for n in GOLDEN["bits_needed"]}
    assert counts == GOLDEN["bits_needed"]
    assert encodings.digit_count(65, base=4) == 4
    expected = GOLDEN["t5_bidirectional_32_128"]
    got = encodings.t5_bucket(torch.tensor([int(r) for r in expected]), bidirectional=True)
    assert got.tolist() == list(expected.values())


# -- transformers' own modules ---------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 32, 71, 112])
def test_slopes_are_those_of_bloom_and_mpt(heads):
    mask = torch.ones(1, 9, dtype=torch.long)
    bloom = build_alibi_tensor(mask, heads, torch.float64).view(heads, 9)
    slopes = encodings.alibi_slopes(heads)
    torch.testing.assert_close(bloom, slopes[:, None] * span(9), atol=1e-6, rtol=1e-6)
    mpt = build_mpt_alibi_tensor(heads, 9).view(heads, 9)
    mine = encodings.alibi_bias(slopes, 8 - span(9))
    torch.testing.assert_close(mpt.double(), mine, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (16, 64), (32, 1000), (64, 300)])
def test_buckets_are_those_of_t5(bidirectional, buckets, farthest):
    relative = span(-3000, 3000)
    expected = T5Attention._relative_position_bucket(relative, bidirectional, buckets, farthest)
    got = encodings.t5_bucket(
        relative, bidirectional=bidirectional, buckets=buckets, max_distance=farthest
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("width", [8, 64])
def test_tables_are_those_of_the_models(width):
    marian = MarianSinusoidalPositionalEmbedding(50, width)
    expected = {
        "whisper": (sinusoids(50, width), span(50), "tensor2tensor"),
        "ctrl": (positional_encoding(50, width, torch.float32), span(50), "vaswani"),
        "marian": (marian.create_weight(), span(50), "vaswani"),
        "xglm": (
            XGLMSinusoidalPositionalEmbedding.get_embedding(52, width),
            span(52),
            "tensor2tensor",
        ),
    }
    for name, (table, positions, law) in expected.items():
        got = encodings.sinusoidal_table(positions, width, layout="halves", law=law)
        torch.testing.assert_close(got, table.double(), atol=1e-5, rtol=0, msg=name)


# -- properties ------------------------------------------------------------------------------------


def test_the_shift_matrix_moves_every_position():
    table = encodings.sinusoidal_table(span(30), 16)
    moved = table @ encodings.shift_matrix(7.5, 16).T
    expected = encodings.sinusoidal_table(span(30) + 7.5, 16)
    torch.testing.assert_close(moved, expected, atol=1e-12, rtol=0)


def test_products_depend_on_the_distance_alone():
    table = encodings.sinusoidal_table(span(40), 32)
    distances = span(40)[:, None] - span(40)
    expected = encodings.dot_products(distances.flatten(), 32).view(40, 40)
    torch.testing.assert_close(table @ table.T, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("factor", [2, 3, 8])
def test_a_linear_stretch_holds_every_trained_row(factor, dtype):
    table = torch.randn(100, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    stretched = encodings.stretch_table(table, 100 * factor)
    assert stretched.dtype == dtype
    assert torch.equal(stretched[::factor], table)


def test_stretches_between_lengths():
    table = torch.arange(10.0, dtype=torch.float64)[:, None]
    got = encodings.stretch_table(table, 13)[:, 0]
    expected = (span(13).double() * 10 / 13).clamp(max=9)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    assert torch.equal(encodings.stretch_table(table, 25, "tile")[:, 0], span(25).double() % 10)
    assert torch.equal(encodings.stretch_table(table, 10), table)


def test_ntk_slopes_keep_the_steepest():
    slopes = encodings.alibi_slopes(12)
    scaled = encodings.ntk_slopes(slopes, 4)
    assert scaled.max() == slopes.max()
    torch.testing.assert_close(scaled.min(), slopes.min() / 4)
    assert torch.equal(scaled.argsort(), slopes.argsort())
    single = encodings.alibi_slopes(1)  # the steepest and the flattest: it follows the length
    assert torch.equal(encodings.ntk_slopes(single, 4), single / 4)


def test_squeezed_distances_rise_and_stay_within_the_trained_ones():
    distances = encodings.squeeze_tail(span(2048), trained=256, length=2048)
    assert torch.equal(distances[:16], span(16))
    assert (distances.diff() >= 0).all()
    assert distances.max() == 255


@pytest.mark.parametrize(
    ("call", "fact"),
    [
        (lambda: encodings.stretch_table(TABLE, 8, "spline"), "one of linear, cubic, tile"),
        (lambda: encodings.stretch_table(TABLE, 3), "at least the 4 .*got 3"),
        (lambda: encodings.digit_table(span(4), 2, count=3), "3 digits"),
        (lambda: encodings.sinusoidal_table(span(4), 8, layout="whole"), "layout"),
        (lambda: encodings.sinusoidal_table(span(4), 8, law="own"), "law.*vaswani"),
        (
            lambda: encodings.squeeze_tail(span(4), trained=64, length=64),
            "16, 64 and 64",
        ),
    ],
)
def test_what_cannot_be_is_refused(call, fact):
    with pytest.raises(Refused, match=fact):
        call()
