"""Gradients through a cache whose keys are rotated again, against passes without any cache."""

import pytest
import torch
from helpers.tiny_models import LONG_FACTOR, SHORT, TRAINED, make_model, tokens
from transformers import DynamicCache, StaticCache

import rope_patch
from rope_patch.patching.dynamic.rerotation import KeyRerotation

START = 60  # tokens in the first chunk, and as many in the second
METHODS = {
    "dynamic-yarn": {},
    "mixed-yarn": {"factor": 4},
    "longrope": {"factor": 4, "long_factor": LONG_FACTOR, "start_tokens": 8},
}


@pytest.fixture(scope="module")
def model():
    """One layer: hidden states then depend on no frequencies, so a cache changes nothing."""
    return make_model(num_hidden_layers=1).train()


def loss(logits):
    return logits.pow(2).mean()


def gradients(model, losses):
    model.zero_grad()
    losses.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def chunks(model, ids, call=None):
    """Return the logits of two chunks; the second outgrows the first one's frequencies."""
    cache = DynamicCache(config=model.config)
    first = model(ids[:, :START], past_key_values=cache).logits
    call = model if call is None else call
    return first, call(ids[:, START:], past_key_values=cache).logits


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, f"{name}: {error}"


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_on_a_later_chunk_reaches_keys_that_were_rotated_again(model, method):
    ids = tokens(2 * START, batch=2)
    with rope_patch.patch(model, method, **METHODS[method]):
        whole = gradients(model, loss(model(ids, use_cache=False).logits[:, START:]))
        got = gradients(model, loss(chunks(model, ids)[1]))
    assert "model.layers.0.self_attn.k_proj.weight" in got
    assert_same(got, whole)


@pytest.mark.parametrize("method", METHODS)
def test_losses_on_both_chunks(model, method):
    """The first chunk's attention has saved its keys for the backward pass."""
    ids = tokens(2 * START)
    with rope_patch.patch(model, method, **METHODS[method]):
        short = loss(model(ids[:, :START], use_cache=False).logits)
        whole = loss(model(ids, use_cache=False).logits[:, START:])
        expected = gradients(model, short + whole)
        got = gradients(model, sum(map(loss, chunks(model, ids))))
    assert_same(got, expected)


def test_rows_that_change_by_themselves(model):
    """Of two rows only the second outgrows its frequencies."""
    ids = tokens(SHORT + 1, batch=2)
    positions = torch.arange(SHORT + 1).repeat(2, 1)
    positions[1, -1] = 4 * TRAINED
    mask = torch.ones(2, 1, SHORT + 1, SHORT + 1, dtype=torch.bool).tril()
    with rope_patch.patch(model, "dynamic-yarn"):
        whole = model(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
        expected = gradients(model, loss(whole[:, -1]))
        cache = DynamicCache(config=model.config)
        model(ids[:, :SHORT], past_key_values=cache)
        last = model(ids[:, SHORT:], position_ids=positions[:, SHORT:], past_key_values=cache)
        assert_same(gradients(model, loss(last.logits[:, -1])), expected)


def test_a_compiled_chunk(model):
    torch._dynamo.reset()
    ids = tokens(2 * START)
    with rope_patch.patch(model, "dynamic-yarn"):
        expected = gradients(model, loss(chunks(model, ids)[1]))
        compiled = torch.compile(model, backend="aot_eager")
        got = gradients(model, loss(chunks(model, ids, compiled)[1]))
    torch._dynamo.reset()
    assert_same(got, expected)


def test_a_static_cache_refuses_what_would_lose_gradients(model):
    ids = tokens(2 * START)
    cache = StaticCache(config=model.config, max_cache_len=2 * START)
    with rope_patch.patch(model, "dynamic-yarn"):
        model(ids[:, :START], past_key_values=cache)
        with pytest.raises(ValueError, match="Use a DynamicCache"):
            model(ids[:, START:], past_key_values=cache)


def test_keys_without_gradients_are_rotated_in_place():
    turning = KeyRerotation({None: (0, 9)}, interleaved=False, kernels=None, start_tokens=0)
    keys, at = torch.randn(1, 2, START, 16), torch.arange(START)[None]
    before, sets = keys.clone(), torch.rand(2, 1, 9, dtype=torch.float64) + 0.5
    turning.rerotate([(keys, at, None)], sets[0], sets[1], torch.tensor([True]))
    assert not keys.equal(before)
    assert not keys.requires_grad


@pytest.mark.parametrize("kernels", [None, "reference"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_derivative_of_rotating_again(kernels, interleaved):
    """By finite differences: two rows of which one changes, start tokens, other factors."""
    torch.manual_seed(0)
    old, new = (torch.rand(2, 5, dtype=torch.float64) + 0.5 for _ in range(2))
    turning = KeyRerotation({None: (0, 5)}, interleaved, kernels, start_tokens=2)
    at, changed = torch.arange(4).repeat(2, 1), torch.tensor([False, True])

    def rotated(keys):
        keys = keys.clone()
        turning.rerotate([(keys, at, None)], old, new, changed)
        return keys

    keys = torch.randn(2, 1, 4, 10, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(rotated, keys)
    torch.autograd.gradgradcheck(rotated, keys)
