"""Test dynamic methods in other architectures: keys are re-rotated, or the patch is refused.

tests/architectures checks the cache of every architecture over two steps; here are logits over
long texts of those that cache other things than one rotated key a token.
"""

import copy

import pytest
import torch
import transformers
from architectures.cached_rotation import assert_followed
from architectures.tiny_architectures import tiny_model
from helpers.growing_texts import END, PROMPT, read_in_parts
from helpers.latent_reference import LatentReference
from helpers.releases import plain_transformers, require_model
from helpers.tiny_models import (
    BEFORE_5_17,
    BEFORE_5_23,
    OLD_TRANSFORMERS,
    SHORT,
    SIZES,
    TRAINED,
    assert_close,
    forward,
    make_other,
    padded,
    step_by_step,
    tokens,
)
from transformers import CONFIG_MAPPING, DynamicCache, StaticCache
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

import rope_patch

IDS = tokens(END)


def close(got, expected, atol=2e-4):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def test_several_thetas_in_one_layer_type_are_refused():
    require_model("granite_swa")
    model = tiny_model("granite_swa", layer_rope_theta=[1e4, 5e5])
    for method in ("linear", "dynamic-linear"):
        with pytest.raises(ValueError, match=r"10000 and 500000 .*layer_rope_theta"):
            rope_patch.patch(model, method, factor=None if method.startswith("dynamic") else 2)


def test_thetas_of_layers_change_with_the_config(tmp_path):
    require_model("granite_swa")
    model = tiny_model("granite_swa", layer_rope_theta=[0, 1e4])
    rope_patch.patch(model, "abf", factor=2)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(forward(loaded, IDS), forward(model, IDS))


# One scaled attention each, so that only its keys depend on the length of the text.
ONE_ATTENTION = {
    "afmoe": {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
    "beam": {"layer_types": ["full_attention", "sliding_attention"]},
    "cohere": {"num_hidden_layers": 1},  # pairs are neighbours
    "falcon": {"num_hidden_layers": 1},
    "falcon_h1": {"num_hidden_layers": 1},
    "gemma3n_text": {},
    "gemma4_text": {},
    "gpt_neox": {"num_hidden_layers": 1},  # a part of the head
    "gpt_oss": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "granite_swa": {"layer_rope_theta": [0, 1e4]},  # a rotary module that is not used, and one
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "moshi": {"num_hidden_layers": 1, "sliding_window": 512},  # a rotary module for each layer
    "olmo_hybrid": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "zaya": {"num_hidden_layers": 1, "layer_types": ["hybrid"]},
}
OWN_CACHE = ("falcon_h1", "gemma3n_text", "granitemoehybrid")


@pytest.mark.parametrize("model_type", ONE_ATTENTION)
def test_cached_keys_are_rerotated(model_type):
    require_model(model_type)
    if OLD_TRANSFORMERS and model_type in OWN_CACHE:
        pytest.skip("has a cache class of its own, or asks for a cache to rotate")
    model = tiny_model(model_type, **ONE_ATTENTION[model_type])
    with plain_transformers():  # some have caches of their own in old releases
        step_by_step(model, tokens(4), 3)
    types = set(getattr(model.config, "layer_types", None) or ())
    rotations = rope_patch.rope_config.by_layer_type(model.config.rope_parameters)
    kinds = sorted(types) if types == {"sliding_attention"} and len(rotations) > 1 else None
    plain = forward(model, IDS)[:, -1]
    handle = rope_patch.patch(model, "dynamic-linear", layer_types=kinds)
    assert handle.method.is_length_dependent(TRAINED)
    with torch.no_grad():
        decoded = step_by_step(model, IDS, PROMPT)[:, -1]
    close(decoded, forward(model, IDS)[:, -1])
    assert (decoded - plain).abs().max() > 1e-3


def test_keys_of_layers_that_run_several_times_are_rerotated():
    """Dory's loops cache the keys of each time in another layer of the cache."""
    require_model("dory")
    assert_followed(tiny_model("dory"), lambda handle, kind, inv_freq: inv_freq)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("nanochat", {}),
        ("llama4_text", {"no_rope_layers": [1], "use_qk_norm": True}),
        ("llama4_text", {"no_rope_layers": [1], "use_qk_norm": False}),
    ],
)
def test_norms_after_the_rotation_remove_the_attention_factor(model_type, changes):
    types = {"layer_types": ["full_attention"]} if model_type == "llama4_text" else {}
    model = tiny_model(model_type, num_hidden_layers=1, **types, **changes)
    rope_patch.patch(model, "dynamic-yarn")
    close(step_by_step(model, IDS, PROMPT)[:, -1], forward(model, IDS)[:, -1])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("method", "options"), [("dynamic-yarn", {}), ("mixed-yarn", {"factor": 4})]
)
@pytest.mark.parametrize("model_type", ["llama4_text", "deepseek_v2", "cohere"])
def test_rows_of_a_batch_have_frequencies_of_their_own(model_type, method, options, side):
    """Rotate rows of different lengths together, by complex numbers in the first two."""
    if model_type == "deepseek_v2" and BEFORE_5_17:
        pytest.skip("transformers caches expanded keys")
    model = tiny_model(model_type)
    rope_patch.patch(model, method, trained_length=TRAINED, **options)
    rows = [tokens(length, seed=length) for length in (END, SHORT, TRAINED)]
    ids, mask = padded(rows, side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    got = forward(model, ids, attention_mask=mask, position_ids=positions)
    for row, is_token, logits in zip(rows, mask.bool(), got, strict=True):
        close(logits[is_token], forward(model, row)[0])


@pytest.mark.skipif(BEFORE_5_23, reason="its rotary modules take one set of frequencies")
@pytest.mark.parametrize("model_type", ["llama4_text", "deepseek_v2"])
def test_forwards_that_take_frequencies_per_row_stay(model_type):
    """Keep forwards of one complex tensor, too: its rows are not cos and sin."""
    model = tiny_model(model_type)
    rope_patch.patch(model, "dynamic-yarn")
    assert "forward" not in vars(model.model.rotary_emb)


def moved_layers(model, **inputs):
    """Return which layers' keys of a short text change as it grows."""
    rope_patch.patch(model, "dynamic-yarn")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS[:, :SHORT], past_key_values=cache, **inputs)
        before = [layer.keys.clone() for layer in cache.layers]
        model(IDS[:, SHORT:], past_key_values=cache)
    pairs = zip(cache.layers, before, strict=True)
    return [not layer.keys[:, :, : keys.shape[2]].equal(keys) for layer, keys in pairs]


def test_layers_without_rotation_keep_their_keys():
    model = make_other("SmolLM3", no_rope_layers=[0, 1], rope_parameters=None)
    assert moved_layers(model) == [False, True]


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="fails on a second chunk without the patch, too")
def test_cached_keys_of_images_do_not_rotate():
    """Mllama caches the keys of cross-attention beside the others."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    layers = {"num_hidden_layers": 3, "cross_attention_layers": [1]}
    config = MllamaTextConfig(**{**SIZES, **layers, **rope})
    torch.manual_seed(0)
    model = transformers.MllamaForCausalLM(config).eval()
    states = torch.randn(1, 10, config.hidden_size)
    assert moved_layers(model, cross_attention_states=states) == [True, False, True]


# -- latent attention: only the cached rotary slice is re-rotated ----------------------------------

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


def latent_model(model_type="deepseek_v3"):
    if BEFORE_5_17 or model_type not in CONFIG_MAPPING or (model_type in SPARSE and BEFORE_5_23):
        pytest.skip("this release has no such model, or caches its keys expanded")
    # Few heads of an indexer often score 0, and the cache's size decides how ties are broken.
    return tiny_model(model_type, **({"index_n_heads": 32} if model_type in SPARSE else {}))


@pytest.mark.skipif(not OLD_TRANSFORMERS, reason="newer releases cache the latent")
def test_expanded_latent_keys_are_refused():
    latent = {"moe_layer_freq": 1, "v_head_dim": 16, "kv_lora_rank": 16}
    with torch.device("meta"):
        model = make_other("DeepseekV3", qk_rope_head_dim=16, qk_nope_head_dim=16, **latent)
    with pytest.raises(ValueError, match="caches its keys expanded"):
        rope_patch.patch(model, "dynamic-yarn")
    assert rope_patch.current(model) is None


# Those whose attention is another one's here.
ALIKE = ["axk1", "axk2", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu"]


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(n, marks=pytest.mark.slow if n in ALIKE else ()) for n in DENSE + SPARSE],
)
def test_decoding_latents_equals_unrotated_keys(model_type, monkeypatch):
    model = latent_model(model_type)
    plain = forward(model, IDS)
    with monkeypatch.context() as patching:
        reference = LatentReference(model, patching)
        parts = IDS.split([PROMPT] + [1] * (END - PROMPT), 1)
        expected = torch.cat([reference.step(part) for part in parts], 1)
    handle = rope_patch.patch(model, "dynamic-yarn")
    decoded = step_by_step(model, IDS, PROMPT)
    close(decoded, expected)
    assert (decoded[:, -1] - plain[:, -1]).abs().max() > 1e-3
    if model_type in ("deepseek_v2", "deepseek_v3", *SPARSE):
        static = StaticCache(config=model.config, max_cache_len=END + 7)
        close(step_by_step(model, IDS, PROMPT, static), decoded)
    handle.undo()
    assert torch.equal(forward(model, IDS), plain)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "axk2"])
def test_latent_rows_have_factors_of_their_own(model_type):
    model = latent_model(model_type)
    rope_patch.patch(model, "dynamic-yarn")
    rows = [IDS, tokens(SHORT, seed=2)]
    alone = [step_by_step(model, row, row.shape[1] - 3)[:, -1] for row in rows]
    ids, mask = padded(rows, "left")
    together = read_in_parts(model, ids, [END - 3], DynamicCache(config=model.config), mask)
    close(together[:, -1], torch.cat(alone))


def test_short_texts_of_latents_keep_their_logits():
    model = latent_model()
    expected = step_by_step(model, tokens(SHORT), SHORT - 5)
    rope_patch.patch(model, "dynamic-yarn")
    assert torch.equal(step_by_step(model, tokens(SHORT), SHORT - 5), expected)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("mixed-yarn", {"factor": 4}),
        ("dynamic-yarn", {"mscale": 0.707, "mscale_all_dim": 1.0}),
    ],
)
def test_long_texts_of_latents_are_those_of_the_static_method(method, options):
    model = latent_model()
    handle = rope_patch.patch(model, method, **options)
    if method.startswith("dynamic"):
        handle.fix_length(END)
        options = {**options, "factor": 2 ** (2 / 4)}  # the step above 80 / 64
    last = step_by_step(model, IDS, END - 1)[:, -1]
    rope_patch.patch(model, "yarn", **options)
    close(last, forward(model, IDS)[:, -1])


def gradient(model):
    model.zero_grad()
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    return next(p.grad.clone() for n, p in model.named_parameters() if "q_b_proj" in n)


def test_checkpointing_of_latents_is_refused_unless_the_length_is_known():
    model = latent_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    handle = rope_patch.patch(model, "dynamic-yarn")
    with pytest.raises(ValueError, match="fix_length"):
        gradient(model)
    handle.fix_length(END)
    checkpointed = gradient(model)
    model.gradient_checkpointing_disable()
    torch.testing.assert_close(checkpointed, gradient(model))


def test_gradients_reach_rerotated_slices():
    model = latent_model()
    rope_patch.patch(model, "dynamic-yarn")
    cache = DynamicCache(config=model.config)
    model(IDS[:, :SHORT], past_key_values=cache)
    model(IDS[:, SHORT:], past_key_values=cache).logits[:, -1].sum().backward()
    assert model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight.grad.abs().sum() > 0


def test_a_replaced_query_projection_is_refused():
    model = latent_model()
    handle = rope_patch.patch(model, "dynamic-yarn")
    attention = model.model.layers[0].self_attn
    original = attention.q_b_proj
    attention.q_b_proj = torch.nn.Sequential(original)
    with pytest.raises(ValueError, match=r"query projection.*replaced"):
        forward(model, IDS)
    attention.q_b_proj = original
    handle.undo()
    forward(model, IDS)


def test_copies_of_latent_models_follow_their_own_length():
    model = latent_model()
    rope_patch.patch(model, "dynamic-yarn")
    copied = copy.deepcopy(model)
    expected = forward(model, IDS)
    rope_patch.unpatch(model)
    assert_close(forward(copied, IDS), expected)
