"""Test transformers' continuous batching: equal to `generate` alone, or refused at its start."""

import threading

import pytest
import torch
import transformers
from helpers.encoded_models import encoded
from helpers.encoding_models import encoding_model
from helpers.releases import batching_sizes
from helpers.tiny_models import BEFORE_5_17, LONG_FACTOR, OLD_TRANSFORMERS, make_generator, tokens
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

import rope_patch

if OLD_TRANSFORMERS:
    pytest.skip("transformers 5.0 runs continuous batching on GPUs alone", allow_module_level=True)
if not hasattr(transformers, "ContinuousBatchingConfig"):
    pytest.skip("this transformers has no ContinuousBatchingConfig", allow_module_level=True)

NEW = 8
COMMON = tokens(70, seed=9)[0].tolist()
PROMPTS = [  # the second passes 64 tokens while decoding; the last two share two blocks of 32
    *(tokens(n, seed=n)[0].tolist() for n in (20, 58)),
    COMMON,
    COMMON[:64] + tokens(6, seed=3)[0].tolist(),
]
LONG_SET = {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": LONG_FACTOR}


def settings(**changes):
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = {"num_blocks": 32, "max_batch_tokens": 128, **changes}
    return {
        "generation_config": config,
        "continuous_batching_config": batching_sizes(32, **sizes),
    }


def batched(model, **kwargs):
    outputs = model.generate_batch(inputs=PROMPTS, **settings(), **kwargs)
    assert all(output.error is None for output in outputs.values())
    return [output.generated_tokens for output in outputs.values()]


def alone(model):
    """Return each prompt's tokens by an ordinary cache."""
    settings = {"max_new_tokens": NEW, "do_sample": False}
    rows = [model.generate(torch.tensor([prompt]), **settings)[0] for prompt in PROMPTS]
    return [row[len(prompt) :].tolist() for row, prompt in zip(rows, PROMPTS, strict=True)]


def make_gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **special, initializer_range=0.3)).eval()


@pytest.mark.parametrize(("family", "attention"), [("qwen3", "eager"), ("gemma3", "sdpa")])
def test_families_and_paged_attentions(family, attention):
    if family == "gemma3" and BEFORE_5_17:
        pytest.skip("the plain model in a batch differs from itself alone, too")
    model = make_generator(family)
    rope_patch.patch(model, "yarn", factor=4)
    model.set_attn_implementation(attention)
    assert batched(model) == alone(model)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("longrope", {**LONG_SET, "start_tokens": 4}),
        ("yarn", {"factor": 4, "temperature": "log-n"}),
        ("nope", {"factor": 4, "temperature": "drope:0.1"}),
    ],
)
def test_start_tokens_and_temperatures(method, options):
    model = make_generator("llama")
    rope_patch.patch(model, method, **options)
    assert batched(model) == alone(model)


def test_stretched_table():
    model = make_gpt2()
    rope_patch.patch(model, "linear", factor=4)
    assert batched(model) == alone(model)


def test_manager_streams_and_shares_prefixes_across_requests():
    model = make_generator("llama")
    rope_patch.patch(model, "yarn", factor=4)
    expected = alone(model)
    manager = model.init_continuous_batching(**settings())
    manager.start()
    try:
        for prompt, answer in zip(PROMPTS, expected, strict=True):  # each may reuse earlier blocks
            request = manager.add_request(prompt, max_new_tokens=NEW, streaming=True)
            parts = list(manager.request_id_iter(request))
            assert len(parts) > 1
            assert parts[-1].generated_tokens == answer
    finally:
        manager.stop(block=True)


def test_position_maps_are_refused():
    model = make_generator("llama")
    rope_patch.patch(model, "self-extend", factor=4)
    assert_refused(model, r"self-extend.*model\.generate")


@pytest.mark.parametrize("family", ["BloomForCausalLM", "T5ForConditionalGeneration"])
def test_patched_biases_are_refused(family):
    model = encoding_model(family)
    rope_patch.patch(model, "linear", factor=4, trained_length=64)
    assert_refused(model, r"slots of the cache.*model\.generate")


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "fire", "sandwich", "xpos"])
def test_encodings_that_read_slots_are_refused(name):
    model = encoded(name, {})
    assert_refused(model, f"'{name}' measures distances by slots")


@pytest.mark.parametrize("name", ["sinusoidal", "rnope"])
def test_other_encodings_batch_correctly(name):
    model = make_generator("llama")
    rope_patch.encode(model, name)
    assert batched(model) == alone(model)


def test_kept_manager_of_another_table_is_refused():
    model = make_gpt2()
    with rope_patch.patch(model, "linear", factor=4):
        batched(model, persistent_manager=True)
        with pytest.raises(rope_patch.Refused, match="destroy_cached_continuous_batching_manager"):
            rope_patch.patch(model, "linear", factor=2)
        model.destroy_cached_continuous_batching_manager()
        with rope_patch.patch(model, "linear", factor=2):
            batched(model, persistent_manager=True)
        with pytest.raises(rope_patch.Refused, match="keys of another rotation"):
            batched(model)
        model.destroy_cached_continuous_batching_manager()
        assert batched(model) == alone(model)


def test_undo_allows_batching_again():
    model = make_generator("llama")
    rope_patch.encode(model, "alibi").undo()
    assert "init_continuous_batching" not in vars(model)
    assert batched(model) == alone(model)


def assert_refused(model, reason):
    """Assert that each entry raises in the caller's thread, and starts no other."""
    threads = plain_threads()
    with pytest.raises(rope_patch.Refused, match=reason):
        model.generate_batch(inputs=PROMPTS, **settings())
    with pytest.raises(rope_patch.Refused, match=reason):
        model.init_continuous_batching(**settings())
    assert plain_threads() == threads


def plain_threads():
    """Return the running threads but those of a class of their own, such as tqdm's monitor."""
    return [thread for thread in threading.enumerate() if type(thread) is threading.Thread]
