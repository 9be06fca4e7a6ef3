"""Test the table of docs/kernels.md: what torch.compile makes one graph of, and what breaks."""

import re
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import TRAINED, make_model, tokens
from torch._dynamo.utils import counters
from transformers import DynamicCache, StaticCache

import rope_patch

PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
ROWS = re.findall(r"^\| `([\w-]+)`[^|]*\| (one graph|breaks) \| (one graph|breaks) \|", PAGE, re.M)
ONE_GRAPH = "one graph"
FAST = [("dynamic-yarn", "static"), ("rerope", "forward")]  # others are slow

pytestmark = [
    pytest.mark.usefixtures("reset_compiler"),
    pytest.mark.skipif(
        not hasattr(torch._C.Tag, "cudagraph_unsafe"), reason="maps break graphs of this torch"
    ),
]


def cases():
    for method, forward, step in ROWS:
        for kind, expected in (("forward", forward), ("static", step), ("dynamic", step)):
            marks = () if (method, kind) in FAST else pytest.mark.slow
            yield pytest.param(method, kind, expected, marks=marks, id=f"{method}-{kind}")


def test_the_table_has_each_kind_of_method():
    assert {"yarn", "dynamic-yarn", "mixed-yarn", "nope", "rerope", "self-extend"} == {
        method for method, _, _ in ROWS
    }


@pytest.mark.parametrize(("method", "kind", "expected"), cases())
@torch.no_grad()
def test_graphs_are_as_documented(method, kind, expected):
    model = make_model(num_hidden_layers=1)
    rope_patch.patch(model, method, **({"factor": 4} if method in ("yarn", "mixed-yarn") else {}))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, dynamic=False)
    ids = tokens(TRAINED + 3)
    if kind == "forward":
        got = compiled(ids, use_cache=False).logits
    else:
        caches = {"static": StaticCache(model.config, max_cache_len=128), "dynamic": DynamicCache()}
        cache = caches[kind]
        model(ids[:, :-1], past_key_values=cache)
        got = compiled(ids[:, -1:], past_key_values=cache).logits
    if expected == ONE_GRAPH:
        assert (len(graphs), sum(counters["graph_break"].values())) == (1, 0)
    else:
        assert len(graphs) > 1
        assert counters["graph_break"]
    expected_logits = model(ids, use_cache=False).logits[:, -got.shape[1] :]
    torch.testing.assert_close(got, expected_logits, rtol=0, atol=1e-4)
