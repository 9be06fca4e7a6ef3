"""Measure position maps on a tiny random model of one architecture, under each of its attentions.

Each claim is about the mapped model alone, or holds it against the plain one where no query is
mapped: queries within the trained length, chunks and steps with a cache, a row that is padded, and
one implementation of attention against the other.
"""

from __future__ import annotations

from typing import Any

import torch
from architecture_measurements import (
    assert_untouched,
    inv_freq_buffers,
    reason,
    replaces_scaling,
)
from architectures.tiny_architectures import TRAINED, tiny_model
from helpers.releases import CACHE

import rope_patch

LONG, SHORT_ROW = 100, 80
WITHIN = 40  # tokens of a text within the trained length
CHUNKS = [70, 26, 1, 1, 1, 1]  # the first one ends behind the trained length, as the others do
CLOSE = 3e-4  # logits are of size 3, and maps move them by 1e-2 to 5
MAPS: dict[str, dict[str, int]] = {
    "self-extend": {"window": 8},
    "rerope": {"window": 8},
    "dca": {},
    "streaming": {},
}
FIRST_MAPPED = {"streaming": TRAINED - 4}  # others: the trained length

# Fields that change what an attention sees, or which modules and caches it shares.
FLAGS: dict[str, dict[str, Any]] = {
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
# Gemma 2 runs eager attention, where the mask alone decides.
BIDIRECTIONAL = {name for name in FLAGS if "bidirectional" in name} - {"gemma2, bidirectional"}
NOT_STEPWISE = {"bamba", "doge", "dory, last loop", *BIDIRECTIONAL}
NOT_PADDED = {"doge", "gemma, bidirectional"}
NOT_ALIKE = {"gemma, bidirectional"}
# Mapped models refuse padding ahead of tokens where an indexer takes positions for slots.
PADDING_REFUSED = {"minimax_m3_vl_text, sparse"}


def mapped_names(rows: dict[str, Any]) -> list[str]:
    """Return the architectures to map, and those with flags, from the rows of `measure`."""
    patched = [name for name, row in rows.items() if row["static"] == "patched"]
    return [*patched, *(name for name in FLAGS if model_type_of(name) in patched)]


def model_type_of(name: str) -> str:
    """Return the architecture of a name, which may name flags behind it."""
    return name.partition(", ")[0]


def flagged_model(name: str) -> Any:
    """Return the tiny model of an architecture, with two layers of each type."""
    return tiny_model(model_type_of(name), copies=2, **FLAGS.get(name, {}))


def attentions(model: Any) -> list[str]:
    """Return the implementation that a model runs by default, and eager attention."""
    return list(dict.fromkeys(["sdpa" if model._supports_sdpa else "eager", "eager"]))


def measure_maps(name: str) -> dict[str, str]:
    """Return the attentions that an architecture was mapped under, and the result of each map."""
    row = {"attentions": ", ".join(attentions(flagged_model(name)))}
    return row | {method: measure_map(name, method) for method in MAPS}


def measure_map(name: str, method: str) -> str:
    """Map a model under each of its attentions, and check every claim.

    Returns:
        "patched", or the reason of the refusal, which is the same under each.

    Raises:
        AssertionError: An accepted map has a wrong effect.
    """
    model, ids = flagged_model(name), tokens(LONG)
    default = attentions(model)[0]
    plain, mapped, results = {}, {}, set()
    for implementation in attentions(model):
        model.set_attn_implementation(implementation)
        plain[implementation] = one_pass(model, ids)
        result, mapped[implementation] = _measure_under(
            model, name, method, implementation, plain[implementation]
        )
        results.add(result)
    (result,) = results
    if result == "patched":
        # Of a default that is eager there is one implementation, which is like itself.
        if difference(plain[default], plain["eager"]) < CLOSE:
            assert difference(mapped[default], mapped["eager"]) < CLOSE
        else:
            assert name in NOT_ALIKE
    return result


def _measure_under(
    model: Any, name: str, method: str, implementation: str, plain: torch.Tensor
) -> tuple[str, torch.Tensor]:
    """Return the result under one implementation of attention, and the logits of a long text."""
    ids, alone = tokens(LONG), tokens(SHORT_ROW, 2)
    within = one_pass(model, ids[:, :WITHIN])
    buffers = inv_freq_buffers(model)
    geometry = next(
        iter(rope_patch.entry_points.check(model, "yarn", factor=2).geometries.values())
    )
    trained = None if geometry.trained_length == TRAINED else TRAINED
    plain_prefixed = prefixed(model, ids, implementation)
    try:
        handle = rope_patch.patch(model, method, trained_length=trained, **MAPS[method])
    except ValueError as error:
        assert_untouched(model, plain, buffers)
        return f"refused: {reason(error)}", plain
    result, got = "patched", one_pass(model, ids)
    first = FIRST_MAPPED.get(method, TRAINED)
    assert difference(got, plain) > 1e-3
    if not replaces_scaling(handle):
        short = one_pass(model, ids[:, :WITHIN])
        assert torch.equal(short, within)
    if name not in BIDIRECTIONAL:  # else later tokens, which are mapped, reach all others
        assert difference(got[:, :first], plain[:, :first]) < CLOSE
    if name not in NOT_STEPWISE:
        try:
            assert difference(in_chunks(model, ids), got) < CLOSE
        except ValueError as error:  # caches that transformers before 5.4 has for some models
            result = f"refused with a cache: {reason(error)}"
    if name not in NOT_PADDED | PADDING_REFUSED:
        assert difference(padded(model, ids), one_pass(model, alone)) < CLOSE
    with_prefix = prefixed(model, ids, implementation)
    assert difference(with_prefix[:, :first], plain_prefixed[:, :first]) < CLOSE
    handle.undo()
    assert_untouched(model, plain, buffers)
    return result, got


def tokens(length: int, seed: int = 1) -> torch.Tensor:
    """Return random tokens, none of which is special."""
    return torch.randint(4, 100, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def one_pass(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Return the logits of a text that is read at once."""
    return model(input_ids=ids, use_cache=False, **inputs).logits


@torch.no_grad()
def in_chunks(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a text that is read in chunks and steps, with a cache."""
    given, parts = {}, []
    for part in ids.split(CHUNKS, 1):
        output = model(input_ids=part, use_cache=True, **given)
        given = {CACHE: output[CACHE]}
        parts.append(output.logits)
    return torch.cat(parts, 1)


def padded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a row beside a longer one, from which padding on the left keeps it."""
    rows = torch.cat([ids, torch.nn.functional.pad(tokens(SHORT_ROW, 2), (LONG - SHORT_ROW, 0))])
    mask = torch.ones_like(rows)
    mask[1, : LONG - SHORT_ROW] = 0
    return one_pass(model, rows, attention_mask=mask)[1:, LONG - SHORT_ROW :]


def prefixed(model: Any, ids: torch.Tensor, implementation: str) -> torch.Tensor:
    """Return the logits of a text whose first 32 tokens see each other, by a mask in 4-D."""
    places = torch.arange(LONG)
    mask = ((places <= places[:, None]) | (places < 32))[None, None]
    if implementation == "eager":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    return one_pass(model, ids, attention_mask=mask)


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two tensors."""
    return float((got - expected).abs().max())
