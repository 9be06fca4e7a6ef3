"""Test position maps in every architecture, under the attention that it runs by default and eager.

The claims are in mapped_measurements.py. The same functions compute docs/architectures.md.
"""

import json

import architectures_page as page
import mapped_measurements as maps
import pytest
import torch
import transformers
from architectures.tiny_architectures import TRAINED, tiny_model
from helpers.releases import require_model
from helpers.tiny_models import OLD_TRANSFORMERS
from kinds import kinds, slow_unless
from mapped_measurements import (
    CLOSE,
    LONG,
    NOT_ALIKE,
    NOT_PADDED,
    NOT_STEPWISE,
    SHORT_ROW,
    difference,
    flagged_model,
    in_chunks,
    measure_map,
    one_pass,
    padded,
    tokens,
)

import rope_patch

MEASURED = json.loads(page.MEASURED.read_text())
ROWS = MEASURED.get(transformers.__version__, {})
MAPS = json.loads(page.MAPS.read_text())
STORED = MAPS.get(transformers.__version__)
NEWEST = max(MAPS, key=page.version_key)
NAMES = maps.mapped_names(ROWS)
QUICK = kinds(
    {
        name: {**MEASURED[NEWEST].get(name, {"flags": name}), **row}
        for name, row in MAPS[NEWEST].items()
    }
)

pytestmark = [
    pytest.mark.skipif(OLD_TRANSFORMERS, reason="it has fewer architectures"),
    pytest.mark.skipif(not ROWS, reason="the page has no row of this release"),
]


@pytest.mark.parametrize("method", slow_unless(maps.MAPS, {"self-extend"}))
@pytest.mark.parametrize("name", slow_unless(NAMES, QUICK))
def test_architecture_is_mapped_or_refused_as_on_the_page(name, method):
    result = measure_map(name, method)  # asserts logits, frequencies and undo, by each attention
    if STORED:
        assert result == STORED[name][method]
    else:
        assert result == "patched" or len(result) > len("refused: ") + 30


@pytest.mark.parametrize("name", sorted({*NOT_STEPWISE, *NOT_PADDED, *NOT_ALIKE} & {*NAMES}))
def test_plain_models_do_not_do_what_mapped_ones_are_not_asked(name):
    model, ids, alone = flagged_model(name), tokens(LONG), tokens(SHORT_ROW, 2)
    plain, stepwise, row = [], [], []
    for implementation in maps.attentions(model):
        model.set_attn_implementation(implementation)
        plain.append(one_pass(model, ids))
        stepwise.append(difference(in_chunks(model, ids), plain[-1]))
        row.append(difference(padded(model, ids), one_pass(model, alone)))
    assert name not in NOT_STEPWISE or max(stepwise) > CLOSE
    assert name not in NOT_PADDED or max(row) > CLOSE
    assert name not in NOT_ALIKE or difference(plain[0], plain[-1]) > CLOSE


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}),  # sinks
        ("gemma2", {"layer_types": ["full_attention"] * 2}),  # bounded logits
    ],
)
def test_mapped_models_see_the_same_under_flash_attention(name, changes):
    """Compare with eager attention; flash attention itself, which CPUs lack, is not called."""
    require_model(name)
    model, ids = tiny_model(name, **changes), tokens(LONG)
    for attention in (layer.self_attn for layer in model.model.layers):
        if hasattr(attention, "sinks"):
            torch.nn.init.normal_(attention.sinks, std=3)
    model.set_attn_implementation("eager")
    rope_patch.patch(model, "self-extend", window=8, trained_length=TRAINED)
    expected, row = one_pass(model, ids), padded(model, ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
        assert difference(one_pass(model, ids), expected) < CLOSE
        assert difference(in_chunks(model, ids), expected) < CLOSE
        assert difference(padded(model, ids), row) < CLOSE


def test_page_names_the_attentions_that_a_model_runs():
    stored = MAPS[NEWEST]
    assert {row["attentions"] for row in stored.values()} <= {"sdpa, eager", "eager"}
    for name in ("llama", "qwen2, windows"):
        assert stored[name]["attentions"] == ", ".join(maps.attentions(flagged_model(name)))


def test_padding_ahead_of_tokens_is_refused_where_positions_are_taken_for_slots():
    require_model("minimax_m3_vl_text")
    model = flagged_model("minimax_m3_vl_text, sparse")
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
