"""Test the prefix reader: chunks and shared prefixes give the logits of one transformers pass."""

from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.releases import plain_transformers
from helpers.tiny_models import make_model, step_by_step, tokens
from transformers import AutoModelForCausalLM, Lfm2Config, Lfm2ForCausalLM

import rope_patch
from rope_patch.inference import PrefixReader, is_out_of_memory

ASSETS = Path(__file__).parents[1] / "assets"
CHUNK = 64
METHODS = {
    "none": {},
    "yarn": {"method": "yarn", "factor": 4},
    "dynamic-yarn": {"method": "dynamic-yarn"},
    "mixed-yarn": {"method": "mixed-yarn", "factor": 4},
    "nope": {"method": "nope"},
    "rerope": {"method": "rerope"},
    "self-extend": {"method": "self-extend"},
    "string on yarn": {"method": "string", "on": "yarn:4"},
    "nope-cool": {"method": "nope", "temperature": "drope:1.2"},
}


# Of each kind; others differ in their formula alone.
QUICK = [("llama", method) for method in METHODS if method not in ("none", "nope", "rerope")]
QUICK += [("gemma3", method) for method in ("dynamic-yarn", "self-extend")]
SLOW = [("llama", "none"), ("llama", "nope"), ("llama", "rerope"), ("gemma3", "none")]
SLOW += [("qwen3", method) for method in ("none", "dynamic-yarn", "self-extend")]
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow, id="-".join(case)) for case in SLOW)]


@cache
def trained_model(family):
    """Return a tiny model of trained length 256."""
    return AutoModelForCausalLM.from_pretrained(ASSETS / f"tiny-{family}")


@pytest.fixture
def llama():
    return trained_model("llama")


@pytest.fixture(params=CASES, ids="-".join)
def model(request):
    family, method = request.param
    if method == "none":
        yield trained_model(family)
        return
    with rope_patch.patch(trained_model(family), **METHODS[method]):
        yield trained_model(family)


@pytest.fixture
def hybrid():
    """Return a model of attention layers and convolutions, whose state cannot be cropped."""
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention", "conv"],
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    model = Lfm2ForCausalLM(config).eval()
    with plain_transformers():  # 5.0 has a cache class of its own for it
        step_by_step(model, tokens(4), 3)
    return model


def prompt(length, seed=1, start=()):
    """Return random tokens after a common start."""
    return [*start, *tokens(length - len(start), seed=seed)[0].tolist()]


@torch.no_grad()
def one_pass(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0]


@torch.no_grad()
def read_logits(reader, ids, following=(), length=None):
    """Return the logits of the prompt's last token and of following ones from a reader's cache."""
    cache = reader(ids, length=length)
    assert cache.get_seq_length() == len(ids) - 1
    input_ids = torch.tensor([[ids[-1], *following]])
    return reader.model(input_ids, past_key_values=cache, use_cache=True).logits[0]


@pytest.mark.parametrize("length", [1, 256, 257, 330])
def test_a_prompt_in_chunks_has_the_logits_of_one_pass(model, length):
    ids = prompt(length)
    got = read_logits(PrefixReader(model, chunk=CHUNK), ids)
    torch.testing.assert_close(
        got, one_pass(model, ids)[-1:], rtol=0, atol=1e-5 * tolerance_scale(got)
    )


def tolerance_scale(logits):
    """Return the factor of a tolerance meant for logits of about 1; trained models' are larger."""
    return max(1.0, logits.abs().max().item())


def test_tokens_after_the_prompt_have_the_logits_of_one_pass(model):
    """The prompt ends within the trained length, the following tokens beyond."""
    ids, following = prompt(250), prompt(20, seed=2)
    got = read_logits(PrefixReader(model, chunk=CHUNK), ids, following, length=270)
    expected = one_pass(model, [*ids, *following])[249:]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * tolerance_scale(got))


@torch.no_grad()
def greedy_logits(reader, ids, steps):
    """Return the logits of greedy decode steps, which extend the cache past the prompt."""
    cache, token, step_logits = reader(ids), ids[-1], []
    for _ in range(steps):
        input_ids = torch.tensor([[token]])
        logits = reader.model(input_ids, past_key_values=cache, use_cache=True).logits[0, -1]
        token = int(logits.argmax())
        step_logits.append(logits)
    return torch.stack(step_logits)


# Shared prefixes end within a chunk or at its end, and some prompts are prefixes of others.
START = prompt(300, seed=3)
PROMPTS = [
    [*START[:290], *prompt(10, seed=4)],
    [*START[:290], *prompt(20, seed=5)],
    [*START[:40], *prompt(60, seed=6)],
    START[:256],
    START[:257],
    [*START[:250], *prompt(6, seed=7)],  # decoding passes the trained length
    START[:252],
]


def test_sharing_changes_no_bit_in_any_order(model):
    unshared = PrefixReader(model, share=False, chunk=CHUNK)
    expected = [greedy_logits(unshared, ids, 3) for ids in PROMPTS]
    assert unshared.tokens_read == sum(len(ids) - 1 for ids in PROMPTS)
    order = list(range(len(PROMPTS)))
    for shuffled_order in (order[::-1], sorted(order, key=PROMPTS.__getitem__)):
        reader = PrefixReader(model, chunk=CHUNK)
        for i in shuffled_order:
            assert torch.equal(greedy_logits(reader, PROMPTS[i], 3), expected[i]), f"prompt {i}"
        assert reader.prompt_tokens == sum(map(len, PROMPTS))
        assert reader.tokens_read < unshared.tokens_read


def test_common_chunks_are_read_once(llama):
    reader = PrefixReader(llama, chunk=CHUNK)
    first, second = prompt(200), [*prompt(200)[:150], *prompt(50, seed=2)]
    reader(first)
    assert reader.tokens_read == 199
    reader(second)
    assert reader.tokens_read == 199 + 199 - 128  # two chunks of 64 were cached
    assert reader.prompt_tokens == 400


def test_a_repeated_prompt_is_read_once(model):
    """Several answers to a question are scored on the same cached keys."""
    reader, last_logits = PrefixReader(model, chunk=CHUNK), []
    for _ in range(3):
        cache = reader(prompt(200))
        scratch = reader.borrow(cache, 1)
        input_ids = torch.tensor([prompt(200)[-1:]])
        last_logits.append(model(input_ids, past_key_values=scratch, use_cache=True).logits[0, -1])
        reader.give_back(cache, scratch, 1)
    assert reader.tokens_read == 199
    assert torch.equal(last_logits[0], last_logits[1])
    assert torch.equal(last_logits[0], last_logits[2])


def test_prompts_with_different_frequencies_share_nothing(llama):
    with rope_patch.patch(llama, "dynamic-yarn"):
        reader = PrefixReader(llama, chunk=CHUNK)
        reader(prompt(300))
        reader(prompt(300)[:200])
    assert reader.tokens_read == 299 + 199


def test_borrowing_leaves_the_cache_unchanged(model):
    """Scoring a target must not change generation, even if the target re-rotates the keys."""
    ids, target = prompt(250), prompt(20, seed=2)
    reader = PrefixReader(model, chunk=CHUNK)
    expected = greedy_logits(reader, ids, 8)
    cache = reader(ids)
    scratch = reader.borrow(cache, len(target))
    with torch.no_grad():
        model(torch.tensor([target]), past_key_values=scratch, use_cache=True)
    reader.give_back(cache, scratch, len(target))
    assert cache.get_seq_length() == len(ids) - 1
    with torch.no_grad():
        got = model(torch.tensor([ids[-1:]]), past_key_values=cache, use_cache=True).logits[0, -1]
    assert torch.equal(got, expected[0])


def test_the_model_follows_the_length_again_after_reading_and_after_a_failure(llama):
    ids = prompt(300)
    with rope_patch.patch(llama, "dynamic-yarn"):
        expected = one_pass(llama, ids)
        reader = PrefixReader(llama, chunk=CHUNK)
        reader(prompt(700))
        assert torch.equal(one_pass(llama, ids), expected)
        hook = llama.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            reader(prompt(700, seed=2))
        hook.remove()
        assert torch.equal(one_pass(llama, ids), expected)
        # The prompt that failed is read from its start.
        got = read_logits(reader, prompt(700, seed=2))
        assert torch.equal(got, read_logits(PrefixReader(llama, chunk=CHUNK), prompt(700, seed=2)))


def test_progress_adds_up_to_the_prompt(llama):
    reader, steps = PrefixReader(llama, chunk=CHUNK), []
    for ids in (prompt(300), prompt(300)[:200], prompt(1)):
        steps.clear()
        reader(ids, steps.append)
        assert sum(steps) == len(ids)


def test_chunks_are_halved_down_to_a_minimum(llama):
    reader = PrefixReader(llama, chunk=200)
    ids = prompt(300)
    expected = read_logits(reader, ids)
    assert reader.halve_chunk()
    assert reader.chunk == 100
    assert reader.halve_chunk()
    assert not reader.halve_chunk()
    assert reader.chunk == 50
    torch.testing.assert_close(read_logits(reader, ids), expected, rtol=0, atol=1e-4)


def test_models_with_other_state_than_keys_share_nothing(hybrid):
    reader, sizes = PrefixReader(hybrid, chunk=CHUNK), []
    hybrid.register_forward_hook(lambda _, args, __: sizes.append(args[0].shape[1]))
    for ids in (prompt(200), [*prompt(200)[:150], *prompt(50, seed=2)]):
        torch.testing.assert_close(
            read_logits(reader, ids), one_pass(hybrid, ids)[-1:], rtol=0, atol=1e-5
        )
    assert reader.tokens_read == 2 * 199
    assert max(sizes[:2]) == 199  # in one pass
    assert not reader.halve_chunk()


def test_borrowing_leaves_the_cache_of_a_hybrid_model_unchanged(hybrid):
    ids = prompt(80)
    reader = PrefixReader(hybrid)
    cache = reader(ids)
    scratch = reader.borrow(cache, 5)
    with torch.no_grad():
        hybrid(tokens(5), past_key_values=scratch, use_cache=True)
        reader.give_back(cache, scratch, 5)
        got = hybrid(torch.tensor([ids[-1:]]), past_key_values=cache, use_cache=True).logits[0]
    torch.testing.assert_close(got, one_pass(hybrid, ids)[-1:], rtol=0, atol=1e-5)


def test_sliding_windows_around_the_chunk_size_have_the_logits_of_one_pass():
    """The window has 32 tokens; with random weights every token matters."""
    model = make_model("gemma3")
    for length in (30, 33, 64, 65, 150):
        ids = prompt(length)
        got = read_logits(PrefixReader(model, chunk=16), ids)
        torch.testing.assert_close(got, one_pass(model, ids)[-1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("shapes do not match"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_out_of_memory_errors_are_recognised(error, expected):
    assert is_out_of_memory(error) is expected
