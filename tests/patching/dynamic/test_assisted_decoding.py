"""Test that assisted decoding of length-dependent methods gives the tokens of greedy decoding.

In float64, where rounding does not change the argmax between forwards of one and several tokens.
"""

from pathlib import Path

import pytest
import torch
import transformers
from helpers.growing_texts import LONGROPE
from helpers.releases import prompt_lookup
from helpers.tiny_models import (
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    TRAINED,
    given_cache,
    make_model,
    tokens,
)

import rope_patch
from rope_patch.methods import registered_methods

OPTIONS = {
    "longrope": LONGROPE,
    "mixed-longrope": {"factor": 4, "long_factor": LONG_FACTOR},
    "nope": {"temperature": "drope:0.4"},
    "dpe": {"groups": [2, 4]},
}
METHODS = {
    name: OPTIONS.get(name, {} if method.is_dynamic else {"factor": 4})
    for name, method in registered_methods().items()
    if method.is_dynamic or name.startswith(("mixed", "longrope"))
}
# Of each kind; others differ in their formula alone.
QUICK = ["dynamic-yarn", "jet-long", "longrope", "mixed-yarn", "nope", "self-extend", "streaming"]
LOOKUP = prompt_lookup(10)
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def generator(layers=1, seed=0):
    """Return a model whose next token depends on the whole context, not only on the last token."""
    changes = {"tie_word_embeddings": False, "initializer_range": 0.2}
    config = {"num_hidden_layers": layers, "dtype": torch.float64, **changes}
    return make_model(seed=seed, **config).double()


@pytest.fixture(scope="module")
def model():
    return generator()


def prompts(length, count=2):
    """Return random prompts whose second half repeats the first, for prompt lookup."""
    return [tokens(length // 2, seed=seed).repeat(1, 2) for seed in range(count)]


def generate(model, prompt, new, **options):
    ids = model.generate(prompt, max_new_tokens=new, **{**GREEDY, **options})
    return ids[:, : prompt.shape[1] + new]  # transformers 5.0 may look up a few more


def test_the_table_names_methods_of_all_kinds():
    assert {"dynamic", *QUICK} < METHODS.keys()


@pytest.mark.parametrize(
    "method",
    [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in METHODS if n not in QUICK)],
)
def test_prompt_lookup_is_lossless(model, method):
    """Stop at the trained length, which candidates cross, and cross two growth steps."""
    with rope_patch.patch(model, method, **METHODS[method]):
        for prompt in prompts(48, 1):
            short = generate(model, prompt, TRAINED - 48)
            assert generate(model, prompt, TRAINED - 48, **LOOKUP).equal(short)
            assert generate(model, prompt, 30, **LOOKUP).equal(generate(model, prompt, 30))


@pytest.mark.parametrize("method", ["mixed-yarn", "dynamic-yarn"])
def test_prompt_lookup_matches_the_unpatched_model_up_to_the_trained_length(model, method):
    plain = [generate(model, prompt, TRAINED - 48) for prompt in prompts(48)]
    with rope_patch.patch(model, method, **METHODS[method]):
        for prompt, expected in zip(prompts(48), plain, strict=True):
            assert generate(model, prompt, TRAINED - 48, **LOOKUP).equal(expected)


@pytest.mark.parametrize(("layers", "method"), [(1, "mixed-yarn"), (2, "dynamic-yarn")])
def test_assistant_models_are_lossless(layers, method):
    model, assistant = generator(layers), generator(layers, seed=3)
    assistant.generation_config.num_assistant_tokens = 6
    rope_patch.patch(model, method, **METHODS[method])
    for prompt in prompts(50, 1):
        expected = generate(model, prompt, 30)
        assert generate(model, prompt, 30, assistant_model=assistant).equal(expected)
    rope_patch.patch(assistant, method, **METHODS[method])
    assert generate(model, prompt, 30, assistant_model=assistant).equal(expected)


def test_exact_growth_turns_candidates_off(model):
    """Beyond the trained length every token changes the frequencies, so no candidate is used."""
    assistant = generator(seed=3)
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    assistant.generation_config.num_assistant_tokens = 5
    with rope_patch.patch(model, "dynamic-yarn", growth="exact"):
        for prompt in prompts(70, 1):
            expected = generate(model, prompt, 20)
            assert generate(model, prompt, 20, **LOOKUP).equal(expected)
            assert generate(model, prompt, 20, assistant_model=assistant).equal(expected)
    assert assistant.generation_config.num_assistant_tokens == 5


def test_padded_prompt_with_prompt_lookup(model):
    prompt = prompts(40, 1)[0]
    mask = torch.cat([torch.zeros(1, 12), torch.ones(1, 40)], 1).long()
    padded = torch.cat([torch.zeros(1, 12).long(), prompt], 1)
    with rope_patch.patch(model, "mixed-yarn", factor=4):
        expected = generate(model, prompt, 40)
        got = generate(model, padded, 40, attention_mask=mask, **LOOKUP)
    assert got[:, 12:].equal(expected)


# -- no growth step within a forward of candidates -------------------------------------------------


def past_and_new(kwargs):
    cache = given_cache(kwargs)  # None in a first forward with transformers 5.0
    return cache.get_seq_length() if cache is not None else 0, kwargs["input_ids"].shape[1]


@pytest.fixture
def decoder_steps(model):
    """Record (cached tokens, new tokens) of each of the decoder's forwards."""
    steps = []

    def note(decoder, args, kwargs):
        steps.append(past_and_new(kwargs))

    hook = model.model.register_forward_pre_hook(note, with_kwargs=True)
    yield steps
    hook.remove()


def assert_no_change_within(steps, handle, prompt):
    """Assert that the tokens of each forward share their frequencies."""
    several = [(past, new) for past, new in steps if past >= prompt and new > 1]
    assert several, "no candidates at all"
    for past, new in several:
        (first,), (last,) = (handle.frequencies_at(n).values() for n in (past + 1, past + new))
        assert first.same_as(last), f"{new} tokens behind {past}"


@pytest.mark.parametrize("way", ["lookup", "assistant"])
def test_sampling_with_candidates_has_no_growth_within_a_forward(model, decoder_steps, way):
    torch.manual_seed(0)
    assistant = generator(seed=3)
    assistant.generation_config.num_assistant_tokens = 6
    options = LOOKUP if way == "lookup" else {"assistant_model": assistant}
    with rope_patch.patch(model, "dynamic-yarn") as handle:
        generate(model, prompts(50)[0], 40, do_sample=True, temperature=0.3, **options)
    assert_no_change_within(decoder_steps, handle, 50)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="transformers 5.0 itself fails to")
def test_early_exit_drafts_are_lossless():
    model = generator(layers=2)
    with rope_patch.patch(model, "mixed-yarn", factor=4):
        expected = generate(model, tokens(50), 40)
        assert generate(model, tokens(50), 40, assistant_early_exit=1).equal(expected)


@pytest.mark.parametrize("do_sample", [False, True])
def test_assistant_with_another_tokenizer(do_sample):
    assets = Path(__file__).parents[2] / "assets"
    folders = assets / "tiny-llama", assets / "tiny-qwen3"
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, assistant = (load(folder, dtype=torch.float64) for folder in folders)
    assistant.resize_token_embeddings(assistant.config.vocab_size + 8)  # another vocabulary
    tokenizers = dict.fromkeys(("tokenizer", "assistant_tokenizer"))
    for name, folder in zip(tokenizers, folders, strict=True):
        tokenizers[name] = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizers["assistant_tokenizer"].add_tokens([f"<{i}>" for i in range(8)])
    text = "It is a truth universally acknowledged, that a single man in possession of a good "
    ids = tokenizers["tokenizer"](text, return_tensors="pt").input_ids[:, :24]
    steps, options = [], {"assistant_model": assistant, "do_sample": do_sample, **tokenizers}
    handle = rope_patch.patch(model, "dynamic-yarn", trained_length=32, factor=4)
    expected = generate(model, ids, 40)
    model.model.register_forward_pre_hook(
        lambda _, __, kwargs: steps.append(past_and_new(kwargs)),
        with_kwargs=True,
    )
    got = generate(model, ids, 40, **options)
    assert_no_change_within(steps, handle, ids.shape[1])
    assert do_sample or got.equal(expected)


def test_wrapped_models_with_prompt_lookup():
    peft = pytest.importorskip("peft")
    plain = generator()
    wrapped = peft.get_peft_model(generator(), peft.LoraConfig(target_modules=["q_proj"]))
    compiled = torch.compile(generator(), backend="eager")
    for model in (plain, wrapped, compiled):
        rope_patch.patch(model, "mixed-yarn", factor=4)
    prompt = prompts(48, 1)[0]
    expected = generate(plain, prompt, 40)
    greedy = {**GREEDY, **LOOKUP}
    assert wrapped.generate(input_ids=prompt, max_new_tokens=40, **greedy).equal(expected)
    assert generate(compiled, prompt, 40, **LOOKUP).equal(expected)
    rope_patch.unpatch(wrapped)
    inner = wrapped.base_model.model
    assert not {"_get_candidate_generator", "prepare_inputs_for_generation"} & vars(inner).keys()
