"""The ops that rotate, in Triton: what each is given, and its truth in complex float64."""

from dataclasses import dataclass

import pytest
import torch
from helpers.exact_rotation import assert_laid_out_as, assert_rounded, draw, draw_heads

EPS = 1e-6
SHAPE = (3, 2)  # heads of queries and of keys


@dataclass(frozen=True)
class Op:
    """One way to rotate queries and keys.

    Attributes:
        normed: Whether they are normed before.
        across: Whether all heads of a token are normed together.
        offset: Added to the norm's weights.
        save: What the norm saves for its gradients.
    """

    normed: bool = True
    across: bool = False
    offset: float = 0.0
    save: str = "input"

    def draw_weight(self, heads, head_dim, seed=3, dtype=torch.float32):
        """Return a norm's weight: around 1 with the offset."""
        shape = (heads, head_dim) if self.across else (head_dim,)
        return (1 - self.offset + 0.3 * draw(*shape, seed=seed)).to(dtype).requires_grad_()

    def draw(self, rotation, heads=SHAPE, head_dim=64, batch=1, dtype=torch.float32, **settings):
        """Return queries, keys, and the weights of both if they are normed."""
        grad, weight_dtype = settings.get("grad", True), settings.get("weight_dtype", torch.float32)
        scale = 2 if self.normed else 1
        inputs = [
            draw_heads(n, head_dim, rotation, seed=seed, batch=batch, dtype=dtype).mul_(scale)
            for seed, n in enumerate(heads, start=1)
        ]
        if self.normed:
            inputs += [
                self.draw_weight(n, head_dim, seed, weight_dtype).detach()
                for seed, n in enumerate(heads, start=3)
            ]
        return [x.requires_grad_(grad) for x in inputs]

    def apply(self, inputs, rotation, kernels="triton", eps=EPS, **settings):
        """Return rotated queries, and keys if there are any."""
        if not self.normed:
            return [x for x in rotation.rope(*inputs, kernels=kernels) if x is not None]
        settings = {"eps": eps, "offset": self.offset, "save": self.save, **settings}
        return list(rotation.norm_and_rope(*inputs, kernels=kernels, **settings))

    def truth(self, inputs, rotation, grads, eps=EPS):
        """Return outputs and gradients of all inputs, in float64 by PyTorch's own derivatives."""
        leaves = [x.detach().cpu().double().requires_grad_() for x in inputs]
        if self.normed:
            pairs = zip(leaves[:2], leaves[2:], strict=True)
            outputs = [rotation.true_norm_and_rope(x, w, eps, self.offset) for x, w in pairs]
        else:
            outputs = [rotation.true_rope(x) for x in leaves]
        return outputs, torch.autograd.grad(outputs, leaves, [g.cpu().double() for g in grads])

    def check(self, inputs, rotation, grads=None, eps=EPS, slack=None):
        """Check outputs, and gradients of inputs that require them; return both.

        `slack` is for sums over tokens and heads in float32.
        """
        before = [x.detach().clone() for x in inputs]
        outputs = self.apply(inputs, rotation, eps=eps)
        if grads is None:
            grads = [draw(*x.shape, dtype=x.dtype, seed=5 + i) for i, x in enumerate(outputs)]
        true_outputs, true_grads = self.truth(inputs, rotation, grads, eps)
        assert len(outputs) == len(true_outputs)
        for output, x, truth in zip(outputs, inputs, true_outputs, strict=False):
            assert_laid_out_as(output, x)
            assert_rounded(output, truth, slack=1e-6 if self.normed else 4e-7)
        indices = [i for i, x in enumerate(inputs) if x.requires_grad]
        # A view of a leaf has a separate gradient with the view's layout.
        leaves = [inputs[i] for i in indices]
        input_grads = torch.autograd.grad(outputs, leaves, grads) if indices else ()
        for grad, i in zip(input_grads, indices, strict=True):
            assert grad.dtype == inputs[i].dtype
            assert_rounded(grad, true_grads[i], slack=slack or (2e-6 if self.normed else 4e-7))
        assert all(x.equal(old) for x, old in zip(inputs, before, strict=True))
        return outputs, input_grads


ROPE, NORM, ACROSS = Op(normed=False), Op(), Op(across=True)
GEMMA, BY_OUTPUT = Op(offset=1.0), Op(save="output")
OPS = {"rope": ROPE, "norm": NORM, "norm of all heads": ACROSS, "norm of Gemma": GEMMA}
NORMS = {name: op for name, op in OPS.items() if op.normed}


def each(*ops):
    """Parametrise a test by some of the ops."""
    names = {**OPS, "norm by output": BY_OUTPUT}
    ids = [next(name for name, other in names.items() if other == op) for op in ops]
    return pytest.mark.parametrize("op", ops, ids=ids)


def slow(*arguments):
    """Return parameters that only the slow tests try."""
    return [pytest.param(*x, marks=pytest.mark.slow) for x in arguments]
