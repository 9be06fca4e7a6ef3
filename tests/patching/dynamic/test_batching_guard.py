"""Test continuous batching of length-dependent methods: refused, but for a fixed length.

tests/integrations has static ones, which batch as they are.
"""

import copy
import threading

import pytest
import torch
import transformers
from helpers.growing_texts import LONGROPE
from helpers.releases import CACHE, batching_sizes
from helpers.tiny_models import (
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    forward,
    make_model,
    tokens,
)
from transformers import GenerationConfig
from transformers.generation.continuous_batching import PagedAttentionCache

import rope_patch

PROMPTS = [tokens(n, seed=n)[0].tolist() for n in (20, 58)]  # the second passes 64 tokens
NEW = 12
ONE_SET = {**LONGROPE, "short_factor": LONG_FACTOR}


@pytest.fixture(scope="module")
def base():
    return make_model(num_hidden_layers=1, tie_word_embeddings=False, initializer_range=0.2)


@pytest.fixture
def model(base):
    """Return a copy, because continuous batching leaves its settings on the model."""
    return copy.deepcopy(base)


def settings():
    """Return arguments for a small paged cache; the default one takes most of the memory."""
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = {"num_blocks": 16, "max_batch_tokens": 128}
    if hasattr(transformers, "ContinuousBatchingConfig"):
        sizes = batching_sizes(32, **sizes)
        return {"generation_config": config, "continuous_batching_config": sizes}
    vars(config).update(sizes)
    return {"generation_config": config}


def batch_tokens(model, **kwargs):
    outputs = model.generate_batch(inputs=PROMPTS, **settings(), **kwargs)
    return [output.generated_tokens for output in outputs.values()]


def greedy_tokens(model):
    """Return each prompt's greedy tokens, computed without a cache."""
    generated = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        for _ in range(NEW):
            ids = torch.cat([ids, forward(model, ids)[:, -1:].argmax(-1)], dim=1)
        generated.append(ids[0, len(prompt) :].tolist())
    return generated


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="transformers 5.0 batches on GPUs alone")
def test_fixed_length_batches_correctly(model):
    plain = greedy_tokens(model)
    rope_patch.patch(model, "dynamic-yarn").fix_length(256)
    expected = greedy_tokens(model)
    assert expected != plain
    assert batch_tokens(model) == expected


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dynamic-linear", {}),
        ("mixed-yarn", {"factor": 4}),
        ("longrope", LONGROPE),
    ],
)
def test_length_dependent_methods_are_refused(model, method, options):
    rope_patch.patch(model, method, **options)
    threads = threading.active_count()
    for start in (
        lambda: batch_tokens(model),
        lambda: model.init_continuous_batching(**settings()),
        lambda: model.continuous_batching_context_manager(**settings()).__enter__(),
    ):
        with pytest.raises(ValueError, match=r"yarn.*fix_length.*model\.generate"):
            start()
    assert threading.active_count() == threads


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="transformers 5.0 has no paged caches in generate")
def test_generate_with_a_paged_cache_is_refused(model):
    rope_patch.patch(model, "dynamic-yarn")
    with pytest.raises(ValueError, match="paged cache"):
        model.generate(torch.tensor(PROMPTS[:1]), cache_implementation="paged", max_new_tokens=2)


def test_undo_allows_batching_again(model):
    rope_patch.patch(model, "dynamic-yarn").undo()
    assert "init_continuous_batching" not in vars(model)
    assert model.init_continuous_batching(**settings()).model is model


def test_copy_has_its_own_guard(model):
    handle = rope_patch.patch(model, "dynamic-yarn")
    twin = copy.deepcopy(model)
    handle.undo()
    with pytest.raises(ValueError, match="paged cache"):
        batch_tokens(twin)
    rope_patch.current(twin).fix_length(256)
    assert twin.init_continuous_batching(**settings()).model is twin


def test_forward_with_a_paged_cache_is_refused(model):
    """Call as a manager does that was made by hand, or before the patch."""
    rope_patch.patch(model, "dynamic-yarn")
    cache = PagedAttentionCache.__new__(PagedAttentionCache)  # refused before it is read
    with pytest.raises(ValueError, match="paged cache"):
        model.model(tokens(4), cache=cache, use_cache=False)


def test_a_cache_that_does_not_count_is_refused(model):
    rope_patch.patch(model, "dynamic-yarn")
    with pytest.raises(ValueError, match="how many tokens it holds"):
        model.model(tokens(4), **{CACHE: object()}, use_cache=False)


@pytest.mark.parametrize(
    ("method", "options"), [("dynamic-yarn", {}), ("longrope", {**ONE_SET, "start_tokens": 4})]
)
def test_packed_rows_need_their_positions(model, method, options):
    """Packed documents need positions: lengths and start tokens depend on where each begins."""
    rope_patch.patch(model, method, **options)
    borders = torch.tensor([0, 50, 100], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q.*position_ids"):
        model.model(tokens(100), cu_seq_lens_q=borders, use_cache=False)
    positions = torch.cat([torch.arange(50), torch.arange(50)])[None]
    kwargs = {"position_ids": positions, "use_cache": False}
    packed = model.model(tokens(100), cu_seq_lens_q=borders, **kwargs).last_hidden_state
    assert packed.equal(model.model(tokens(100), **kwargs).last_hidden_state)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="transformers 5.0 keeps no managers")
def test_persistent_manager_must_be_destroyed_before_a_patch(model):
    """A persistent manager's cache reuses keys of finished requests."""
    batch_tokens(model, persistent_manager=True)
    with pytest.raises(ValueError, match="destroy_cached_continuous_batching_manager"):
        rope_patch.patch(model, "yarn", factor=4)
    assert rope_patch.current(model) is None
    model.destroy_cached_continuous_batching_manager()
    rope_patch.patch(model, "yarn", factor=4)
    assert batch_tokens(model) == greedy_tokens(model)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="transformers 5.0 keeps no managers")
def test_persistent_manager_of_another_rotation_is_refused(model):
    with rope_patch.patch(model, "dynamic-yarn") as handle:
        handle.fix_length(256)
        with rope_patch.patch(model, "linear", factor=4):
            batch_tokens(model, persistent_manager=True)
        with pytest.raises(ValueError, match="keys of another rotation"):
            batch_tokens(model, persistent_manager=True)
        model.destroy_cached_continuous_batching_manager()
        assert batch_tokens(model, persistent_manager=True) == greedy_tokens(model)
        handle.fix_length(1024)
        with pytest.raises(ValueError, match="keys of another rotation"):
            batch_tokens(model, persistent_manager=True)
