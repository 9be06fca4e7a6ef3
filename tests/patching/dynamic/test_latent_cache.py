"""Test dynamic methods on latent attention: only the cached rotary slice is re-rotated."""

import pytest
import torch
from architectures.tiny_architectures import tiny_model
from helpers.latent_reference import LatentReference
from helpers.tiny_models import (
    BEFORE_5_17,
    BEFORE_5_23,
    LONG,
    SHORT,
    assert_close,
    forward,
    step_by_step,
    tokens,
)
from transformers import CONFIG_MAPPING, DynamicCache, StaticCache

import rope_patch

if BEFORE_5_17:
    pytest.skip("transformers caches expanded keys", allow_module_level=True)

DENSE = [
    "axk1",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "longcat_flash",
    "minicpm3",
    "youtu",
]
SPARSE = ["axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"]


def model_of(model_type):
    if model_type not in CONFIG_MAPPING or (model_type in SPARSE and BEFORE_5_23):
        pytest.skip("this release has no such model, or caches its keys expanded")
    # Few heads of an indexer often score 0, and the cache's size decides how ties are broken.
    changes = {"index_n_heads": 32} if model_type in SPARSE else {}
    return tiny_model(model_type, **changes)


def reference_logits(model, ids, prompt, monkeypatch):
    with monkeypatch.context() as patching:
        reference = LatentReference(model, patching)
        cuts = [prompt] + [1] * (ids.shape[1] - prompt)
        return torch.cat([reference.step(part) for part in ids.split(cuts, 1)], 1)


@pytest.mark.parametrize("model_type", DENSE + SPARSE)
def test_decoding_equals_unrotated_keys(model_type, monkeypatch):
    model = model_of(model_type)
    ids = tokens(LONG)
    plain = forward(model, ids)
    expected = reference_logits(model, ids, SHORT, monkeypatch)
    handle = rope_patch.patch(model, "dynamic-yarn")
    with torch.no_grad():
        decoded = step_by_step(model, ids, SHORT)
    torch.testing.assert_close(decoded, expected, rtol=0, atol=2e-4)
    assert (decoded[:, -1] - plain[:, -1]).abs().max() > 1e-3
    handle.undo()
    assert torch.equal(forward(model, ids), plain)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "axk2"])
def test_rows_have_factors_of_their_own(model_type):
    model = model_of(model_type)
    rope_patch.patch(model, "dynamic-yarn")
    rows = [tokens(LONG), tokens(SHORT, seed=2)]
    alone = [step_by_step(model, row, row.shape[1] - 3)[:, -1] for row in rows]
    length = LONG
    ids = torch.cat([rows[0], torch.cat([rows[1][:, :1].expand(1, length - SHORT), rows[1]], 1)])
    mask = torch.ones_like(ids)
    mask[1, : length - SHORT] = 0
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for start, end in [(0, length - 3), *((i, i + 1) for i in range(length - 3, length))]:
            together = model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                past_key_values=cache,
            ).logits[:, -1]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=2e-4)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", *SPARSE])
def test_a_static_cache_gives_the_same(model_type):
    model = model_of(model_type)
    rope_patch.patch(model, "dynamic-yarn")
    ids = tokens(LONG)
    static = StaticCache(config=model.config, max_cache_len=LONG + 7)
    with torch.no_grad():
        expected = step_by_step(model, ids, SHORT)
        got = step_by_step(model, ids, SHORT, static)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)


def test_short_texts_keep_their_logits():
    model = tiny_model("deepseek_v3")
    ids = tokens(SHORT)
    with torch.no_grad():
        expected = step_by_step(model, ids, SHORT - 5)
        rope_patch.patch(model, "dynamic-yarn")
        assert torch.equal(step_by_step(model, ids, SHORT - 5), expected)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("mixed-yarn", {"factor": 4}),
        ("dynamic-yarn", {"mscale": 0.707, "mscale_all_dim": 1.0}),
    ],
)
def test_long_texts_are_those_of_the_static_method(method, options):
    model = tiny_model("deepseek_v3")
    ids = tokens(LONG)
    handle = rope_patch.patch(model, method, **options)
    if method.startswith("dynamic"):
        handle.fix_length(LONG)
        options = {**options, "factor": 2 ** (5 / 4)}  # the step above 150 / 64
    with torch.no_grad():
        last = step_by_step(model, ids, LONG - 1)[:, -1]
    rope_patch.patch(model, "yarn", **options)
    torch.testing.assert_close(last, forward(model, ids)[:, -1], rtol=0, atol=2e-4)


def test_gradient_checkpointing_is_refused_unless_the_length_is_known():
    model = tiny_model("deepseek_v3").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    handle = rope_patch.patch(model, "dynamic-yarn")
    ids = tokens(LONG)
    with pytest.raises(ValueError, match=r"outside its decoder's forward.*fix_length"):
        model(ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()
    handle.fix_length(LONG)
    model(ids, labels=ids, use_cache=False).loss.backward()
    name, weight = next((n, p) for n, p in model.named_parameters() if "q_b_proj" in n)
    checkpointed = weight.grad.clone()
    model.gradient_checkpointing_disable()
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    torch.testing.assert_close(checkpointed, weight.grad, msg=name)


def test_gradients_reach_rerotated_slices():
    model = tiny_model("deepseek_v3")
    rope_patch.patch(model, "dynamic-yarn")
    ids = tokens(80)
    cache = DynamicCache(config=model.config)
    model(ids[:, :SHORT], past_key_values=cache)
    model(ids[:, SHORT:], past_key_values=cache).logits[:, -1].sum().backward()
    assert model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight.grad.abs().sum() > 0


def test_a_replaced_query_projection_is_refused():
    model = tiny_model("deepseek_v3")
    handle = rope_patch.patch(model, "dynamic-yarn")
    attention = model.model.layers[0].self_attn
    original = attention.q_b_proj
    attention.q_b_proj = torch.nn.Sequential(original)
    with pytest.raises(ValueError, match=r"query projection.*replaced after the patch"):
        forward(model, tokens(LONG))
    attention.q_b_proj = original
    handle.undo()
    forward(model, tokens(LONG))


def test_copies_follow_their_own_length():
    import copy

    model = tiny_model("deepseek_v3")
    rope_patch.patch(model, "dynamic-yarn")
    ids = tokens(LONG)
    copied = copy.deepcopy(model)
    expected = forward(model, ids)
    rope_patch.unpatch(model)
    assert_close(forward(copied, ids), expected)
