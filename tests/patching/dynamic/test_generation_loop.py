"""Test decode steps at any position against forwards without a cache at the same positions."""

import pytest
import torch
from helpers.tiny_models import (
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT_FACTOR,
    assert_close,
    forward,
    make_model,
    padded,
    tokens,
)
from transformers import DynamicCache, StaticCache

import rope_patch
from rope_patch.patching.dynamic import hooks

PAST = 50
METHODS = {
    "dynamic-linear": {},
    "dynamic-yarn": {"growth": "exact"},
    "mixed-yarn": {"factor": 4},
    "longrope": {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR},
}


@pytest.fixture(scope="module")
def model():
    """Return a model of one layer, in which no keys depend on frequencies."""
    return make_model(num_hidden_layers=1)


def assert_decodes(model, positions, cache=None, call=None, pass_positions=True):
    """Check decoding: PAST tokens at once, then one by one, at positions `[B, S]`."""
    batch, length = positions.shape
    call = model if call is None else call
    ids, cache = tokens(length, batch), cache or DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :PAST], position_ids=positions[:, :PAST], past_key_values=cache)
        for i in range(PAST, length):
            step_positions = {"position_ids": positions[:, i : i + 1]} if pass_positions else {}
            got = call(ids[:, i : i + 1], past_key_values=cache, **step_positions).logits
            positions_so_far = positions[:, : i + 1]
            mask = torch.ones(batch, 1, i + 1, i + 1, dtype=torch.bool).tril()  # none is packed
            whole = forward(
                model, ids[:, : i + 1], position_ids=positions_so_far, attention_mask=mask
            )
            assert_close(got[:, -1], whole[:, -1])


def positions(*last, start=0):
    """Return PAST consecutive positions, followed by `last`, `[1, S]`."""
    return torch.cat([torch.arange(start, start + PAST), torch.tensor(last)])[None]


@pytest.mark.parametrize("method", METHODS)
def test_decode_step_that_jumps_ahead(model, method):
    with rope_patch.patch(model, method, **METHODS[method]):
        assert_decodes(model, positions(50, 200, 201, 300))


@pytest.mark.parametrize("method", METHODS)
def test_decode_step_that_jumps_back(model, method):
    """Jump back, also to before the first token: the length counts from the smallest position."""
    with rope_patch.patch(model, method, **METHODS[method]):
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


def test_compiled_step_with_jumping_positions(model):
    torch._dynamo.reset()
    with rope_patch.patch(model, "dynamic-yarn"):
        step = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_decodes(model, positions(50, 200, 30, 201), call=step)
    torch._dynamo.reset()


def test_padded_rows_with_a_jump(model):
    """Jump ahead in a left-padded row; the mask hides the padding only."""
    rows = [tokens(30), tokens(PAST, seed=2)]
    ids, mask = padded(rows, "left")
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    new, jump = tokens(1, batch=2, seed=3), torch.tensor([[150], [50]])
    with rope_patch.patch(model, "dynamic-yarn"), torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache)
        mask = torch.cat([mask, torch.ones_like(new)], 1)
        got = model(new, attention_mask=mask, position_ids=jump, past_key_values=cache).logits
        for i, row in enumerate(rows):
            ids = torch.cat([row, new[i : i + 1]], 1)
            row_positions = torch.cat([torch.arange(row.shape[1]), jump[i]])[None]
            full_mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            single = forward(model, ids, position_ids=row_positions, attention_mask=full_mask)
            assert_close(got[i, -1], single[0, -1])


# -- reads of position tensors, each of which a GPU waits for --------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """Record the shapes of position tensors that are read."""
    shapes = []
    tolist, spans = torch.Tensor.tolist, hooks.first_and_last_positions

    def recording_tolist(self):
        if self.dtype == torch.int64 and self.numel() and not torch.compiler.is_compiling():
            shapes.append(tuple(self.shape))
        return tolist(self)

    def recording_spans(positions, *args):
        shapes.append(tuple(positions.shape))
        return spans(positions, *args)

    monkeypatch.setattr(torch.Tensor, "tolist", recording_tolist)
    monkeypatch.setattr(hooks, "first_and_last_positions", recording_spans)
    return shapes


LOOPS = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 2},
    "static": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("way", LOOPS)
def test_generate_reads_only_the_first_position(model, reads, way):
    """Count reads beyond those of the prompt and of growth steps."""
    ids, mask = padded([tokens(20), tokens(30, seed=2)], "left")
    steps, settings = [], {"do_sample": False, "pad_token_id": 0, "eos_token_id": 127} | LOOPS[way]
    with rope_patch.patch(model, "mixed-yarn", factor=4):
        hook = model.model.register_forward_hook(lambda *_: steps.append(len(reads)))
        model.generate(ids, attention_mask=mask, max_new_tokens=30, min_new_tokens=30, **settings)
        hook.remove()
    assert len(steps) == 30
    assert steps[-1] == steps[1] <= 3  # the prompt and the first new token of each row


def test_generate_reads_once_at_a_growth_step(model, reads):
    steps = []
    with rope_patch.patch(model, "mixed-yarn", factor=4):
        hook = model.model.register_forward_hook(lambda *_: steps.append(len(reads)))
        model.generate(tokens(40), max_new_tokens=60, eos_token_id=None, do_sample=False)
        hook.remove()
    change = 64 - 40 + 1  # the step of the first token beyond the trained length
    assert steps[change - 1] == steps[1] < steps[change] == steps[-1]


def test_positions_from_a_custom_loop_are_read(model, reads):
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
            whole = torch.ones(1, 1, i, i, dtype=torch.bool).tril()
            expected = forward(model, ids[:, :i], position_ids=position_ids, attention_mask=whole)
            assert_close(output.logits[:, -1], expected[:, -1])
            kwargs = model._update_model_kwargs_for_generation(output, kwargs)
            if i == PAST + 3:
                kwargs["position_ids"][:, -1] = 200  # in place
            if i == PAST + 5:
                kwargs["position_ids"] = torch.cat([position_ids, torch.tensor([[300]])], 1)
            position_ids = kwargs["position_ids"].clone()
