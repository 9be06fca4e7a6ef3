"""Test that methods and guards are right or refused on a release that renames arguments.

Llama's own file under other names stands in for the release. The truth is the same method on
transformers' Llama with the same weights.
"""

import inspect
import logging

import pytest
import torch
import transformers
from helpers.tiny_models import (
    FACTOR,
    LONG_FACTOR,
    SHORT_FACTOR,
    TRAINED,
    assert_close,
    make_config,
    make_model,
    tokens,
)
from next_release import renamed_llama

from rope_patch import encode, patch

RENAMES = {
    "cache": ({"cache": "kv_store", "past_key_values": "kv_store"}, True),
    "cache, no annotation": ({"cache": "kv_store", "past_key_values": "kv_store"}, False),
    "positions": ({"position_ids": "positions"}, True),
    "mask": ({"attention_mask": "padding"}, True),
    "tokens": ({"input_ids": "ids"}, True),
    "embeddings": ({"inputs_embeds": "vectors"}, True),
    "rotation": ({"position_embeddings": "rotation"}, True),
    "hidden states": ({"hidden_states": "states", "x": "states"}, True),
}
TWO_SETS = {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}
KINDS = {
    "yarn": {"factor": FACTOR},
    "longrope": {"factor": FACTOR, **TWO_SETS},
    "longrope, start tokens": {"factor": FACTOR, "long_factor": LONG_FACTOR, "start_tokens": 4},
    "dynamic-yarn": {"factor": FACTOR},
    "self-extend": {"window": 16, "group": 8},
    "yarn, temperature": {"factor": FACTOR, "temperature": "log-n"},
}
ENCODINGS = ["alibi", "learned", "none"]


class Caller:
    """Call a model by the names that its release has."""

    def __init__(self, model, names):
        self.model, self.names = model, names

    @torch.no_grad()
    def __call__(self, ids, cache=None, **arguments):
        given = {"input_ids": ids, **arguments}
        if cache is not None:
            given[CACHE] = cache
        return self.model(**{self.names.get(k, k): v for k, v in given.items()}).logits

    def steps(self, ids, prompt, **arguments):
        cache = transformers.DynamicCache(config=self.model.config)
        cuts = [prompt] + [1] * (ids.shape[1] - prompt)
        return torch.cat([self(part, cache, **arguments) for part in ids.split(cuts, 1)], 1)


PARAMETERS = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in PARAMETERS else "past_key_values"


@pytest.fixture(scope="module", params=RENAMES)
def release(request, tmp_path_factory):
    """Return a maker of callers: of transformers' Llama, and of the same under other names."""
    names, annotated = RENAMES[request.param]
    module = renamed_llama(names, tmp_path_factory.mktemp("release"), annotated=annotated)

    def make():
        config = make_config(num_hidden_layers=1)
        own = make_model(config=config)
        renamed = module.LlamaForCausalLM(config).eval()
        renamed.load_state_dict(own.state_dict())
        return Caller(own, {}), Caller(renamed, names)

    return make


def done_to_both(change, own, renamed, *args, **kwargs):
    """Change both models; return the stand-in's refusal, or None."""
    torch.manual_seed(0)
    change(own, *args, **kwargs)
    torch.manual_seed(0)
    try:
        change(renamed, *args, **kwargs)
    except ValueError as error:
        return str(error)
    return None


def patched(callers, kind):
    """Patch both callers' models; return the stand-in's refusal, or None."""
    own, renamed = callers
    return done_to_both(patch, own.model, renamed.model, kind.split(",")[0], **KINDS[kind])


def test_the_stand_in_is_llama(release):
    own, renamed = release()
    ids = tokens(2 * TRAINED)
    assert torch.equal(own(ids), renamed(ids))
    assert torch.equal(own.steps(ids, 2 * TRAINED - 8), renamed.steps(ids, 2 * TRAINED - 8))


@pytest.mark.parametrize("kind", KINDS)
def test_methods_are_right_or_refused(release, kind):
    callers = own, renamed = release()
    refusal = patched(callers, kind)
    if refusal is not None:
        assert f"transformers {transformers.__version__}" in refusal
        return
    ids = tokens(2 * TRAINED)
    assert_close(renamed(ids), own(ids))
    assert_close(renamed.steps(ids, 2 * TRAINED - 8), own.steps(ids, 2 * TRAINED - 8))
    pads = torch.zeros(1, 20, dtype=torch.long)
    mask = torch.cat([pads, torch.ones_like(ids)], 1)
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    left = torch.cat([pads, ids], 1)
    assert_close(renamed(left, **given)[:, 20:], own(left, **given)[:, 20:])


@pytest.mark.parametrize("kind", KINDS)
def test_caches_of_other_rotations_are_refused(release, kind):
    callers = release()
    renamed = callers[1]
    ids = tokens(60)
    cache = transformers.DynamicCache(config=renamed.model.config)
    renamed(ids[:, :50], cache)
    if patched(callers, kind) is None:
        with pytest.raises(ValueError, match="cache holds 50 tokens"):
            renamed(ids[:, 50:], cache)


def test_outgrown_lengths_are_reported(release, caplog):
    callers = release()
    renamed = callers[1]
    if patched(callers, "yarn") is None:
        with caplog.at_level(logging.WARNING, logger="rope_patch"):
            renamed(tokens(FACTOR * TRAINED + 8))
        assert "outgrew" in caplog.text


@pytest.mark.parametrize("name", ENCODINGS)
def test_encodings_are_right_or_refused(release, name):
    own, renamed = release()
    refusal = done_to_both(encode, own.model, renamed.model, name)
    if refusal is not None:
        assert f"transformers {transformers.__version__}" in refusal
        return
    ids = tokens(TRAINED)
    assert_close(renamed(ids), own(ids))
    assert_close(renamed.steps(ids, TRAINED - 8), own.steps(ids, TRAINED - 8))
