"""Scaled ALiBi slopes and squeezed T5 buckets: against transformers' own code with other inputs."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from helpers.encoding_models import LENGTH, encoding_model, token_logits
from helpers.releases import plain_transformers
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.models.bloom import modeling_bloom
from transformers.models.t5.modeling_t5 import T5Attention

import rope_patch

ALIBI = {"BloomForCausalLM": "n_head", "MptForCausalLM": "n_heads"}
ALIBI["FalconForCausalLM"] = "num_attention_heads"
FACTOR = 4


def alibi_model(family, heads=4):
    fields = {ALIBI[family]: heads}
    if family == "MptForCausalLM":
        fields["max_seq_len"] = LENGTH
    return encoding_model(family, **fields)


def scale_of(method, heads):
    """Return what each head's slope is multiplied by, from the slopes' own logarithms."""
    biases = modeling_bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
    slopes = biases.view(heads, 2)[:, 1].double()
    if method == "linear":
        return torch.full((heads,), 1 / FACTOR, dtype=torch.float64)
    logs = slopes.log()
    return FACTOR ** -((logs.max() - logs) / (logs.max() - logs.min()))


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("method", ["linear", "ntk"])
@pytest.mark.parametrize("masked", [True, False])
def test_bloom_equals_its_own_code_with_other_slopes(heads, method, masked, monkeypatch):
    model = alibi_model("BloomForCausalLM", heads)
    mask = torch.ones(2, 100, dtype=torch.long)
    mask[0, :9] = 0
    arguments = {"attention_mask": mask} if masked else {}
    with rope_patch.patch(model, method, factor=FACTOR, trained_length=LENGTH):
        got = token_logits(model, 100, **arguments)
    # Newer releases have the slopes in a function of their own.
    name = (
        "_get_alibi_slopes"
        if hasattr(modeling_bloom, "_get_alibi_slopes")
        else "build_alibi_tensor"
    )
    own, scale = getattr(modeling_bloom, name), scale_of(method, heads).float()

    def scaled(*args):
        result = own(*args)
        return result * scale.repeat(len(result) // heads).view(-1, *[1] * (result.ndim - 1))

    monkeypatch.setattr(modeling_bloom, name, scaled)
    torch.testing.assert_close(got, token_logits(model, 100, **arguments), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("method", ["linear", "ntk"])
def test_mpt_equals_its_own_code_with_other_slopes(heads, method):
    model = alibi_model("MptForCausalLM", heads)
    with pytest.raises(RuntimeError):
        token_logits(model, 100)
    with rope_patch.patch(model, method, factor=FACTOR):
        assert model.config.max_seq_len == FACTOR * LENGTH
        got = token_logits(model, 100)
        beyond = token_logits(model, FACTOR * LENGTH + 30)
    assert beyond.isfinite().all()
    model.config.max_seq_len = FACTOR * LENGTH
    own, scale = model.transformer.build_mpt_alibi_tensor, scale_of(method, heads).float()
    model.transformer.build_mpt_alibi_tensor = lambda *args, **kwargs: (
        own(*args, **kwargs) * scale[:, None, None]
    )
    torch.testing.assert_close(got, token_logits(model, 100), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["linear", "ntk"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_falcon_equals_its_own_code_with_other_slopes(method, implementation, monkeypatch):
    from transformers.models.falcon import modeling_falcon

    model = alibi_model("FalconForCausalLM")
    model.set_attn_implementation(implementation)
    with rope_patch.patch(model, method, factor=FACTOR, trained_length=LENGTH):
        got = token_logits(model, 100)
    own, scale = modeling_falcon.build_alibi_tensor, scale_of(method, 4).float()

    def scaled(mask, heads, dtype):
        alibi = own(mask, heads, dtype=dtype).view(len(mask), heads, 1, -1)
        return (alibi * scale[:, None, None]).view(-1, 1, mask.shape[1])

    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", scaled)
    torch.testing.assert_close(got, token_logits(model, 100), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ALIBI)
def test_alibi_in_a_cache_equals_one_forward(family):
    model = alibi_model(family)
    rope_patch.patch(model, "ntk", factor=FACTOR, trained_length=LENGTH)
    ids = torch.arange(10, 80)[None]
    cache = model(ids[:, :50], use_cache=True).past_key_values
    steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(50, 70)]
    expected = model(ids).logits[:, 50:]
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ALIBI)
@pytest.mark.parametrize("formula", ["linear", "ntk"])
def test_dynamic_alibi_follows_the_text(family, formula):
    model = alibi_model(family)
    short = token_logits(model, LENGTH)
    with rope_patch.patch(model, f"dynamic-{formula}", trained_length=LENGTH) as handle:
        assert "any length" in handle.summary()
        assert torch.equal(token_logits(model, LENGTH), short)
        got = token_logits(model, 3 * LENGTH)
    with rope_patch.patch(model, formula, factor=3, trained_length=LENGTH):
        torch.testing.assert_close(got, token_logits(model, 3 * LENGTH), rtol=1e-5, atol=1e-6)
    assert torch.equal(token_logits(model, LENGTH), short)


def t5_attention(model, part):
    return getattr(model, part).block[0].layer[0].SelfAttention


@pytest.mark.parametrize("part", ["encoder", "decoder"])
@pytest.mark.parametrize(
    ("method", "moved"),
    [
        ("linear", lambda r, exact: r * LENGTH // (FACTOR * LENGTH)),
        (
            "log-tail",
            lambda r, exact: (
                r
                if r < exact
                else math.floor(
                    exact
                    * (r / exact) ** (math.log(LENGTH / exact) / math.log(FACTOR * LENGTH / exact))
                    + 1e-9
                )
            ),
        ),
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


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("method", ["dynamic-log-tail", "dynamic-linear"])
@pytest.mark.parametrize(
    "family", ["T5ForConditionalGeneration", "UMT5ForConditionalGeneration", "MT5EncoderModel"]
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
