"""Test that a cache is found by its kind: by annotation, by value, and in outputs."""

from typing import Optional

import pytest
import torch
import transformers
from helpers.tiny_models import make_model, tokens
from torch import nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_outputs import BaseModelOutputWithPast, ModelOutput

import rope_patch
from rope_patch.transformers_api.caches import cache_in_output, is_cache, is_paged
from rope_patch.transformers_api.forwards import (
    ForwardCall,
    cache_among,
    cache_arguments,
    cache_parameter,
)

NEW = "cache" in BaseModelOutputWithPast.__dataclass_fields__


class Annotated(nn.Module):
    def forward(self, input_ids, memory: Cache | None = None, **kwargs): ...


class Optionally(nn.Module):
    def forward(self, input_ids, memory: Optional[DynamicCache] = None): ...  # noqa: UP045


class Spelled(nn.Module):
    def forward(self, input_ids, memory: "DynamicCache | None" = None): ...


class Named(nn.Module):
    def forward(self, input_ids, past_key_values=None, use_cache=None): ...


class Without(nn.Module):
    def forward(self, input_ids, use_cache: bool = False): ...


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *((kind, "memory") for kind in (Annotated, Optionally, Spelled)),
        (Named, "past_key_values"),
        (Without, None),
    ],
)
def test_parameters_are_known_by_their_annotation_before_their_name(module, name):
    assert cache_parameter(module()) == name
    if name is None:
        with pytest.raises(ValueError, match=f"in transformers {transformers.__version__}"):
            cache_arguments(module(), DynamicCache())
    else:
        cache = DynamicCache()
        assert cache_arguments(nn.Sequential(module()), cache) == {name: cache}
    assert cache_arguments(module(), None) == {}


@pytest.mark.parametrize("name", ["cache", "past_key_values", "memory"])
def test_values_are_known_by_their_kind(name):
    cache = DynamicCache()
    ids = tokens(3)
    others = {"input_ids": ids, "attention_mask": None, "use_cache": True}
    assert cache_among({**others, name: cache}) is cache
    assert cache_among({**others, "past_key_values": None, name: cache}) is cache
    both = EncoderDecoderCache(cache, DynamicCache())
    assert cache_among({**others, name: both}) is cache
    assert cache_among(others) is None


def test_arguments_by_position():
    cache = DynamicCache()
    call = ForwardCall(Annotated(), (tokens(3), cache), {"position_ids": None})
    assert call.cache is cache
    assert call.tokens.shape == (1, 3)


def test_a_cache_that_the_forward_would_ignore_is_refused():
    call = ForwardCall(Annotated(), (tokens(3),), {"past_key_values": DynamicCache()})
    with pytest.raises(ValueError, match="as `memory` and ignores `past_key_values`"):
        _ = call.cache
    paged = PagedAttentionCache.__new__(PagedAttentionCache)
    assert ForwardCall(Annotated(), (), {"cache": paged}).cache is paged


@pytest.mark.parametrize("as_tuple", [False, True])
def test_outputs_are_searched_for_a_cache(as_tuple):
    cache, hidden = DynamicCache(), torch.zeros(1, 2, 3)
    name = "cache" if NEW else "past_key_values"
    output = BaseModelOutputWithPast(last_hidden_state=hidden, **{name: cache})
    assert cache_in_output(output.to_tuple() if as_tuple else output) is cache
    assert cache_in_output((hidden,) if as_tuple else ModelOutput(logits=hidden)) is None


def test_paged_caches_are_known_by_their_class():
    paged = PagedAttentionCache.__new__(PagedAttentionCache)
    assert is_paged(paged)
    assert is_cache(paged)
    assert not is_paged(DynamicCache())


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn", "self-extend"])
@pytest.mark.parametrize("name", ["past_key_values", *(["cache"] if NEW else [])])
def test_both_spellings_of_users(name, method):
    model = make_model()
    rope_patch.patch(model, method, **({} if method == "self-extend" else {"factor": 4}))
    ids, cache = tokens(150), DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [model(part, **{name: cache}).logits for part in ids.split([149, 1], 1)]
        expected = model(ids).logits
    torch.testing.assert_close(parts[1], expected[:, -1:], rtol=0, atol=1e-4)
