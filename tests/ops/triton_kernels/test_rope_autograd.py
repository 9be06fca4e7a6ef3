"""Test autograd of the rotation in Triton: gradients, saved tensors, in-place use."""

from collections import Counter

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
from rope_checks import check, draw_pair, rotate_back
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from rope_patch import ops
from rope_patch.ops.kernels import rope

layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])


# -- gradients of each input -----------------------------------------------------------------------


@pytest.mark.parametrize("needs_grad", [(True, False), (False, True), (False, False)])
def test_gradients_of_queries_or_keys_only(needs_grad):
    rotation = make_rotation(64)
    q, k = (
        x.detach().requires_grad_(w) for x, w in zip(draw_pair(rotation), needs_grad, strict=True)
    )
    outputs = check(q, k, rotation)
    assert any(needs_grad) == any(x.requires_grad for x in outputs)


@pytest.mark.parametrize("index", [0, 1])
def test_backward_rotates_only_required_gradients(monkeypatch, index):
    rotation, launch, calls = make_rotation(64), rope.launch, []
    inputs = draw_pair(rotation, grad=False)
    inputs[index].requires_grad_()
    outputs = rotation.rope(*inputs)

    def recording(q, k, *rest):
        calls.append((q, k))
        return launch(q, k, *rest)

    monkeypatch.setattr(rope, "launch", recording)
    sum(x.sum() for x in outputs).backward()
    ((x, other),) = calls
    assert x.shape == inputs[index].shape
    assert other is None


PROJECTED = {
    # [B, S, H, D], as a projection's view to heads, and as slices of a packed projection
    "views": lambda: [torch.randn(2, 5, n, 64) for n in (3, 2)],
    "packed": lambda: list(torch.randn(2, 5, 7, 64).split((3, 2, 2), dim=2))[:2],
}


@pytest.mark.parametrize("projected", PROJECTED)
@pytest.mark.parametrize("norm", [False, True])
def test_gradients_have_the_layout_of_queries_and_keys(projected, norm):
    """Eager attention's gradients are contiguous in [B, H, S, D], and queries in [B, S, H, D]."""
    rotation = make_rotation(64, tokens=5, heads_dim=1)
    leaves = [x.to(DEVICE).requires_grad_() for x in PROJECTED[projected]()]
    q, k = (x.transpose(1, 2) for x in leaves)
    grads = [draw(2, n, 5, 64, seed=n) for n in (3, 2)]
    assert all(g.is_contiguous() for g in grads)
    if norm:
        weights = [torch.rand(64, device=DEVICE) for _ in range(2)]
        outputs = rotation.norm_and_rope(q, k, *weights, eps=1e-6)
        truths = [
            torch.autograd.grad(rotation.true_norm_and_rope(x, w, 1e-6), x, g.cpu().double())[0]
            for x, w, g in zip((q, k), weights, grads, strict=True)
        ]
    else:
        outputs = rotation.rope(q, k)
        truths = [rotate_back(rotation, x, g) for x, g in zip((q, k), grads, strict=True)]
    for grad, truth in zip(torch.autograd.grad(outputs, [q, k], grads), truths, strict=True):
        assert_rounded(grad, truth, slack=2e-6)
        assert grad.transpose(1, 2).is_contiguous()


class OperatorCounter(TorchDispatchMode):
    """Counts PyTorch's operators by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_gradients_reach_projections_without_a_copy():
    rotation = make_rotation(64, tokens=5, heads_dim=1)
    hidden = draw(2, 5, 32)
    projections = [torch.nn.Linear(32, n * 64, device=DEVICE) for n in (3, 2)]
    q, k = (p(hidden).view(2, 5, -1, 64).transpose(1, 2) for p in projections)
    outputs = rotation.rope(q, k)
    grads = [torch.ones_like(x).contiguous() for x in outputs]
    assert all(g.stride() != x.stride() for g, x in zip(grads, outputs, strict=True))
    with OperatorCounter() as counter:
        torch.autograd.backward(outputs, grads)
    # Triton's interpreter uses `copy_`; a reshape that copies would use `clone`.
    assert counter.counts["view"] >= 2
    assert not counter.counts["clone"]


@pytest.mark.parametrize("needed", [0, 1])
def test_layout_of_the_only_gradient(needed):
    rotation = make_rotation(64, tokens=5, heads_dim=1)
    leaves = [torch.randn(2, 5, n, 64, device=DEVICE) for n in (3, 2)]
    leaves[needed].requires_grad_()
    output = rotation.rope(*(x.transpose(1, 2) for x in leaves))[needed]
    (grad,) = torch.autograd.grad(output, leaves[needed], torch.ones_like(output).contiguous())
    assert grad.stride() == leaves[needed].stride()


def test_queries_without_keys():
    rotation = make_rotation(64)
    q, _ = draw_pair(rotation)
    assert rotation.rope(q)[1] is None
    check(q, None, rotation)


@pytest.mark.parametrize("index", [0, 1])
def test_gradients_if_one_output_is_unused(index):
    rotation = make_rotation(64)
    inputs = draw_pair(rotation)
    rotation.rope(*inputs)[index].square().sum().backward()
    assert inputs[1 - index].grad is None
    expected = rotate_back(rotation, inputs[index], 2 * rotation.true_rope(inputs[index].detach()))
    assert_rounded(inputs[index].grad, expected, slack=1e-6)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_queries_and_keys_of_different_dtypes(dtypes):
    rotation = make_rotation(48)
    q, k = (draw_heads(2, 64, rotation, dtype=d, grad=True) for d in dtypes)
    check(q, k, rotation)


# -- autograd --------------------------------------------------------------------------------------


@layouts
def test_second_derivatives(interleaved):
    rotation = make_rotation(48, factor=1.5, interleaved=interleaved)
    inputs = draw_pair(rotation)
    grads = [draw(*x.shape, seed=7, grad=True) for x in inputs]
    back = torch.autograd.grad(rotation.rope(*inputs), inputs, grads, create_graph=True)
    second = torch.autograd.grad([b.square().sum() for b in back], grads)
    for got, grad, x in zip(second, grads, inputs, strict=True):
        leaf = grad.detach().cpu().double().requires_grad_()
        (expected,) = torch.autograd.grad(rotation.true_rope(leaf, True).square().sum(), leaf)
        assert_rounded(got, expected, slack=1e-6)
        assert x.grad is None


@pytest.mark.filterwarnings("ignore:.*is not a double precision")
def test_numerical_derivatives():
    """Use float32, where derivatives of a linear function are exact up to rounding."""
    rotation = make_rotation(2, 1, factor=1.25)
    inputs = [draw_heads(1, 3, rotation, batch=1, seed=s, grad=True) for s in (1, 2)]
    tolerances = {"eps": 0.125, "atol": 1e-4, "rtol": 1e-4}
    torch.autograd.gradcheck(rotation.rope, inputs, **tolerances)
    torch.autograd.gradgradcheck(rotation.rope, inputs, **tolerances)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    rotation = make_rotation(64)
    q, k = draw_pair(rotation)

    def loss(q, k):
        rotated_q, rotated_k = rotation.rope(q * 2, k * 3)
        return rotated_q.square().sum() + rotated_k.square().sum()

    expected = torch.autograd.grad(loss(q, k), (q, k))
    got = torch.autograd.grad(checkpoint(loss, q, k, use_reentrant=False), (q, k))
    if reentrant:
        checkpoint(loss, q, k, use_reentrant=True).backward()
        got = q.grad, k.grad
    for one, other in zip(got, expected, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_training_after_inference(mode):
    rotation = make_rotation(64)
    q, k = draw_pair(rotation)
    with mode():
        before = rotation.rope(q, k)
    assert not any(x.requires_grad for x in before)
    for one, other in zip(check(q, k, rotation), before, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("changed", ["positions", "packed_freqs", "sections"])
def test_inputs_changed_before_backward_are_an_error(changed):
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


def test_queries_may_change_before_backward():
    """Autograd does not save the rotated tensor."""
    rotation = make_rotation(64)
    leaf = draw_heads(2, 64, rotation, grad=True)
    q = leaf * 1
    outputs, _ = rotation.rope(q)
    q.mul_(3)
    (got,) = torch.autograd.grad(outputs.sum(), leaf)
    assert_rounded(got, rotate_back(rotation, leaf, torch.ones(leaf.shape)))


def test_only_positions_and_frequencies_are_saved():
    rotation = make_rotation(64)
    q, k = draw_pair(rotation)
    saved_tensors = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved_tensors.append(x) or x, lambda x: x
    ):
        rotation.rope(q, k)
    assert {x.dtype for x in saved_tensors} == {torch.int64}


# -- in place --------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("rotary_dim", [64, 20])
def test_in_place_function_writes_into_inputs(rotary_dim, interleaved):
    rotation = make_rotation(rotary_dim, interleaved=interleaved)
    leaves = draw_pair(rotation)
    q, k = (x * 1 for x in leaves)
    versions = [x._version for x in (q, k)]
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
    for x, got, leaf, grad, input_grad, version in zip(
        (q, k), outputs, leaves, grads, back, versions, strict=True
    ):
        assert got.data_ptr() == x.data_ptr()
        assert x._version > version
        assert_rounded(x, rotation.true_rope(leaf.detach()))
        assert_rounded(input_grad, rotate_back(rotation, leaf, grad))


def test_in_place_over_a_saved_tensor_is_an_error():
    rotation = make_rotation(64)
    leaf = draw_heads(2, 64, rotation, grad=True)
    saved = leaf.exp()
    settings = (rotation.positions.to(DEVICE), rotation.packed_freqs, None, False, 2, False, True)
    outputs, _ = rope.RopeFunction.apply(saved, None, *settings)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


@pytest.mark.parametrize("kernels", ["auto", "reference", "triton"])
@pytest.mark.parametrize("keys", [True, False], ids=["keys", "queries-alone"])
def test_in_place_matches_and_returns_the_inputs(kernels, keys):
    q, k = torch.randn(2, 3, 5, 80), torch.randn(2, 3, 1, 80) if keys else None
    positions, packed_freqs = torch.arange(3), ops.pack_frequencies(0.9 ** torch.arange(16))
    expected = ops.rope(q, k, positions, packed_freqs, kernels=kernels)
    got = ops.rope(q, k, positions, packed_freqs, kernels=kernels, inplace=True)
    assert got[0] is q
    assert got[1] is k
    for a, b in zip(got, expected, strict=True):
        assert a is b or a.equal(b)


@pytest.mark.parametrize("kernels", ["auto", "reference", "triton"])
def test_autograd_handles_in_place_rotation(kernels):
    positions, packed_freqs = torch.arange(3), ops.pack_frequencies(0.9 ** torch.arange(4))
    x = torch.randn(2, 3, 2, 8, requires_grad=True)
    grad = torch.randn_like(x)
    out, _ = ops.rope(x * 1, None, positions, packed_freqs, kernels=kernels)
    in_place, _ = ops.rope(x * 1, None, positions, packed_freqs, kernels=kernels, inplace=True)
    assert torch.autograd.grad(out, x, grad)[0].equal(torch.autograd.grad(in_place, x, grad)[0])
    with pytest.raises(RuntimeError, match="leaf"):
        ops.rope(x, None, positions, packed_freqs, kernels=kernels, inplace=True)
    saved = x.exp()  # its backward needs this value
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
def test_conjugate_launch_undoes_the_rotation(interleaved):
    rotation = make_rotation(48, interleaved=interleaved)
    q, k = draw_pair(rotation, grad=False)
    settings = (rotation.positions.to(DEVICE), rotation.packed_freqs, None, interleaved, 2)
    for got, x in zip(rope.launch(*rotation.rope(q, k), *settings, True), (q, k), strict=True):
        torch.testing.assert_close(got, x, rtol=0, atol=2e-6)


def test_inputs_are_unchanged():
    rotation = make_rotation(64)
    q, k = draw_pair(rotation, grad=False)
    before = q.clone(), k.clone()
    rotation.rope(q, k)
    assert q.equal(before[0])
    assert k.equal(before[1])


def test_scores_depend_on_distance_only():
    """Compare positions up to 2^33; float32 angles at ten million are off by half a radian."""
    q, k = (draw(1, 1, 1, 128, seed=s) for s in (1, 2))
    inv_freq, scores = frequencies(128, 5e5), []
    for start in (0, 131_072, 10_000_000, 2**33):
        near, far = (Rotation(torch.tensor([start + d]), inv_freq) for d in (0, 1000))
        scores.append((far.rope(q)[0] * near.rope(k)[0]).sum().item())
    assert max(scores) - min(scores) < 1e-5 * 128
