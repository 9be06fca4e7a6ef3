"""Check `qk_norm_rope` in Triton, forward and backward, against complex float64."""

import torch
from helpers.exact_rotation import assert_laid_out_as, assert_rounded, draw, draw_heads

EPS = 1e-6

# Slack for sums over tokens and heads in float32.
SUM_SLACK = 2e-6


def make_weight(heads, head_dim, across=False, offset=0.0, dtype=torch.float32, seed=3, spread=0.3):
    """Return a norm's weight: around 1 with the offset."""
    shape = (heads, head_dim) if across else (head_dim,)
    return (1 - offset + spread * draw(*shape, seed=seed)).to(dtype).requires_grad_()


def make_inputs(rotation, heads=3, key_heads=2, head_dim=64, across=False, offset=0.0, **settings):
    """Return queries, keys and their weights."""
    settings.setdefault("batch", 1)
    weight_dtype = settings.pop("weight_dtype", torch.float32)
    q, k = (
        draw_heads(n, head_dim, rotation, seed=s, **settings).mul_(2).requires_grad_()
        for n, s in ((heads, 1), (key_heads, 2))
    )
    weights = (
        make_weight(n, head_dim, across, offset, weight_dtype, seed)
        for n, seed in ((heads, 3), (key_heads, 4))
    )
    return q, k, *weights


def float64_results(inputs, rotation, grads, eps=EPS, offset=0.0):
    """Return both outputs and all four gradients, in float64 by PyTorch's own derivatives."""
    leaves = [x.detach().cpu().double().requires_grad_() for x in inputs]
    outputs = [
        rotation.true_norm_and_rope(x, w, eps, offset)
        for x, w in zip(leaves[:2], leaves[2:], strict=True)
    ]
    return outputs, torch.autograd.grad(outputs, leaves, [g.cpu().double() for g in grads])


def check(inputs, rotation, grads=None, eps=EPS, offset=0.0, save="input", slack=SUM_SLACK):
    """Check outputs, and gradients of inputs that require them; return both."""
    outputs = rotation.norm_and_rope(*inputs, eps=eps, offset=offset, save=save)
    if grads is None:
        grads = [draw(*x.shape, dtype=x.dtype, seed=5 + i) for i, x in enumerate(outputs)]
    true_outputs, true_grads = float64_results(inputs, rotation, grads, eps, offset)
    for output, x, truth in zip(outputs, inputs, true_outputs, strict=False):
        assert_laid_out_as(output, x)
        assert_rounded(output, truth, slack=1e-6)
    indices = [i for i, x in enumerate(inputs) if x.requires_grad]
    leaves = [inputs[i] for i in indices]
    input_grads = torch.autograd.grad(outputs, leaves, grads) if indices else ()
    for grad, i in zip(input_grads, indices, strict=True):
        assert grad.dtype == inputs[i].dtype
        assert_rounded(grad, true_grads[i], slack=slack)
    return outputs, input_grads
