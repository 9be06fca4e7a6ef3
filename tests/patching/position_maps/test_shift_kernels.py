"""Test queries and keys that our kernels turn by shifts against float64 and plain torch."""

import contextlib
from unittest import mock

import pytest
import torch
from helpers.exact_rotation import DEVICE, Rotation, draw, frequencies
from helpers.tiny_models import assert_close, make_model, tokens
from transformers import DynamicCache

pytest.importorskip("triton", minversion="3.6")

import rope_patch
from rope_patch.benchmarks import LaunchCounts, dispatched_launches
from rope_patch.ops.kernels.launcher import Launcher
from rope_patch.patching import ShiftPositions, ShiftRotation

B, H, S, D = 2, 3, 5, 16
WHOLE = torch.tensor([[-1_000_003.0, -7, 0, 3, 900_000], [5, 6, -7, 8, -9]], dtype=torch.float64)
QUARTERS = WHOLE / 4
THIRDS = (WHOLE / 1000) / 3


def true_turn(x, shift, inv_freq, interleaved):
    """Turn by exact angles in float64, from shifts in units of 2^-20 tokens."""
    units = (shift * 2**20).round().to(torch.int64)
    rotation = Rotation(units, inv_freq.float() / 2**20, 1.0, None, interleaved, heads_dim=1)
    return rotation.true_rope(x.cpu())


@pytest.mark.parametrize(
    ("shift", "rotary_dim", "sign", "interleaved"),
    [
        *((shift, D, 1, False) for shift in (WHOLE, QUARTERS, THIRDS, WHOLE[:1])),
        *((WHOLE, rotary_dim, -1, True) for rotary_dim in (D, 12)),
        (THIRDS, 12, 1, False),
    ],
    ids=range(7),
)
def test_turned_heads_match_float64(shift, rotary_dim, sign, interleaved):
    inv_freq = sign * frequencies(rotary_dim).double()
    rotation = ShiftRotation(inv_freq, interleaved, "triton")
    x = draw(B, H, S, D)
    tables = rotation.tables(shift, x)
    expected = true_turn(x, shift, inv_freq, interleaved)
    assert isinstance(tables, ShiftPositions)
    close(rotation.turn(x, tables), expected)
    plain = ShiftRotation(inv_freq, interleaved)
    close(plain.turn(x, plain.tables(shift, x)), expected)
    rotation.turn_(x, tables)
    close(x, expected)


def test_parts_of_the_pairs_with_shifts_of_their_own():
    inv_freq = frequencies(D).double()
    shift = torch.stack([WHOLE, WHOLE / 10, -WHOLE, WHOLE // 3], -1)
    x, rotations = draw(B, H, S, D), [ShiftRotation(inv_freq, False, k) for k in ("triton", "hf")]
    got, expected = (r.turn(x, r.tables(shift, x)) for r in rotations)
    close(got, expected.double().cpu(), 3e-6)


def test_one_token_is_turned_by_several_shifts_in_one_launch():
    rotation = ShiftRotation(frequencies(D).double(), False, "triton")
    x, shifts = draw(B, H, 1, D), torch.tensor([[-3.0], [70_000], [0]], dtype=torch.float64)
    with counted() as counts:
        got = rotation.turn_alike(x, rotation.tables(shifts, x))
    assert counts.ours == 1
    for turned, shift in zip(got, shifts, strict=True):
        close(turned, true_turn(x, shift[None], rotation.inv_freq, False))


def test_gradients_are_turned_back():
    rotation = ShiftRotation(frequencies(D).double(), False, "triton")
    x, weight = draw(B, H, S, D, grad=True), draw(B, H, S, D, seed=1)
    (rotation.turn(x, rotation.tables(WHOLE, x)) * weight).sum().backward()
    close(x.grad, true_turn(weight, -WHOLE, rotation.inv_freq, False))


@pytest.mark.parametrize("kernels", ["hf", "reference", "auto"])
def test_a_cpu_is_left_to_plain_torch(kernels):
    rotation = ShiftRotation(frequencies(D).double(), False, kernels)
    is_kernel = isinstance(rotation.tables(WHOLE, draw(B, H, S, D)), ShiftPositions)
    assert is_kernel is (kernels == "auto" and DEVICE == "cuda")


def close(got, expected, atol=2e-6):
    torch.testing.assert_close(got.detach().cpu().double(), expected, rtol=0, atol=atol)


# -- whole models ----------------------------------------------------------------------------------

MAPS = {
    "self-extend": {"window": 10, "group": 3},
    "dca": {},
    "leaky-rerope": {"window": 20, "k": 4.0},
    "dpe": {"groups": [2, 4, 3, 8], "window": 9},
}
TRAINED = 24  # tokens, of which each takes time in an interpreter of kernels
LENGTH = TRAINED + 6
LAUNCHES = 9  # of one turn in plain torch


def small_model(**changes):
    return make_model(**{"num_hidden_layers": 1, "max_position_embeddings": TRAINED, **changes})


@contextlib.contextmanager
def counted():
    counts = LaunchCounts()
    with dispatched_launches(counts):
        yield counts


@contextlib.contextmanager
def turned_by(kernels):
    """Have queries and keys turned by these kernels, and rotated by transformers all the same.

    Attention is computed as where its own kernel does not run, or takes wider heads.
    """
    real = ShiftRotation.uses_kernels

    def uses_kernels(self, x):
        object.__setattr__(self, "kernels", kernels)
        return real(self, x)

    with (
        mock.patch.object(ShiftRotation, "uses_kernels", uses_kernels),
        mock.patch("rope_patch.ops.attention.mapped_attention", return_value=None),
    ):
        yield


@torch.no_grad()
def decode(model, ids, kernels, prompt_kernels="hf", **inputs):
    """Return the logits of a prompt and of a step, and the launches of the step."""
    cache = DynamicCache(config=model.config)
    with turned_by(prompt_kernels):
        prompt = model(ids[:, :-1], past_key_values=cache).logits
    with turned_by(kernels), counted() as counts:
        step = model(ids[:, -1:], past_key_values=cache, **inputs).logits
    return torch.cat([prompt, step], 1), counts


@pytest.mark.parametrize(
    ("name", "length", "moving"), [*((name, LENGTH, 1) for name in MAPS), ("dca", 60, 2)]
)
def test_steps_take_one_launch_a_layer_for_all_regions(name, length, moving):
    """DCA has two regions whose queries move, from the third chunk on."""
    ids, launches = tokens(length, batch=2), []
    for layers in (1, 3):  # the difference is without what all layers share
        model = small_model(num_hidden_layers=layers)
        rope_patch.patch(model, name, kernels="hf", **MAPS[name])
        expected, before = decode(model, ids, "hf")
        got, after = decode(model, ids, "triton")
        assert_close(got, expected)
        launches.append((before.others, after.others, before.ours, after.ours))
    a_layer = [(y - x) / 2 for x, y in zip(*launches, strict=True)]
    assert a_layer[0] - a_layer[1] == moving * LAUNCHES
    assert a_layer[2:] == [0, 1]


def test_prompts_are_turned_as_in_plain_torch():
    model, ids = small_model(), tokens(LENGTH)
    rope_patch.patch(model, "self-extend", kernels="hf", **MAPS["self-extend"])
    expected, _ = decode(model, ids, "hf")
    got, _ = decode(model, ids, "triton", "triton")
    assert_close(got, expected)


def test_gradients_of_models_are_those_of_plain_torch():
    model, ids = small_model(), tokens(LENGTH)
    rope_patch.patch(model, "dca", kernels="hf")
    gradients = []
    for kernels in ("hf", "triton"):
        with turned_by(kernels):
            loss = model(input_ids=ids, labels=ids).loss
        gradients.append(torch.autograd.grad(loss, [*model.parameters()], allow_unused=True))
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


def test_padded_rows_decode_as_in_plain_torch():
    model, ids = small_model(), tokens(TRAINED + 2, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    rope_patch.patch(model, "self-extend", kernels="hf", **MAPS["self-extend"])
    expected, _ = decode(model, ids, "hf", attention_mask=mask)
    got, after = decode(model, ids, "triton", attention_mask=mask)
    assert_close(got, expected)
    assert after.ours == 2  # queries, and the keys of the cache


@pytest.mark.parametrize("kernels", ["hf", "reference", "auto", "triton"])
def test_choice_of_kernels_reaches_the_maps(kernels):
    class Asked(Exception):
        pass

    def uses_kernels(self, x):
        raise Asked(self.kernels)

    model = small_model()
    rope_patch.patch(model, "rerope", kernels=kernels, window=20)
    cache = DynamicCache(config=model.config)
    with mock.patch.object(Launcher, "__call__", return_value=None), torch.no_grad():
        model(tokens(TRAINED), past_key_values=cache)
        with (
            mock.patch.object(ShiftRotation, "uses_kernels", uses_kernels),
            pytest.raises(Asked, match=kernels),
        ):
            model(tokens(1), past_key_values=cache)
