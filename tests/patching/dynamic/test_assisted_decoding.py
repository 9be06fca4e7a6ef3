"""Assisted decoding of models whose frequencies follow the sequence: what greedy decoding says.

In float64, where a forward of several tokens does not round to another argmax than one token does.
"""

from pathlib import Path

import pytest
import torch
import transformers
from helpers.tiny_models import (
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT_FACTOR,
    TRAINED,
    make_model,
    tokens,
)

import rope_patch
from rope_patch.methods import registered_methods

LONG = {"factor": 4, "long_factor": LONG_FACTOR}
OPTIONS = {
    "longrope": {**LONG, "short_factor": SHORT_FACTOR},
    "mixed-longrope": LONG,
    "nope": {"temperature": 0.4},
}
METHODS = {
    name: OPTIONS.get(name, {} if method.is_dynamic else {"factor": 4})
    for name, method in registered_methods().items()
    if method.is_dynamic or name.startswith(("mixed", "longrope"))
}
LOOKUP = {"prompt_lookup_num_tokens": 10}
# transformers 5.0 cannot look prompts up without an end of sequence; nothing here says 127.
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 127 if OLD_TRANSFORMERS else None}


def generator(family="llama", layers=1, seed=0):
    """Make a model whose next token depends on the whole context, not on the last token alone."""
    changes = {"tie_word_embeddings": False, "initializer_range": 0.2}
    config = {"num_hidden_layers": layers, "dtype": torch.float64, **changes}
    return make_model(family, seed=seed, **config).double()


@pytest.fixture(scope="module")
def model():
    return generator()


def prompts(length, count=2):
    """Return random prompts whose second half repeats the first, for prompt lookup."""
    return [tokens(length // 2, seed=seed).repeat(1, 2) for seed in range(count)]


def generate(model, prompt, new, **way):
    ids = model.generate(prompt, max_new_tokens=new, **{**GREEDY, **way})
    return ids[:, : prompt.shape[1] + new]  # transformers 5.0 may look up a few more


def test_every_method_that_follows_lengths_is_here():
    plain = [name for name in registered_methods() if name not in METHODS]
    for name in plain:
        assert not registered_methods()[name].is_dynamic
    assert {"dynamic", "dynamic-yarn", "mixed-yarn", "longrope", "nope"} < METHODS.keys()


@pytest.mark.parametrize("method", METHODS)
def test_looking_up_is_lossless(model, method):
    """Up to the trained length, though candidates reach beyond it, and across several changes."""
    with rope_patch.patch(model, method, **METHODS[method]):
        for prompt in prompts(48):
            short = generate(model, prompt, TRAINED - 48)
            assert generate(model, prompt, TRAINED - 48, **LOOKUP).equal(short)
            assert generate(model, prompt, 50, **LOOKUP).equal(generate(model, prompt, 50))


@pytest.mark.parametrize("method", ["mixed-yarn", "dynamic-yarn"])
def test_up_to_the_trained_length_it_is_the_unpatched_model(model, method):
    plain = [generate(model, prompt, TRAINED - 48) for prompt in prompts(48, 4)]
    with rope_patch.patch(model, method, **METHODS[method]):
        for prompt, expected in zip(prompts(48, 4), plain, strict=True):
            assert generate(model, prompt, TRAINED - 48, **LOOKUP).equal(expected)


@pytest.mark.parametrize(
    ("family", "layers", "method"),
    [
        ("llama", 1, "mixed-yarn"),
        ("llama", 2, "dynamic-yarn"),
        ("qwen3", 1, "dynamic"),
    ],
)
def test_assistants_are_lossless(family, layers, method):
    model, assistant = generator(family, layers), generator(family, layers, seed=3)
    assistant.generation_config.num_assistant_tokens = 6
    rope_patch.patch(model, method, **METHODS[method])
    for prompt in prompts(50):
        expected = generate(model, prompt, 40)
        assert generate(model, prompt, 40, assistant_model=assistant).equal(expected)
    rope_patch.patch(assistant, method, **METHODS[method])
    assert generate(model, prompt, 40, assistant_model=assistant).equal(expected)


def test_growth_with_every_token(model):
    """No candidate is like the next token then: none is tried beyond the trained length."""
    assistant = generator(seed=3)
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    assistant.generation_config.num_assistant_tokens = 5
    with rope_patch.patch(model, "dynamic-yarn", growth="exact"):
        for prompt in prompts(70):
            expected = generate(model, prompt, 20)
            assert generate(model, prompt, 20, **LOOKUP).equal(expected)
            assert generate(model, prompt, 20, assistant_model=assistant).equal(expected)
    assert assistant.generation_config.num_assistant_tokens == 5


def test_a_padded_prompt(model):
    prompt = prompts(40, 1)[0]
    mask = torch.cat([torch.zeros(1, 12), torch.ones(1, 40)], 1).long()
    padded = torch.cat([torch.zeros(1, 12).long(), prompt], 1)
    with rope_patch.patch(model, "mixed-yarn", factor=4):
        expected = generate(model, prompt, 40)
        got = generate(model, padded, 40, attention_mask=mask, **LOOKUP)
    assert got[:, 12:].equal(expected)


# -- which tokens are processed together -----------------------------------------------------------


@pytest.fixture
def together(model):
    """Return (tokens cached, new tokens) of each of the decoder's forwards."""
    steps = []

    def note(decoder, args, kwargs):
        steps.append((kwargs["past_key_values"].get_seq_length(), kwargs["input_ids"].shape[1]))

    hook = model.model.register_forward_pre_hook(note, with_kwargs=True)
    yield steps
    hook.remove()


def assert_no_change_within(steps, handle, prompt):
    several = [(past, new) for past, new in steps if past >= prompt and new > 1]
    assert several, "no candidates at all"
    for past, new in several:
        (first,), (last,) = (handle.frequencies_at(n).values() for n in (past + 1, past + new))
        assert first.same_as(last), f"{new} tokens behind {past}"


@pytest.mark.parametrize("way", ["lookup", "assistant"])
def test_sampling(model, together, way):
    torch.manual_seed(0)
    assistant = generator(seed=3)
    assistant.generation_config.num_assistant_tokens = 6
    own = LOOKUP if way == "lookup" else {"assistant_model": assistant}
    with rope_patch.patch(model, "dynamic-yarn") as handle:
        generate(model, prompts(50)[0], 40, do_sample=True, temperature=0.3, **own)
    assert_no_change_within(together, handle, 50)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="transformers 5.0 itself fails to")
def test_a_model_that_leaves_early_to_draft_for_itself():
    model = generator(layers=2)
    with rope_patch.patch(model, "mixed-yarn", factor=4):
        expected = generate(model, tokens(50), 40)
        assert generate(model, tokens(50), 40, assistant_early_exit=1).equal(expected)


@pytest.mark.parametrize("do_sample", [False, True])
def test_an_assistant_of_other_tokens(do_sample):
    assets = Path(__file__).parents[2] / "assets"
    folders = assets / "tiny-llama", assets / "tiny-qwen3"
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, assistant = (load(folder, dtype=torch.float64) for folder in folders)
    assistant.resize_token_embeddings(assistant.config.vocab_size + 8)  # as if other tokens
    named = dict.fromkeys(("tokenizer", "assistant_tokenizer"))
    for name, folder in zip(named, folders, strict=True):
        named[name] = transformers.AutoTokenizer.from_pretrained(folder)
    named["assistant_tokenizer"].add_tokens([f"<{i}>" for i in range(8)])
    text = "It is a truth universally acknowledged, that a single man in possession of a good "
    ids = named["tokenizer"](text, return_tensors="pt").input_ids[:, :24]
    steps, own = [], {"assistant_model": assistant, "do_sample": do_sample, **named}
    handle = rope_patch.patch(model, "dynamic-yarn", trained_length=32, factor=4)
    expected = generate(model, ids, 40)
    model.model.register_forward_pre_hook(
        lambda _, __, given: steps.append(
            (given["past_key_values"].get_seq_length(), given["input_ids"].shape[1])
        ),
        with_kwargs=True,
    )
    got = generate(model, ids, 40, **own)
    assert_no_change_within(steps, handle, ids.shape[1])
    assert do_sample or got.equal(expected)


def test_a_wrapped_model():
    peft = pytest.importorskip("peft")
    plain = generator()
    wrapped = peft.get_peft_model(generator(), peft.LoraConfig(target_modules=["q_proj"]))
    compiled = torch.compile(generator(), backend="eager")
    for model in (plain, wrapped, compiled):
        rope_patch.patch(model, "mixed-yarn", factor=4)
    prompt = prompts(48, 1)[0]
    expected = generate(plain, prompt, 40)
    assert wrapped.generate(input_ids=prompt, max_new_tokens=40, **GREEDY, **LOOKUP).equal(expected)
    assert generate(compiled, prompt, 40, **LOOKUP).equal(expected)
    rope_patch.unpatch(wrapped)
    inner = wrapped.base_model.model
    assert not {"_get_candidate_generator", "prepare_inputs_for_generation"} & vars(inner).keys()
