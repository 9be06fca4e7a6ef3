"""torch.compile of methods whose frequencies stay: one graph, which serves every length."""

import pytest
import torch
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

LENGTHS = [SHORT, TRAINED - 1, TRAINED, TRAINED + 1, 100, LONG]  # across the trained length
REQUIRED = {
    "longrope": {"long_factor": LONG_FACTOR, "short_factor": LONG_FACTOR},
    "proportional": {"partial_rotary_factor": 0.5},
}


def options(name):
    """Return the options that a method requires; none if it has a factor of its own."""
    factor = {} if name == "nope" else {"factor": 4.0}
    return factor | REQUIRED.get(name, {})


def is_static(name):
    try:
        return not build(name, **options(name)).is_length_dependent(TRAINED)
    except ValueError:  # asks for options that only methods of two sets have
        return False


STATIC = [name for name in rope_patch.list_methods() if name != "default" and is_static(name)]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def patched(method, **sizes):
    """Return a model patched by a static method."""
    model = make_model(**sizes)
    handle = rope_patch.patch(model, method, **options(method))
    assert not handle.method.is_length_dependent(TRAINED)
    return model


def compiled(model, backend="eager", **how):
    return torch.compile(model, fullgraph=True, backend=backend, **how)


def test_the_static_methods_are_all_here():
    known = {"linear", "ntk", "ntk-by-parts", "yarn", "llama3", "abf", "longrope", "proportional"}
    assert known | {"nope", "ntk-by-parts-2023-06"} <= set(STATIC)
    for name in set(rope_patch.list_methods()) - set(STATIC) - {"default"}:
        assert name.startswith(("dynamic", "mixed-")), name


@pytest.mark.parametrize("method", STATIC)
def test_every_static_method_is_one_graph_for_all_lengths(method):
    model = patched(method, num_hidden_layers=1)  # half as long to trace
    together = compiled(model, dynamic=True)
    for length in LENGTHS:
        ids = tokens(length)
        assert_close(forward(together, ids), forward(model, ids))
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("family", "kernels"), [("qwen3", "auto"), ("gemma3", "hf"), ("gemma3", "reference")]
)
def test_other_families_and_whoever_rotates(family, kernels):
    model = make_model(family)
    rope_patch.patch(model, "yarn", factor=4, kernels=kernels)
    together = compiled(model, dynamic=True)
    for length in LENGTHS:
        ids = tokens(length)
        assert_close(forward(together, ids), forward(model, ids))
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("method", ["linear", "yarn", "longrope"])
def test_a_marked_length_compiles_once(method):
    model = patched(method, num_hidden_layers=1)
    together = compiled(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in LENGTHS:
            ids = tokens(length)
            torch._dynamo.mark_dynamic(ids, 1, min=2, max=4 * TRAINED)
            assert_close(forward(together, ids), forward(model, ids))
    assert counters["stats"]["unique_graphs"] == 1


def test_left_to_itself_torch_compiles_again_only_once():
    """The first length, and then all others, as for an unpatched model."""
    graphs = {}
    for name in ("plain", "patched"):
        torch._dynamo.reset()
        counters.clear()
        sizes = {"num_hidden_layers": 1}
        model = make_model(**sizes) if name == "plain" else patched("yarn", **sizes)
        together = compiled(model)
        for length in LENGTHS:
            forward(together, tokens(length))
        graphs[name] = counters["stats"]["unique_graphs"]
    assert graphs == {"plain": 2, "patched": 2}


@pytest.mark.parametrize("method", ["ntk", "yarn"])
def test_decoding_steps_share_a_graph(method):
    model, ids = patched(method, num_hidden_layers=1), tokens(LONG)
    expected = forward(model, ids)
    step = compiled(model)
    cache = StaticCache(config=model.config, max_cache_len=LONG)
    got = []
    with torch.no_grad():
        got.append(model(ids[:, :SHORT], past_key_values=cache).logits)
        for i in range(SHORT, LONG):
            at = torch.tensor([[i]])
            got.append(step(ids[:, i : i + 1], position_ids=at, past_key_values=cache).logits)
    assert_close(torch.cat(got, dim=1), expected)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


def test_gradients_through_a_compiled_model():
    found = []
    for compile_it in (False, True):
        model = patched("yarn", num_hidden_layers=1).train()
        run = compiled(model, backend="aot_eager", dynamic=True) if compile_it else model
        for length in (SHORT, LONG):
            ids = tokens(length)
            run(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_inductor_serves_every_length_with_one_graph():
    model, plain = patched("yarn"), make_model()
    together = torch.compile(model, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in LENGTHS:
            ids = tokens(length)
            got = forward(together, ids)
            assert_close(got, forward(model, ids))
    assert_differs(got, forward(plain, ids))
