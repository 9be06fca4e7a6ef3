"""Test chunked prompts, shared prefixes and batches on models that do not rotate."""

import pytest
import torch
from helpers.encoding_models import LENGTH, encoding_model

import rope_patch
from rope_patch.inference.cache_batch import CacheBatch
from rope_patch.inference.prefix_reader import PrefixReader

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
def model(request):
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
def test_chunks_and_shared_prefixes_change_nothing(model):
    first = prompt(100, 0)
    second = [*first[:70], *prompt(40, 1)]
    reader = PrefixReader(model, chunk=32)
    for ids in (first, second):
        cache = reader(ids)
        ours = model(torch.tensor([ids[-1:]]), past_key_values=cache).logits[0, -1]
        torch.testing.assert_close(ours, last_logits(model, ids), rtol=1e-4, atol=1e-4)
    assert reader.tokens_read == 99 + 109 - 64  # two whole chunks are shared


@torch.no_grad()
def test_rows_of_a_batch_are_as_single_prompts(model):
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
