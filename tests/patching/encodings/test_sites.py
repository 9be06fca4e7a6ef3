"""Positions of less common models: found by asking them, extended, or refused with a reason."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers
from architectures.text_models import text_output, tiny_text_model
from architectures.tiny_architectures import TRAINED
from helpers.releases import plain_transformers, require_model
from helpers.tiny_models import OLD_TRANSFORMERS
from transformers.models.longt5 import modeling_longt5

import rope_patch

FACTOR = 4
IDS = torch.arange(10, 110)[None]


def squeezed(distance, exact, trained):
    """Return the distance that `log-tail` reads instead, from its formula in the reference."""
    if distance < exact:
        return distance
    power = math.log(trained / exact) / math.log(FACTOR * trained / exact)
    return math.floor(exact * (distance / exact) ** power + 1e-9)


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
    with pytest.raises(rope_patch.Refused, match=r"at least 36 tokens.*got 35"):
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


def test_ctrl_reads_a_buffer_in_its_own_forward():
    model = tiny_text_model("ctrl")
    before = text_output(model, TRAINED)
    with rope_patch.patch(model, "linear", factor=FACTOR) as handle:
        assert "transformer: sinusoidal table of 64 positions, now 256" in handle.summary()
        width = model.config.n_embd
        angles = np.arange(256)[:, None] / FACTOR / 10000 ** (np.arange(0, width, 2) / width)
        table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        np.testing.assert_allclose(model.transformer.pos_encoding.numpy(), table, atol=1e-6)
        cache = model(IDS[:, :80], use_cache=True).past_key_values
        step = model(IDS[:, 80:], past_key_values=cache).logits
        torch.testing.assert_close(step, model(IDS).logits[:, 80:], rtol=1e-4, atol=1e-5)
    assert torch.equal(text_output(model, TRAINED), before)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="a small copy of the model cannot be built")
def test_the_text_part_of_clip_is_extended_and_saved(tmp_path):
    model = tiny_text_model("clip")
    before = model.get_text_features(IDS[:, :TRAINED])
    handle = rope_patch.patch(model, "linear", factor=FACTOR)
    assert model.config.text_config.max_position_embeddings == FACTOR * TRAINED
    after = model.get_text_features(IDS)
    model.save_pretrained(tmp_path)
    plain = transformers.CLIPModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(plain.get_text_features(IDS).pooler_output, after.pooler_output)
    handle.undo()
    assert model.config.text_config.max_position_embeddings == TRAINED
    again = model.get_text_features(IDS[:, :TRAINED])
    assert torch.equal(again.pooler_output, before.pooler_output)


def test_parts_are_told_apart_by_their_names():
    model = tiny_text_model("seamless_m4t")
    with rope_patch.patch(model, "linear", factor=2) as handle:
        assert [site.part for site in handle.sites] == ["encoder", "decoder"]


def test_a_stretched_table_is_not_resized():
    model = tiny_text_model("pegasus")
    with (
        rope_patch.patch(model, "linear", factor=2),
        pytest.raises(ValueError, match=r"expected undo\(\) first"),
    ):
        model.resize_position_embeddings(200)
    model.resize_position_embeddings(96)
    with rope_patch.patch(model, "linear", factor=2) as handle:
        assert (handle.trained_length, handle.length) == (96, 192)
        assert text_output(model, 192).isfinite().all()


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("deberta", "disentangled attention"),
        ("xlnet", r"sinusoids of distances .*r_r_bias"),
        ("wavlm", "gated by what each query holds"),
        ("prophetnet", "the one cannot be stretched without the other"),
        ("layoutlmv3", "columns of a linear map"),
        ("roformer", "rotates queries and keys by a fixed table"),
        ("inkling_text", "computed from the tokens"),
        ("reformer", "a grid of fixed shape"),
        ("luke", r"entity_embeddings\.position_embeddings\.weight grows with its length"),
        ("pegasus_x", "no table to stretch"),
        ("encoder-decoder", r"extend each by itself, for example rope_patch\.patch\(model\.dec"),
        ("mamba", "no positions to extend, and reads any length"),
        ("rwkv", "recurrence alone"),
    ],
)
def test_other_encodings_are_refused_with_the_reason(model_type, message):
    require_model(model_type)
    with plain_transformers():  # some releases build no encoder-decoder without its parts
        model = tiny_text_model(model_type)
    with pytest.raises(rope_patch.Refused, match=message):
        rope_patch.patch(model, "linear", factor=2, trained_length=TRAINED)
    assert rope_patch.current(model) is None
