"""Test gradients of the norm that start from its output: how close, and for which weights."""

import gc
import weakref

import pytest
import torch
from checked_ops import ACROSS, EPS, NORM, NORMS, each
from helpers.exact_rotation import DEVICE, draw, frequencies, make_rotation, relative_error
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from rope_patch import ops
from rope_patch.ops.kernels import qk_norm_rope

PACKED_FREQS = ops.pack_frequencies(frequencies(4)).to(DEVICE)
each_norm = each(*NORMS.values())


def starts_from_output(outputs):
    """Return whether the backward pass recomputes the input."""
    return outputs[0].grad_fn.settings[-1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@each_norm
def test_gradients_are_close_for_even_weights(op, dtype):
    """With weights in 1 +- 0.2, as after training, the error is that of rounding x."""
    rotation = make_rotation(48, interleaved=dtype == torch.bfloat16, factor=1.2)
    inputs = op.draw(rotation, dtype=dtype)
    with torch.no_grad():
        for weight in inputs[2:]:
            weight.copy_(1 - op.offset + 0.1 * draw(*weight.shape).clamp(-2, 2))
    outputs = op.apply(inputs, rotation, save="output")
    assert starts_from_output(outputs)
    grads = [draw(*x.shape, dtype=dtype, seed=6) for x in outputs]
    _, truth = op.truth(inputs, rotation, grads)
    for got, expected in zip(torch.autograd.grad(outputs, inputs, grads), truth, strict=True):
        assert relative_error(got, expected) < 2 * torch.finfo(dtype).eps


@each_norm
def test_gradients_are_right_in_float32(op):
    """Use float32, where errors in parts, padding and signs are visible."""
    rotation = make_rotation(40, interleaved=op.across, factor=0.7)
    by_output = type(op)(across=op.across, offset=op.offset, save="output")
    inputs = by_output.draw(rotation, (5, 1), head_dim=80)
    outputs, _ = by_output.check(inputs, rotation, slack=2e-5)
    assert starts_from_output(outputs)


def gradient_errors(rotation, inputs, recompute_input):
    """Return the gradients' relative errors, recomputing from the output or not."""
    rest = (rotation.positions.to(DEVICE), rotation.packed_freqs, None, EPS, 0.0, False, 2)
    outputs = qk_norm_rope.QKNormRopeFunction.apply(*inputs, *rest, recompute_input)
    grads = [draw(*x.shape, dtype=x.dtype, seed=6) for x in outputs]
    _, truth = NORM.truth(inputs, rotation, grads)
    got = torch.autograd.grad(outputs, inputs, grads)
    return [relative_error(x, expected) for x, expected in zip(got, truth, strict=True)]


@pytest.mark.parametrize("kind", ["uneven", "tiny"])
def test_uneven_weights_save_the_input(kind):
    """Weight gradients from the output would lose a digit, or float16 cannot represent it."""
    rotation = make_rotation(64)
    inputs = NORM.draw(rotation, dtype=torch.bfloat16 if kind == "uneven" else torch.float16)
    with torch.no_grad():
        for seed, weight in enumerate(inputs[2:]):
            change = (2 * draw(*weight.shape, seed=seed)).exp()
            weight.copy_(change if kind == "uneven" else 1e-6 * weight)
    assert max(gradient_errors(rotation, inputs, True)[2:]) > 5e-3
    outputs = NORM.apply(inputs, rotation, save="output")
    assert not starts_from_output(outputs)
    if kind == "uneven":
        assert max(gradient_errors(rotation, inputs, False)[2:]) < 1e-5


@pytest.mark.parametrize("place", [0, 50], ids=["in a pair", "in none"])
@each(NORM, ACROSS)
def test_zero_weights_save_the_input(op, place):
    rotation = make_rotation(48)
    inputs = op.draw(rotation)
    with torch.no_grad():
        inputs[3][..., place] = 0
    assert not starts_from_output(op.apply(inputs, rotation, save="output"))


# -- which weights ---------------------------------------------------------------------------------


def can_recompute(weight, other, **settings):
    return ops.can_recompute_from_output(weight, other, PACKED_FREQS, **settings)


@pytest.mark.parametrize(
    ("weight", "halves", "neighbours"),
    [
        ([1.0, 1.1, 0.9, 1.0, 1.2], True, True),
        ([-1.0, 1.1, 0.9, -1.0, 1.2], True, True),
        ([1.0, 100.0, 1.0, 100.0, 1.0], True, False),
        ([1.0, 1.0, 100.0, 100.0, 1.0], False, True),
        ([1.0, 1.0, 1.0, 1.0, 1e6], True, True),  # unrotated dimensions are in no pair
        ([1.0, 1.0, 1.0, 1.0, 0.0], False, False),
        ([1.0, 0.0, 1.0, 0.0, 1.0], False, False),
        ([1.0, 63.0, 63.0, 1.0, 1.0], True, True),
        ([1.0, 65.0, 65.0, 1.0, 1.0], False, False),
        ([1.0, 1.0, float("nan"), 1.0, 1.0], False, False),
        ([1.0, float("inf"), 1.0, float("inf"), 1.0], False, False),
    ],
)
def test_ratio_within_pairs_decides(weight, halves, neighbours):
    good, weight = torch.ones(5, device=DEVICE), torch.tensor(weight, device=DEVICE)
    for interleaved, expected in ((False, halves), (True, neighbours)):
        for pair in ((weight, good), (good, weight), (good[None], torch.stack([good, weight]))):
            assert can_recompute(*pair, interleaved=interleaved) is expected


def test_offset_is_added_and_no_pairs_are_allowed():
    weight = torch.zeros(5, device=DEVICE)
    assert can_recompute(weight, weight, offset=1.0)
    assert not can_recompute(weight - 1, weight, offset=1.0)
    assert ops.can_recompute_from_output(weight + 1, weight + 1, PACKED_FREQS[-1:])


# -- reads of the device ---------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """The number of numbers that the CPU reads from the device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ == "_local_scalar_dense"
        return function(*args, **(kwargs or {}))


def reads(function, *args, **kwargs):
    with Reads() as read:
        function(*args, **kwargs)
    return read.count


def pair():
    return [(1 + draw(16, seed=s) / 10).requires_grad_() for s in (5, 6)]


def test_weights_are_read_once_and_after_changes():
    rotation, norms = make_rotation(12), pair()

    def call():
        inputs = [*NORM.draw(rotation, head_dim=16)[:2], *norms]
        return reads(NORM.apply, inputs, rotation, save="output")

    assert [call(), call()] == [2, 0]  # each weight once
    with torch.no_grad():
        norms[0].mul_(1.1)
    assert [call(), call()] == [1, 0]
    torch.optim.SGD(norms, lr=0.1).zero_grad()
    assert call() == 0
    norms[1].grad = torch.ones_like(norms[1])
    torch.optim.SGD(norms, lr=0.1).step()
    assert [call(), call()] == [1, 0]


def test_answer_follows_the_weight():
    weight, other = pair()
    assert can_recompute(weight, other)
    with torch.no_grad():
        weight[0] = 0.0
    assert not can_recompute(weight, other)
    assert not can_recompute(other, weight)
    weight.data = torch.ones_like(weight)
    assert can_recompute(weight, other)
    assert not can_recompute(weight, other, offset=-1.0)


def test_views_of_one_tensor_have_answers_of_their_own():
    both = torch.ones(2, 16, device=DEVICE)
    both[1, 0] = 0.0
    assert can_recompute(both[0], both[0])
    assert not can_recompute(both[0], both[1])
    assert reads(can_recompute, both[0], both[0]) == 0


def test_inference_tensors_are_read_each_time():
    with torch.inference_mode():
        weight = torch.ones(16, device=DEVICE)
        assert can_recompute(weight, weight)
        weight[0] = 0.0
        assert not can_recompute(weight, weight)


def test_weights_are_not_kept_alive():
    weight = torch.ones(16, device=DEVICE)
    can_recompute(weight, weight)
    alive = weakref.ref(weight)
    del weight
    gc.collect()
    assert alive() is None
