"""Test torch.compile of dynamically patched models: one graph for all lengths."""

import pytest
import torch
from helpers.reference_rerotation import Reference
from helpers.tiny_models import LONG, SHORT, assert_close, forward, make_model, padded, tokens
from torch._dynamo.utils import counters
from transformers import DynamicCache, StaticCache

import rope_patch

pytestmark = pytest.mark.usefixtures("reset_compiler")


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_decode_step_is_one_graph_at_any_length(family, kind):
    """Decode across the trained length and several growth steps."""
    model, ids = make_model(family), tokens(LONG)
    reference = Reference(model, "dynamic-yarn")
    rope_patch.patch(model, "dynamic-yarn")
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = kind(config=model.config, **({"max_cache_len": LONG} if kind is StaticCache else {}))
    got = []
    with torch.no_grad():
        got.append(model(ids[:, :SHORT], past_key_values=cache).logits)
        for i in range(SHORT, LONG):
            position_ids = torch.tensor([[i]])
            got.append(
                step(ids[:, i : i + 1], position_ids=position_ids, past_key_values=cache).logits
            )
    assert_close(torch.cat(got, dim=1), reference.decode(ids, SHORT))
    assert not counters["graph_break"]
    # The first step, and recompilations for the sizes that vary.
    assert counters["stats"]["unique_graphs"] <= 3


def test_compiled_forward_of_sequences_and_batches():
    model = make_model()
    rope_patch.patch(model, "dynamic-yarn")
    ids, mask = padded([tokens(30), tokens(LONG)], "left")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(forward(compiled, ids), forward(model, ids))
    assert_close(
        forward(compiled, ids, attention_mask=mask), forward(model, ids, attention_mask=mask)
    )


def test_compiled_prefill_records_the_rotation_in_its_cache():
    model, ids = make_model(), tokens(LONG)
    reference = Reference(model, "dynamic-yarn")
    rope_patch.patch(model, "dynamic-yarn")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        output = compiled(ids[:, :SHORT], use_cache=True)
        for i in range(SHORT, LONG):
            got = model(ids[:, i : i + 1], past_key_values=output.past_key_values).logits
    assert_close(got[:, -1], reference.decode(ids, SHORT)[:, -1])


@pytest.mark.slow
def test_inductor_gives_the_same_logits():
    model, ids = make_model(), tokens(LONG)
    reference = Reference(model, "dynamic-yarn")
    rope_patch.patch(model, "dynamic-yarn")
    step = torch.compile(model, fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=LONG)
    with torch.no_grad():
        model(ids[:, :SHORT], past_key_values=cache)
        for i in range(SHORT, LONG):
            position_ids = torch.tensor([[i]])
            got = step(ids[:, i : i + 1], position_ids=position_ids, past_key_values=cache).logits
    assert_close(got[:, -1], reference.decode(ids, SHORT)[:, -1])
