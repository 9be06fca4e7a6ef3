"""Test saved folders of models that do not rotate, against plain transformers and bit for bit."""

import json

import pytest
import torch
from helpers.encoding_models import LENGTH, encoding_model, token_logits
from helpers.tiny_models import OLD_TRANSFORMERS
from transformers import AutoTokenizer

import rope_patch
from rope_patch.pretrained.encoding_checkpoint import TABLES
from rope_patch.utils.errors import Refused

BLOOM = {"trained_length": LENGTH}
# Method, arguments, whether plain transformers loads the folder to the same logits.
CASES = {
    "GPT2LMHeadModel": ("linear", {}, True),
    "GPTNeoForCausalLM": ("tile", {}, True),
    "BartForConditionalGeneration": ("linear", {}, True),
    "BertForMaskedLM": ("linear", {}, True),
    "PegasusForConditionalGeneration": ("ntk", {}, True),  # its table is among the weights
    "MarianMTModel": ("ntk", {}, False),
    "XGLMForCausalLM": ("linear", {}, False),
    "BloomForCausalLM": ("ntk", BLOOM, False),
    "MptForCausalLM": ("linear", {}, False),
    "T5ForConditionalGeneration": ("log-tail", {"trained_length": LENGTH}, False),
    "UMT5ForConditionalGeneration": ("max-distance", {"trained_length": 512}, True),
    "LongT5ForConditionalGeneration": ("max-distance", {"trained_length": 512}, False),
}
HALF = ("GPT2LMHeadModel", "XGLMForCausalLM", "BloomForCausalLM", "UMT5ForConditionalGeneration")
SMALL = {"MptForCausalLM": {"max_seq_len": LENGTH, "n_heads": 6}}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():  # sdpa has another kernel for gradients, with other last bits
        yield


def patched(family, dtype=torch.float32):
    method, arguments, _ = CASES[family]
    model = encoding_model(family, **SMALL.get(family, {})).to(dtype)
    rope_patch.patch(model, method, factor=4, **arguments)
    return model


def saved(family, folder, dtype=torch.float32):
    model = patched(family, dtype)
    rope_patch.save(model, folder)
    return model


def sidecar(folder):
    return json.loads((folder / "rope_patch.json").read_text())


def config_json(folder):
    return json.loads((folder / "config.json").read_text())


def own_memory(model):
    """Copy weights out of the mapped file, whose alignment can change the last bits."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in CASES),
        *((family, torch.bfloat16) for family in HALF),
    ],
)
def test_load_and_undo_restore_the_model_bit_for_bit(tmp_path, family, dtype):
    if OLD_TRANSFORMERS and dtype == torch.bfloat16 and "UMT5" in family:
        pytest.skip("transformers 5.0 loads some of its weights in float32")
    plain = encoding_model(family, **SMALL.get(family, {})).to(dtype)
    before = token_logits(plain, LENGTH)
    model = saved(family, tmp_path, dtype)
    expected = token_logits(model, 3 * LENGTH)
    loaded = own_memory(rope_patch.load(tmp_path))
    assert type(loaded) is type(model)
    assert str(rope_patch.current(loaded)) == str(rope_patch.current(model))
    assert torch.equal(token_logits(loaded, 3 * LENGTH), expected)
    rope_patch.unpatch(loaded)
    assert torch.equal(token_logits(loaded, LENGTH), before)
    assert (
        loaded.config.to_dict().items()
        >= {name: getattr(plain.config, name) for name in sidecar(tmp_path)["original"]}.items()
    )
    for (name, ours), (_, theirs) in zip(
        [*loaded.named_parameters(), *loaded.named_buffers()],
        [*plain.named_parameters(), *plain.named_buffers()],
        strict=True,
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("family", CASES)
def test_native_is_what_plain_transformers_loads(tmp_path, family):
    model = saved(family, tmp_path)
    native = CASES[family][2]
    plain = own_memory(type(model).from_pretrained(tmp_path).eval())
    assert sidecar(tmp_path)["native"] is native
    if native:
        length = 3 * LENGTH if family != "UMT5ForConditionalGeneration" else 400
        assert torch.equal(token_logits(plain, length), token_logits(model, length))
        return
    rope_patch.unpatch(model)  # without our package the folder is the unpatched model
    assert torch.equal(token_logits(plain, LENGTH), token_logits(model, LENGTH))
    assert plain.config.to_dict().items() >= sidecar(tmp_path)["original"].items()


@pytest.mark.parametrize(
    "family", ["GPT2LMHeadModel", "MarianMTModel", "XGLMForCausalLM", "BloomForCausalLM"]
)
def test_another_method_starts_from_the_original(tmp_path, family):
    saved(family, tmp_path)
    arguments = CASES[family][1]
    loaded = own_memory(rope_patch.load(tmp_path, "linear", factor=2, **arguments))
    model = encoding_model(family, **SMALL.get(family, {}))
    rope_patch.patch(model, "linear", factor=2, **arguments)
    assert torch.equal(token_logits(loaded, 2 * LENGTH), token_logits(model, 2 * LENGTH))


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_whisper_is_saved_by_parts(tmp_path, part):
    model = encoding_model("WhisperForConditionalGeneration")
    rope_patch.patch(model, "linear", factor=2, layer_types=[part])
    rope_patch.save(model, tmp_path)
    plain = type(model).from_pretrained(tmp_path).eval()
    loaded = rope_patch.load(tmp_path)
    mels = torch.randn(1, 80, 2 * model.config.max_source_positions)
    ids = torch.arange(6, 6 + model.config.max_target_positions)[None]
    texts = {"input_features": mels, "decoder_input_ids": ids}
    assert sidecar(tmp_path)["native"] is True
    assert torch.equal(own_memory(plain)(**texts).logits, model(**texts).logits)
    assert torch.equal(own_memory(loaded)(**texts).logits, model(**texts).logits)


def test_half_of_t5_has_no_native_form(tmp_path):
    model = encoding_model("T5ForConditionalGeneration")
    rope_patch.patch(model, "max-distance", factor=4, trained_length=512, layer_types=["decoder"])
    rope_patch.save(model, tmp_path)
    assert sidecar(tmp_path)["native"] is False
    assert config_json(tmp_path)["relative_attention_max_distance"] == 128


def test_a_table_trained_under_the_patch_is_kept(tmp_path):
    model = patched("GPT2LMHeadModel")
    original = encoding_model("GPT2LMHeadModel").transformer.wpe.weight
    model.transformer.wpe.weight.mul_(1.5)
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path)
    assert torch.equal(loaded.transformer.wpe.weight, model.transformer.wpe.weight)
    rope_patch.unpatch(loaded)
    assert torch.equal(loaded.transformer.wpe.weight, original)


def test_a_changed_sinusoidal_table_is_kept_without_a_native_form(tmp_path):
    model = patched("MarianMTModel")
    model.model.encoder.embed_positions.weight.mul_(1.5)
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path)
    for part in ("encoder", "decoder"):
        table = getattr(loaded.model, part).embed_positions.weight
        assert torch.equal(table, getattr(model.model, part).embed_positions.weight)


def test_save_says_what_plain_transformers_loads(tmp_path, library_log):
    saved("GPT2LMHeadModel", tmp_path / "gpt2")
    assert not library_log.text
    saved("BloomForCausalLM", tmp_path / "bloom")
    assert "has no form of its own for ntk" in library_log.text


def test_save_raises_the_tokenizers_length(tmp_path):
    from helpers.tokenizers import TINY

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.model_max_length = LENGTH
    rope_patch.save(patched("GPT2LMHeadModel"), tmp_path, tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 4 * LENGTH


def test_a_later_save_leaves_no_tables_behind(tmp_path):
    saved("GPT2LMHeadModel", tmp_path)
    assert (tmp_path / TABLES).is_file()
    saved("BloomForCausalLM", tmp_path)
    assert not (tmp_path / TABLES).exists()
    assert str(rope_patch.current(rope_patch.load(tmp_path))) == "ntk, 40 → 160 tokens"


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_load_refuses_damaged_tables(tmp_path, damage):
    saved("GPT2LMHeadModel", tmp_path)
    path = tmp_path / TABLES
    path.unlink() if damage == "missing" else path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(Refused, match="save the model again; plain transformers loads the folder"):
        rope_patch.load(tmp_path)


def test_load_refuses_what_the_model_cannot_do_before_weights_are_read(tmp_path):
    saved("GPT2LMHeadModel", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with pytest.raises(Refused, match="expected one of linear, cubic, tile"):
        rope_patch.load(tmp_path, "yarn", factor=2)


def test_interrupted_saves_leave_the_folder_as_it_was(tmp_path, monkeypatch):
    saved("GPT2LMHeadModel", tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = patched("BloomForCausalLM")

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr("rope_patch.pretrained.saving.record_encoding", fail)
    with pytest.raises(OSError, match="no space"):
        rope_patch.save(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
