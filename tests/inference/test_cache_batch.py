"""Test batches of caches: rows of any lengths give the tokens and logits of each prompt alone."""

import pytest
import torch
from helpers.encoding_models import LENGTH, encoding_model
from helpers.tiny_models import make_model, tokens
from transformers import DynamicCache

import rope_patch
from rope_patch.inference import CacheBatch, GreedyDecoder, PrefixReader, token_bytes

LENGTHS = (30, 47, 38)  # tokens
METHODS = {
    "none": {},
    "yarn": {"method": "yarn", "factor": 4},
    "nope": {"method": "nope"},
    "rerope": {"method": "rerope", "trained_length": 24},
    "self-extend": {"method": "self-extend", "trained_length": 24},
}


@pytest.fixture(params=METHODS)
def model(request):
    model = make_model("llama", vocab_size=128)
    if request.param == "none":
        yield model
        return
    with rope_patch.patch(model, **METHODS[request.param]):
        yield model


def prompts():
    return [tokens(length, seed=length)[0].tolist() for length in LENGTHS]


@torch.no_grad()
def read(model, ids):
    cache = DynamicCache()
    model(torch.tensor([ids[:-1]]), past_key_values=cache, use_cache=True)
    return cache


def read_batch(model, room):
    batch = CacheBatch([length - 1 for length in LENGTHS], room, rope_patch.current(model))
    for row, ids in enumerate(prompts()):
        batch.fill_row(row, read(model, ids))
    return batch


@torch.no_grad()
def one_pass(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def test_rows_have_the_logits_of_their_prompts(model):
    batch, rows = read_batch(model, 3), prompts()
    for step in range(3):
        fed = torch.tensor([[ids[-1]] for ids in rows])
        with torch.no_grad():
            got = model(fed, use_cache=True, **batch.inputs(model, fed.device)).logits[:, -1]
        expected = torch.stack([one_pass(model, ids) for ids in rows])
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        if step == 0:  # the last row takes the first one's place
            batch.drop_row(0)
            rows = [rows[2], rows[1]]
        for row, ids in enumerate(rows):
            ids.append(7 + row)


def test_greedy_answers_equal_those_of_transformers_until_each_ends(model):
    rooms = (6, 12, 9)
    expected = []
    for ids, room in zip(prompts(), rooms, strict=True):
        options = {"max_new_tokens": room, "do_sample": False, "eos_token_id": None}
        expected.append(model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist())
    end = expected[2][4]  # the third ends at this token, wherever it comes first
    cut = [ids[: ids.index(end)] if end in ids else ids for ids in expected]
    cut[1] = cut[1][:2]
    decoder = GreedyDecoder(model, {end})
    is_done = [lambda ids: False, lambda ids: len(ids) == 2, lambda ids: False]
    last = [ids[-1] for ids in prompts()]
    got = decoder.decode_batch(read_batch(model, max(rooms)), last, rooms, is_done)
    assert got == cut
    alone = [
        decoder.decode(read(model, ids), ids[-1], room, done)
        for ids, room, done in zip(prompts(), rooms, is_done, strict=True)
    ]
    assert alone == cut


def test_layers_that_drop_keys_are_refused():
    model = make_model("gemma3", vocab_size=128)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(40), past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="keep all keys, got DynamicSlidingWindowLayer"):
        CacheBatch([40], 1).fill_row(0, cache)


def test_bytes_of_a_token_are_those_of_its_keys_and_values():
    model = make_model("llama", vocab_size=128)
    config = model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert token_bytes(model, torch.device("cpu")) == 4 * numbers


def batch_of_equal_rows(model, room):
    ids = tokens(20)[0].tolist()
    batch = CacheBatch([19, 19, 19], room)
    for row in range(3):
        batch.fill_row(row, read(model, ids))
    return batch


def test_more_tokens_than_there_is_room_for_are_refused():
    """Equal rows have no mask, so nothing else would tell that the token was written nowhere."""
    model = make_model("llama", vocab_size=128)
    batch, fed = batch_of_equal_rows(model, 1), torch.tensor([[5]] * 3)
    with torch.no_grad():
        model(fed, **batch.inputs(model, fed.device))
        with pytest.raises(ValueError, match="at most 0 more tokens of 3 rows, got 1 of 3"):
            model(fed, **batch.inputs(model, fed.device))


def test_a_token_of_one_row_is_not_written_to_all():
    model = make_model("llama", vocab_size=128)
    layer = batch_of_equal_rows(model, 2).cache.layers[0]
    states = torch.ones_like(layer.keys[:1, :, :1])
    with pytest.raises(ValueError, match="at most 2 more tokens of 3 rows, got 1 of 1"):
        layer.update(states, states)
    assert layer.keys.shape[-2] == 19


def test_rows_that_a_cache_does_not_fill_are_refused():
    model = make_model("llama", vocab_size=128)
    batch = CacheBatch([19, 25], 1)
    for row, (count, expected) in enumerate([(19, 19), (19, 25)]):
        cache = read(model, tokens(count + 1)[0].tolist())
        if count == expected:
            batch.fill_row(row, cache)
            continue
        with pytest.raises(ValueError, match="a cache of 25 tokens for row 1, got one of 19"):
            batch.fill_row(row, cache)


def test_negative_rows_are_counted_from_the_last_one_in_use():
    model = make_model("llama", vocab_size=128)
    batch = batch_of_equal_rows(model, 1)
    layer = batch.cache.layers[0]
    layer.keys[:] = torch.arange(3.0).view(3, 1, 1, 1)
    batch.drop_row(0)  # rows 2 and 1 are left
    layer.batch_select_indices(torch.tensor([-1, 0]))
    assert layer.keys[:, 0, 0, 0].tolist() == [1, 2]


# --- Models that do not rotate: chunks, shared prefixes and batches -------------------------------

CASES = {
    "GPT2LMHeadModel": ("linear", {}, {}),
    "GPTNeoForCausalLM": ("linear", {}, {}),
    "OPTForCausalLM": ("tile", {}, {}),
    "BioGptForCausalLM": ("linear", {}, {}),
    "XGLMForCausalLM": ("ntk", {}, {}),
    "BloomForCausalLM": ("ntk", {"trained_length": LENGTH}, {}),
    "MptForCausalLM": ("linear", {}, {"max_seq_len": LENGTH, "n_heads": 6}),
    "FalconForCausalLM": ("ntk", {"trained_length": LENGTH}, {"num_attention_heads": 6}),
}


@pytest.fixture(params=CASES)
def unrotated(request):
    method, arguments, fields = CASES[request.param]
    model = encoding_model(request.param, **fields)
    rope_patch.patch(model, method, factor=4, **arguments)
    return model


def prompt(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, 90, (length,), generator=generator).tolist()


def last_logits(model, ids):
    return model(torch.tensor([ids])).logits[0, -1]


@torch.no_grad()
def test_chunks_and_shared_prefixes_change_nothing(unrotated):
    model = unrotated
    first = prompt(100, 0)
    second = [*first[:70], *prompt(40, 1)]
    reader = PrefixReader(model, chunk=32)
    for ids in (first, second):
        cache = reader(ids)
        ours = model(torch.tensor([ids[-1:]]), past_key_values=cache).logits[0, -1]
        torch.testing.assert_close(ours, last_logits(model, ids), rtol=1e-4, atol=1e-4)
    assert reader.tokens_read == 99 + 109 - 64  # two whole chunks are shared


@torch.no_grad()
def test_rows_of_a_batch_are_as_single_prompts(unrotated):
    model = unrotated
    prompts = [prompt(61, 2), prompt(90, 3)]
    reader = PrefixReader(model, chunk=32)
    batch = CacheBatch([len(ids) - 1 for ids in prompts], room=4)
    for row, ids in enumerate(prompts):
        batch.fill_row(row, reader(ids))
    for _ in range(3):
        tokens = torch.tensor([ids[-1:] for ids in prompts])
        logits = model(tokens, **batch.inputs(model, tokens.device)).logits[:, -1]
        for row, ids in enumerate(prompts):
            torch.testing.assert_close(logits[row], last_logits(model, ids), rtol=1e-4, atol=1e-4)
        prompts = [[*ids, int(row.argmax())] for ids, row in zip(prompts, logits, strict=True)]
