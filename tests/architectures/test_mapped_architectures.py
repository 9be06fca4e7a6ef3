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
from architectures.tiny_architectures import tiny_model
from helpers.tiny_models import OLD_TRANSFORMERS

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
    "minimax_m3_vl_text, sparse": {"layer_types": ["minimax_m3_sparse", "full_attention"] * 2},
    "qwen2, windows": {
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
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
