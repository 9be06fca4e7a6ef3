"""Stretched tables of positions: against models that are built with them, and undone."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from architectures.text_models import text_output, tiny_text_model
from helpers.encoding_models import LENGTH, encoding_model, token_logits
from helpers.tiny_models import OLD_TRANSFORMERS

import rope_patch

LEARNED = [  # class, rows before position 0, names of the tables
    ("GPT2LMHeadModel", 0, ["transformer.wpe.weight"]),
    ("GPTNeoForCausalLM", 0, ["transformer.wpe.weight"]),
    ("GPTBigCodeForCausalLM", 0, ["transformer.wpe.weight"]),
    ("OpenAIGPTLMHeadModel", 0, ["transformer.positions_embed.weight"]),
    ("OPTForCausalLM", 2, ["model.decoder.embed_positions.weight"]),
    ("BioGptForCausalLM", 2, ["biogpt.embed_positions.weight"]),
    ("BartForCausalLM", 2, ["model.decoder.embed_positions.weight"]),
    (
        "BartForConditionalGeneration",
        2,
        ["model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"],
    ),
    ("BertForMaskedLM", 0, ["bert.embeddings.position_embeddings.weight"]),
    ("RobertaForMaskedLM", 2, ["roberta.embeddings.position_embeddings.weight"]),
]
SINUSOIDAL = [  # class, rows before position 0, angle of position 0, law
    ("MarianMTModel", 0, 0, "vaswani"),
    ("PegasusForConditionalGeneration", 0, 0, "vaswani"),
    ("XGLMForCausalLM", 2, 2, "tensor2tensor"),
    ("M2M100ForConditionalGeneration", 2, 2, "tensor2tensor"),
]


def interpolated(table: np.ndarray, length: int) -> np.ndarray:
    """Read a table between its rows, one component after the other."""
    positions = np.arange(length) * len(table) / length
    rows = np.arange(len(table))
    return np.stack([np.interp(positions, rows, column) for column in table.T], axis=1)


def all_tensors(model):
    return dict([*model.named_parameters(), *model.named_buffers()])


@pytest.mark.parametrize(("family", "first", "names"), LEARNED)
@pytest.mark.parametrize("factor", [2, 2.5])
def test_linear_equals_a_model_built_with_interpolated_rows(family, first, names, factor):
    model = encoding_model(family)
    length = int(LENGTH * factor)
    field = model.config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    rows = getattr(model.config, field) + length - LENGTH
    expected = encoding_model(family, **{field: rows})
    state = model.state_dict()
    for name in names:
        old = state[name].double().numpy()
        new = np.concatenate([old[:first], interpolated(old[first:], length)])
        state[name] = torch.tensor(new, dtype=torch.float32)
    expected.load_state_dict(state, strict=False)
    with rope_patch.patch(model, "linear", factor=factor) as handle:
        assert (handle.trained_length, handle.length) == (LENGTH, length)
        assert getattr(model.config, field) == rows
        for size in (LENGTH // 2, length):
            got = token_logits(model, size)
            torch.testing.assert_close(got, token_logits(expected, size), rtol=1e-5, atol=1e-5)
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        token_logits(model, length)


@pytest.mark.parametrize("family", ["GPT2LMHeadModel", "GPTNeoForCausalLM", "OPTForCausalLM"])
def test_a_whole_factor_keeps_every_trained_row(family):
    model = encoding_model(family)
    before = token_logits(model, 30, position_ids=torch.arange(30)[None])
    with rope_patch.patch(model, "linear", factor=4):
        after = token_logits(model, 30, position_ids=4 * torch.arange(30)[None])
    assert torch.equal(before, after)


def test_tiles_change_nothing_within_the_trained_length():
    model = encoding_model("GPT2LMHeadModel")
    before = token_logits(model, LENGTH)
    with rope_patch.patch(model, "tile", length=3 * LENGTH):
        assert torch.equal(token_logits(model, LENGTH), before)
        table = model.transformer.wpe.weight
        assert torch.equal(table[LENGTH : 2 * LENGTH], table[:LENGTH])


@pytest.mark.parametrize("family", [f for f, *_ in [*LEARNED, *SINUSOIDAL]])
def test_undo_restores_everything(family):
    model = encoding_model(family)
    tensors, config = all_tensors(model), model.config.to_dict()
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    rope_patch.patch(model, "linear", factor=3).undo()
    after = all_tensors(model)
    assert after.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert after[name] is tensor or not isinstance(tensor, torch.nn.Parameter)
        assert torch.equal(after[name], values[name])
    assert model.config.to_dict() == config
    assert rope_patch.current(model) is None


@pytest.mark.parametrize("family", ["GPT2LMHeadModel", "OPTForCausalLM", "BertForMaskedLM"])
def test_plain_transformers_loads_a_stretched_model(family, tmp_path):
    model = encoding_model(family)
    rope_patch.patch(model, "linear", factor=2)
    model.save_pretrained(tmp_path)
    plain = getattr(transformers, family).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(token_logits(plain, 2 * LENGTH), token_logits(model, 2 * LENGTH))


def test_load_patches_a_learned_table(tmp_path):
    model = encoding_model("GPT2LMHeadModel")
    model.save_pretrained(tmp_path)
    loaded = rope_patch.load(tmp_path, "linear", factor=2)
    rope_patch.patch(model, "linear", factor=2)
    assert torch.equal(token_logits(loaded, 60), token_logits(model, 60))


@pytest.mark.parametrize(("family", "first", "angle", "law"), SINUSOIDAL)
@pytest.mark.parametrize("method", ["linear", "ntk"])
def test_sinusoidal_tables_are_computed(family, first, angle, law, method):
    model, factor, width = encoding_model(family), 4, 32
    k = np.arange(width // 2)
    exponents = 2 * k / width if law == "vaswani" else k / (width // 2 - 1)
    slowest = exponents[-1]
    base = 10000 * factor ** (1 / slowest) if method == "ntk" else 10000
    step = 1 / factor if method == "linear" else 1
    angles = (angle + np.arange(factor * LENGTH) * step)[:, None] * base**-exponents
    expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    rope_patch.patch(model, method, factor=factor)
    tables = [m for n, m in model.named_modules() if n.endswith("embed_positions")]
    assert tables
    for module in tables:
        table = module.weights if hasattr(module, "weights") else module.weight
        np.testing.assert_allclose(table[first:].double().numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("family", ["XGLMForCausalLM", "M2M100ForConditionalGeneration"])
def test_tables_that_grow_by_themselves_stay_stretched(family):
    model = encoding_model(family)
    rope_patch.patch(model, "linear", factor=2)
    assert token_logits(model, 2 * LENGTH).isfinite().all()
    with pytest.raises(ValueError, match="80 positions"):
        token_logits(model, 2 * LENGTH + 8)


@pytest.mark.parametrize("family", ["GPT2LMHeadModel", "OPTForCausalLM", "XGLMForCausalLM"])
def test_caches_belong_to_one_table(family):
    model = encoding_model(family)
    ids = torch.arange(10, 30)[None]
    old = model(ids, use_cache=True).past_key_values
    rope_patch.patch(model, "linear", factor=2)
    with pytest.raises(ValueError, match=r"20 tokens.*table"):
        model(ids[:, :1], past_key_values=copy.deepcopy(old))
    cache = model(ids[:, :15], use_cache=True).past_key_values
    step = model(ids[:, 15:], past_key_values=cache).logits
    torch.testing.assert_close(step, model(ids).logits[:, 15:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["GPT2LMHeadModel", "OPTForCausalLM", "MarianMTModel"])
def test_generation_equals_forward_by_forward(family):
    model = encoding_model(family)
    rope_patch.patch(model, "linear", factor=4)
    ids = torch.arange(10, 60)[None]
    settings = {
        "do_sample": False,
        "pad_token_id": 1,
        "eos_token_id": None,
        "forced_eos_token_id": None,
    }
    got = model.generate(input_ids=ids, max_new_tokens=60, **settings)
    inputs = (
        {"input_ids": ids, "decoder_input_ids": got} if len(got[0]) < 100 else {"input_ids": got}
    )
    choices = model(**inputs).logits[0, :-1].clone()
    start = 0 if len(got[0]) < 100 else 49
    if family == "MarianMTModel":
        choices[:, 1] = -torch.inf  # generation never writes the token of padding
    assert torch.equal(choices[start:].argmax(-1), got[0, start + 1 :])


def test_parts_with_other_lengths_are_named_one_at_a_time():
    model = encoding_model("WhisperForConditionalGeneration")
    with pytest.raises(ValueError, match=r"60 .*encoder.*40 .*decoder.*layer_types"):
        rope_patch.patch(model, "linear", factor=2)
    with rope_patch.patch(model, "cubic", factor=2, layer_types=["decoder"]):
        assert model.config.max_target_positions == 2 * LENGTH
    with rope_patch.patch(model, "ntk", factor=2, layer_types=["encoder"]) as handle:
        assert model.config.max_source_positions == 120
        assert "sinusoidal table of 60 positions, now 120" in handle.summary()
        mel = torch.zeros(1, model.config.num_mel_bins, 240)
        ids = torch.full((1, 4), 7)
        assert model(input_features=mel, decoder_input_ids=ids).logits.isfinite().all()


def test_a_copy_is_undone_by_itself():
    model = encoding_model("GPT2LMHeadModel")
    before = token_logits(model, 20)
    rope_patch.patch(model, "linear", factor=2)
    copied, after = copy.deepcopy(model), token_logits(model, 20)
    rope_patch.unpatch(copied)
    assert torch.equal(token_logits(copied, 20), before)
    assert torch.equal(token_logits(model, 20), after)


# -- less common models ----------------------------------------------------------------------------

ROWS = 64  # of `tiny_text_model`
IDS = torch.arange(10, 110)[None]


def test_ctrl_reads_a_buffer_in_its_own_forward():
    model = tiny_text_model("ctrl")
    before = text_output(model, ROWS)
    with rope_patch.patch(model, "linear", factor=4) as handle:
        assert "transformer: sinusoidal table of 64 positions, now 256" in handle.summary()
        width = model.config.n_embd
        angles = np.arange(256)[:, None] / 4 / 10000 ** (np.arange(0, width, 2) / width)
        table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        np.testing.assert_allclose(model.transformer.pos_encoding.numpy(), table, atol=1e-6)
        cache = model(IDS[:, :80], use_cache=True).past_key_values
        step = model(IDS[:, 80:], past_key_values=cache).logits
        torch.testing.assert_close(step, model(IDS).logits[:, 80:], rtol=1e-4, atol=1e-5)
    assert torch.equal(text_output(model, ROWS), before)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="a small copy of the model cannot be built")
def test_the_text_part_of_clip_is_extended_and_saved(tmp_path):
    model = tiny_text_model("clip")
    before = model.get_text_features(IDS[:, :ROWS])
    handle = rope_patch.patch(model, "linear", factor=4)
    assert model.config.text_config.max_position_embeddings == 4 * ROWS
    after = model.get_text_features(IDS)
    model.save_pretrained(tmp_path)
    plain = transformers.CLIPModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(plain.get_text_features(IDS).pooler_output, after.pooler_output)
    handle.undo()
    assert model.config.text_config.max_position_embeddings == ROWS
    again = model.get_text_features(IDS[:, :ROWS])
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
