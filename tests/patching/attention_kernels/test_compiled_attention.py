"""Compiled graphs of patched models."""

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
    saved_by,
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


def test_compiled_graphs_keep_transformers_code_unless_kernels_are_demanded():
    for kernels, calls in (("auto", 0), ("triton", SIZES["num_hidden_layers"])):
        torch._dynamo.reset()
        model, graphs = make_model("qwen3"), []

        def backend(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        patch(model, kernels)
        logits(torch.compile(model, fullgraph=True, backend=backend))
        called = [str(n.target) for graph in graphs for n in graph.graph.nodes]
        assert sum("rope_patch.qk_norm_rope" in name for name in called) == calls
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_inductor_keeps_as_little_of_transformers_code_as_our_operator(family):
    """Why compiled graphs keep that code: what is kept beyond attention's own is x, once."""
    kept = {}
    for kernels in ("hf", "triton"):
        torch._dynamo.reset()
        model = make_model(family)
        patch(model, kernels)
        attention = model.model.layers[0].self_attn
        kind = "full_attention" if family == "gemma3" else None
        x = torch.randn(1, 32, SIZES["hidden_size"])
        positions = torch.arange(32)[None]
        given = (x, positions) if kind is None else (x, positions, kind)
        compiled = torch.compile(attention, fullgraph=True)
        with torch.no_grad():
            pair = model.model.rotary_emb(*given)
        kept[kernels] = saved_by(lambda c=compiled, x=x, p=pair: c(x, p, None)[0])
    torch._dynamo.reset()
    tables = 2 * 32 * SIZES["head_dim"] * 4  # cos and sin, which all layers share
    assert kept["hf"] <= kept["triton"] + tables
