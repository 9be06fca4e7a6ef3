"""Test gradients through a cache with re-rotated keys, against forwards without a cache."""

import pytest
import torch
from helpers.tiny_models import LONG_FACTOR, SHORT, TRAINED, make_model, tokens
from transformers import DynamicCache, StaticCache

import rope_patch
from rope_patch.patching.architecture.key_layout import KeyLayout
from rope_patch.patching.dynamic.rerotation import KeyRerotation

CHUNK = 60  # tokens in each of the two chunks
METHODS = {
    "dynamic-yarn": {},
    "mixed-yarn": {"factor": 4},
    "longrope": {"factor": 4, "long_factor": LONG_FACTOR, "start_tokens": 8},
}


@pytest.fixture(scope="module")
def model():
    """Return a model of one layer, in which no keys depend on frequencies."""
    return make_model(num_hidden_layers=1).train()


def loss(logits):
    return logits.pow(2).mean()


def gradients(model, losses):
    model.zero_grad()
    losses.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def chunks(model, ids, call=None):
    """Return the logits of two chunks, with a growth step between them."""
    cache = DynamicCache(config=model.config)
    first = model(ids[:, :CHUNK], past_key_values=cache).logits
    call = model if call is None else call
    return first, call(ids[:, CHUNK:], past_key_values=cache).logits


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, f"{name}: {error}"


@pytest.mark.parametrize("method", METHODS)
def test_loss_on_a_later_chunk_reaches_rerotated_keys(model, method):
    ids = tokens(2 * CHUNK, batch=2)
    with rope_patch.patch(model, method, **METHODS[method]):
        whole = gradients(model, loss(model(ids, use_cache=False).logits[:, CHUNK:]))
        got = gradients(model, loss(chunks(model, ids)[1]))
    assert "model.layers.0.self_attn.k_proj.weight" in got
    assert_same(got, whole)


@pytest.mark.parametrize("method", METHODS)
def test_losses_on_both_chunks_give_the_gradients_without_a_cache(model, method):
    """Re-rotation must not change the keys that the first chunk saved for its backward pass."""
    ids = tokens(2 * CHUNK)
    with rope_patch.patch(model, method, **METHODS[method]):
        short = loss(model(ids[:, :CHUNK], use_cache=False).logits)
        whole = loss(model(ids, use_cache=False).logits[:, CHUNK:])
        expected = gradients(model, short + whole)
        got = gradients(model, sum(map(loss, chunks(model, ids))))
    assert_same(got, expected)


def test_gradients_if_only_one_row_is_rerotated(model):
    """Decode two rows of which only the second passes a growth step."""
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


def test_gradients_through_a_compiled_chunk(model):
    torch._dynamo.reset()
    ids = tokens(2 * CHUNK)
    with rope_patch.patch(model, "dynamic-yarn"):
        expected = gradients(model, loss(chunks(model, ids)[1]))
        compiled = torch.compile(model, backend="aot_eager")
        got = gradients(model, loss(chunks(model, ids, compiled)[1]))
    torch._dynamo.reset()
    assert_same(got, expected)


def test_static_cache_that_would_lose_gradients_is_refused(model):
    ids = tokens(2 * CHUNK)
    cache = StaticCache(config=model.config, max_cache_len=2 * CHUNK)
    with rope_patch.patch(model, "dynamic-yarn"):
        model(ids[:, :CHUNK], past_key_values=cache)
        with pytest.raises(ValueError, match="Use a DynamicCache"):
            model(ids[:, CHUNK:], past_key_values=cache)


def test_keys_without_gradients_are_rerotated_in_place():
    rerotation = KeyRerotation(
        {None: (0, 9)}, layout=KeyLayout(interleaved=False), kernels=None, start_tokens=0
    )
    keys, positions = torch.randn(1, 2, CHUNK, 16), torch.arange(CHUNK)[None]
    before, sets = keys.clone(), torch.rand(2, 1, 9, dtype=torch.float64) + 0.5
    rerotation.rerotate([(keys, positions, None)], sets[0], sets[1], torch.tensor([True]))
    assert not keys.equal(before)
    assert not keys.requires_grad


@pytest.mark.parametrize("kernels", [None, "reference"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_derivative_of_rerotation(kernels, interleaved):
    """Check by finite differences: one of two rows changes, with start tokens and factors."""
    torch.manual_seed(0)
    old, new = (torch.rand(2, 5, dtype=torch.float64) + 0.5 for _ in range(2))
    rerotation = KeyRerotation({None: (0, 5)}, KeyLayout(interleaved), kernels, start_tokens=2)
    positions, changed = torch.arange(4).repeat(2, 1), torch.tensor([False, True])

    def rerotate(keys):
        keys = keys.clone()
        rerotation.rerotate([(keys, positions, None)], old, new, changed)
        return keys

    keys = torch.randn(2, 1, 4, 10, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(rerotate, keys)
    torch.autograd.gradgradcheck(rerotate, keys)


def test_derivative_of_rerotation_by_sections():
    torch.manual_seed(0)
    old, new = (torch.rand(2, 5, dtype=torch.float64) + 0.5 for _ in range(2))
    layout = KeyLayout(interleaved=False, sections=(0, 1, 2, 0))
    rerotation = KeyRerotation({None: (0, 5)}, layout, kernels=None, start_tokens=0)
    positions, changed = torch.randint(9, (2, 4, 3)), torch.tensor([False, True])

    def rerotate(keys):
        keys = keys.clone()
        rerotation.rerotate([(keys, positions, None)], old, new, changed)
        return keys

    keys = torch.randn(2, 1, 4, 10, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(rerotate, keys)
    # The same as rotating by the difference at each pair's own position.
    at = positions[1][:, [0, 1, 2, 0]]
    angle = (new - old)[1, :-1] * at
    turn = torch.polar(new[1, -1] / old[1, -1] * torch.ones_like(angle), angle)
    first, second, rest = keys.split([4, 4, 2], dim=-1)
    rotated = torch.complex(first[1, 0], second[1, 0]) * turn
    expected = torch.cat([rotated.real, rotated.imag, rest[1, 0]], dim=-1)
    torch.testing.assert_close(rerotate(keys)[1, 0], expected, rtol=0, atol=1e-5)
    assert rerotate(keys)[0].equal(keys[0])
