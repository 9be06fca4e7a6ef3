"""Test re-rotated keys: their gradients, against forwards without a cache, and their launches."""

import pytest
import torch
from helpers.tiny_models import (
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT,
    TRAINED,
    make_model,
    tokens,
)
from transformers import DynamicCache, StaticCache

import rope_patch
from rope_patch.ops import triton_unavailable_reason
from rope_patch.patching import KeyLayout, KeyRerotation

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
def test_losses_give_the_gradients_without_a_cache(model, method):
    """Of both chunks: re-rotation must not change what the first saved for its backward pass."""
    ids = tokens(2 * CHUNK, batch=2)
    with rope_patch.patch(model, method, **METHODS[method]):
        later = gradients(model, loss(chunks(model, ids)[1]))
        both = gradients(model, sum(map(loss, chunks(model, ids))))
        of_short = gradients(model, loss(model(ids[:, :CHUNK], use_cache=False).logits))
        whole = gradients(model, loss(model(ids, use_cache=False).logits[:, CHUNK:]))
    assert "model.layers.0.self_attn.k_proj.weight" in later
    assert_same(later, whole)
    assert_same(both, {name: whole[name] + of_short[name] for name in whole})


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


@pytest.mark.usefixtures("reset_compiler")
def test_gradients_through_a_compiled_chunk(model):
    ids = tokens(2 * CHUNK)
    with rope_patch.patch(model, "dynamic-yarn"):
        expected = gradients(model, loss(chunks(model, ids)[1]))
        compiled = torch.compile(model, backend="eager")
        got = gradients(model, loss(chunks(model, ids, compiled)[1]))
    assert_same(got, expected)


def test_static_cache_that_would_lose_gradients_is_refused(model):
    ids = tokens(2 * CHUNK)
    cache = StaticCache(config=model.config, max_cache_len=2 * CHUNK)
    with rope_patch.patch(model, "dynamic-yarn"):
        model(ids[:, :CHUNK], past_key_values=cache)
        with pytest.raises(ValueError, match="DynamicCache"):
            model(ids[:, CHUNK:], past_key_values=cache)


def rerotated(rerotation, keys, positions, old, new, changed):
    """Return re-rotated keys, `[B, K, S, D]`."""
    keys = keys.clone()
    rerotation.rerotate([(keys, positions, None)], old, new, torch.tensor(changed))
    return keys


@pytest.mark.parametrize("kernels", [None, "reference"])
@pytest.mark.parametrize(
    "layout",
    [KeyLayout(False), KeyLayout(True), KeyLayout(False, sections=(0, 1, 2))],
    ids=["halves", "neighbours", "sections"],
)
def test_derivatives(layout, kernels):
    """Check by finite differences: one of two rows changes, with start tokens and factors."""
    torch.manual_seed(0)
    old, new = (torch.rand(2, 4, dtype=torch.float64) + 0.5 for _ in range(2))
    positions, start_tokens = torch.arange(2).repeat(2, 1), 1
    if layout.sections is not None:
        if kernels is not None:
            pytest.skip("keys of several positions have transformers' angles")
        positions, start_tokens = torch.randint(9, (2, 2, 3)), 0
    rerotation = KeyRerotation({None: (0, 4)}, layout, kernels, start_tokens)
    keys = torch.randn(2, 1, 2, 6, dtype=torch.float64, requires_grad=True)

    def rerotate(keys):
        return rerotated(rerotation, keys, positions, old, new, [False, True])

    torch.autograd.gradcheck(rerotate, keys)
    torch.autograd.gradgradcheck(rerotate, keys)


def test_sections_turn_by_the_difference_at_each_pair_s_own_position():
    torch.manual_seed(0)
    old, new = (torch.rand(2, 5, dtype=torch.float64) + 0.5 for _ in range(2))
    layout, positions = KeyLayout(False, sections=(0, 1, 2, 0)), torch.randint(9, (2, 4, 3))
    rerotation = KeyRerotation({None: (0, 5)}, layout, kernels=None, start_tokens=0)
    keys = torch.randn(2, 1, 4, 10, dtype=torch.float64)
    got = rerotated(rerotation, keys, positions, old, new, [False, True])
    angle = (new - old)[1, :-1] * positions[1][:, [0, 1, 2, 0]]
    turn = torch.polar(new[1, -1] / old[1, -1] * torch.ones_like(angle), angle)
    first, second, rest = keys.split([4, 4, 2], dim=-1)
    turned = torch.complex(first[1, 0], second[1, 0]) * turn
    expected = torch.cat([turned.real, turned.imag, rest[1, 0]], dim=-1)
    torch.testing.assert_close(got[1, 0], expected, rtol=0, atol=1e-5)
    assert got[0].equal(keys[0])


# -- launches --------------------------------------------------------------------------------------

LAYERS = 36
TYPES = ["sliding_attention"] * 2 + ["full_attention"]


@pytest.fixture
def launches(monkeypatch):
    """Record the number of layers of each launch that re-rotates; launch nothing.

    Triton's interpreter would take minutes for so many layers, and results are tested with few.
    """
    pytest.importorskip("triton")
    assert triton_unavailable_reason() is None  # imports the kernels
    from rope_patch.ops.kernels.launcher import Launcher

    counts = []

    def record(self, key, tensors, address_bits, make_spec, *spec_args):
        if self.kernel.__name__ == "rerotate_kernel":
            counts.append(spec_args[1])

    monkeypatch.setattr(Launcher, "__call__", record)
    return counts


@torch.no_grad()
def grow(model, cache, ends=(TRAINED,)):
    """Read rows whose last position is given: those beyond the trained length grow."""
    ids = tokens(TRAINED + 1, batch=len(ends))
    model(ids[:, :TRAINED], past_key_values=cache)
    model(ids[:, TRAINED:], past_key_values=cache, position_ids=torch.tensor(ends)[:, None])


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_growth_of_36_layers_takes_one_launch(launches, kind):
    if OLD_TRANSFORMERS and kind is StaticCache:
        pytest.skip("5.0 counts the slots that are not zero, and no launch fills them here")
    model = make_model("llama", num_hidden_layers=LAYERS)
    rope_patch.patch(model, "dynamic-yarn", kernels="triton")
    size = {} if kind is DynamicCache else {"max_cache_len": TRAINED + 2}
    grow(model, kind(config=model.config, **size))
    assert launches == [LAYERS]


def test_sliding_and_full_layers_take_a_launch_each(launches):
    model = make_model("gemma3", num_hidden_layers=LAYERS, layer_types=TYPES * (LAYERS // 3))
    rope_patch.patch(model, "dynamic-yarn", kernels="triton", layer_types=sorted(set(TYPES)))
    grow(model, DynamicCache(config=model.config))
    assert sorted(launches) == [LAYERS // 3, LAYERS - LAYERS // 3]


def test_neighbouring_rows_take_a_launch_together(launches):
    model = make_model("llama")
    rope_patch.patch(model, "dynamic-yarn", kernels="triton")
    far, near = TRAINED, TRAINED - 1
    grow(model, DynamicCache(config=model.config), (near, far, far, near, near, far, near, far))
    assert launches == [2, 2, 2]  # rows 1 and 2, row 5, row 7; each of two layers
