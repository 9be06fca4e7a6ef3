"""torch.compile of decoding steps: one graph, whatever length the sequence has."""

import pytest
import torch
from helpers.reference_rerotation import Reference
from helpers.tiny_models import LONG, SHORT, assert_close, forward, make_model, padded, tokens
from torch._dynamo.utils import counters
from transformers import DynamicCache, StaticCache

import rope_patch


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_decoding_step_is_one_graph_at_any_length(family, kind):
    """Across the trained length and several steps of growth."""
    model, ids = make_model(family), tokens(LONG)
    reference = Reference(model, "dynamic-yarn")
    rope_patch.patch(model, "dynamic-yarn")
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = kind(config=model.config, **({"max_cache_len": LONG} if kind is StaticCache else {}))
    got = []
    with torch.no_grad():
        got.append(model(ids[:, :SHORT], past_key_values=cache).logits)
        for i in range(SHORT, LONG):
            at = torch.tensor([[i]])
            got.append(step(ids[:, i : i + 1], position_ids=at, past_key_values=cache).logits)
    assert_close(torch.cat(got, dim=1), reference.decode(ids, SHORT))
    assert not counters["graph_break"]
    # The first step, and once more for what turned out to vary.
    assert counters["stats"]["unique_graphs"] <= 3


def test_whole_sequences_and_batches():
    model = make_model()
    rope_patch.patch(model, "dynamic-yarn")
    ids, mask = padded([tokens(30), tokens(LONG)], "left")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(forward(compiled, ids), forward(model, ids))
    assert_close(
        forward(compiled, ids, attention_mask=mask), forward(model, ids, attention_mask=mask)
    )


def test_a_compiled_prompt_makes_a_cache_that_remembers():
    model, ids = make_model(), tokens(LONG)
    reference = Reference(model, "dynamic-yarn")
    rope_patch.patch(model, "dynamic-yarn")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        said = compiled(ids[:, :SHORT], use_cache=True)
        for i in range(SHORT, LONG):
            got = model(ids[:, i : i + 1], past_key_values=said.past_key_values).logits
    assert_close(got[:, -1], reference.decode(ids, SHORT)[:, -1])


@pytest.mark.slow
def test_inductor_writes_the_same():
    model, ids = make_model(), tokens(LONG)
    reference = Reference(model, "dynamic-yarn")
    rope_patch.patch(model, "dynamic-yarn")
    step = torch.compile(model, fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=LONG)
    with torch.no_grad():
        model(ids[:, :SHORT], past_key_values=cache)
        for i in range(SHORT, LONG):
            at = torch.tensor([[i]])
            got = step(ids[:, i : i + 1], position_ids=at, past_key_values=cache).logits
    assert_close(got[:, -1], reference.decode(ids, SHORT)[:, -1])
