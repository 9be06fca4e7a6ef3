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
from helpers.releases import require_model
from helpers.tiny_models import OLD_TRANSFORMERS

import rope_patch
from rope_patch.transformers_api.caches import cache_in_output
from rope_patch.transformers_api.forwards import cache_arguments

LONG, SHORT_ROW = 100, 80
CHUNKS = [70, 26, 1, 1, 1, 1]  # the first one ends behind the trained length, as the others do
CLOSE = 3e-4  # logits are of size 3, and maps move them by 1e-2 to 5
MAPS = {"self-extend": {"window": 8}, "rerope": {"window": 8}, "dca": {}, "streaming": {}}
METHODS = [pytest.param(m, marks=() if m == "self-extend" else pytest.mark.slow) for m in MAPS]
FIRST_MAPPED = {"streaming": TRAINED - 4}  # others: the trained length

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
# What transformers' own models do not do: chunks like one pass (states of Mamba, masks and windows
# of a chunk's own), padded rows like rows alone, SDPA like eager attention.
BIDIRECTIONAL = {name for name in FLAGS if "bidirectional" in name}
NOT_STEPWISE = {"bamba", "doge", "dory, last loop", *BIDIRECTIONAL}
NOT_PADDED = {"doge", "gemma, bidirectional", "minimax_m3_vl_text, sparse"}
NOT_ALIKE = {"gemma, bidirectional"}

pytestmark = [
    pytest.mark.skipif(OLD_TRANSFORMERS, reason="it has fewer architectures"),
    pytest.mark.skipif(not ARCHITECTURES, reason="the page has no row of this release"),
]


def build(name):
    model_type, _, flags = name.partition(", ")
    require_model(model_type)
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


def difference(got, expected):
    return float((got - expected).abs().max())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *FLAGS])
def test_architecture_is_mapped_as_one_pass_and_as_the_plain_model(name, method):
    model, ids, alone = build(name), tokens(LONG), tokens(SHORT_ROW, 2)
    default = "sdpa" if model._supports_sdpa else "eager"
    geometry = next(iter(rope_patch.patching.check(model, "yarn", factor=2).geometries.values()))
    trained = None if geometry.trained_length == TRAINED else TRAINED
    first = FIRST_MAPPED.get(method, TRAINED)
    plain, mapped = {}, {}
    for implementation in dict.fromkeys((default, "eager")):
        model.set_attn_implementation(implementation)
        plain[implementation] = one_pass(model, ids)
        plain_prefixed = prefixed(model, ids, implementation)
        handle = rope_patch.patch(model, method, trained_length=trained, **MAPS[method])
        got = mapped[implementation] = one_pass(model, ids)
        assert difference(got, plain[implementation]) > 1e-3
        if name not in BIDIRECTIONAL:  # else later tokens, which are mapped, reach all others
            assert difference(got[:, :first], plain[implementation][:, :first]) < CLOSE
        if name not in NOT_STEPWISE:
            assert difference(in_chunks(model, ids), got) < CLOSE
        if name not in NOT_PADDED:
            assert difference(padded(model, ids), one_pass(model, alone)) < CLOSE
        with_prefix = prefixed(model, ids, implementation)
        assert difference(with_prefix[:, :first], plain_prefixed[:, :first]) < CLOSE
        handle.undo()
    if difference(plain[default], plain["eager"]) < CLOSE:
        assert difference(mapped[default], mapped["eager"]) < CLOSE
    else:
        assert name in NOT_ALIKE


def test_padding_ahead_of_tokens_is_refused_where_positions_are_taken_for_slots():
    model = build("minimax_m3_vl_text, sparse")
    expected = padded(model, tokens(LONG))
    handle = rope_patch.patch(model, "self-extend")
    with pytest.raises(rope_patch.Refused, match="takes a token's position for its slot"):
        padded(model, tokens(LONG))
    mask = torch.ones(1, LONG, dtype=torch.long)
    mask[:, SHORT_ROW:] = 0  # padding behind the tokens
    got = one_pass(model, tokens(LONG), attention_mask=mask)[:, :SHORT_ROW]
    assert difference(got, one_pass(model, tokens(LONG)[:, :SHORT_ROW])) < CLOSE
    handle.undo()
    assert torch.equal(padded(model, tokens(LONG)), expected)
