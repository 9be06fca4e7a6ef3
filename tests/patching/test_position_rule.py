"""Test the table of docs/methods.md: what positions are under padding, packing and jumps.

Each cell runs a row among others and compares it with the row alone, in one pass and with a cache,
cut into the same prompt and steps. No test passes positions but where its cell is about them.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from helpers.encoding_models import encoding_model
from helpers.no_copies import NoCopies
from helpers.releases import plain_transformers
from helpers.tiny_models import (
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SIZES,
    TRAINED,
    forward,
    make_model,
    padded,
    tokens,
)
from helpers.vision_models import MODEL_TYPES, gemma3_with_vision, text_tokens, vision_model
from torch._dynamo.utils import counters

import rope_patch
from rope_patch.patching import counted_positions
from rope_patch.patching.dynamic import hooks as length_hooks
from rope_patch.transformers_api import ForwardCall

LENGTHS = (60, 150, 90)  # below the trained length alone, and beyond it with its padding
FEW = (30, 60, 44)  # for a table, which has no row beyond the trained length
STEPS = 2
COLUMNS = [
    "left padding",
    "right padding",
    "tokens behind right padding",
    "`inputs_embeds`",
    "packed rows",
    "`cu_seq_lens_q` alone",
    "jumps",
    "M-RoPE",
]


def patch(method, **options):
    return lambda model: rope_patch.patch(model, method, **options)


def encode(name, **options):
    return lambda model: rope_patch.encode(model, name, **options)


# By row of the table, what puts it on a model.
ROWS = {
    "static": {"yarn": patch("yarn", factor=4), "linear": patch("linear", factor=4)},
    "dynamic": {
        "dynamic-yarn": patch("dynamic-yarn"),
        "mixed-linear": patch("mixed-linear", factor=4),
    },
    "start tokens": {
        "longrope": patch("longrope", factor=4, long_factor=LONG_FACTOR, start_tokens=5)
    },
    "position maps": {
        "rerope": patch("rerope", window=20),
        "self-extend": patch("self-extend", window=12),
        "string": patch("string", on="yarn:4"),
        "dca": patch("dca"),
    },
    "`temperature=`": {
        "yarn": patch("yarn", factor=4, temperature="log-n"),
        "dynamic-yarn": patch("dynamic-yarn", temperature="llama4"),
    },
    "`encode`, tables": {"learned": encode("learned"), "sinusoidal": encode("sinusoidal")},
    "`encode`, biases": {"fire": encode("fire"), "alibi": encode("alibi"), "t5": encode("t5")},
    "`patch`, tables of GPT-2's kind": {
        family: patch("linear", factor=2) for family in ("GPT2LMHeadModel", "GPTBigCodeForCausalLM")
    },
}

RIGHT, REFUSED, SLOTS, NONE = "right", "refused", "counts padding", "–"
_ABSOLUTE = [RIGHT, RIGHT, RIGHT, RIGHT, RIGHT, REFUSED, RIGHT, REFUSED]
TABLE = {
    "static": [RIGHT, RIGHT, SLOTS, RIGHT, RIGHT, NONE, RIGHT, RIGHT],
    "dynamic": [RIGHT, RIGHT, SLOTS, RIGHT, RIGHT, REFUSED, RIGHT, RIGHT],
    **dict.fromkeys(list(ROWS)[2:], _ABSOLUTE),
    "`encode`, biases": [RIGHT, RIGHT, SLOTS, RIGHT, RIGHT, REFUSED, RIGHT, REFUSED],
    "`patch`, tables of GPT-2's kind": [*_ABSOLUTE[:-1], NONE],
}


# Variants for which the first one of their row stands in all columns but that of left padding.
ALIKE = {(row, name) for row in ROWS for name in [*ROWS[row]][1:] if name != "dca"}


def cells(column):
    """Return each variant of each row, with what the table says of it in a column."""
    return [
        pytest.param(
            *(row, name, said[COLUMNS.index(column)]),
            id=f"{row}-{name}",
            marks=pytest.mark.slow if (row, name) in ALIKE else (),
        )
        for row, said in TABLE.items()
        for name in ROWS[row]
        if said[COLUMNS.index(column)] != NONE
    ]


def model_of(row, name, **changes):
    if name.startswith("GPT"):
        model = encoding_model(name, vocab_size=SIZES["vocab_size"])
    else:
        model = make_model(**changes)
    ROWS[row][name](model)
    return model


def texts_of(row):
    return [tokens(length, seed=length) for length in (FEW if "tables" in row else LENGTHS)]


@torch.no_grad()
def run(model, ids, cuts, *, mask=None, positions=None, embed=False):
    """Return logits of a text in parts, `[B, S, vocab]`; with a cache where there are several.

    Args:
        model: The model.
        ids: `[B, S]`.
        cuts: Tokens of each part.
        mask: `[B, S]`, of which a part is given what it has seen; or `[1, 1, S, S]`.
        positions: `[B, S]`.
        embed: Whether embeddings are given in the place of ids.
    """
    cache = transformers.DynamicCache(config=model.config) if len(cuts) > 1 else None
    parts, start = [], 0
    for steps in cuts:
        end = start + steps
        own = ids[:, start:end]
        given = (
            {"inputs_embeds": model.get_input_embeddings()(own)} if embed else {"input_ids": own}
        )
        if mask is not None:
            given["attention_mask"] = (
                mask[..., start:end, :end] if mask.ndim == 4 else mask[:, :end]
            )
        if positions is not None:
            given["position_ids"] = positions[:, start:end]
        if cache is not None:
            given["past_key_values"] = cache
        parts.append(model(**given, use_cache=cache is not None).logits)
        start = end
    return torch.cat(parts, 1)


def cuts_of(length, *, cached):
    return [length - STEPS, *[1] * STEPS] if cached else [length]


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)


def require_rows_as_alone(model, rows, side, *, cached, embed=False):
    ids, mask = padded(rows, side)
    got = run(model, ids, cuts_of(ids.shape[1], cached=cached), mask=mask, embed=embed)
    for text, is_token, logits in zip(rows, mask.bool(), got, strict=True):
        alone = run(model, text, cuts_of(text.shape[1], cached=cached))
        close(logits[is_token], alone[0])


@pytest.mark.parametrize(
    ("row", "name", "cached"),
    [
        pytest.param(
            *(row, name, cached),
            id=f"{row}-{name}-{'steps' if cached else 'one pass'}",
            # The prompt before steps is a pass.
            marks=pytest.mark.slow if (row, name) in ALIKE and not cached else (),
        )
        for row in ROWS
        for name in ROWS[row]
        for cached in (False, True)
    ],
)
def test_left_padding(row, name, cached):
    require_rows_as_alone(model_of(row, name), texts_of(row), "left", cached=cached)


@pytest.mark.parametrize(
    "cached", [pytest.param(False, marks=pytest.mark.slow), True], ids=["one pass", "steps"]
)
@pytest.mark.parametrize(("row", "name", "said"), cells("`inputs_embeds`"))
def test_embeddings(row, name, said, cached):
    require_rows_as_alone(model_of(row, name), texts_of(row), "left", cached=cached, embed=True)


@pytest.mark.parametrize(("row", "name", "said"), cells("right padding"))
def test_right_padding(row, name, said):
    require_rows_as_alone(model_of(row, name), texts_of(row), "right", cached=False)


@pytest.mark.parametrize(("row", "name", "said"), cells("tokens behind right padding"))
def test_tokens_behind_right_padding(row, name, said):
    """Rotation alone counts slots there, as the plain model does, unless positions are given.

    Biases read slots, and no positions.
    """
    model, rows = model_of(row, name), [text[:, : -2 * STEPS] for text in texts_of(row)]
    ids, mask = padded(rows, "right")
    more = tokens(STEPS, batch=len(rows), seed=7)
    all_ids = torch.cat([ids, more], 1)
    all_masks = torch.cat([mask, torch.ones_like(more)], 1)
    width = ids.shape[1]
    cuts = [width, *[1] * STEPS]
    got = run(model, all_ids, cuts, mask=all_masks)[:, width:]
    if "biases" in row:
        close(got, forward(model, all_ids, attention_mask=all_masks)[:, width:])
        own = torch.cat([rows[0], more[:1]], 1)
        assert (got[0] - forward(model, own)[0, -STEPS:]).abs().max() > 1e-2
        return
    told = (all_masks.cumsum(1) - 1).clamp(min=0)
    given = run(model, all_ids, cuts, mask=all_masks, positions=told)[:, width:]
    for text, own, logits, by_positions in zip(rows, more, got, given, strict=True):
        whole, length = torch.cat([text, own[None]], 1), text.shape[1]
        own_cuts = [length, *[1] * STEPS]
        alone = run(model, whole, own_cuts)[0, length:]
        close(by_positions, alone)
        if said == SLOTS:
            places = torch.cat([torch.arange(length), torch.arange(STEPS) + width])[None]
            alone = run(model, whole, own_cuts, positions=places)[0, length:]
        close(logits, alone)


@pytest.mark.parametrize(("row", "name", "said"), cells("packed rows"))
def test_packed_rows(row, name, said):
    """Documents of one length, because the longest decides for the whole row where one does."""
    length = 50 if "tables" in row else 100
    model, documents = model_of(row, name), [tokens(length, seed=seed) for seed in (2, 3)]
    positions = torch.arange(length).repeat(2)[None]
    got = forward(model, torch.cat(documents, 1), position_ids=positions)
    for document, logits in zip(documents, got.split(length, 1), strict=True):
        close(logits, forward(model, document))


@pytest.mark.parametrize(("row", "name", "said"), cells("`cu_seq_lens_q` alone"))
def test_documents_without_positions(row, name, said):
    if OLD_TRANSFORMERS and "kind" in row:
        pytest.skip("transformers 5.0 packs no rows of GPT-2's kind")
    model = model_of(row, name)
    borders = torch.tensor([0, 20, 40], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q.*position_ids"):
        forward(model, tokens(40), cu_seq_lens_q=borders)


@pytest.mark.parametrize("how", ["mask", "cache", "steps", "left padding"])
@pytest.mark.parametrize(("row", "name", "said"), cells("jumps"))
def test_jumps(row, name, said, how):
    """A jump begins no document: all that came before is seen, as by a mask that says so."""
    before, after, skipped = (20, 20, 20) if "tables" in row else (50, 60, 40)
    model, length = model_of(row, name), before + after
    ids = tokens(length)
    positions = torch.cat([torch.arange(before), torch.arange(after) + before + skipped])[None]
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    cuts = cuts_of(length, cached=how == "steps")
    expected = run(model, ids, cuts, mask=causal, positions=positions)
    if how == "cache":  # which the decoder makes
        with torch.no_grad():
            got = model(ids, position_ids=positions).logits
    elif how == "left padding":
        pads = torch.zeros(1, 9, dtype=torch.long)
        padded_ids, places = torch.cat([pads, ids], 1), torch.cat([pads, positions], 1)
        mask = torch.cat([pads, torch.ones_like(ids)], 1)
        got = run(model, padded_ids, [length + 9], mask=mask, positions=places)[:, 9:]
    else:
        mask = torch.ones_like(ids) if how == "mask" else None
        got = run(model, ids, cuts, mask=mask, positions=positions)
    close(got, expected)
    assert (got - run(model, ids, cuts)).abs().max() > 1e-2 or row == "`encode`, biases"


@pytest.mark.parametrize("cached", [False, True], ids=["one pass", "steps"])
@pytest.mark.parametrize(("row", "name", "said"), cells("M-RoPE"))
def test_several_positions_for_a_token(row, name, said, cached):
    """A loop of steps passes positions, as docs/dynamic.md says."""
    # Up to 5.10, Qwen2.5-VL has the sections in its attention, which dynamic methods refuse.
    model = vision_model(MODEL_TYPES[1] if row == "dynamic" else "qwen2_5_vl")
    if said == REFUSED:
        with pytest.raises(ValueError, match="M-RoPE"):
            ROWS[row][name](model)
        return
    ROWS[row][name](model)
    rows = [text_tokens(length, seed=length) for length in LENGTHS]
    ids, mask = padded(rows, "left")
    got = run_vision(model, ids, mask, cached=cached)
    for text, is_token, logits in zip(rows, mask.bool(), got, strict=True):
        alone = run_vision(model, text, torch.ones_like(text), cached=cached)
        close(logits[is_token], alone[0])


@torch.no_grad()
def run_vision(model, ids, mask, *, cached):
    if not cached:
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    positions = (mask.cumsum(1) - 1).clamp(min=0).expand(3, -1, -1)
    cache = transformers.DynamicCache(config=model.config.get_text_config())
    parts, start = [], 0
    for steps in cuts_of(ids.shape[1], cached=True):
        end = start + steps
        output = model(
            input_ids=ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[..., start:end],
            past_key_values=cache,
        )
        parts.append(output.logits)
        start = end
    return torch.cat(parts, 1)


def test_the_page_has_the_tested_cells():
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    section = page.split("## One rule of positions\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line] for line in lines]
    assert header[1:] == COLUMNS
    assert {row: said for row, *said in rows} == TABLE


@pytest.mark.parametrize("kwargs_of_prompt", ["static cache", "longer mask"])
@pytest.mark.parametrize("row", ["position maps", "`temperature=`", "`encode`, tables"])
@torch.no_grad()
def test_masks_that_go_on_behind_the_tokens(row, kwargs_of_prompt):
    """A static cache has slots for what is to come, and its mask may have columns for them."""
    if OLD_TRANSFORMERS and "tables" not in row:
        pytest.skip("transformers 5.0 counts no slot of a static cache that holds padding")
    for name in (each for each in ROWS[row] if (row, each) not in ALIKE):
        model, rows = model_of(row, name), texts_of(row)
        ids, mask = padded(rows, "left")
        length = ids.shape[1]
        wide = torch.cat([mask, torch.zeros_like(mask[:, :20])], 1)
        cache = transformers.StaticCache(config=model.config, max_cache_len=length + 20)
        parts = []
        ends = range(length - STEPS, length + 1)
        for start, end in pairwise([0, *ends]):
            given = mask[:, :end]
            if kwargs_of_prompt == "longer mask":
                given = wide.clone()
                given[:, end:] = 0
            step = model(ids[:, start:end], attention_mask=given, past_key_values=cache)
            parts.append(step.logits)
        got = torch.cat(parts, 1)
        for text, is_token, logits in zip(rows, mask.bool(), got, strict=True):
            alone = run(model, text, cuts_of(text.shape[1], cached=True))
            close(logits[is_token], alone[0])


@torch.no_grad()
def test_counted_positions_of_a_dynamic_method_are_not_read(monkeypatch):
    """With a temperature the decoder is given positions; steps still wait for no device."""
    model, rows = model_of("`temperature=`", "dynamic-yarn"), texts_of("`temperature=`")
    ids, mask = padded(rows, "left")
    cache, prompt = transformers.DynamicCache(config=model.config), 70
    model(ids[:, :prompt], attention_mask=mask[:, :prompt], past_key_values=cache)
    reads, read_growth = [], length_hooks.first_and_last_positions
    monkeypatch.setattr(length_hooks, "token_extents", lambda *_: reads.append("extents"))
    monkeypatch.setattr(
        length_hooks,
        "first_and_last_positions",
        lambda *args: reads.append("growth") or read_growth(*args),
    )
    for end in range(prompt + 1, 91):
        model(ids[:, end - 1 : end], attention_mask=mask[:, :end], past_key_values=cache)
    assert set(reads) <= {"growth"}
    assert len(reads) < 5


@torch.no_grad()
def test_counting_waits_for_no_device():
    model = make_model().to("meta").model
    ids, mask = (torch.ones(2, 5, dtype=torch.long, device="meta") for _ in range(2))
    caches = [
        transformers.DynamicCache(config=model.config),
        transformers.StaticCache(config=model.config, max_cache_len=9),
    ]
    for cache in caches:
        with plain_transformers():
            model(ids, past_key_values=cache)
        longer = torch.ones(2, 6, dtype=torch.long, device="meta")
        arguments = {"input_ids": ids[:, :1], "past_key_values": cache}
        with NoCopies():
            call = ForwardCall(model, (), arguments | {"attention_mask": longer})
            assert counted_positions(call).shape == (2, 1)
    with NoCopies():
        assert counted_positions(ForwardCall(model, (ids, mask), {})).shape == (2, 5)


@pytest.mark.usefixtures("reset_compiler")
def test_counting_is_part_of_one_compiled_graph():
    model = make_model(num_hidden_layers=1)
    rope_patch.patch(model, "yarn", factor=4, temperature="log-n")
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for lengths in ((30, 70), (20, 150), (40, 99)):
        ids, mask = padded([tokens(length) for length in lengths], "left")
        close(forward(compiled, ids, attention_mask=mask), forward(model, ids, attention_mask=mask))
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("is_bare", [False, True], ids=["whole", "bare"])
@pytest.mark.parametrize(
    ("row", "name"),
    [("position maps", "rerope"), ("`temperature=`", "yarn"), ("dynamic", "dynamic-yarn")],
)
@torch.no_grad()
def test_masks_made_around_the_decoder(row, name, is_bare):
    model = gemma3_with_vision()
    model = model.model if is_bare else model
    ROWS[row][name](model)
    rows = [tokens(length, seed=length) for length in LENGTHS]
    ids, mask = padded(rows, "left")
    got = model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
    for text, is_token, states in zip(rows, mask.bool(), got, strict=True):
        close(states[is_token], model(input_ids=text, use_cache=False)[0][0])


@pytest.mark.parametrize("row", ["position maps", "`temperature=`", "`encode`, tables"])
def test_checkpointed_layers_have_the_same_positions(row):
    """The backward pass runs them again, outside of the decoder's forward."""
    name = next(iter(ROWS[row]))
    ids, mask = padded(texts_of(row), "left")
    gradients = []
    for settings in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = model_of(row, name).train()
        if settings is not None:
            model.gradient_checkpointing_enable(settings)
        model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    for each in gradients[1:]:
        torch.testing.assert_close(each, gradients[0], rtol=1e-4, atol=1e-6)


def test_the_patched_length_counts_no_padding(caplog):
    model = make_model()
    rope_patch.patch(model, "string", on="yarn:2")
    longest = rope_patch.current(model).longest_text
    rows = [tokens(longest - 4), tokens(30)]
    ids, mask = padded(rows, "left")
    pads = torch.zeros(2, 30, dtype=torch.long)
    forward(model, torch.cat([pads, ids], 1), attention_mask=torch.cat([pads, mask], 1))
    assert "outgrew" not in caplog.text
    ids, mask = padded([tokens(longest + 3)], "left")
    pads = pads[:1]
    forward(model, torch.cat([pads, ids], 1), attention_mask=torch.cat([pads, mask], 1))
    assert f"a text of {longest + 3} tokens outgrew" in caplog.text
    assert longest > TRAINED
