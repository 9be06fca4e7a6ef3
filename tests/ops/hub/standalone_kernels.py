"""Run a built kernels' package where rope_patch cannot be imported; print each case's error.

Called as `python standalone_kernels.py FOLDER SHAPE...`, with the folder of a backend. The package
is loaded as the `kernels` library does it: by path, under the name in its metadata. Errors are the
largest differences from formulas in float64, relative to the largest number.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch

SHAPES = {  # rotated dimensions, neighbours, heads of queries and keys, dimension of the heads
    "halves": (64, False, (4, 2), 2),
    "neighbours": (64, True, (4, 1), 1),
    "partial": (24, False, (3, 3), 1),
    "partial-neighbours": (24, True, (5, 2), 2),
    "one-tensor": (64, False, (4,), 2),
}
DIM, TOKENS, BATCH = 64, 2, 2
EPS = 1e-6


def load(folder):
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def positions():
    return torch.tensor([[0, 131_072], [1_000_000, 9]])


def inv_freq(rotary_dim):
    return (1e4 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)).float()


def rotate(x, rotary_dim, neighbours, heads_dim, factor):
    """Multiply pairs, as complex numbers, by the factor and exp(i position frequency)."""
    angle = positions().double()[..., None] * inv_freq(rotary_dim).double()
    turn = factor * torch.polar(torch.ones_like(angle), angle).unsqueeze(heads_dim)
    part, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    pairs = part.unflatten(-1, (-1, 2)) if neighbours else part.unflatten(-1, (2, -1)).mT
    rotated = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    rotated = rotated if neighbours else rotated.mT
    return torch.cat((rotated.flatten(-2), rest), -1)


def norm(x, weight, heads_dim):
    """Apply RMSNorm with weights that count from 1, as Gemma's do."""
    together = weight.ndim == 2
    mean = x.square().mean([-1, heads_dim] if together else -1, keepdim=True)
    scale = (1 + weight).unsqueeze(1) if together and heads_dim == 1 else 1 + weight
    return x / (mean + EPS).sqrt() * scale


def compare(inputs, function, formula):
    """Return the largest errors of the results and of the gradients."""
    wide = [x.double().requires_grad_() for x in inputs]
    narrow = [x.clone().requires_grad_() for x in inputs]
    expected, found = formula(*wide), function(*narrow)
    weights = [torch.randn_like(x) for x in found]
    sum((x * w.double()).sum() for x, w in zip(expected, weights, strict=True)).backward()
    sum((x * w).sum() for x, w in zip(found, weights, strict=True)).backward()
    error = max(relative(*pair) for pair in zip(found, expected, strict=True))
    grads = (relative(x.grad, y.grad) for x, y in zip(narrow, wide, strict=True))
    return {"forward": error, "backward": max(grads)}


def relative(found, expected):
    with torch.no_grad():
        return float((found.double() - expected).abs().max() / expected.abs().max())


def check(package, shape, kernels):
    rotary_dim, neighbours, heads, heads_dim = SHAPES[shape]
    packed = package.pack_frequencies(inv_freq(rotary_dim), 1.25)
    layout = {"interleaved": neighbours, "heads_dim": heads_dim, "kernels": kernels}
    sizes = [(TOKENS, n) if heads_dim == 2 else (n, TOKENS) for n in heads]
    tensors = [torch.randn(BATCH, *size, DIM) for size in sizes]

    def rope(*x):
        found = package.rope(*(*x, None)[:2], positions(), packed, **layout)
        return [f for f in found if f is not None]

    def turn(x):
        return rotate(x, rotary_dim, neighbours, heads_dim, 1.25)

    errors = {"rope": compare(tensors, rope, lambda *x: [turn(y) for y in x])}
    if len(heads) == 1:
        return errors

    def norm_rope(q, k, *weights):
        settings = {"eps": EPS, "offset": 1.0, **layout}
        return package.qk_norm_rope(q, k, *weights, positions(), packed, **settings)

    def formula(q, k, q_weight, k_weight):
        return [turn(norm(x, w, heads_dim)) for x, w in ((q, q_weight), (k, k_weight))]

    for name, shapes in (("each", [(), ()]), ("together", [(n,) for n in heads])):
        weights = [torch.randn(*s, DIM) / 4 for s in shapes]
        errors[f"norm-{name}"] = compare([*tensors, *weights], norm_rope, formula)
    return errors


def check_compiled(package):
    """Compare the custom operators, which take the place of the kernels in graphs."""
    packed = package.pack_frequencies(inv_freq(DIM), 1.25)

    @torch.compile(backend="eager", fullgraph=True)
    def rope(q, k):
        return package.rope(q, k, positions(), packed, kernels="triton")

    inputs = [torch.randn(BATCH, TOKENS, heads, DIM) for heads in (4, 2)]
    return {"rope": compare(inputs, rope, lambda *x: [rotate(y, DIM, False, 2, 1.25) for y in x])}


if __name__ == "__main__":
    sys.modules["rope_patch"] = None  # importing it raises
    sys.path.append(str(Path(__file__).parents[2]))
    from helpers.triton_interpreter import hasten_interpreter

    hasten_interpreter()
    torch.manual_seed(0)
    package = load(Path(sys.argv[1]))
    kernels = ("triton", "auto")
    errors = {
        f"{shape} {name}": check(package, shape, name) for shape in sys.argv[2:] for name in kernels
    }
    print(json.dumps({**errors, "compiled triton": check_compiled(package)}))
