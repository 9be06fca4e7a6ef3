"""Test the kernels' custom ops: opcheck, torch.compile and torch.export."""

from functools import cache

import pytest
import torch
from helpers.exact_rotation import DEVICE, assert_laid_out_as, draw, frequencies
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from rope_patch import ops
from rope_patch.ops.kernels import qk_norm_rope

assert ops.triton_unavailable_reason() is None  # registers the operators
rope_op, norm_op, norm_back_op = (
    getattr(torch.ops.rope_patch, name).default
    for name in ("rope", "qk_norm_rope", "qk_norm_rope_backward")
)

D, EPS = 16, 1e-6
PACKED_FREQS = ops.pack_frequencies(frequencies(12)).to(DEVICE)


def heads(count, batch=1, tokens=2, seed=0, grad=False, dtype=torch.float32):
    """Return `[B, H, S, D]` in the memory layout of projections."""
    x = draw(batch, tokens, count, D, seed=seed, dtype=dtype).transpose(1, 2)
    return x.detach().requires_grad_(grad)


def positions(batch=1, tokens=2):
    return torch.arange(batch * tokens, device=DEVICE).view(batch, tokens)


def weights(*counts, grad=False):
    """Return weights for each head by itself, or for all `counts` heads together."""
    shapes = [(n, D) for n in counts] or [(D,), (D,)]
    return [(1 + draw(*s, seed=i) / 10).requires_grad_(grad) for i, s in enumerate(shapes)]


AXES = torch.arange(6, device=DEVICE).view(3, 1, 2)
SECTIONS = torch.arange(6, device=DEVICE) % 3


def rope_inputs(grad=False):
    q, k = heads(3, grad=grad), heads(1, seed=1, grad=grad)
    return {
        "both": (q, k, positions(), PACKED_FREQS, None, False, 1, False),
        "queries alone": (q, None, positions(), PACKED_FREQS, None, True, 1, False),
        "backwards": (q.half(), k, positions()[0], PACKED_FREQS[None], None, False, 1, True),
        "axes": (q, k, AXES, PACKED_FREQS, SECTIONS, False, 1, False),
    }


def norm_inputs(grad=False):
    q, k = heads(3, grad=grad), heads(1, seed=1, grad=grad)
    rest, gemma = (EPS, 0.0, False, 1, True), (EPS, 1.0, True, 1, True)
    return {
        "each": (q, k, *weights(grad=grad), positions(), PACKED_FREQS, None, *rest),
        "together": (q, k, *weights(3, 1, grad=grad), positions(), PACKED_FREQS, None, *rest),
        "axes": (q.half(), k, *weights(grad=grad), AXES, PACKED_FREQS, SECTIONS, *gemma),
    }


@cache
def norm_back_inputs():
    inputs_by_name = {}
    for name, arguments in norm_inputs().items():
        q_out, k_out, *rstds = norm_op(*arguments)
        tensors = (*arguments[:4], *rstds, q_out, k_out, *arguments[4:7])
        inputs_by_name[name] = (*tensors, *arguments[8:-1], True)
    q, k, *rest = inputs_by_name["each"]
    ones = [torch.ones((), device=DEVICE).expand(x.shape) for x in (q, k)]
    return {**inputs_by_name, "of a sum": (q, k, *rest[:4], *ones, *rest[6:])}


# -- operators -------------------------------------------------------------------------------------

OPERATORS = [
    *((rope_op, rope_inputs, name) for name in rope_inputs()),
    *((norm_op, norm_inputs, name) for name in norm_inputs()),
    *((norm_back_op, norm_back_inputs, name) for name in (*norm_inputs(), "of a sum")),
]
# Of these, opcheck, which runs each some times, tries few: with None, with axes, and all heads.
CHECKED = {
    rope_op: ("queries alone", "axes"), norm_op: ("together",), norm_back_op: ("of a sum",),
}  # fmt: skip


def operators(is_slow=lambda op, name: False):
    return pytest.mark.parametrize(
        ("op", "inputs", "name"),
        [
            pytest.param(
                op, inputs, name,
                id=f"{op.name()}, {name}", marks=pytest.mark.slow if is_slow(op, name) else (),
            )
            for op, inputs, name in OPERATORS
        ],
    )  # fmt: skip


@operators(is_slow=lambda op, name: name not in CHECKED[op])
def test_operators_pass_opcheck(op, inputs, name):
    arguments = inputs() if op is norm_back_op else inputs(grad=True)  # it has no derivative
    torch.library.opcheck(op, arguments[name])


@operators()
def test_fake_and_meta_results_have_the_layout_of_real_ones(op, inputs, name):
    arguments = inputs()[name]
    expected = op(*arguments)
    for kind, empty in (
        ("fake", FakeTensorMode().from_tensor),
        ("meta", lambda x: x.to("meta")),
    ):
        dataless = [empty(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        for got, real in zip(op(*dataless), expected, strict=True):
            assert_laid_out_as(got, got)
            assert (got.shape, got.dtype) == (real.shape, real.dtype)
            assert got.stride() == real.stride()
            assert got.device.type == (DEVICE if kind == "fake" else "meta")


MEMORY = {
    "contiguous": lambda: draw(2, 3, 2, D),
    "a view of BSHD": lambda: draw(2, 2, 3, D).transpose(1, 2),
    "beside a gate": lambda: draw(2, 2, 3, 2 * D)[..., :D].transpose(1, 2),
    "every other number": lambda: draw(2, 3, 2, 2 * D)[..., ::2],
    "repeated heads": lambda: draw(2, 1, 2, D).expand(-1, 3, -1, -1),
    "no tokens": lambda: draw(2, 3, 0, D),
}


@pytest.mark.parametrize("name", MEMORY)
def test_results_have_the_memory_layout_of_inputs(name):
    """Check real and fake kernels."""
    x, mode = MEMORY[name](), FakeTensorMode()
    rest = (positions(2, x.shape[2]), PACKED_FREQS, None)
    arguments = [
        (x, x, *rest, False, 1, False),
        (x, x, *weights(), *rest, EPS, 0.0, False, 1, True),
    ]
    for op, args in zip((rope_op, norm_op), arguments, strict=True):
        real = op(*args)
        fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
        for real_output, fake_output in zip(real[:2], fake[:2], strict=True):
            assert_laid_out_as(real_output, x)
            assert real_output.stride() == fake_output.stride()


def test_operators_match_the_functions():
    q, k, w = heads(3, grad=True), heads(1, grad=True), weights(grad=True)
    rest, settings = (positions(), PACKED_FREQS), {"heads_dim": 1, "kernels": "triton"}
    by_op = rope_op(q, k, *rest, None, False, 1, False)
    pairs = [
        (by_op, ops.rope(q, k, *rest, **settings), (q, k)),
        (
            norm_op(q, k, *w, *rest, None, EPS, 1.0, False, 1, True)[:2],
            ops.qk_norm_rope(q, k, *w, *rest, eps=EPS, offset=1.0, **settings),
            (q, k, *w),
        ),
    ]
    for op_outputs, function_outputs, leaves in pairs:
        grads = [draw(*x.shape, seed=3) for x in function_outputs]
        results = [
            [*outputs, *torch.autograd.grad(outputs, leaves, grads)]
            for outputs in (op_outputs, function_outputs)
        ]
        assert all(one.equal(other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kind", ["rope", "qk_norm_rope"])
def test_gradients_if_one_output_is_unused(kind, index):
    q, k = arguments = heads(3, grad=True), heads(1, grad=True)
    rest, w = (positions(), PACKED_FREQS, None), weights()
    if kind == "rope":
        outputs = rope_op(q, k, *rest, False, 1, False)
    else:
        outputs = norm_op(q, k, *w, *rest, EPS, 0.0, False, 1, True)
    got = torch.autograd.grad(outputs[index].sum(), arguments, allow_unused=True)
    settings = {"heads_dim": 1, "kernels": "triton"}
    if kind == "rope":
        outputs = ops.rope(q, k, *rest[:2], **settings)
    else:
        outputs = ops.qk_norm_rope(q, k, *w, *rest[:2], eps=EPS, **settings)
    assert got[index].equal(torch.autograd.grad(outputs[index].sum(), arguments[index])[0])
    assert got[1 - index] is None or not got[1 - index].any()


def test_second_derivatives_of_operators():
    q, grad = heads(3, grad=True), heads(3, seed=2, grad=True)
    outputs = rope_op(q, None, positions(), PACKED_FREQS, None, False, 1, False)
    (back,) = torch.autograd.grad(outputs, q, grad, create_graph=True)
    (second,) = torch.autograd.grad(back.square().sum(), grad)
    torch.testing.assert_close(second, 2 * grad.detach(), rtol=0, atol=1e-5)

    outputs = norm_op(q, q, *weights(), positions(), PACKED_FREQS, None, EPS, 0.0, False, 1, True)
    (back,) = torch.autograd.grad(outputs[0], q, grad, create_graph=True)
    with pytest.raises(RuntimeError, match="qk_norm_rope_backward"):
        back.sum().backward()


# -- torch.compile and torch.export ----------------------------------------------------------------


def small_layer(q, k, positions, q_weight, k_weight):
    """Apply both ops between other operations, like a small layer."""
    settings = {"heads_dim": 1, "kernels": "triton"}
    q, k = ops.qk_norm_rope(
        q * 2, k, q_weight, k_weight, positions, PACKED_FREQS, eps=EPS, save="output", **settings
    )
    q, k = ops.rope(q, k, positions, PACKED_FREQS, **settings)
    q, none = ops.rope(q + 1, None, positions, PACKED_FREQS, **settings)
    assert none is None
    return q, k


def outputs_and_gradients(f, batch=2, tokens=1):
    """Return outputs and gradients of all inputs."""
    leaves = heads(3, batch, tokens, 1, True), heads(1, batch, tokens, 2, True)
    w = weights(grad=True)
    out = f(*leaves, positions(batch, tokens), *w)
    grads = [draw(*x.shape, seed=3) for x in out]
    return *out, *torch.autograd.grad(out, (*leaves, *w), grads)


def assert_same(got, expected):
    for got_tensor, expected_tensor in zip(got, expected, strict=True):
        torch.testing.assert_close(got_tensor, expected_tensor, rtol=1e-4, atol=1e-4)


@pytest.fixture(autouse=True)
def _reset_compiler():
    torch._dynamo.reset()


@pytest.mark.slow  # a C++ compiler takes half a minute for what stands between the operators
def test_compiled_layer_is_one_graph():
    f = torch.compile(small_layer, backend="inductor", fullgraph=True, dynamic=True)
    assert_same(outputs_and_gradients(f), outputs_and_gradients(small_layer))


def operators_alone(q, k, positions, q_weight, k_weight):
    settings = {"heads_dim": 1, "kernels": "triton"}
    q, k = ops.qk_norm_rope(
        q, k, q_weight, k_weight, positions, PACKED_FREQS, eps=EPS, save="output", **settings
    )
    return ops.rope(q, k, positions, PACKED_FREQS, **settings)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_graphs_call_the_operators_for_any_size(backend):
    """With nothing between them there is no code for Inductor to compile."""
    f = torch.compile(operators_alone, backend=backend, fullgraph=True, dynamic=True)
    outputs_and_gradients(f, 2, 4)  # sizes that differ from all others, else they are merged
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = outputs_and_gradients(f, 3, 2)
    assert_same(got, outputs_and_gradients(operators_alone, 3, 2))


def test_compiled_layer_in_inference_mode():
    f = torch.compile(small_layer, backend="aot_eager", fullgraph=True)
    arguments = (heads(3), heads(1, seed=2), positions(), *weights())
    with torch.inference_mode():
        assert_same(f(*arguments), small_layer(*arguments))
    assert_same(outputs_and_gradients(f), outputs_and_gradients(small_layer))


def names_in(graph):
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


def test_graphs_contain_the_operators():
    """Check also that without Triton graphs contain plain torch, which Inductor can fuse."""
    names = []

    def backend(graph, _):
        names.append(names_in(graph.graph))
        return graph

    arguments = (heads(3), heads(1), positions(), *weights())
    torch.compile(small_layer, backend=backend, fullgraph=True)(*arguments)
    assert {"rope_patch.rope", "rope_patch.qk_norm_rope"} <= names.pop()

    def plain(q, k, positions):
        return ops.rope(q, k, positions, PACKED_FREQS, heads_dim=1, kernels="reference")

    torch.compile(plain, backend=backend, fullgraph=True)(*arguments[:3])
    assert not any("rope_patch" in name for name in names.pop())


@pytest.mark.parametrize("trained", ["none", "inputs", "weights"])
def test_compiled_layers_compute_only_what_is_needed(trained, monkeypatch):
    """Check that inference saves no reciprocal norms, and frozen weights get no gradients."""
    last_arguments = {}
    for name in ("launch_forward", "launch_backward"):
        launch = getattr(qk_norm_rope, name)

        def record(*args, name=name, launch=launch):
            last_arguments[name] = args[-1]
            return launch(*args)

        monkeypatch.setattr(qk_norm_rope, name, record)

    def layer(q, k, *weights):
        settings = {"eps": EPS, "heads_dim": 1, "kernels": "triton"}
        return ops.qk_norm_rope(q, k, *weights, positions(), PACKED_FREQS, **settings)

    q, k = (heads(count, grad=trained != "none") for count in (3, 1))
    outputs = torch.compile(layer, backend="aot_eager", fullgraph=True)(
        q, k, *weights(grad=trained == "weights")
    )
    if trained == "none":
        assert last_arguments == {"launch_forward": False}
        return
    sum(x.sum() for x in outputs).backward()
    assert last_arguments == {"launch_forward": True, "launch_backward": trained == "weights"}


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q_weight, self.k_weight = (torch.nn.Parameter(w) for w in weights())

    def forward(self, q, k, positions):
        return small_layer(q, k, positions, self.q_weight, self.k_weight)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exported_layer_matches(strict):
    layer, batch, tokens = Layer(), torch.export.Dim("batch"), torch.export.Dim("tokens")
    sizes = {0: batch, 2: tokens}
    arguments = heads(3, 2, 4), heads(1, 2, 4, seed=2), positions(2, 4)
    with torch.no_grad():
        exported = torch.export.export(
            layer, arguments, dynamic_shapes=(sizes, sizes, {0: batch, 1: tokens}), strict=strict
        )
        assert {"rope_patch.rope.default", "rope_patch.qk_norm_rope.default"} <= names_in(
            exported.graph
        )
        arguments = heads(3, 3, 2), heads(1, 3, 2, seed=2), positions(3, 2)  # another size
        assert_same(exported.module()(*arguments), layer(*arguments))
