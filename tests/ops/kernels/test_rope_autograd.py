"""Autograd of the rotation in Triton: gradients of each input, saved tensors, in-place use."""

import pytest
import torch
from helpers.exact_rotation import (
    DEVICE,
    Rotation,
    assert_rounded,
    draw,
    draw_heads,
    frequencies,
    make_rotation,
)
from rope_checks import check, pair, transposed
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from rope_patch import ops
from rope_patch.ops.kernels import rope

layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])


# -- gradients of each input -----------------------------------------------------------------------


@pytest.mark.parametrize("needs_grad", [(True, False), (False, True), (False, False)])
def test_gradients_of_one_of_the_two(needs_grad):
    rotation = make_rotation(64)
    q, k = (x.detach().requires_grad_(w) for x, w in zip(pair(rotation), needs_grad, strict=True))
    outputs = check(q, k, rotation)
    assert any(needs_grad) == any(x.requires_grad for x in outputs)


@pytest.mark.parametrize("index", [0, 1])
def test_only_what_is_wanted_is_rotated_back(monkeypatch, index):
    rotation, launch, rotated = make_rotation(64), rope.launch, []
    inputs = pair(rotation, grad=False)
    inputs[index].requires_grad_()
    outputs = rotation.rope(*inputs)

    def recording(q, k, *rest):
        rotated.append((q, k))
        return launch(q, k, *rest)

    monkeypatch.setattr(rope, "launch", recording)
    sum(x.sum() for x in outputs).backward()
    ((x, other),) = rotated
    assert x.shape == inputs[index].shape
    assert other is None


def test_queries_alone():
    rotation = make_rotation(64)
    q, _ = pair(rotation)
    assert rotation.rope(q)[1] is None
    check(q, None, rotation)


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_of_the_two_is_used(used):
    rotation = make_rotation(64)
    inputs = pair(rotation)
    rotation.rope(*inputs)[used].square().sum().backward()
    assert inputs[1 - used].grad is None
    expected = transposed(rotation, inputs[used], 2 * rotation.true_rope(inputs[used].detach()))
    assert_rounded(inputs[used].grad, expected, slack=1e-6)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_queries_and_keys_of_different_dtypes(dtypes):
    rotation = make_rotation(48)
    q, k = (draw_heads(2, 64, rotation, dtype=d, grad=True) for d in dtypes)
    check(q, k, rotation)


# -- autograd --------------------------------------------------------------------------------------


@layouts
def test_derivatives_of_the_second_order(interleaved):
    rotation = make_rotation(48, factor=1.5, interleaved=interleaved)
    inputs = pair(rotation)
    grads = [draw(*x.shape, seed=7, grad=True) for x in inputs]
    back = torch.autograd.grad(rotation.rope(*inputs), inputs, grads, create_graph=True)
    twice = torch.autograd.grad([b.square().sum() for b in back], grads)
    for got, grad, x in zip(twice, grads, inputs, strict=True):
        leaf = grad.detach().cpu().double().requires_grad_()
        (expected,) = torch.autograd.grad(rotation.true_rope(leaf, True).square().sum(), leaf)
        assert_rounded(got, expected, slack=1e-6)
        assert x.grad is None


@pytest.mark.filterwarnings("ignore:.*is not a double precision")
def test_numerical_derivatives():
    """Check in float32, where derivatives of a linear function are exact up to rounding."""
    rotation = make_rotation(2, 1, factor=1.25)
    inputs = [draw_heads(1, 3, rotation, batch=1, seed=s, grad=True) for s in (1, 2)]
    close = {"eps": 0.125, "atol": 1e-4, "rtol": 1e-4}
    torch.autograd.gradcheck(rotation.rope, inputs, **close)
    torch.autograd.gradgradcheck(rotation.rope, inputs, **close)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant):
    rotation = make_rotation(64)
    q, k = pair(rotation)

    def attended(q, k):
        rotated_q, rotated_k = rotation.rope(q * 2, k * 3)
        return rotated_q.square().sum() + rotated_k.square().sum()

    expected = torch.autograd.grad(attended(q, k), (q, k))
    got = torch.autograd.grad(checkpoint(attended, q, k, use_reentrant=False), (q, k))
    if reentrant:
        checkpoint(attended, q, k, use_reentrant=True).backward()
        got = q.grad, k.grad
    for one, other in zip(got, expected, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_training_after_inference(mode):
    rotation = make_rotation(64)
    q, k = pair(rotation)
    with mode():
        before = rotation.rope(q, k)
    assert not any(x.requires_grad for x in before)
    for one, other in zip(check(q, k, rotation), before, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("changed", ["positions", "packed_freqs", "sections"])
def test_what_changed_before_the_backward_pass_is_an_error(changed):
    inputs = {
        "positions": torch.arange(6, device=DEVICE).view(3, 1, 2),
        "packed_freqs": ops.pack_frequencies(frequencies(64)).to(DEVICE),
        "sections": (torch.arange(32) % 3).to(DEVICE),
    }
    q = draw(1, 2, 2, 64, grad=True)
    outputs, _ = ops.rope(q, **inputs, kernels="triton")
    inputs[changed] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_what_was_rotated_may_change_before_the_backward_pass():
    """Check that autograd saves nothing of it."""
    rotation = make_rotation(64)
    leaf = draw_heads(2, 64, rotation, grad=True)
    q = leaf * 1
    outputs, _ = rotation.rope(q)
    q.mul_(3)
    (got,) = torch.autograd.grad(outputs.sum(), leaf)
    assert_rounded(got, transposed(rotation, leaf, torch.ones(leaf.shape)))


def test_nothing_but_positions_and_turns_is_kept():
    rotation = make_rotation(64)
    q, k = pair(rotation)
    saved_tensors = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved_tensors.append(x) or x, lambda x: x
    ):
        rotation.rope(q, k)
    assert {x.dtype for x in saved_tensors} == {torch.int64}


# -- in place --------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("rotary_dim", [64, 20])
def test_in_place(rotary_dim, interleaved):
    rotation = make_rotation(rotary_dim, interleaved=interleaved)
    leaves = pair(rotation)
    q, k = (x * 1 for x in leaves)
    was = [x._version for x in (q, k)]
    settings = (
        rotation.positions.to(DEVICE),
        rotation.packed_freqs,
        None,
        interleaved,
        2,
        False,
        True,
    )
    outputs = rope.RopeFunction.apply(q, k, *settings)
    grads = [draw(*x.shape, seed=5) for x in outputs]
    back = torch.autograd.grad(outputs, leaves, grads)
    for x, got, leaf, grad, into, version in zip(
        (q, k), outputs, leaves, grads, back, was, strict=True
    ):
        assert got.data_ptr() == x.data_ptr()
        assert x._version > version
        assert_rounded(x, rotation.true_rope(leaf.detach()))
        assert_rounded(into, transposed(rotation, leaf, grad))


def test_in_place_over_what_another_gradient_needs_is_an_error():
    rotation = make_rotation(64)
    leaf = draw_heads(2, 64, rotation, grad=True)
    needed = leaf.exp()
    settings = (rotation.positions.to(DEVICE), rotation.packed_freqs, None, False, 2, False, True)
    outputs, _ = rope.RopeFunction.apply(needed, None, *settings)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("keys", [True, False], ids=["keys", "queries-alone"])
def test_in_place_is_the_same_and_keeps_what_does_not_rotate(kernels, keys):
    q, k = torch.randn(2, 3, 5, 80), torch.randn(2, 3, 1, 80) if keys else None
    positions, packed_freqs = torch.arange(3), ops.pack_frequencies(0.9 ** torch.arange(16))
    expected = ops.rope(q, k, positions, packed_freqs, kernels=kernels)
    got = ops.rope(q, k, positions, packed_freqs, kernels=kernels, inplace=True)
    assert got[0] is q
    assert got[1] is k
    for a, b in zip(got, expected, strict=True):
        assert a is b or a.equal(b)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_in_place_autograd_sees_what_happens(kernels):
    positions, packed_freqs = torch.arange(3), ops.pack_frequencies(0.9 ** torch.arange(4))
    x = torch.randn(2, 3, 2, 8, requires_grad=True)
    grad = torch.randn_like(x)
    out, _ = ops.rope(x * 1, None, positions, packed_freqs, kernels=kernels)
    again, _ = ops.rope(x * 1, None, positions, packed_freqs, kernels=kernels, inplace=True)
    assert torch.autograd.grad(out, x, grad)[0].equal(torch.autograd.grad(again, x, grad)[0])
    with pytest.raises(RuntimeError, match="leaf"):
        ops.rope(x, None, positions, packed_freqs, kernels=kernels, inplace=True)
    saved = x.exp()  # its gradient needs what it was
    ops.rope(saved, None, positions, packed_freqs, kernels=kernels, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
    with torch.no_grad():
        saved = x.exp()
    y = x * saved
    ops.rope(saved, None, positions, packed_freqs, kernels=kernels, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@layouts
def test_backwards_undoes_it(interleaved):
    rotation = make_rotation(48, interleaved=interleaved)
    q, k = pair(rotation, grad=False)
    settings = (rotation.positions.to(DEVICE), rotation.packed_freqs, None, interleaved, 2)
    for got, x in zip(rope.launch(*rotation.rope(q, k), *settings, True), (q, k), strict=True):
        torch.testing.assert_close(got, x, rtol=0, atol=2e-6)


def test_a_rotation_does_not_touch_what_goes_in():
    rotation = make_rotation(64)
    q, k = pair(rotation, grad=False)
    was = q.clone(), k.clone()
    rotation.rope(q, k)
    assert q.equal(was[0])
    assert k.equal(was[1])


def test_a_score_depends_on_distance_alone():
    """Check at ten million tokens, where float32 angles are off by half a radian."""
    q, k = (draw(1, 1, 1, 128, seed=s) for s in (1, 2))
    inv_freq, scores = frequencies(128, 5e5), []
    for start in (0, 131_072, 10_000_000, 2**33):
        near, far = (Rotation(torch.tensor([start + d]), inv_freq) for d in (0, 1000))
        scores.append((far.rope(q)[0] * near.rope(k)[0]).sum().item())
    assert max(scores) - min(scores) < 1e-5 * 128
