"""`rope_patch.patch` on encoded models: the same numbers as an encoding with other parameters."""

import copy

import pytest
import torch
from helpers.encoded_models import encoded, llama, logits, tokens
from helpers.written_out_decoder import LENGTH
from transformers.models.t5.modeling_t5 import T5Attention

import rope_patch
from rope_patch.encodings import AttentionHook, SharedTensors, Span

FACTOR = 4
LONG = FACTOR * LENGTH - 3
EXTENSIONS = [
    ("learned", {}, "linear", {"factor": FACTOR}),
    ("learned", {}, "cubic", {"factor": FACTOR}),
    ("learned", {}, "tile", {"factor": FACTOR}),
    ("alibi", {}, "linear", {"factor": FACTOR}),
    ("alibi", {}, "ntk", {"factor": FACTOR}),
    ("alibi", {}, "dynamic-ntk", {}),
    ("t5", {"buckets": 8}, "log-tail", {"factor": FACTOR}),
    ("t5", {"buckets": 8}, "max-distance", {"factor": FACTOR}),
    ("t5", {"buckets": 8}, "linear", {"factor": FACTOR}),
    ("t5", {"buckets": 8}, "dynamic-log-tail", {}),
    ("sinusoidal", {}, "linear", {"factor": FACTOR}),
    ("sinusoidal", {}, "ntk", {"factor": FACTOR}),
    ("integer", {}, "linear", {"factor": FACTOR}),
    ("normalised", {}, "linear", {"factor": FACTOR}),
    ("none", {}, "nope", {"temperature": "log-n"}),
    ("none", {}, "nope", {"temperature": 1.4}),
    ("rope", {}, "yarn", {"factor": FACTOR}),
    ("rope", {"p": 0.5}, "linear", {"factor": FACTOR}),
    ("rope", {}, "dynamic-yarn", {}),
    ("rnope", {}, "yarn", {"factor": FACTOR}),
    ("xpos", {}, "linear", {"factor": FACTOR}),
    ("xpos", {}, "dynamic-yarn", {}),
]
IDS = [f"{name}-{method}-{index}" for index, (name, _, method, _) in enumerate(EXTENSIONS)]


@pytest.mark.parametrize(("name", "options", "method", "arguments"), EXTENSIONS, ids=IDS)
def test_extension_acts_copies_and_undoes(name, options, method, arguments):
    model = encoded(name, options)
    ids = tokens(count=LONG)
    plain = None if name == "learned" else logits(model, ids)
    short = logits(model, tokens())
    handle = rope_patch.patch(model, method, **arguments)
    assert rope_patch.current(model) is handle
    extended = logits(model, ids)
    assert extended.isfinite().all()
    if plain is not None:
        assert (extended - plain).abs().max() > 1e-4
    assert torch.equal(logits(copy.deepcopy(model), ids), extended)
    rope_patch.unpatch(model)
    assert torch.equal(logits(model, tokens()), short)
    if plain is None:
        with pytest.raises(rope_patch.Refused, match="beyond the 16 rows"):
            logits(model, ids)


@pytest.mark.parametrize(
    ("name", "method", "unscaled"),
    [("alibi", "dynamic-ntk", {}), ("t5", "dynamic-log-tail", {"buckets": 8})],
)
def test_dynamic_methods_change_nothing_up_to_the_trained_length(name, method, unscaled):
    model = encoded(name, unscaled)
    before = logits(model, tokens())
    rope_patch.patch(model, method)
    torch.testing.assert_close(logits(model, tokens()), before, rtol=0, atol=1e-6)


def test_alibi_linear_divides_slopes():
    model = encoded("alibi", {})
    expected = torch.tensor([2.0 ** (-2 * h) / 16 for h in range(1, 5)])
    rope_patch.patch(model, "linear", factor=16)
    bias = model.model.position_encoding(Span(torch.tensor([9]), torch.arange(10)))
    torch.testing.assert_close(bias[0, :, 0, 0], -9 * expected)


@pytest.mark.parametrize("method", ["linear", "max-distance"])
def test_t5_equals_buckets_of_transformers(method):
    model = encoded("t5", {"buckets": 8, "max_distance": 12})
    handle = rope_patch.patch(model, method, factor=2)
    assert ("last bucket begins at 24 tokens" in handle.summary()) == (method == "max-distance")
    encoding = model.model.position_encoding
    with torch.no_grad():
        encoding.relative_attention_bias.weight.copy_(torch.arange(8.0)[:, None].expand(-1, 4))
    at = torch.arange(30)
    got = encoding(Span(torch.tensor([29]), 29 - at))[0, 0, 0].long()
    distances, largest = (at // 2, 12) if method == "linear" else (at, 24)
    expected = T5Attention._relative_position_bucket(
        -distances, bidirectional=False, num_buckets=8, max_distance=largest
    )
    assert torch.equal(got, expected)


def test_sinusoids_are_read_at_divided_positions():
    """Every fourth token of the extended table is a token of the plain one."""
    model = encoded("sinusoidal", {})
    encoding = model.model.position_encoding
    plain = encoding(torch.arange(LENGTH)[None])
    rope_patch.patch(model, "linear", factor=FACTOR)
    torch.testing.assert_close(encoding(torch.arange(0, 4 * LENGTH, 4)[None]), plain)
    rope_patch.patch(model, "ntk", factor=FACTOR)
    stretched = encoding(torch.arange(0, 4 * LENGTH)[None])
    torch.testing.assert_close(stretched[0, :LENGTH, :2], plain[0, :, :2])  # the fastest stays
    slowest = encoding(torch.arange(0, 4 * LENGTH, 4)[None])[0, :, -2:]
    torch.testing.assert_close(slowest, plain[0, :, -2:])  # four times slower


def test_a_learned_table_keeps_its_rows_at_multiples():
    model = encoded("learned", {})
    table = model.model.position_encoding.table
    plain = table.weight
    rope_patch.patch(model, "linear", factor=FACTOR)
    assert torch.equal(table.weight[::FACTOR], plain)
    rope_patch.unpatch(model)
    assert table.weight is plain  # the object that optimizers hold


def test_rnope_stretches_the_layers_that_rotate():
    """Against two plain models: one layer of the yarn one, then one without positions."""
    model = encoded("rnope", {}, num_hidden_layers=2)
    rope_patch.patch(model, "yarn", factor=FACTOR)
    ids = tokens(count=LONG)
    rotating = llama(num_hidden_layers=2)
    rope_patch.patch(rotating, "yarn", factor=FACTOR)
    still = llama(num_hidden_layers=2)
    rope_patch.patch(still, "nope", kernels="hf")
    with torch.no_grad():
        got = model.model(ids, output_hidden_states=True).hidden_states
        first = rotating.model(ids, output_hidden_states=True).hidden_states[1]
        torch.testing.assert_close(got[1], first, rtol=1e-5, atol=1e-5)
        cos, sin = still.model.rotary_emb(first, torch.arange(LONG)[None])
        second = still.model.layers[1](first, position_embeddings=(cos, sin))
    torch.testing.assert_close(got[2], still.model.norm(second), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "method", "arguments", "match"),
    [
        ("none", "yarn", {"factor": 4}, "'nope' with a temperature"),
        ("none", "nope", {}, "'nope' with a temperature"),
        ("kerple", "linear", {"factor": 4}, "kerple"),
        ("binary", "linear", {"factor": 4}, "binary"),
        ("alibi", "yarn", {"factor": 4}, "linear, ntk, dynamic-linear"),
        ("alibi", "ntk", {"factor": 1}, "would change nothing"),
        ("learned", "ntk", {"factor": 4}, "linear, cubic, tile"),
        ("rnope", "dynamic-yarn", {}, "rnope"),
        ("xpos", "yarn", {"factor": 4, "kernels": "reference"}, "kernels"),
    ],
)
def test_unsuitable_methods_are_refused(name, method, arguments, match):
    model = encoded(name, {})
    before = logits(model, tokens())
    with pytest.raises(rope_patch.Refused, match=match):
        rope_patch.patch(model, method, **arguments)
    assert rope_patch.current(model) is None
    assert torch.equal(logits(model, tokens()), before)


def test_the_divisor_of_normalised_positions_is_no_trained_length():
    model = encoded("normalised", {"length": 40})
    patch = rope_patch.patch(model, "linear", length=4 * LENGTH)
    assert (patch.trained_length, patch.factor) == (LENGTH, 4)


@pytest.mark.parametrize("name", ["sinusoidal", "integer"])
def test_a_formula_may_be_trained_on_longer_texts_than_the_config_states(name):
    """A formula has no last row, unlike a table."""
    model = encoded(name, {})
    patch = rope_patch.patch(model, "linear", trained_length=2 * LENGTH, factor=2)
    assert patch.length == 4 * LENGTH


@pytest.mark.parametrize(
    ("name", "options", "method", "left"),
    [
        ("alibi", {}, "dynamic-ntk", True),
        ("alibi", {}, "dynamic-linear", False),
        ("t5", {"buckets": 8}, "dynamic-log-tail", True),
        ("t5", {"buckets": 8}, "dynamic-linear", False),
    ],
)
def test_dynamic_extensions_count_tokens_and_no_padding(name, options, method, left):
    model = encoded(name, options)
    rope_patch.patch(model, method)
    ids = tokens(count=LENGTH + 5)
    pads = (30, 0) if left else (0, 30)
    padded, mask = (torch.nn.functional.pad(x, pads) for x in (ids, torch.ones_like(ids)))
    got = model(padded, attention_mask=mask).logits
    got = got[:, 30:] if left else got[:, :-30]
    torch.testing.assert_close(got, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "method"),
    [("alibi", {}, "dynamic-ntk"), ("t5", {"buckets": 8}, "dynamic-log-tail")],
)
def test_flex_attention_counts_tokens_and_no_padding(name, options, method):
    """Twenty slots are beyond the trained length, and fourteen tokens are not."""
    from torch.nn.attention.flex_attention import create_block_mask

    slots, padding = LENGTH + 4, 6
    model = encoded(name, options)
    rope_patch.patch(model, method)
    layer = model.model.layers[0]
    layer.self_attn.config._attn_implementation = "flex_attention"

    def position_bias(first):
        def sees(row, head, query, key):
            return (key <= query) & (key >= first)

        hook = AttentionHook(model.model.position_encoding, layer, 0, SharedTensors())
        still = torch.zeros(1, slots, 8)
        arguments = {
            "attention_mask": create_block_mask(sees, 2, None, slots, slots, device="cpu"),
            "position_embeddings": (still, still),
            "position_ids": torch.arange(slots)[None],
        }
        return hook(layer.self_attn, (torch.zeros(2, slots, 32),), arguments)[1]["position_bias"]

    padded, whole = position_bias(padding), position_bias(0)
    span = Span(torch.arange(slots), torch.arange(slots))
    rope_patch.unpatch(model)
    plain = model.model.position_encoding(span).expand_as(padded)
    assert torch.equal(padded, plain)
    assert not torch.equal(whole, plain)
