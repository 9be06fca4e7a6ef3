"""Test torch.compile of patched models: one graph, and which code it contains."""

import pytest
import torch
from helpers.tiny_models import (
    SIZES,
    assert_close,
    make_model,
)
from kernel_models import (
    OURS,
    logits,
    patch,
    saved_bytes,
)

pytest.importorskip("triton")


@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2"])
@pytest.mark.parametrize("kernels", ["auto", *OURS])
def test_compiled_models_are_one_graph(kernels, family):
    model = make_model(family)
    patch(model, kernels)
    expected = logits(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(logits(compiled), expected)
    torch._dynamo.reset()


def test_compiled_graphs_use_our_operator_only_on_request():
    for kernels, calls in (("auto", 0), ("triton", SIZES["num_hidden_layers"])):
        torch._dynamo.reset()
        model, graphs = make_model("qwen3"), []

        def backend(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        patch(model, kernels)
        logits(torch.compile(model, fullgraph=True, backend=backend))
        targets = [str(n.target) for graph in graphs for n in graph.graph.nodes]
        assert sum("rope_patch.qk_norm_rope" in name for name in targets) == calls
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_inductor_saves_as_little_for_transformers_code_as_for_our_operator(family):
    """Check why compiled graphs keep transformers' code: beside attention it saves only x."""
    saved = {}
    for kernels in ("hf", "triton"):
        torch._dynamo.reset()
        model = make_model(family)
        patch(model, kernels)
        attention = model.model.layers[0].self_attn
        kind = "full_attention" if family == "gemma3" else None
        x = torch.randn(1, 32, SIZES["hidden_size"])
        positions = torch.arange(32)[None]
        arguments = (x, positions) if kind is None else (x, positions, kind)
        compiled = torch.compile(attention, fullgraph=True)
        with torch.no_grad():
            pair = model.model.rotary_emb(*arguments)
        saved[kernels] = saved_bytes(lambda c=compiled, x=x, p=pair: c(x, p, None)[0])
    torch._dynamo.reset()
    tables = 2 * 32 * SIZES["head_dim"] * 4  # cos and sin, which all layers share
    assert saved["hf"] <= saved["triton"] + tables
