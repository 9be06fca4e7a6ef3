"""Check `rope` in Triton, forward and backward, against complex numbers in float64."""

import torch
from helpers.exact_rotation import assert_laid_out_as, assert_rounded, draw, draw_heads


def check(q, k, rotation, grads=None):
    """Check outputs, and gradients of inputs that require them; return the outputs."""
    inputs = [x for x in (q, k) if x is not None]
    outputs = [x for x in rotation.rope(q, k) if x is not None]
    assert len(outputs) == len(inputs)
    for output, x in zip(outputs, inputs, strict=True):
        assert_laid_out_as(output, x)
        assert_rounded(output, rotation.true_rope(x))
    indices = [i for i, x in enumerate(inputs) if x.requires_grad]
    if not indices:
        return outputs
    if grads is None:
        grads = [draw(*x.shape, dtype=x.dtype, seed=5 + i) for i, x in enumerate(outputs)]
    # A view of a leaf has a separate gradient with the view's layout.
    input_grads = torch.autograd.grad(outputs, [inputs[i] for i in indices], grads)
    for grad, i in zip(input_grads, indices, strict=True):
        assert grad.dtype == inputs[i].dtype
        assert_rounded(grad, rotate_back(rotation, inputs[i], grads[i]))
    return outputs


def rotate_back(rotation, x, grad):
    """Return the gradient in float64, by PyTorch's own derivative of complex numbers."""
    leaf = x.detach().cpu().double().requires_grad_()
    return torch.autograd.grad(rotation.true_rope(leaf), leaf, grad.cpu().double())[0]


def draw_pair(rotation, heads=3, key_heads=2, head_dim=64, grad=True, **settings):
    """Return queries and keys for a rotation."""
    return (
        draw_heads(heads, head_dim, rotation, seed=1, grad=grad, **settings),
        draw_heads(key_heads, head_dim, rotation, seed=2, grad=grad, **settings),
    )
