"""Test torch.compile of static methods: one graph for all lengths."""

import pytest
import torch
from helpers.method_names import frequency_methods
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    SHORT,
    TRAINED,
    assert_close,
    assert_differs,
    forward,
    make_model,
    tokens,
)
from torch._dynamo.utils import counters
from transformers import StaticCache

import rope_patch
from rope_patch.methods import build

pytestmark = pytest.mark.usefixtures("reset_compiler")

LENGTHS = [SHORT, TRAINED, TRAINED + 1, LONG]  # across the trained length
REQUIRED = {
    "longrope": {"long_factor": LONG_FACTOR, "short_factor": LONG_FACTOR},
    "proportional": {"partial_rotary_factor": 0.5},
}


def options(name):
    """Return the options that a method requires."""
    factor = {} if name == "nope" else {"factor": 4.0}
    return factor | REQUIRED.get(name, {})


def is_static(name):
    try:
        return not build(name, **options(name)).is_length_dependent(TRAINED)
    except ValueError:  # requires other options, like methods with two sets
        return False


STATIC = [name for name in frequency_methods() if name != "default" and is_static(name)]


def make_patched(method, family="llama", kernels="auto", **sizes):
    """Return a model patched by a static method."""
    model = make_model(family, **sizes)
    handle = rope_patch.patch(model, method, kernels=kernels, **options(method))
    assert not handle.method.is_length_dependent(TRAINED)
    return model


def compile_model(model, backend="eager", **settings):
    return torch.compile(model, fullgraph=True, backend=backend, **settings)


def test_static_covers_all_static_methods():
    known = {"linear", "ntk", "ntk-by-parts", "yarn", "llama3", "abf", "longrope", "proportional"}
    assert known | {"nope", "ntk-by-parts-2023-06"} <= set(STATIC)
    for name in set(frequency_methods()) - set(STATIC) - {"default"}:
        assert name.startswith(("dynamic", "mixed-")), name


@pytest.mark.parametrize(
    ("family", "method", "kernels"),
    [
        ("gemma3", "longrope", "reference"),  # several sets; YaRN has a test below
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("llama", method, "auto") for method in STATIC),
                ("qwen3", "yarn", "auto"),
                ("gemma3", "yarn", "hf"),
                ("gemma3", "yarn", "reference"),
            )
        ),
    ],
)
def test_static_methods_are_one_graph_for_all_lengths(family, method, kernels):
    sizes = {"num_hidden_layers": 1} if family == "llama" else {}  # faster to trace
    model = make_patched(method, family, kernels, **sizes)
    compiled = compile_model(model, dynamic=True)
    for length in LENGTHS:
        ids = tokens(length)
        assert_close(forward(compiled, ids), forward(model, ids))
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


def test_marked_dynamic_length_compiles_once():
    model = make_patched("yarn", num_hidden_layers=1)
    compiled = compile_model(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in LENGTHS:
            ids = tokens(length)
            torch._dynamo.mark_dynamic(ids, 1, min=2, max=4 * TRAINED)
            assert_close(forward(compiled, ids), forward(model, ids))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "patched"])
def test_automatic_dynamic_shapes_recompile_once(kind):
    """Compile for the first length, then for all others, as for an unpatched model."""
    sizes = {"num_hidden_layers": 1}
    compiled = compile_model(
        make_model(**sizes) if kind == "plain" else make_patched("yarn", **sizes)
    )
    for length in LENGTHS:
        forward(compiled, tokens(length))
    assert counters["stats"]["unique_graphs"] == 2


def test_decode_steps_share_a_graph():
    """Decode across the trained length."""
    model, ids = make_patched("yarn", num_hidden_layers=1), tokens(TRAINED + 4)
    expected = forward(model, ids)
    step = compile_model(model)
    cache = StaticCache(config=model.config, max_cache_len=LONG)
    got = []
    with torch.no_grad():
        got.append(model(ids[:, : TRAINED - 4], past_key_values=cache).logits)
        for i in range(TRAINED - 4, TRAINED + 4):
            position_ids = torch.tensor([[i]])
            got.append(
                step(ids[:, i : i + 1], position_ids=position_ids, past_key_values=cache).logits
            )
    assert_close(torch.cat(got, dim=1), expected)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("dynamic", "lengths"),  # sizes that are symbols take AOT autograd thrice as long
    [(False, (LONG,)), pytest.param(True, (SHORT, LONG), marks=pytest.mark.slow)],
)
def test_gradients_through_a_compiled_model(dynamic, lengths):
    gradients = []
    for compile_it in (False, True):
        model = make_patched("yarn", num_hidden_layers=1).train()
        run = compile_model(model, backend="aot_eager", dynamic=dynamic) if compile_it else model
        for length in lengths:
            ids = tokens(length)
            run(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_inductor_serves_every_length_with_one_graph():
    model, plain = make_patched("yarn"), make_model()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in LENGTHS:
            ids = tokens(length)
            got = forward(compiled, ids)
            assert_close(got, forward(model, ids))
    assert_differs(got, forward(plain, ids))
