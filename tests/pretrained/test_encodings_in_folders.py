"""Test saved folders of models that do not rotate and of encoded ones."""

import json

import pytest
import torch
from architectures.text_models import tiny_text_model
from helpers.encoded_models import NAMES, ONE_EACH, encoded, logits, tokens
from helpers.encoding_models import LENGTH, encoding_model, token_logits
from helpers.tiny_models import OLD_TRANSFORMERS
from helpers.tokenizers import TINY
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch import Refused

# --- Extended encodings, against plain transformers and bit for bit -------------------------------

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
TABLES = "rope_patch_tables.safetensors"
HALF = ("GPT2LMHeadModel", "BloomForCausalLM", "XGLMForCausalLM", "UMT5ForConditionalGeneration")
# Whose positions are those of another one here.
FURTHER = ("BertForMaskedLM", "MptForCausalLM", "LongT5ForConditionalGeneration")
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
        *(
            pytest.param(f, torch.float32, marks=pytest.mark.slow if f in FURTHER else ())
            for f in CASES
        ),
        *((family, torch.bfloat16) for family in HALF[:2]),
        *(pytest.param(f, torch.bfloat16, marks=pytest.mark.slow) for f in HALF[2:]),
    ],
)
def test_load_and_undo_restore_the_model_bit_for_bit(tmp_path, family, dtype):
    if OLD_TRANSFORMERS and dtype == torch.bfloat16 and "UMT5" in family:
        pytest.skip("transformers 5.0 loads some of its weights in float32")
    plain = encoding_model(family, **SMALL.get(family, {})).to(dtype)
    before = token_logits(plain, LENGTH)
    model = saved(family, tmp_path, dtype)
    length = 3 * LENGTH if family != "UMT5ForConditionalGeneration" else 400
    expected = token_logits(model, length)
    loaded = own_memory(rope_patch.load(tmp_path))
    assert type(loaded) is type(model)
    assert str(rope_patch.current(loaded)) == str(rope_patch.current(model))
    assert torch.equal(token_logits(loaded, length), expected)
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
    native = CASES[family][2]
    assert sidecar(tmp_path)["native"] is native
    if dtype != torch.float32:
        return
    by_transformers = own_memory(type(model).from_pretrained(tmp_path).eval())
    if native:
        assert torch.equal(token_logits(by_transformers, length), expected)
        return
    # Without our package the folder is the unpatched model.
    assert torch.equal(token_logits(by_transformers, LENGTH), before)
    assert by_transformers.config.to_dict().items() >= sidecar(tmp_path)["original"].items()


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


def test_numbers_of_udop_have_no_native_form(tmp_path):
    model = tiny_text_model("udop")  # its encoder's largest distance is in no field of the config
    before = model.config.relative_attention_max_distance
    rope_patch.patch(model, "max-distance", factor=4, trained_length=64)
    rope_patch.save(model, tmp_path)
    assert sidecar(tmp_path)["native"] is False
    assert config_json(tmp_path)["relative_attention_max_distance"] == before


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


def test_save_raises_the_tokenizers_length(tmp_path):
    from helpers.tokenizers import TINY

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.model_max_length = LENGTH
    rope_patch.save(patched("GPT2LMHeadModel"), tmp_path, tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 4 * LENGTH


def test_a_later_save_replaces_all_files_or_none(tmp_path, monkeypatch, library_log):
    saved("GPT2LMHeadModel", tmp_path)
    assert not library_log.text
    assert (tmp_path / TABLES).is_file()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = patched("BloomForCausalLM")

    def fail(*_):
        raise OSError("no space")

    with monkeypatch.context() as interrupted:
        interrupted.setattr("rope_patch.pretrained.saving.record_encoding", fail)
        with pytest.raises(OSError, match="no space"):
            rope_patch.save(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    rope_patch.save(model, tmp_path)
    assert "has no form of its own for ntk" in library_log.text
    assert not (tmp_path / TABLES).exists()
    assert str(rope_patch.current(rope_patch.load(tmp_path))) == "ntk, 40 → 160 tokens"


def test_load_refuses_damaged_tables_and_reads_no_weights_for_another_encodings_method(tmp_path):
    saved("GPT2LMHeadModel", tmp_path)
    tables = tmp_path / TABLES
    content = tables.read_bytes()
    for change in (lambda: tables.write_bytes(content[:-9]), tables.unlink):
        change()
        with pytest.raises(Refused, match="save the model again; plain transformers loads the"):
            rope_patch.load(tmp_path)
    tables.write_bytes(content)
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with pytest.raises(Refused, match="expected one of linear, cubic, tile"):
        rope_patch.load(tmp_path, "yarn", factor=2)


# --- Their adapters -------------------------------------------------------------------------------

TARGETS = {"GPT2LMHeadModel": "c_attn", "BloomForCausalLM": "query_key_value"}
REQUESTS = {
    "GPT2LMHeadModel": ("linear", {"factor": 4}),
    "BloomForCausalLM": ("ntk", {"factor": 4, "trained_length": LENGTH}),
}


@pytest.fixture(scope="module", params=TARGETS)
def adapter(request, tmp_path_factory):
    """Return a folder with an adapter and its base, its model class, and the model's logits."""
    peft, family = pytest.importorskip("peft"), request.param
    tmp_path = tmp_path_factory.mktemp("adapter")
    base = encoding_model(family)
    base.save_pretrained(tmp_path / "base")
    base = type(base).from_pretrained(tmp_path / "base").eval()
    method, arguments = REQUESTS[family]
    rope_patch.patch(base, method, **arguments)
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=[TARGETS[family]], r=2, init_lora_weights=False)
    model = peft.get_peft_model(base, config).eval()
    rope_patch.save(model, tmp_path / "adapter")
    with torch.no_grad():
        return tmp_path, family, token_logits(model, 3 * LENGTH)


def plain_base(folder, family):
    return type(encoding_model(family)).from_pretrained(folder / "base").eval()


def test_load_restores_base_patch_and_adapter(adapter):
    folder, family, expected = adapter
    loaded = rope_patch.load(folder / "adapter")
    assert torch.equal(token_logits(loaded, 3 * LENGTH), expected)
    assert str(rope_patch.current(loaded)) == f"{REQUESTS[family][0]}, 40 → 160 tokens"


def test_load_adapter_patches_a_plain_base_and_takes_a_patched_one(adapter):
    folder, family, expected = adapter
    plain, patched = (plain_base(folder, family) for _ in range(2))
    method, arguments = REQUESTS[family]
    rope_patch.patch(patched, method, **arguments)
    for base in (plain, patched):
        model = rope_patch.load_adapter(base, folder / "adapter")
        assert torch.equal(token_logits(model, 3 * LENGTH), expected)


def test_a_base_that_is_extended_otherwise_is_refused(adapter):
    folder, family, _ = adapter
    base = plain_base(folder, family)
    arguments = REQUESTS[family][1] | {"factor": 2}
    rope_patch.patch(base, "linear", **arguments)
    with pytest.raises(Refused, match=r"got one that is patched with linear, 40 → 80 tokens"):
        rope_patch.load_adapter(base, folder / "adapter")
    with pytest.raises(Refused, match="got one that is patched with linear"):
        rope_patch.load(folder / "adapter", "linear", **arguments)


def test_another_base_is_refused(adapter):
    folder, family, _ = adapter
    with pytest.raises(Refused, match="was trained on a base that was patched with"):
        rope_patch.load_adapter(encoding_model("OPTForCausalLM"), folder / "adapter")
    if family == "GPT2LMHeadModel":
        longer = encoding_model(family, n_positions=64)
        with pytest.raises(Refused, match="load the base that the adapter was trained on"):
            rope_patch.load_adapter(longer, folder / "adapter")


# --- Encoded models -------------------------------------------------------------------------------

EXTENDED = [
    ("alibi", {}, "ntk", {"factor": 4}),
    ("t5", {"buckets": 8}, "log-tail", {"factor": 4}),
    ("sinusoidal", {}, "linear", {"factor": 4}),
    ("none", {}, "nope", {"temperature": 1.3}),
    ("rope", {"p": 0.5}, "linear", {"factor": 4}),
    ("xpos", {}, "yarn", {"factor": 4}),
    ("rnope", {}, "yarn", {"factor": 4}),
]


# Tables and biases that are saved as others here.
ALIKE = ("integer", "normalised", "binary", "kerple", "sandwich")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(
            pytest.param(*each, marks=pytest.mark.slow if each[0] in ALIKE else ())
            for each in ONE_EACH
        ),
        ("rope", {"partial": 0.5}),
        ("binary", {"base": 8, "digits": 3}),
    ],
    ids=[*NAMES, "partial rope", "octal"],
)
def test_a_saved_model_loads_to_the_same_bits(name, options, tmp_path):
    model = encoded(name, options)
    expected = logits(model, tokens())
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path)
    assert torch.equal(logits(loaded, tokens()), expected)
    assert not loaded.training
    assert loaded.state_dict().keys() == model.state_dict().keys()
    rope_patch.save(loaded, tmp_path, overwrite=True)  # over itself
    assert torch.equal(logits(rope_patch.load(tmp_path), tokens()), expected)
    rope_patch.encode(loaded, "none")
    rope_patch.encode(model, "none")
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))


@pytest.mark.parametrize("name", ["xpos", "rnope", "rope"])
def test_an_encoding_that_replaced_another_is_saved_alone(name, tmp_path):
    """What the config said of the first encoding must not come back with the second one."""
    model, expected = encoded("rope", {"base": 50.0}), encoded(name, {})
    encoded(name, {}, model)
    assert torch.equal(logits(model, tokens()), logits(expected, tokens()))
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path)
    assert torch.equal(logits(loaded, tokens()), logits(expected, tokens()))


@pytest.mark.parametrize(("name", "options", "method", "arguments"), EXTENDED)
def test_an_extension_is_saved_with_it(name, options, method, arguments, tmp_path):
    model = encoded(name, options)
    ids = tokens(count=40)
    plain = logits(model, ids)
    rope_patch.patch(model, method, **arguments)
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    rope_patch.unpatch(loaded)
    assert torch.equal(logits(loaded, ids), plain)
    named = rope_patch.load(tmp_path, method, **arguments)
    assert torch.equal(logits(named, ids), logits(model, ids))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"factor": 4}, "factor goes with a method"),
        ({"method": "ntk", "factor": 4, "layer_types": ["encoder"]}, "this model has decoder"),
        ({"method": "ntk", "factor": 4, "start": "unscaled"}, "is for models that rotate"),
        ({"method": "ntk", "factor": 4, "kernels": "triton"}, "is for models that rotate"),
        ({"method": "yarn", "factor": 4}, "does not extend LlamaForCausalLM's positions"),
        ({"method": "ntk", "factor": 4, "gguf_file": "x.gguf"}, r"x\.gguf"),
    ],
)
def test_a_request_that_cannot_be_met_reads_no_weights(arguments, match, tmp_path):
    rope_patch.save(encoded("alibi", {}), tmp_path)
    if "gguf_file" not in arguments:
        (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=match):
        rope_patch.load(tmp_path, **arguments)


def test_the_tokenizers_length_is_that_of_the_extension(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.model_max_length = 16
    model = encoded("alibi", {})
    rope_patch.patch(model, "ntk", factor=4)
    rope_patch.save(model, tmp_path, tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 64


@pytest.mark.parametrize(("name", "warned"), [("alibi", True), ("rope", False)])
def test_a_warning_says_that_plain_transformers_loses_the_encoding(name, warned, tmp_path, caplog):
    rope_patch.save(encoded(name, {}), tmp_path)
    assert ("without the encoding" in caplog.text) == warned


def test_a_stretched_table_is_saved_as_it_was_trained_on(tmp_path):
    model = encoded("learned", {})
    rope_patch.patch(model, "linear", factor=4)
    with torch.no_grad():
        model.model.position_encoding.table.weight.add_(0.01)
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path)
    ids = tokens(count=60)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert rope_patch.current(loaded) is None


def test_half_precision_is_kept(tmp_path):
    model = encoded("t5", {}).to(torch.bfloat16)
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))


def test_plain_transformers_reads_the_other_weights(tmp_path):
    model = encoded("learned", {})
    rope_patch.save(model, tmp_path)
    plain, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    rope_patch.encode(model, "rope")
    assert torch.equal(logits(plain, tokens()), logits(model, tokens()))


def test_partial_rope_needs_no_sidecar(tmp_path):
    model = encoded("rope", {"partial": 0.5})
    rope_patch.save(model, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(plain, tokens()), logits(model, tokens()))


def test_targets_are_made_or_refused(tmp_path):
    model = encoded("alibi", {})
    rope_patch.save(model, tmp_path / "new" / "folder")
    assert torch.equal(
        logits(rope_patch.load(tmp_path / "new" / "folder"), tokens()), logits(model, tokens())
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(rope_patch.Refused, match="is a file"):
        rope_patch.save(model, tmp_path / "file")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(rope_patch.Refused, match=r"holds adapter_config\.json"):
        rope_patch.save(model, tmp_path)


def test_adapters_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    model = peft.get_peft_model(encoded("t5", {}), config)
    with pytest.raises(rope_patch.Refused, match="merge the adapter first"):
        rope_patch.save(model, tmp_path)


def test_damaged_folders_and_other_readers_are_refused(tmp_path):
    rope_patch.save(encoded("t5", {}), tmp_path)
    with pytest.raises(rope_patch.Refused, match=r"only rope_patch\.load reads"):
        rope_patch.diagnose(tmp_path)
    path = tmp_path / "rope_patch.json"
    content = path.read_text()
    path.write_text(json.dumps({**json.loads(content), "options": 3}))
    with pytest.raises(rope_patch.Refused, match="damaged"):
        rope_patch.load(tmp_path)
    path.write_text(content)
    (tmp_path / "model-encoding.safetensors").unlink()
    with pytest.raises(rope_patch.Refused, match="lacks the trained parts of the encoding 't5'"):
        rope_patch.load(tmp_path)


def test_a_patched_model_replaces_it(tmp_path):
    model = encoded("t5", {})
    rope_patch.save(model, tmp_path)
    rope_patch.encode(model, "none").undo()
    rope_patch.patch(model, "yarn", factor=4)
    rope_patch.save(model, tmp_path)
    assert not (tmp_path / "model-encoding.safetensors").exists()
    assert torch.equal(logits(rope_patch.load(tmp_path), tokens()), logits(model, tokens()))
