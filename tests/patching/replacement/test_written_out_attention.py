"""Every encoding against a decoder that is written out in numpy from the papers' formulas."""

import json
from pathlib import Path

import pytest
import torch
from helpers.encoded_models import IDS, VARIANTS, encoded, llama, logits, tokens
from helpers.written_out_decoder import written_out_logits

import rope_patch
from rope_patch.patching.replacement.encoding import DecoderShape, Span
from rope_patch.patching.replacement.registry import build_encoding

GOLDEN = json.loads((Path(__file__).parents[2] / "encodings" / "golden.json").read_text())


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_equals_a_written_out_decoder(name, options):
    model = encoded(name, options).double()
    ids = tokens()
    expected = torch.stack(
        [torch.from_numpy(written_out_logits(model, name, options, row)) for row in ids]
    )
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        # Frequencies and slopes of 32 bits are within the tolerance.
        torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_positions_matter_as_much_as_the_encoding_says(name, options):
    """Shuffled keys change nothing without positions, beyond what the causal mask does."""
    ids = tokens(rows=1)
    shuffled = torch.cat([ids[:, torch.tensor([1, 0])], ids[:, 2:]], 1)
    model = llama(num_hidden_layers=1)  # deeper layers see the order through the mask
    encoded(name, options, model)
    gap = (logits(model, ids) - logits(model, shuffled))[0, -1].abs().max()
    if name == "none":
        assert gap < 1e-5
    else:
        assert gap > 1e-4


def span(queries, keys, offset=0):
    return Span(torch.arange(queries) + offset, torch.arange(keys))


def bias(name, heads, at, **options):
    shape = DecoderShape(width=16, heads=heads, length=64, spread=0.02)
    return build_encoding(name, shape, options)[0], at


def test_alibi_equals_the_golden_vectors():
    encoding, at = bias("alibi", 4, span(3, 3))
    expected = torch.tensor(GOLDEN["alibi_4_heads_q3_k3"]).tril()
    torch.testing.assert_close(encoding(at)[0].tril(), expected)


def test_sandwich_equals_the_golden_vectors():
    encoding, at = bias("sandwich", 2, span(1, 51, offset=50), width=16)
    expected = torch.tensor(GOLDEN["sandwich_2_heads_d16"])
    got = encoding(at)[0, :, 0].flip(1)[:, [0, 1, 5, 50]]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "weight", "rate"), [("log", 1.5, 0.25), ("power", 0.1, 0.5)])
def test_kerple_equals_the_golden_vectors(kind, weight, rate):
    distances = [int(d) for d in GOLDEN["t5_causal_32_128"]]
    last = max(distances)
    encoding, at = bias("kerple", 1, span(1, last + 1, offset=last), kind=kind)
    with torch.no_grad():
        encoding.weight.fill_(weight)
        encoding.rate.fill_(rate)
        got = encoding(at)[0, 0, 0].flip(0)[distances]
    torch.testing.assert_close(got, torch.tensor(GOLDEN[f"kerple_{kind}"]), rtol=1e-5, atol=1e-6)


def test_t5_equals_the_golden_buckets():
    distances = [int(d) for d in GOLDEN["t5_causal_32_128"]]
    last = max(distances)
    encoding, at = bias("t5", 1, span(1, last + 1, offset=last))
    with torch.no_grad():
        encoding.relative_attention_bias.weight.copy_(torch.arange(32.0)[:, None])
        got = encoding(at)[0, 0, 0].flip(0)[distances]
    assert got.tolist() == list(GOLDEN["t5_causal_32_128"].values())


def test_every_encoding_is_tested():
    assert {name for name, _ in VARIANTS} == set(rope_patch.list_encodings())
