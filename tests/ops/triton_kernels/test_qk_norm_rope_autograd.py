"""Test autograd of norm and rotation in Triton: gradients of each input, and saved tensors."""

import pytest
import torch
from helpers.exact_rotation import (
    DEVICE,
    assert_rounded,
    draw,
    frequencies,
    make_rotation,
    relative_error,
)
from qk_norm_rope_checks import EPS, check, float64_results, make_inputs
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from rope_patch import ops
from rope_patch.ops.kernels import qk_norm_rope
from rope_patch.ops.output_inversion import can_recompute_from_output

layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
heads_dims = pytest.mark.parametrize("heads_dim", [1, 2])
forms = pytest.mark.parametrize(
    ("offset", "across"), [(0.0, False), (1.0, False), (0.0, True)], ids=["llama", "gemma", "olmo2"]
)


# -- gradients of each input -----------------------------------------------------------------------


@pytest.mark.parametrize("needs_grad", ["0111", "1011", "1100", "0011", "1000", "0001", "0000"])
def test_gradients_of_subsets_of_inputs(needs_grad):
    """Include frozen weights, and weights as the only trained inputs."""
    rotation = make_rotation(48)
    inputs = [
        x.requires_grad_(w == "1") for x, w in zip(make_inputs(rotation), needs_grad, strict=True)
    ]
    outputs, _ = check(inputs, rotation)
    assert any(x.requires_grad for x in outputs) == ("1" in needs_grad)


@pytest.mark.parametrize("save", ["input", "output"])
def test_gradients_if_one_output_is_unused(save):
    rotation = make_rotation(48)
    inputs = make_inputs(rotation)
    outputs = rotation.norm_and_rope(*inputs, eps=EPS, save=save)
    grad = draw(*outputs[1].shape, seed=6)
    torch.autograd.backward(outputs[1], grad)
    expected = float64_results(inputs, rotation, (torch.zeros(outputs[0].shape), grad))[1]
    for x, truth in zip(inputs, expected, strict=True):
        assert_rounded(x.grad, truth, slack=4e-6)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_training_after_inference(mode):
    rotation = make_rotation(48)
    inputs = make_inputs(rotation)
    with mode():
        before = rotation.norm_and_rope(*inputs, eps=EPS)
    assert not any(x.requires_grad for x in before)
    for one, other in zip(check(inputs, rotation)[0], before, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("save", ["input", "output"])
def test_activation_checkpointing(save, reentrant):
    rotation = make_rotation(48)

    def run(through):
        inputs = make_inputs(rotation)
        through(lambda *x: rotation.norm_and_rope(*x, eps=EPS, save=save), inputs).backward()
        return [x.grad for x in inputs]

    def loss(f, inputs):
        return sum(x.square().sum() for x in f(*inputs))

    got = run(lambda f, inputs: checkpoint(loss, f, inputs, use_reentrant=False))
    if reentrant:
        got = run(
            lambda f, inputs: sum(
                x.square().sum() for x in checkpoint(f, *inputs, use_reentrant=True)
            )
        )
    for one, other in zip(got, run(loss), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("across", [False, True])
def test_gradients_are_bitwise_deterministic(monkeypatch, across):
    monkeypatch.setattr(qk_norm_rope, "_PROGRAMS", 4)
    monkeypatch.setattr(qk_norm_rope, "_PROGRAMS_ALL_HEADS", 4)
    rotation = make_rotation(48)
    inputs = make_inputs(rotation, across=across)
    first, second = (check(inputs, rotation)[1] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("save", ["input", "output"])
@pytest.mark.parametrize("changed", ["x", "weight", "positions", "packed_freqs", "sections"])
def test_inputs_changed_before_backward_are_an_error(changed, save):
    rotation = make_rotation(48, 1)
    q, k, *weights = make_inputs(rotation)
    inputs = {
        "positions": torch.zeros(3, 1, 1, dtype=torch.int64, device=DEVICE),
        "packed_freqs": rotation.packed_freqs,
        "sections": (torch.arange(24) % 3).to(DEVICE),
    }
    x, weight = q * 1, weights[0] * 1
    outputs = ops.qk_norm_rope(
        x, k, weight, weights[1], **inputs, eps=EPS, save=save, kernels="triton"
    )
    # If the output is saved, the input may change, but the output may not.
    if changed == "x" and save == "output":
        x.add_(1)
        torch.autograd.grad(outputs[0].sum(), q, retain_graph=True)
        x = outputs[0]
    inputs = {**inputs, "x": x, "weight": weight}
    with torch.no_grad():
        inputs[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[1].sum().backward()


@pytest.mark.parametrize("kernels", ["auto", "reference", "triton"])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_matches_and_returns_the_inputs(dtype, across, kernels):
    rotation = make_rotation(48)  # of 64 dimensions
    q, k, *weights = (x.detach() for x in make_inputs(rotation, across=across, dtype=dtype))
    rest = (*weights, rotation.positions.to(DEVICE), rotation.packed_freqs)
    expected = ops.qk_norm_rope(q, k, *rest, eps=EPS, kernels=kernels)
    assert not expected[0].equal(q)
    version = q._version
    got = ops.qk_norm_rope(q, k, *rest, eps=EPS, kernels=kernels, inplace=True)
    assert got[0] is q
    assert got[1] is k
    assert q._version > version
    assert all(a.equal(b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_gradients_in_place_are_an_error(kernels):
    rotation = make_rotation(48)
    q, k, *weights = make_inputs(rotation)
    values = q.detach().clone()
    rest = (*weights, rotation.positions.to(DEVICE), rotation.packed_freqs)
    with pytest.raises(ValueError, match=r"inplace=True overwrites q and k.*torch.no_grad"):
        ops.qk_norm_rope(q.detach(), k.detach(), *rest, eps=EPS, kernels=kernels, inplace=True)
    assert q.equal(values)
    with torch.no_grad():
        got, _ = ops.qk_norm_rope(q, k, *rest, eps=EPS, kernels=kernels, inplace=True)
    assert got is q


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("save", ["input", "output"])
def test_second_derivatives_are_an_error(save, power):
    """Also of a loss that is linear in the output, whose own gradient has none."""
    rotation = make_rotation(48, tokens=1)
    inputs = make_inputs(rotation)
    outputs = rotation.norm_and_rope(*inputs, eps=EPS, save=save)
    with pytest.raises(RuntimeError, match=r'first derivatives alone.*kernels="reference"'):
        torch.autograd.grad(outputs[0].pow(power).sum(), inputs[0], create_graph=True)


# -- saved tensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("save", ["input", "output"])
def test_little_is_saved_beside_the_output(save, across):
    rotation = make_rotation(64)
    inputs = make_inputs(rotation, 4, 2, across=across, dtype=torch.float16)
    saved_tensors = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved_tensors.append(x) or x, lambda x: x
    ):
        outputs = rotation.norm_and_rope(*inputs, eps=EPS, save=save)
    known_pointers = {x.data_ptr() for x in (*inputs[2:], *outputs)}
    added = [
        x for x in saved_tensors if x.data_ptr() not in known_pointers and x.dtype != torch.int64
    ]
    rstd = (2 * 4) * (2 if across else 4 + 2)  # tokens, bytes of float32, heads
    input_bytes = sum(x.nbytes for x in inputs[:2]) if save == "input" else 0
    assert sum(x.nbytes for x in added) == rstd + input_bytes
    assert {x.data_ptr() for x in inputs[:2]} <= {
        x.data_ptr() for x in saved_tensors
    } or save == "output"


@forms
@layouts
def test_gradients_from_the_output_are_close_for_even_weights(interleaved, offset, across):
    """With weights in 1 +- 0.2, as after training, the error is that of rounding x."""
    dtype = torch.bfloat16 if interleaved else torch.float16
    rotation = make_rotation(48, interleaved=interleaved, factor=1.2)
    inputs = make_inputs(rotation, across=across, offset=offset, dtype=dtype)
    with torch.no_grad():
        for weight in inputs[2:]:
            weight.copy_(1 - offset + 0.1 * draw(*weight.shape).clamp(-2, 2))
    outputs = rotation.norm_and_rope(*inputs, eps=EPS, offset=offset, save="output")
    assert all(x.grad_fn.settings[-1] for x in outputs)  # recomputed from the output
    grads = [draw(*x.shape, dtype=dtype, seed=6) for x in outputs]
    _, truth = float64_results(inputs, rotation, grads, offset=offset)
    for got, expected in zip(torch.autograd.grad(outputs, inputs, grads), truth, strict=True):
        assert relative_error(got, expected) < 2 * torch.finfo(dtype).eps


@forms
def test_gradients_from_the_output_are_right_in_float32(offset, across):
    """Use float32, where errors in parts, padding and signs are visible."""
    rotation = make_rotation(40, interleaved=across, factor=0.7)
    inputs = make_inputs(rotation, 5, 1, 80, across=across, offset=offset)
    outputs, _ = check(inputs, rotation, offset=offset, save="output", slack=2e-5)
    assert outputs[0].grad_fn.settings[-1] is True


def set_uneven_weights(inputs):
    """Set lognormal weights, and return the inputs."""
    with torch.no_grad():
        for seed, weight in enumerate(inputs[2:]):
            weight.copy_((2 * draw(*weight.shape, seed=seed)).exp())
    return inputs


def gradient_errors(rotation, inputs, recompute_input):
    """Return the gradients' relative errors, recomputing from the output or not."""
    packed_freqs, positions = rotation.packed_freqs, rotation.positions.to(DEVICE)
    rest = (positions, packed_freqs, None, EPS, 0.0, rotation.interleaved, 2, recompute_input)
    outputs = qk_norm_rope.QKNormRopeFunction.apply(*inputs, *rest)
    grads = [draw(*x.shape, dtype=x.dtype, seed=6) for x in outputs]
    _, truth = float64_results(inputs, rotation, grads)
    got = torch.autograd.grad(outputs, inputs, grads)
    return [relative_error(x, expected) for x, expected in zip(got, truth, strict=True)]


def test_uneven_weights_save_the_input():
    """With uneven weights, weight gradients from the output would lose a digit."""
    rotation = make_rotation(64)
    inputs = set_uneven_weights(make_inputs(rotation, dtype=torch.bfloat16))
    assert max(gradient_errors(rotation, inputs, False)[2:]) < 1e-5
    assert max(gradient_errors(rotation, inputs, True)[2:]) > 5e-3
    outputs = rotation.norm_and_rope(*inputs, eps=EPS, save="output")
    assert outputs[0].grad_fn.settings[-1] is False
    check(inputs, rotation, save="output")


@forms
@pytest.mark.parametrize("place", [0, 50], ids=["in a pair", "in none"])
def test_zero_weights_save_the_input(place, offset, across):
    rotation = make_rotation(48)
    inputs = make_inputs(rotation, across=across, offset=offset)
    with torch.no_grad():
        inputs[3][..., place] = -offset
    outputs, _ = check(inputs, rotation, offset=offset, save="output")
    assert outputs[0].grad_fn.settings[-1] is False


def test_tiny_weights_save_the_input():
    """Use equal but tiny weights, whose outputs float16 cannot represent."""
    rotation = make_rotation(48)
    inputs = make_inputs(rotation, dtype=torch.float16)
    with torch.no_grad():
        inputs[2].mul_(1e-6)
        inputs[3].mul_(1e-6)
    assert max(gradient_errors(rotation, inputs, True)[2:]) > 5e-3
    check(inputs, rotation, save="output")


class TestCanRecomputeFromOutput:
    """Test which weights allow recomputing the input from the output."""

    PACKED_FREQS = ops.pack_frequencies(frequencies(4))

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
    def test_ratio_within_pairs_decides(self, weight, halves, neighbours):
        good, weight = torch.ones(5), torch.tensor(weight)
        for interleaved, expected in ((False, halves), (True, neighbours)):
            settings = {"interleaved": interleaved}
            assert (
                can_recompute_from_output(weight, good, self.PACKED_FREQS, **settings) is expected
            )
            assert (
                can_recompute_from_output(good, weight, self.PACKED_FREQS, **settings) is expected
            )
            both = torch.stack([good, weight])
            assert (
                can_recompute_from_output(good[None], both, self.PACKED_FREQS, **settings)
                is expected
            )

    def test_offset_is_added(self):
        weight = torch.zeros(5)
        assert can_recompute_from_output(weight, weight, self.PACKED_FREQS, offset=1.0)
        assert not can_recompute_from_output(weight - 1, weight, self.PACKED_FREQS, offset=1.0)

    def test_no_pairs_are_allowed(self):
        assert can_recompute_from_output(torch.ones(5), torch.ones(5), self.PACKED_FREQS[-1:])
