"""T5's buckets: squeezed distances, against transformers' own code with other inputs."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from architectures.text_models import tiny_text_model
from helpers.encoding_models import LENGTH, encoding_model, token_logits
from helpers.releases import plain_transformers
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.models.longt5 import modeling_longt5
from transformers.models.t5.modeling_t5 import T5Attention

import rope_patch

FACTOR = 4
TRAINED = 64  # of `tiny_text_model`
IDS = torch.arange(10, 110)[None]


def squeezed(distance, exact, trained):
    """Return the distance that `log-tail` reads instead, from its formula in the reference."""
    if distance < exact:
        return distance
    power = math.log(trained / exact) / math.log(FACTOR * trained / exact)
    return math.floor(exact * (distance / exact) ** power + 1e-9)


def t5_attention(model, part):
    return getattr(model, part).block[0].layer[0].SelfAttention


@pytest.mark.parametrize("part", ["encoder", "decoder"])
@pytest.mark.parametrize(
    ("method", "moved"),
    [
        ("linear", lambda distance, exact: distance // FACTOR),
        ("log-tail", lambda distance, exact: squeezed(distance, exact, LENGTH)),
    ],
)
def test_t5_reads_buckets_at_squeezed_distances(part, method, moved):
    model = encoding_model("T5ForConditionalGeneration")
    attention, size = t5_attention(model, part), FACTOR * LENGTH
    with rope_patch.patch(model, method, factor=FACTOR, trained_length=LENGTH):
        bias = attention.compute_bias(size, size)[0]
    exact = 8 if part == "encoder" else 16
    relative = torch.arange(size)[None] - torch.arange(size)[:, None]
    lookup = torch.tensor([moved(r, exact) for r in range(size)])
    distances = relative.sign() * lookup[relative.abs()]
    bucket = T5Attention._relative_position_bucket(distances, part == "encoder", 32, 128)
    expected = attention.relative_attention_bias(bucket).permute(2, 0, 1)
    assert torch.equal(bias, expected)


def test_t5_keeps_near_distances_and_reads_trained_buckets_alone():
    model = encoding_model("T5ForConditionalGeneration")
    attention, size = t5_attention(model, "decoder"), FACTOR * LENGTH
    before = attention.compute_bias(size, size)[0, :, -1].flip(-1)  # by distance
    with rope_patch.patch(model, "log-tail", factor=FACTOR, trained_length=LENGTH):
        after = attention.compute_bias(size, size)[0, :, -1].flip(-1)
    assert torch.equal(after[:, :16], before[:, :16])
    trained = before[:, :LENGTH]
    assert ((after[:, :, None] == trained[:, None]).any(-1)).all()


@pytest.mark.parametrize("family", ["T5ForConditionalGeneration", "UMT5ForConditionalGeneration"])
def test_max_distance_equals_a_model_built_with_it(family):
    model = encoding_model(family)
    expected = encoding_model(family, relative_attention_max_distance=128 * FACTOR)
    with rope_patch.patch(model, "max-distance", factor=FACTOR, trained_length=128):
        assert torch.equal(token_logits(model, 400), token_logits(expected, 400))


def assert_cached_steps_equal_one_forward(model, ids):
    """Return the logits of one forward."""
    expected = model(input_ids=ids, decoder_input_ids=ids).logits
    encoded = model(input_ids=ids, decoder_input_ids=ids[:, :50], use_cache=True)
    step = model(
        encoder_outputs=(encoded.encoder_last_hidden_state,),
        decoder_input_ids=ids[:, 50:],
        past_key_values=encoded.past_key_values,
    )
    torch.testing.assert_close(step.logits, expected[:, 50:], rtol=1e-4, atol=1e-5)
    return expected


@pytest.mark.parametrize(
    "family",
    [
        "T5ForConditionalGeneration",
        "UMT5ForConditionalGeneration",
        "LongT5ForConditionalGeneration",
    ],
)
def test_t5_in_a_cache_equals_one_forward_and_undoes(family):
    model = encoding_model(family)
    ids = torch.arange(10, 80)[None]
    with plain_transformers():  # UMT5 in 5.17 counts the cached tokens twice
        before = assert_cached_steps_equal_one_forward(model, ids)
    handle = rope_patch.patch(model, "log-tail", factor=FACTOR, trained_length=LENGTH)
    assert not torch.equal(assert_cached_steps_equal_one_forward(model, ids), before)
    handle.undo()
    assert torch.equal(model(input_ids=ids, decoder_input_ids=ids).logits, before)


def test_dynamic_t5_changes_nothing_up_to_the_trained_length():
    model = encoding_model("T5ForConditionalGeneration")
    short, long = token_logits(model, LENGTH), token_logits(model, 3 * LENGTH)
    with rope_patch.patch(model, "dynamic-log-tail", trained_length=LENGTH):
        assert torch.equal(token_logits(model, LENGTH), short)
        assert not torch.equal(token_logits(model, 3 * LENGTH), long)


@pytest.mark.parametrize("method", ["dynamic-log-tail", "dynamic-linear"])
@pytest.mark.parametrize("family", ["T5ForConditionalGeneration", "UMT5ForConditionalGeneration"])
def test_dynamic_t5_follows_the_tokens_in_a_static_cache(family, method):
    """A static cache has slots ahead of the tokens, which are no distance to any key."""
    model = encoding_model(family)
    ids = torch.arange(10, 10 + 2 * LENGTH)[None]
    with plain_transformers():
        assert_cached_steps_equal_one_forward(model, ids)
    encoded = model.get_encoder()(ids)

    def read(own):
        cache, logits = EncoderDecoderCache(own, DynamicCache()), []
        for part in ids.split(LENGTH // 2, dim=1):
            step = model(encoder_outputs=encoded, decoder_input_ids=part, past_key_values=cache)
            logits.append(step.logits)
        return torch.cat(logits, 1)

    plain = read(DynamicCache())
    with rope_patch.patch(model, method, trained_length=LENGTH):
        got = read(StaticCache(config=model.config, max_cache_len=6 * LENGTH))
        torch.testing.assert_close(got, read(DynamicCache()), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[:, :LENGTH], plain[:, :LENGTH], rtol=1e-4, atol=1e-5)
    assert (got - plain)[:, LENGTH:].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("family", "method", "implementation"),
    [
        ("T5ForConditionalGeneration", "dynamic-log-tail", "sdpa"),
        ("T5ForConditionalGeneration", "dynamic-linear", "eager"),
        ("UMT5ForConditionalGeneration", "dynamic-log-tail", "eager"),
        ("MT5EncoderModel", "dynamic-linear", "sdpa"),
    ],
)
def test_dynamic_t5_counts_tokens_and_no_padding(family, method, implementation):
    if family.startswith("MT5"):
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        torch.manual_seed(0)
        model = transformers.MT5EncoderModel(transformers.MT5Config(vocab_size=99, **sizes)).eval()
    else:
        model = encoding_model(family)
    model.set_attn_implementation(implementation)
    encoder = model.get_encoder()
    longest = LENGTH + 8
    ids = torch.arange(10, 10 + longest)[None].repeat(2, 1)
    mask = torch.ones(2, longest, dtype=torch.long)
    mask[1, LENGTH:] = 0
    padding = torch.zeros(2, 40, dtype=torch.long)
    with torch.no_grad(), rope_patch.patch(model, method, trained_length=LENGTH):
        want = encoder(ids, attention_mask=mask)[0]
        alone = encoder(ids[:1], attention_mask=None)[0]
        for side in (1, -1):  # padding behind, and before
            padded_ids, padded = (torch.cat([x, padding][::side], 1) for x in (ids, mask))
            got = encoder(padded_ids, attention_mask=padded)[0]
            got = got[:, :longest] if side == 1 else got[:, -longest:]
            real = mask.bool()
            torch.testing.assert_close(got[real], want[real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(want[:1], alone, rtol=1e-5, atol=1e-5)


def test_dynamic_t5_decoder_counts_tokens_and_no_padding():
    model = encoding_model("T5ForConditionalGeneration")
    ids, length = torch.arange(10, 10 + LENGTH)[None], LENGTH + 30
    padded = torch.nn.functional.pad(ids, (30, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (30, 0))
    arguments = {"encoder_outputs": model.get_encoder()(ids)}
    with rope_patch.patch(model, "dynamic-linear", trained_length=LENGTH):
        want = model(decoder_input_ids=ids, **arguments).logits
        got = model(decoder_input_ids=padded, decoder_attention_mask=mask, **arguments).logits
    assert got.shape[1] == length
    torch.testing.assert_close(got[:, 30:], want, rtol=1e-5, atol=1e-5)


def test_dynamic_longt5_counts_tokens_and_no_padding():
    """Blocks of two tokens, seen over summaries whose distances grow with the text."""
    model = encoding_model(
        "LongT5ForConditionalGeneration",
        encoder_attention_type="transient-global",
        global_block_size=2,
        local_radius=3,
        relative_attention_num_buckets=8,
    )
    ids = torch.arange(10, 10 + 2 * LENGTH)[None]
    mask = torch.ones_like(ids)
    padded = torch.nn.functional.pad(ids, (0, 40))
    with torch.no_grad():
        plain = [
            model.get_encoder()(x, attention_mask=(x > 0).long())[0][:, : 2 * LENGTH]
            for x in (ids, padded)
        ]
        with rope_patch.patch(model, "dynamic-log-tail", trained_length=LENGTH):
            want = model.get_encoder()(ids, attention_mask=mask)[0]
            got = model.get_encoder()(padded, attention_mask=(padded > 0).long())[0]
    torch.testing.assert_close(*plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[:, : 2 * LENGTH], want, rtol=1e-4, atol=1e-4)


# -- relatives of T5 -------------------------------------------------------------------------------


def test_longt5_squeezes_distances_between_blocks_and_keeps_its_window():
    model = tiny_text_model("longt5, transient-global")
    attention = model.encoder.block[0].layer[0].TransientGlobalSelfAttention
    block, trained = 4, TRAINED // 4
    mask = torch.ones(1, FACTOR * TRAINED, dtype=torch.long)
    segments = torch.ones(1, FACTOR * trained, dtype=torch.long)
    local, side = attention.compute_bias(32), attention.compute_side_bias(mask, segments)
    with rope_patch.patch(model, "log-tail", factor=FACTOR, trained_length=TRAINED) as handle:
        assert "blocks of 4 tokens" in handle.summary()
        assert torch.equal(attention.compute_bias(32), local)
        got = attention.compute_side_bias(mask, segments)
    relative = modeling_longt5._make_side_relative_position_ids(mask, block)
    assert relative.max() == FACTOR * trained - 1
    lookup = torch.tensor([squeezed(r, 8, trained) for r in range(FACTOR * trained)])
    distances = relative.sign() * lookup[relative.abs()]
    largest = attention.relative_attention_max_distance
    bucket = attention._relative_position_bucket(distances, True, 32, largest)
    expected = attention.global_relative_attention_bias(bucket).permute(0, 3, 1, 2)
    assert torch.equal(got, expected)
    assert not torch.equal(got, side)
    assert torch.equal(attention.compute_side_bias(mask, segments), side)


@pytest.mark.parametrize("method", ["log-tail", "dynamic-log-tail"])
def test_longt5_is_asked_for_a_block_more_than_it_tells_apart(method):
    """Eight blocks of four tokens have a bucket of their own, so the ninth is the first to move."""
    model = tiny_text_model("longt5, transient-global")
    length = {} if method.startswith("dynamic") else {"factor": FACTOR}
    with pytest.raises(rope_patch.Refused, match=r"36 tokens.*35"):
        rope_patch.patch(model, method, trained_length=35, **length)
    with rope_patch.patch(model, method, trained_length=36, **length):
        model.encoder(IDS)


def test_longt5_with_a_window_has_no_new_distances_in_its_encoder():
    model = tiny_text_model("longt5")
    before = model.encoder(IDS).last_hidden_state
    with rope_patch.patch(model, "log-tail", factor=FACTOR, trained_length=TRAINED) as handle:
        assert [site.part for site in handle.sites] == ["decoder"]
        assert torch.equal(model.encoder(IDS).last_hidden_state, before)


def test_udop_squeezes_distances_in_the_text_and_keeps_those_on_the_page():
    model, size = tiny_text_model("udop"), FACTOR * TRAINED
    text, across, down = model.encoder.relative_bias.biases
    mask = torch.ones(1, size, dtype=torch.long)
    boxes = torch.rand(1, size, 4, generator=torch.Generator().manual_seed(0))
    own = [bias(mask, boxes) for bias in (across, down)]
    with rope_patch.patch(model, "log-tail", factor=FACTOR, trained_length=TRAINED):
        got = text(mask, boxes)[0]
        assert all(torch.equal(b(mask, boxes), o) for b, o in zip((across, down), own, strict=True))
    relative = torch.arange(size)[None] - torch.arange(size)[:, None]
    lookup = torch.tensor([squeezed(r, 8, TRAINED) for r in range(size)])
    distances = relative.sign() * lookup[relative.abs()]
    attention = model.encoder.block[0].layer[0].SelfAttention
    bucket = attention._relative_position_bucket(distances, True, 32, 128)
    assert torch.equal(got, text.relative_attention_bias(bucket).permute(2, 0, 1))
