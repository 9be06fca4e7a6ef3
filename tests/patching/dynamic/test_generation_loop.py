"""Test decode steps at any position against forwards without a cache, and as compiled graphs."""

import pytest
import torch
from helpers.growing_texts import END, LONGROPE, PROMPT, position_reads, positions_of, read_in_parts
from helpers.reference_rerotation import Reference
from helpers.tiny_models import (
    LONG,
    OLD_TRANSFORMERS,
    assert_close,
    forward,
    make_model,
    padded,
    tokens,
)
from torch._dynamo.utils import counters
from transformers import DynamicCache, StaticCache

import rope_patch

PAST = 50
PREFILL = 70
METHODS = {
    "dynamic-linear": {},
    "dynamic-yarn": {"growth": "exact"},
    "mixed-yarn": {"factor": 4},
    "longrope": LONGROPE,
}


@pytest.fixture(scope="module")
def model():
    """Return a model of one layer, in which no keys depend on frequencies."""
    return make_model(num_hidden_layers=1)


def seeing_all(rows, length):
    """Return a causal mask that takes no jump of positions for another document."""
    return torch.ones(rows, 1, length, length, dtype=torch.bool).tril()


@torch.no_grad()
def assert_decodes(model, positions, cache=None, call=None, pass_positions=True):
    """Check decoding: PAST tokens at once, then one by one, at positions `[B, S]`."""
    batch, length = positions.shape
    call = model if call is None else call
    ids, cache = tokens(length, batch), cache or DynamicCache(config=model.config)
    model(ids[:, :PAST], position_ids=positions[:, :PAST], past_key_values=cache)
    for i in range(PAST, length):
        step_positions = {"position_ids": positions[:, i : i + 1]} if pass_positions else {}
        got = call(ids[:, i : i + 1], past_key_values=cache, **step_positions).logits
        given = {"position_ids": positions[:, : i + 1], "attention_mask": seeing_all(batch, i + 1)}
        assert_close(got[:, -1], forward(model, ids[:, : i + 1], **given)[:, -1])


def positions(*last, start=0):
    """Return PAST consecutive positions, followed by `last`, `[1, S]`."""
    return torch.cat([torch.arange(start, start + PAST), torch.tensor(last)])[None]


@pytest.mark.parametrize("method", METHODS)
def test_decode_step_that_jumps(model, method):
    """Jump ahead and back, also to before the first token: the length counts from the smallest."""
    with rope_patch.patch(model, method, **METHODS[method]):
        assert_decodes(model, positions(50, 200, 201, 300))
        assert_decodes(model, positions(560, 530, 500, 420, 421, start=500))


def test_rows_jump_independently(model):
    rows = [positions(50, 51, 52), positions(200, 30, 201), positions(50, 80, 81)]
    with rope_patch.patch(model, "dynamic-yarn"):
        assert_decodes(model, torch.cat(rows))


def test_missing_position_ids_default_to_slots(model):
    """Decode without position_ids after a prompt at other positions."""
    with rope_patch.patch(model, "dynamic-yarn"):
        assert_decodes(model, positions(50, 51, start=500), pass_positions=False)


def test_static_cache_with_jumping_positions(model):
    cache = StaticCache(config=model.config, max_cache_len=PAST + 4)
    with rope_patch.patch(model, "dynamic-yarn"):
        assert_decodes(model, positions(50, 200, 30, 201), cache)


@pytest.mark.usefixtures("reset_compiler")
def test_compiled_step_with_jumping_positions(model):
    with rope_patch.patch(model, "dynamic-yarn"):
        assert_decodes(model, positions(50, 200, 30, 201), call=compiled(model, backend="eager"))
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 2  # the first step, and all longer caches


def test_padded_rows_with_a_jump(model):
    """Jump ahead in a left-padded row; the mask hides the padding only."""
    rows = [tokens(30), tokens(PAST, seed=2)]
    ids, mask = padded(rows, "left")
    new, jump = tokens(1, batch=2, seed=3), torch.tensor([[150], [50]])
    with rope_patch.patch(model, "dynamic-yarn"), torch.no_grad():
        cache = DynamicCache(config=model.config)
        given = {"attention_mask": mask, "position_ids": positions_of(mask)}
        model(ids, **given, past_key_values=cache)
        mask = torch.cat([mask, torch.ones_like(new)], 1)
        got = model(new, attention_mask=mask, position_ids=jump, past_key_values=cache).logits
        for i, row in enumerate(rows):
            ids = torch.cat([row, new[i : i + 1]], 1)
            row_positions = torch.cat([torch.arange(row.shape[1]), jump[i]])[None]
            given = {"position_ids": row_positions, "attention_mask": seeing_all(1, ids.shape[1])}
            assert_close(got[i, -1], forward(model, ids, **given)[0, -1])


# -- reads of position tensors, each of which a GPU waits for --------------------------------------


def reads_so_far(model, ids, **options):
    """Generate, and return how many positions had been read at the end of each step."""
    counts, settings = [], {"do_sample": False, "pad_token_id": 0}
    with position_reads() as reads, rope_patch.patch(model, "mixed-yarn", factor=4):
        hook = model.model.register_forward_hook(lambda *_: counts.append(len(reads)))
        model.generate(ids, **{**settings, **options})
        hook.remove()
    return counts


@pytest.mark.parametrize(
    "way",
    [{}, {"do_sample": True}, {"num_beams": 2}, {"cache_implementation": "static"}],
    ids=["greedy", "sampled", "beams", "static"],
)
def test_generate_reads_only_the_first_position(model, way):
    """Count reads beyond those of the prompt and of growth steps."""
    ids, mask = padded([tokens(20), tokens(30, seed=2)], "left")
    lengths = {"max_new_tokens": 20, "min_new_tokens": 20, "eos_token_id": 127}
    reads = reads_so_far(model, ids, attention_mask=mask, **lengths, **way)
    assert len(reads) == 20
    assert reads[-1] == reads[1] <= 3  # the prompt and the first new token of each row


def test_generate_reads_once_at_a_growth_step(model):
    reads = reads_so_far(model, tokens(40), max_new_tokens=40, eos_token_id=None)
    change = 64 - 40 + 1  # the step of the first token beyond the trained length
    assert reads[change - 1] == reads[1] < reads[change] == reads[-1]


def test_positions_from_a_custom_loop_are_read(model):
    """Call generate's own steps in a loop, with other positions."""
    if OLD_TRANSFORMERS:
        pytest.skip("transformers 5.0 prepares inputs from other arguments")
    ids, cache = tokens(PAST + 8), DynamicCache(config=model.config)
    kwargs = {"past_key_values": cache, "position_ids": torch.arange(PAST)[None]}
    position_ids = kwargs["position_ids"]
    with rope_patch.patch(model, "dynamic-linear"), torch.no_grad():
        for i in range(PAST, PAST + 8):
            steps = PAST if i == PAST else 1
            inputs = model.prepare_inputs_for_generation(
                ids[:, :i], next_sequence_length=steps, use_cache=True, **kwargs
            )
            output = model(**inputs)
            given = {"position_ids": position_ids, "attention_mask": seeing_all(1, i)}
            assert_close(output.logits[:, -1], forward(model, ids[:, :i], **given)[:, -1])
            kwargs = model._update_model_kwargs_for_generation(output, kwargs)
            if i == PAST + 3:
                kwargs["position_ids"][:, -1] = 200  # in place
            if i == PAST + 5:
                kwargs["position_ids"] = torch.cat([position_ids, torch.tensor([[300]])], 1)
            position_ids = kwargs["position_ids"].clone()


# -- torch.compile: one graph for all lengths ------------------------------------------------------


def compiled(model, **options):
    return torch.compile(model, fullgraph=True, **{"backend": "aot_eager", **options})


@pytest.mark.usefixtures("reset_compiler")
@pytest.mark.parametrize(
    ("family", "kind", "backend"),
    [
        pytest.param("llama", DynamicCache, "eager", marks=pytest.mark.slow),
        ("llama", StaticCache, "aot_eager"),
        pytest.param("llama", StaticCache, "inductor", marks=pytest.mark.slow),
        ("gemma3", StaticCache, "eager"),
    ],
)
def test_decode_step_is_one_graph_at_any_length(family, kind, backend):
    sizes = {"num_hidden_layers": 1} if family == "llama" else {}  # faster to trace
    model, ids = make_model(family, **sizes), tokens(END)
    reference = Reference(model, "dynamic-yarn")
    rope_patch.patch(model, "dynamic-yarn")
    size = {"max_cache_len": END} if kind is StaticCache else {}
    cache, steps_at = kind(config=model.config, **size), torch.arange(END)[None]
    prompt = read_in_parts(model, ids[:, :PROMPT], [PROMPT], cache)
    steps = read_in_parts(compiled(model, backend=backend), ids, [], cache, positions=steps_at)
    assert_close(torch.cat([prompt, steps], dim=1), reference.decode(ids, PROMPT))
    assert not counters["graph_break"]
    # The first step, and recompilations for the sizes that vary.
    assert counters["stats"]["unique_graphs"] <= 3


@pytest.mark.usefixtures("reset_compiler")
def test_compiled_forward_of_rows_of_several_lengths():
    model = make_model(num_hidden_layers=1)
    rope_patch.patch(model, "dynamic-yarn")
    ids, mask = padded([tokens(30), tokens(LONG)], "left")
    whole = compiled(model, backend="eager")
    assert_close(forward(whole, ids, attention_mask=mask), forward(model, ids, attention_mask=mask))


@pytest.mark.usefixtures("reset_compiler")
def test_compiled_prefill_records_the_rotation_in_its_cache():
    """The prompt is beyond the trained length, and a growth step follows."""
    model, ids = make_model(num_hidden_layers=1), tokens(END)
    reference = Reference(model, "dynamic-yarn")
    rope_patch.patch(model, "dynamic-yarn")
    with torch.no_grad():
        output = compiled(model, backend="eager")(ids[:, :PREFILL], use_cache=True)
    assert_close(output.logits, forward(model, ids[:, :PREFILL]))
    got = read_in_parts(model, ids, [], output.past_key_values)
    assert_close(got[:, -1], reference.decode(ids, PREFILL)[:, -1])
