"""Prompts read in chunks into a cache, against one pass of transformers over the whole prompt."""

from pathlib import Path

import pytest
import torch
from helpers.tiny_models import make_model, tokens
from transformers import AutoModelForCausalLM, Lfm2Config, Lfm2ForCausalLM

import rope_patch
from rope_patch.inference.prefix_reader import PrefixReader, is_out_of_memory

ASSETS = Path(__file__).parents[1] / "assets"
CHUNK = 64
METHODS = {
    "none": {},
    "yarn": {"method": "yarn", "factor": 4},
    "dynamic-yarn": {"method": "dynamic-yarn"},
    "mixed-yarn": {"method": "mixed-yarn", "factor": 4},
    "nope": {"method": "nope"},
    "nope-cool": {"method": "nope", "temperature": 1.2},
}


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def trained(request):
    """Trained on 256 tokens."""
    return AutoModelForCausalLM.from_pretrained(ASSETS / f"tiny-{request.param}")


@pytest.fixture(scope="module")
def llama():
    return AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-llama")


@pytest.fixture(params=METHODS)
def model(request, trained):
    if request.param == "none":
        yield trained
        return
    with rope_patch.patch(trained, **METHODS[request.param]):
        yield trained


@pytest.fixture
def hybrid():
    """Convolutions whose state cannot be cut back, and attention."""
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
    return Lfm2ForCausalLM(config).eval()


def prompt(length, seed=1, start=()):
    """Random tokens after a common start."""
    return [*start, *tokens(length - len(start), seed=seed)[0].tolist()]


@torch.no_grad()
def one_pass(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0]


@torch.no_grad()
def read(reader, ids, more=(), length=None):
    """Logits of the prompt's last token, and of some more, through a reader's cache."""
    cache = reader(ids, length=length)
    assert cache.get_seq_length() == len(ids) - 1
    fed = torch.tensor([[ids[-1], *more]])
    return reader.model(fed, past_key_values=cache, use_cache=True).logits[0]


@pytest.mark.parametrize("length", [1, 2, 200, 256, 257, 258, 520])
def test_a_prompt_in_chunks_is_a_prompt_in_one_pass(model, length):
    ids = prompt(length)
    got = read(PrefixReader(model, chunk=CHUNK), ids)
    torch.testing.assert_close(got, one_pass(model, ids)[-1:], rtol=0, atol=1e-5 * scale(got))


def scale(logits):
    """Tolerances are of logits of about 1; those of trained models are larger."""
    return max(1.0, logits.abs().max().item())


def test_what_follows_the_prompt_is_read_as_in_one_pass(model):
    """The prompt ends within the trained length, what follows beyond."""
    ids, more = prompt(250), prompt(20, seed=2)
    got = read(PrefixReader(model, chunk=CHUNK), ids, more, length=270)
    expected = one_pass(model, [*ids, *more])[249:]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * scale(got))


@torch.no_grad()
def answer(reader, ids, room):
    """Greedy tokens with their logits; the cache grows past the prompt."""
    cache, token, found = reader(ids), ids[-1], []
    for _ in range(room):
        fed = torch.tensor([[token]])
        logits = reader.model(fed, past_key_values=cache, use_cache=True).logits[0, -1]
        token = int(logits.argmax())
        found.append(logits)
    return torch.stack(found)


# Common beginnings of all kinds: within a chunk, of chunks exactly, a prompt within another.
START = prompt(400, seed=3)
PROMPTS = [
    [*START[:330], *prompt(30, seed=4)],
    [*START[:330], *prompt(50, seed=5)],
    [*START[:40], *prompt(100, seed=6)],
    START[:256],
    START[:257],
    START[:384],
    START[:386],
    [*START[:250], *prompt(4, seed=7)],  # written on past the trained length
    START[:252],
    START[:320],
    prompt(90, seed=8),
]


def test_sharing_changes_no_bit_in_any_order(model):
    alone = PrefixReader(model, share=False, chunk=CHUNK)
    expected = [answer(alone, ids, 5) for ids in PROMPTS]
    assert alone.tokens_read == sum(len(ids) - 1 for ids in PROMPTS)
    order = list(range(len(PROMPTS)))
    for turned in (order[::-1], sorted(order, key=PROMPTS.__getitem__)):
        reader = PrefixReader(model, chunk=CHUNK)
        for i in turned:
            assert torch.equal(answer(reader, PROMPTS[i], 5), expected[i]), f"prompt {i}"
        assert reader.prompt_tokens == sum(map(len, PROMPTS))
        assert reader.tokens_read < alone.tokens_read


def test_common_chunks_are_read_once(trained):
    reader = PrefixReader(trained, chunk=CHUNK)
    first, second = prompt(200), [*prompt(200)[:150], *prompt(50, seed=2)]
    reader(first)
    assert reader.tokens_read == 199
    reader(second)
    assert reader.tokens_read == 199 + 199 - 128  # two chunks of 64 were there
    assert reader.prompt_tokens == 400


def test_a_prompt_that_was_read_is_not_read_again(model):
    """Several answers to one question are tried on the same keys."""
    reader, found = PrefixReader(model, chunk=CHUNK), []
    for _ in range(3):
        cache = reader(prompt(200))
        scratch = reader.borrow(cache, 1)
        fed = torch.tensor([prompt(200)[-1:]])
        found.append(model(fed, past_key_values=scratch, use_cache=True).logits[0, -1])
        reader.give_back(cache, scratch, 1)
    assert reader.tokens_read == 199
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_prompts_that_are_rotated_otherwise_share_nothing(llama):
    with rope_patch.patch(llama, "dynamic-yarn"):
        reader = PrefixReader(llama, chunk=CHUNK)
        reader(prompt(300))
        reader(prompt(300)[:200])
    assert reader.tokens_read == 299 + 199


def test_a_cache_is_as_before_after_it_was_tried(model):
    """Scoring a target must not change what is generated, also where the target turns the keys."""
    ids, target = prompt(250), prompt(20, seed=2)
    reader = PrefixReader(model, chunk=CHUNK)
    expected = answer(reader, ids, 8)
    cache = reader(ids)
    scratch = reader.borrow(cache, len(target))
    with torch.no_grad():
        model(torch.tensor([target]), past_key_values=scratch, use_cache=True)
    reader.give_back(cache, scratch, len(target))
    assert cache.get_seq_length() == len(ids) - 1
    with torch.no_grad():
        got = model(torch.tensor([ids[-1:]]), past_key_values=cache, use_cache=True).logits[0, -1]
    assert torch.equal(got, expected[0])


def test_the_length_is_looked_at_again_after_reading_and_after_a_failure(llama):
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
        # Nothing of the prompt that failed is taken for read.
        got = read(reader, prompt(700, seed=2))
        assert torch.equal(got, read(PrefixReader(llama, chunk=CHUNK), prompt(700, seed=2)))


def test_progress_adds_up_to_the_prompt(llama):
    reader, seen = PrefixReader(llama, chunk=CHUNK), []
    for ids in (prompt(300), prompt(300)[:200], prompt(1)):
        seen.clear()
        reader(ids, seen.append)
        assert sum(seen) == len(ids)


def test_smaller_chunks_until_there_are_none(llama):
    reader = PrefixReader(llama, chunk=200)
    ids = prompt(300)
    expected = read(reader, ids)
    assert reader.halve_chunk()
    assert reader.chunk == 100
    assert reader.halve_chunk()
    assert not reader.halve_chunk()
    assert reader.chunk == 50
    torch.testing.assert_close(read(reader, ids), expected, rtol=0, atol=1e-4)


def test_models_that_keep_more_than_keys_share_nothing(hybrid):
    reader, sizes = PrefixReader(hybrid, chunk=CHUNK), []
    hybrid.register_forward_hook(lambda _, given, __: sizes.append(given[0].shape[1]))
    for ids in (prompt(200), [*prompt(200)[:150], *prompt(50, seed=2)]):
        torch.testing.assert_close(read(reader, ids), one_pass(hybrid, ids)[-1:], rtol=0, atol=1e-5)
    assert reader.tokens_read == 2 * 199
    assert max(sizes[:2]) == 199  # in one pass
    assert not reader.halve_chunk()


def test_a_target_tried_on_such_a_model_leaves_its_cache_alone(hybrid):
    ids = prompt(80)
    reader = PrefixReader(hybrid)
    cache = reader(ids)
    scratch = reader.borrow(cache, 5)
    with torch.no_grad():
        hybrid(tokens(5), past_key_values=scratch, use_cache=True)
        reader.give_back(cache, scratch, 5)
        got = hybrid(torch.tensor([ids[-1:]]), past_key_values=cache, use_cache=True).logits[0]
    torch.testing.assert_close(got, one_pass(hybrid, ids)[-1:], rtol=0, atol=1e-5)


def test_windows_shorter_than_a_chunk_and_longer_prompts():
    """Random weights, where every token matters, and a window of 32 tokens."""
    model = make_model("gemma3")
    for length in (30, 33, 64, 65, 150):
        ids = prompt(length)
        got = read(PrefixReader(model, chunk=16), ids)
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
def test_what_counts_as_running_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected
