"""Test position maps in every architecture, under the attention that it runs by default and eager.

Each claim is about the mapped model alone, or holds it against the plain one where no query is
mapped: queries within the trained length, chunks and steps with a cache, a row that is padded, and
one implementation of attention against the other.
"""

import json

import architectures_page as page
import pytest
import torch
import transformers
from architectures.tiny_architectures import TRAINED, tiny_model
from helpers.tiny_models import OLD_TRANSFORMERS

import rope_patch
from rope_patch.transformers_api.caches import cache_in_output
from rope_patch.transformers_api.forwards import cache_arguments

LONG, SHORT_ROW = 100, 80
CHUNKS = [70, 26, 1, 1, 1, 1]  # the first one ends behind the trained length, as the others do
MAPS = {"self-extend": {"window": 8}, "rerope": {"window": 8}, "dca": {}, "streaming": {}}

ROWS = json.loads(page.MEASURED.read_text()).get(transformers.__version__, {})
ARCHITECTURES = [name for name, row in ROWS.items() if row.get("mapped") == "patched"]
# Fields that change what an attention sees, or which modules and caches it shares.
FLAGS = {
    "dory, last loop": {"recurrent_kv_cache_mode": "last_loop"},
    "gemma, bidirectional": {"use_bidirectional_attention": True},
    "gemma2, bidirectional": {"use_bidirectional_attention": True},
    "gemma3_text, bidirectional": {"use_bidirectional_attention": True},
    "gemma3n_text, shared keys": {"num_kv_shared_layers": 2},
    "gemma4_text, bidirectional": {"use_bidirectional_attention": "all"},
    "gemma4_text, shared keys": {"num_kv_shared_layers": 2},
    "minimax_m3_vl_text, sparse": {"layer_types": ["minimax_m3_sparse", "full_attention"]},
    "qwen2, windows": {
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "zamba2, two blocks": {"num_mem_blocks": 2, "use_shared_attention_adapter": True},
}

pytestmark = [
    pytest.mark.skipif(OLD_TRANSFORMERS, reason="it has fewer architectures"),
    pytest.mark.skipif(not ARCHITECTURES, reason="the page has no row of this release"),
]


def build(name):
    model_type, _, flags = name.partition(", ")
    return tiny_model(model_type, copies=2, **FLAGS[name] if flags else {})


def tokens(length, seed=1):
    return torch.randint(4, 100, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def one_pass(model, ids, **inputs):
    return model(input_ids=ids, use_cache=False, **inputs).logits


@torch.no_grad()
def in_chunks(model, ids):
    cache, parts = None, []
    for part in ids.split(CHUNKS, 1):
        output = model(input_ids=part, use_cache=True, **cache_arguments(model, cache))
        cache = cache_in_output(output)
        parts.append(output.logits)
    return torch.cat(parts, 1)


def padded(model, ids):
    """Return the logits of a row beside a longer one, from which padding on the left keeps it."""
    rows = torch.cat([ids, torch.nn.functional.pad(tokens(SHORT_ROW, 2), (LONG - SHORT_ROW, 0))])
    mask = torch.ones_like(rows)
    mask[1, : LONG - SHORT_ROW] = 0
    return one_pass(model, rows, attention_mask=mask)[1:, LONG - SHORT_ROW :]


def prefixed(model, ids, implementation):
    """Return the logits of a text whose first 32 tokens see each other, by a mask in 4-D."""
    places = torch.arange(LONG)
    mask = ((places <= places[:, None]) | (places < 32))[None, None]
    if implementation == "eager":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    return one_pass(model, ids, attention_mask=mask)


def assert_mapped_rightly(name, method):
    """Assert the claims of the module's docstring, where the plain model makes them true."""
    model, ids, alone = build(name), tokens(LONG), tokens(SHORT_ROW, 2)
    default = "sdpa" if model._supports_sdpa else "eager"
    geometry = next(iter(rope_patch.patching.check(model, "yarn", factor=2).geometries.values()))
    trained = None if geometry.trained_length == TRAINED else TRAINED
    first = MAPPED_FROM.get(method, TRAINED)
    passes = {}
    for implementation in dict.fromkeys((default, "eager")):
        model.set_attn_implementation(implementation)
        plain, plain_prefixed = one_pass(model, ids), prefixed(model, ids, implementation)
        is_stepwise = name not in NOT_STEPWISE
        assert is_close(in_chunks(model, ids), plain) is is_stepwise
        is_padded = name not in NOT_PADDED
        assert is_close(padded(model, ids), one_pass(model, alone)) is is_padded
        handle = rope_patch.patch(model, method, trained_length=trained, **MAPS[method])
        mapped = passes[implementation] = one_pass(model, ids)
        assert (mapped - plain).abs().max() > 1e-3
        assert is_close(mapped[:, :first], plain[:, :first]) is not is_bidirectional(name)
        if is_stepwise:
            assert is_close(in_chunks(model, ids), mapped)
        if is_padded:
            assert is_close(padded(model, ids), one_pass(model, alone))
        with_prefix = prefixed(model, ids, implementation)
        assert is_close(with_prefix[:, :first], plain_prefixed[:, :first])
        handle.undo()
    assert is_close(passes[default], passes["eager"])
