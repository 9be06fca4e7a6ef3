"""Test that rotation and the write into a static cache are one launch, and else as before."""

import copy
import importlib
import types
from contextlib import contextmanager

import pytest
import torch
import transformers
from helpers.tiny_models import make_model, tokens
from kernel_models import patch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

pytest.importorskip("triton")

from rope_patch.ops.kernels import launcher
from rope_patch.patching import inspect_forward
from rope_patch.patching.kernels import cache_write

SLOTS, PROMPT, STEPS = 12, 3, 2

pytestmark = pytest.mark.skipif(
    not cache_write._probe_update(), reason="this transformers counts slots in another way"
)


class Operators(TorchDispatchMode):
    """Names of operators, and of kernels that are launched."""

    def __init__(self):
        super().__init__()
        self.names, self.inside = [], False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.inside:  # else the interpreter runs it
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded_operators():
    call, mode = launcher.Launcher.__call__, Operators()

    def record(self, *arguments):
        mode.names.append(self.kernel.__name__)
        mode.inside = True
        call(self, *arguments)
        mode.inside = False

    with pytest.MonkeyPatch.context() as monkeypatch, mode:
        monkeypatch.setattr(launcher.Launcher, "__call__", record)
        yield mode.names


def make_cache(model, kind=StaticCache, **options):
    return kind(config=model.config, max_cache_len=SLOTS, **options)


@torch.no_grad()
def decode(model, cache, batch=1, **kwargs):
    """Return logits of a prompt and of some steps."""
    ids = tokens(PROMPT + STEPS, batch)
    parts = ids.split([PROMPT] + [1] * STEPS, dim=1)
    return torch.cat([model(part, past_key_values=cache, **kwargs).logits for part in parts], 1)


def contents(cache):
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


def assert_as_transformers(model, cache, expected_cache, method="yarn", **kwargs):
    with patch(model, "hf", method):
        expected = decode(model, expected_cache, **kwargs)
    with patch(model, "triton", method), recorded_operators() as names:
        got = decode(model, cache, **kwargs)
    torch.testing.assert_close(got, expected, rtol=0, atol=5e-5)
    for x, y in zip(contents(cache), contents(expected_cache), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-5)
    lengths = [[int(x.cumulative_length) for x in c.layers] for c in (cache, expected_cache)]
    assert lengths[0] == lengths[1]
    return names


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "olmo2", "cohere", "glm", "gpt_neox"])
def test_one_launch_a_layer(family):
    model = make_model(family, num_hidden_layers=1)
    names = assert_as_transformers(model, make_cache(model), make_cache(model))
    layers = model.config.num_hidden_layers
    assert names.count("write_kernel") == layers * (1 + STEPS)
    assert not {"rope_kernel", "forward_kernel", "index_copy_"} & set(names)


def test_dynamic_methods_re_rotate_the_written_keys():
    """The sequence outgrows the trained length in the last step."""
    model = make_model("llama", max_position_embeddings=PROMPT + STEPS - 1)
    caches = [make_cache(model) for _ in range(2)]
    names = assert_as_transformers(model, *caches, "dynamic-yarn")
    assert names.count("write_kernel") == model.config.num_hidden_layers * (1 + STEPS)
    assert names.count("rerotate_kernel") == 1  # all layers at once


def test_fused_projection_is_split_without_a_copy():
    """Per layer of Phi-3: one launch of ours; queries, keys and values stay views of one tensor."""
    model = make_model("phi3")
    cache = make_cache(model)
    with patch(model, "triton"):
        decode(model, cache)
        with recorded_operators() as names:
            model_step(model, cache)
    start = names.index("write_kernel")
    after_projection = names[:start][::-1].index("mm") if "mm" in names[:start] else None
    assert after_projection is not None
    between = names[start - after_projection : start]
    assert not {"clone", "copy_", "_to_copy", "cat", "contiguous"} & set(between), between


@torch.no_grad()
def model_step(model, cache, batch=1):
    return model(tokens(1, batch), past_key_values=cache).logits


def test_only_full_attention_of_gemma_is_fused():
    """Sliding layers have a window, which another layer of the cache handles."""
    model = make_model("gemma3")
    names = assert_as_transformers(model, make_cache(model), make_cache(model))
    assert names.count("write_kernel") == 1 + STEPS  # the model has one full-attention layer
    assert names.count("forward_kernel") == 1 + STEPS


def test_batch_with_padding_and_bfloat16():
    model = make_model("qwen3", num_hidden_layers=1).bfloat16()
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    mask[0, :2] = 0
    caches = [make_cache(model) for _ in range(2)]
    ids = tokens(PROMPT, 2)
    outputs = []
    for kernels, cache in zip(("hf", "triton"), caches, strict=True):
        with patch(model, kernels), torch.no_grad():
            outputs.append(model(ids, attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0.1)
    for x, y in zip(contents(caches[1]), contents(caches[0]), strict=True):
        torch.testing.assert_close(x, y, rtol=2**-6, atol=0.03)


def test_cache_reset_reorder_and_copy():
    model = make_model("llama", num_hidden_layers=1)
    caches = [make_cache(model) for _ in range(2)]
    results = []
    for kernels, cache in zip(("hf", "triton"), caches, strict=True):
        with patch(model, kernels):
            decode(model, cache, batch=2)
            cache.reorder_cache(torch.tensor([1, 1]))
            reordered = model_step(model, cache, batch=2)
            branch = copy.deepcopy(cache)
            branched = model_step(model, branch, batch=2)
            cache.reset()
            results.append((reordered, branched, decode(model, cache, batch=2)))
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-5)
    for x, y in zip(contents(caches[1]), contents(caches[0]), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-5)


def test_tokens_past_the_end_become_nan():
    """transformers' update raises an error there; nothing is written outside of the memory."""
    model = make_model("llama", num_hidden_layers=1)
    cache = make_cache(model)
    with patch(model, "triton"), torch.no_grad():
        model(tokens(SLOTS), past_key_values=cache)
        kept = [x.clone() for x in contents(cache)]
        assert model(tokens(1), past_key_values=cache).logits.isnan().all()
    assert all(x.equal(y) for x, y in zip(contents(cache), kept, strict=True))


# -- where the update stays ------------------------------------------------------------------------


class ScalingLayer(StaticLayer):
    """A layer with an update of its own."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states, 2 * value_states, *args, **kwargs)


def set_layers(cache, monkeypatch):
    cache.layers = [ScalingLayer(max_cache_len=SLOTS) for _ in cache.layers]


def patch_cache(cache, monkeypatch):
    update = cache.update
    cache.update = types.MethodType(
        lambda self, k, v, *args, **kwargs: update(k, v + 1, *args, **kwargs), cache
    )


def patch_layers(cache, monkeypatch):
    for layer in cache.layers:
        update = layer.update
        layer.update = lambda k, v, *args, update=update, **kwargs: update(k, 2 * v)


def derive_cache(cache, monkeypatch):
    class Scaling(type(cache)):
        def update(self, key_states, value_states, *args, **kwargs):
            return super().update(key_states, 2 * value_states, *args, **kwargs)

    cache.__class__ = Scaling


def patch_class(cache, monkeypatch):
    update = StaticLayer.update
    if update.__module__ != __name__:
        replaced = lambda self, k, v, *args, **kwargs: update(self, k, 2 * v, *args, **kwargs)  # noqa: E731
        monkeypatch.setattr(StaticLayer, "update", replaced)


@pytest.mark.parametrize(
    "change", [set_layers, patch_cache, patch_layers, derive_cache, patch_class]
)
def test_updates_of_users_are_called(change, monkeypatch):
    model = make_model("llama", num_hidden_layers=1)
    plain, *caches = (make_cache(model) for _ in range(3))
    with patch(model, "hf"):
        decode(model, plain)
    for cache in caches:
        change(cache, monkeypatch)
    assert "write_kernel" not in assert_as_transformers(model, *caches)
    assert not caches[0].layers[0].values.allclose(plain.layers[0].values)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_other_kernels_update_the_cache_themselves(kernels):
    model = make_model("qwen3")
    with patch(model, kernels), recorded_operators() as names:
        decode(model, make_cache(model))
    assert "write_kernel" not in names
    assert names.count("index_copy_") == 2 * 2 * (1 + STEPS)


def test_gradients_and_growing_caches_update_the_cache_themselves():
    model = make_model("llama", num_hidden_layers=1)
    with patch(model, "triton"), recorded_operators() as names:
        cache = make_cache(model)
        loss = model(tokens(3), past_key_values=cache, labels=tokens(3)).loss
        loss.backward()
        decode(model, transformers.DynamicCache(config=model.config))
    assert "write_kernel" not in names
    assert all(p.grad is not None for p in model.parameters())


def test_cache_of_another_dtype_fails_as_before():
    model = make_model("llama", num_hidden_layers=1)
    cache = make_cache(model)
    with patch(model, "triton"), torch.no_grad():
        model(tokens(3), past_key_values=cache)
        for layer in cache.layers:
            layer.values = layer.values.bfloat16()
        with pytest.raises(RuntimeError, match="same"):
            model(tokens(1), past_key_values=cache)


def test_unpatched_and_copied_models_update_the_cache_themselves():
    model = make_model("llama")
    with patch(model, "triton"):
        duplicate = copy.deepcopy(model)
        expected = decode(model, make_cache(model))
    with recorded_operators() as names:
        got = decode(duplicate, make_cache(duplicate))
    assert got.equal(expected)
    assert "write_kernel" in names
    with recorded_operators() as names:
        decode(model, make_cache(model))
    assert "write_kernel" not in names


# -- the forward's source --------------------------------------------------------------------------

SOURCE = """
import torch

SHARED = None

def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    return q, k

class Attention(torch.nn.Module):
    def forward(self, q, k, v, cos, sin, past_key_values=None):
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        return q, k, v
"""
UPDATE = "past_key_values.update(k, v, self.layer_idx)"
BRANCH = f"        if past_key_values is not None:\n            k, v = {UPDATE}\n"
# What stands in the place of a part of the forward, with which the update stays.
CHANGES = {
    "reads between": (BRANCH, "        q = q * 2\n" + BRANCH),
    "other use": ("return q, k, v", "return q, k, v, past_key_values"),
    "other arguments": (UPDATE, UPDATE.replace("idx)", 'idx, {"scale": 1})')),
    "other names": (BRANCH, "        key = k\n" + BRANCH.replace("update(k", "update(key")),
    "swapped": (f"k, v = {UPDATE}", "k, q = past_key_values.update(k, q, self.layer_idx)"),
    "otherwise": (BRANCH, BRANCH + "        else:\n            k = k * 2\n"),
    "global": ("past_key_values", "SHARED"),
}


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_only_an_update_right_after_the_rotation_counts(change, tmp_path, monkeypatch):
    source = SOURCE
    if change == "global":
        source = source.replace(", past_key_values=None", "")
    if change is not None:
        old, new = CHANGES[change]
        assert old in source
        source = source.replace(old, new)
    name = f"attention_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    usage = inspect_forward(importlib.import_module(name).Attention)
    assert usage.rotates
    assert usage.cache_name == ("past_key_values" if change is None else None)
