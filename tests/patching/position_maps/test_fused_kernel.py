"""Test whole models whose mapped attention is one launch against attention in plain torch."""

import pytest
import torch
from helpers.tiny_models import assert_close, make_model, tokens
from transformers import DynamicCache, StaticCache

pytest.importorskip("triton", minversion="3.6")

import rope_patch
from rope_patch.benchmarks import LaunchCounts, dispatched_launches

TRAINED = 24  # tokens, of which each takes time in an interpreter of kernels
LENGTH = TRAINED + 7
MAPS = {
    "self-extend": {"window": 10, "group": 3},
    "jet-long": {"window": 8},  # two groups
    "rerope": {"window": 9},
    "leaky-rerope": {"window": 20, "k": 4.0},  # shifts that are not whole
    "dca": {"chunk": 9, "top": 20},  # three regions
    "dpe": {"groups": [2, 4, 3, 8], "window": 9},  # shifts for each pair
    "streaming": {"window": 9, "sinks": 2},  # keys that are not seen
}


def both(name, run):
    """Return what `run` returns for a patched model in plain torch and in Triton, and launches."""
    results = []
    for kernels in ("hf", "triton"):
        model = make_model(num_hidden_layers=1, max_position_embeddings=TRAINED)
        rope_patch.patch(model, name, kernels=kernels, **MAPS[name])
        counts = LaunchCounts()
        with torch.no_grad(), dispatched_launches(counts):
            results.append((run(model), counts.ours))
    (expected, _), (got, launches) = results
    return expected, got, launches


def decode(ids, cut, mask=None, make_cache=None):
    """Return a function that returns a model's logits of a prompt and of what follows it."""

    def run(model):
        cache = DynamicCache(config=model.config) if make_cache is None else make_cache(model)
        logits = []
        for part in (slice(0, cut), slice(cut, ids.shape[1])):
            inputs = {}
            if mask is not None:
                positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, part]
                inputs = {"attention_mask": mask[:, : part.stop], "position_ids": positions}
            logits.append(model(ids[:, part], past_key_values=cache, **inputs).logits)
        return torch.cat(logits, 1)

    return run


# Each forward rotates in one launch, and attends in another one.
FUSED = 4


@pytest.mark.parametrize("name", MAPS)
def test_prompts_and_steps_take_one_launch(name):
    expected, got, launches = both(name, decode(tokens(LENGTH), LENGTH - 1))
    assert launches == FUSED
    assert_close(got, expected)


def test_prompts_in_parts():
    expected, got, launches = both("self-extend", decode(tokens(LENGTH + 4), TRAINED + 3))
    assert launches == FUSED
    assert_close(got, expected)


@pytest.mark.parametrize(("name", "side"), [("self-extend", "left"), ("dca", "right")])
def test_padded_rows_take_one_launch(name, side):
    ids = tokens(LENGTH, batch=2)
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :4] = 0
    else:
        mask[0, -4:] = 0
    expected, got, launches = both(name, decode(ids, LENGTH - (1 if side == "left" else 5), mask))
    assert launches == FUSED
    assert_close(got[mask.bool()], expected[mask.bool()])


def test_packed_rows_take_one_launch():
    ids = tokens(LENGTH + 9)
    positions = torch.cat([torch.arange(9), torch.arange(LENGTH)])[None]
    run = lambda model: model(ids, position_ids=positions, use_cache=False).logits  # noqa: E731
    expected, got, launches = both("rerope", run)
    assert launches == 2
    assert_close(got, expected)
    alone, _, _ = both("rerope", lambda model: model(ids[:, 9:], use_cache=False).logits)
    assert_close(got[:, 9:], alone)


def test_static_caches_take_one_launch():
    make = lambda model: StaticCache(model.config, max_cache_len=LENGTH + 6)  # noqa: E731
    expected, got, _ = both("rerope", decode(tokens(LENGTH), LENGTH - 1, make_cache=make))
    assert_close(got, expected)


def test_weights_as_a_result_are_left_to_plain_torch():
    """transformers' eager attention returns weights, which the kernel does not store."""

    def run(model):
        model.set_attn_implementation("eager")
        return model(tokens(LENGTH), use_cache=False, output_attentions=True).attentions[0]

    expected, got, launches = both("self-extend", run)
    assert launches > 2
    assert_close(got, expected)


def test_masks_of_another_form_are_left_to_plain_torch():
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[..., LENGTH - 2, 5] = False

    def run(model):
        return model(tokens(LENGTH), attention_mask=mask, use_cache=False).logits

    expected, got, launches = both("self-extend", run)
    assert launches > 2
    assert_close(got, expected)
    plain, _, _ = both("self-extend", lambda model: model(tokens(LENGTH), use_cache=False).logits)
    assert (plain - expected).abs().max() > 1e-3


def test_gradients_take_two_launches_backwards():
    ids, gradients, launches = tokens(LENGTH, batch=2), [], []
    for kernels in ("hf", "triton"):
        model = make_model(num_hidden_layers=1, max_position_embeddings=TRAINED)
        rope_patch.patch(model, "self-extend", kernels=kernels, **MAPS["self-extend"])
        counts = LaunchCounts()
        with dispatched_launches(counts):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            gradients.append(torch.autograd.grad(loss, [*model.parameters()], allow_unused=True))
        launches.append(counts.ours)
    assert launches == [0, 5]  # of them one each way rotates
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)
