"""Test autograd of the ops that rotate in Triton: which gradients, saved tensors, use in place."""

from collections import Counter

import pytest
import torch
from checked_ops import ACROSS, BY_OUTPUT, EPS, NORM, ROPE, each
from helpers.exact_rotation import (
    DEVICE,
    assert_rounded,
    draw,
    frequencies,
    make_rotation,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from rope_patch import ops
from rope_patch.ops.kernels import rope

each_way = each(ROPE, NORM, BY_OUTPUT)


# -- gradients of each input -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "needs_grad"),
    [
        *((ROPE, needed) for needed in ("10", "01", "00")),
        *((NORM, needed) for needed in ("0111", "1011", "1100", "0011", "1000", "0001", "0000")),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_gradients_of_subsets_of_inputs(op, needs_grad):
    """Include frozen weights, and weights as the only trained inputs."""
    rotation = make_rotation(48)
    drawn = zip(op.draw(rotation, grad=False), needs_grad, strict=True)
    outputs, _ = op.check([x.requires_grad_(needed == "1") for x, needed in drawn], rotation)
    assert any(x.requires_grad for x in outputs) == ("1" in needs_grad)


@pytest.mark.parametrize("index", [0, 1])
@each_way
def test_gradients_if_one_output_is_unused(op, index):
    rotation = make_rotation(48)
    inputs = op.draw(rotation)
    outputs = op.apply(inputs, rotation)
    grads = [torch.zeros(x.shape) for x in outputs]
    grads[index] = draw(*outputs[index].shape, seed=6)
    torch.autograd.backward(outputs[index], grads[index])
    for x, truth in zip(inputs, op.truth(inputs, rotation, grads)[1], strict=True):
        if op is ROPE and not truth.any():
            assert x.grad is None
        else:
            assert_rounded(x.grad, truth, slack=4e-6)


@pytest.mark.parametrize("index", [0, 1])
def test_backward_rotates_only_required_gradients(monkeypatch, index):
    rotation, launch, calls = make_rotation(64), rope.launch, []
    inputs = ROPE.draw(rotation, grad=False)
    inputs[index].requires_grad_()
    outputs = ROPE.apply(inputs, rotation)

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
    "views": lambda: [draw(2, 5, n, 64, seed=n) for n in (3, 2)],
    "packed": lambda: list(draw(2, 5, 7, 64).split((3, 2, 2), dim=2))[:2],
}


@pytest.mark.parametrize("projected", PROJECTED)
@each(ROPE, NORM)
def test_gradients_have_the_layout_of_queries_and_keys(op, projected):
    """Eager attention's gradients are contiguous in [B, H, S, D], and queries in [B, S, H, D]."""
    rotation = make_rotation(64, tokens=5, heads_dim=1)
    inputs = [x.requires_grad_().transpose(1, 2) for x in PROJECTED[projected]()]
    inputs += [op.draw_weight(1, 64) for _ in range(2)] if op.normed else []
    grads = [draw(2, n, 5, 64, seed=n) for n in (3, 2)]
    assert all(g.is_contiguous() for g in grads)
    _, found = op.check(inputs, rotation, grads)
    assert all(grad.transpose(1, 2).is_contiguous() for grad in found[:2])


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
    outputs = rotation.rope(*(p(hidden).view(2, 5, -1, 64).transpose(1, 2) for p in projections))
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


# -- autograd --------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_second_derivatives(interleaved):
    rotation = make_rotation(48, factor=1.5, interleaved=interleaved)
    inputs = ROPE.draw(rotation)
    grads = [draw(*x.shape, seed=7, grad=True) for x in inputs]
    back = torch.autograd.grad(rotation.rope(*inputs), inputs, grads, create_graph=True)
    second = torch.autograd.grad([b.square().sum() for b in back], grads)
    for got, grad in zip(second, grads, strict=True):
        leaf = grad.detach().cpu().double().requires_grad_()
        (expected,) = torch.autograd.grad(rotation.true_rope(leaf, True).square().sum(), leaf)
        assert_rounded(got, expected, slack=1e-6)


@pytest.mark.parametrize("power", [1, 2])
@each(NORM, BY_OUTPUT)
def test_second_derivatives_are_an_error(op, power):
    """Also of a loss that is linear in the output, whose own gradient has none."""
    rotation = make_rotation(48, tokens=1)
    inputs = op.draw(rotation)
    outputs = op.apply(inputs, rotation)
    with pytest.raises(RuntimeError, match='kernels="reference"'):
        torch.autograd.grad(outputs[0].pow(power).sum(), inputs[0], create_graph=True)


@pytest.mark.parametrize("reentrant", [True, False])
@each_way
def test_activation_checkpointing(op, reentrant):
    rotation = make_rotation(48)

    def rotate(*inputs):
        return tuple(op.apply([x * 1 for x in inputs], rotation))

    def gradients(function):
        inputs = op.draw(rotation)
        sum(x.square().sum() for x in function(*inputs)).backward()
        return [x.grad for x in inputs]

    got = gradients(lambda *inputs: checkpoint(rotate, *inputs, use_reentrant=reentrant))
    assert all(one.equal(other) for one, other in zip(got, gradients(rotate), strict=True))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@each(ROPE, NORM)
def test_training_after_inference(op, mode):
    rotation = make_rotation(48)
    inputs = op.draw(rotation)
    with mode():
        before = op.apply(inputs, rotation)
    assert not any(x.requires_grad for x in before)
    for one, other in zip(op.check(inputs, rotation)[0], before, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize(
    ("op", "changed"),
    [
        *((op, x) for op in (ROPE, NORM) for x in ("positions", "packed_freqs", "sections")),
        *((op, x) for op in (NORM, BY_OUTPUT) for x in ("x", "weight")),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_inputs_changed_before_backward_are_an_error(op, changed):
    inputs = {
        "positions": torch.zeros(3, 1, 1, dtype=torch.int64, device=DEVICE),
        "packed_freqs": ops.pack_frequencies(frequencies(48)).to(DEVICE),
        "sections": (torch.arange(24) % 3).to(DEVICE),
    }
    q, k, *weights = op.draw(make_rotation(48, 1))
    x, *weights = (y * 1 for y in (q, *weights))
    if op.normed:
        settings = {"eps": EPS, "save": op.save, "kernels": "triton"}
        outputs = ops.qk_norm_rope(x, k, *weights, **inputs, **settings)
        inputs["weight"] = weights[0]
    else:
        outputs = ops.rope(x, k, **inputs, kernels="triton")
    # A rotation saves neither, and if the output is saved, the input may change.
    if op is not NORM:
        x.add_(1)
        torch.autograd.grad(outputs[0].sum(), q, retain_graph=True)
        x = outputs[0]
    with torch.no_grad():
        {**inputs, "x": x}[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[1].sum().backward()


@pytest.mark.parametrize("save", ["input", "output"])
@each(ROPE, NORM, ACROSS)
def test_little_is_saved_beside_the_output(op, save):
    rotation = make_rotation(64)
    inputs = op.draw(rotation, (4, 2), dtype=torch.float16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        outputs = op.apply(inputs, rotation, **({"save": save} if op.normed else {}))
    known = {x.data_ptr() for x in (*inputs[2:], *outputs)}
    added = [x for x in saved if x.data_ptr() not in known and x.dtype != torch.int64]
    if not op.normed:
        assert not added
        return
    rstd = (2 * 4) * (2 if op.across else 4 + 2)  # tokens, bytes of float32, heads
    input_bytes = sum(x.nbytes for x in inputs[:2]) if save == "input" else 0
    assert sum(x.nbytes for x in added) == rstd + input_bytes
    if save == "input":
        assert {x.data_ptr() for x in inputs[:2]} <= {x.data_ptr() for x in saved}


# -- in place --------------------------------------------------------------------------------------


def rotate_by(op, q, k, weights, kernels, **settings):
    """Rotate 48 of 64 dimensions, or norm and rotate."""
    where = (torch.arange(2, device=DEVICE) * 37, ops.pack_frequencies(frequencies(48)).to(DEVICE))
    if op.normed:
        return ops.qk_norm_rope(q, k, *weights, *where, eps=EPS, kernels=kernels, **settings)
    return ops.rope(q, k, *where, kernels=kernels, **settings)


@pytest.mark.parametrize("kernels", ["auto", "reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each(ROPE, NORM, ACROSS)
def test_in_place_matches_and_returns_the_inputs(op, dtype, kernels):
    q, k, *weights = op.draw(make_rotation(48), dtype=dtype, grad=False)
    for keys in (k, None) if op is ROPE else (k,):
        expected = rotate_by(op, q, keys, weights, kernels)
        version = q._version
        got = rotate_by(op, q, keys, weights, kernels, inplace=True)
        assert got[0] is q
        assert got[1] is keys
        assert q._version > version
        assert all(a is b or a.equal(b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_gradients_of_a_norm_in_place_are_an_error(kernels):
    q, k, *weights = NORM.draw(make_rotation(48))
    values = q.detach().clone()
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        rotate_by(NORM, q.detach(), k.detach(), weights, kernels, inplace=True)
    assert q.equal(values)
    with torch.no_grad():
        assert rotate_by(NORM, q, k, weights, kernels, inplace=True)[0] is q


@pytest.mark.parametrize("kernels", ["auto", "reference", "triton"])
def test_autograd_handles_in_place_rotation(kernels):
    leaves = ROPE.draw(make_rotation(48))
    grads = [draw(*x.shape, seed=5) for x in leaves]
    found = []
    for inplace in (False, True):
        q, k = (x * 1 for x in leaves)
        outputs = rotate_by(ROPE, q, k, (), kernels, inplace=inplace)
        assert [x.data_ptr() == y.data_ptr() for x, y in zip(outputs, (q, k), strict=True)] == [
            inplace
        ] * 2
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, grads)])
    assert all(one.equal(other) for one, other in zip(*found, strict=True))
    x = leaves[0]
    with pytest.raises(RuntimeError, match="leaf"):
        rotate_by(ROPE, x, None, (), kernels, inplace=True)
    saved = x.exp()  # its backward needs this value
    outputs, _ = rotate_by(ROPE, saved, None, (), kernels, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()
    with torch.no_grad():
        saved = x.exp()
    y = x * saved
    rotate_by(ROPE, saved, None, (), kernels, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
