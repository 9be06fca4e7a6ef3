"""Test what packing gives against sums that are written out."""

import itertools
import random

import pytest
from packed_rows import LENGTH, SETTINGS

from rope_patch.training.data.arguments import DataArguments
from rope_patch.training.data.packing import PackedRows
from rope_patch.training.inspection.packing_yield import packing_yield

LENGTHS = [random.Random(0).choice([3, 20, 47, 48, 49, 96, 130, 300]) for _ in range(80)]


def yield_of(tokenizer, lengths, *, short=False, is_kept=None, **arguments):
    arguments = DataArguments(data=["elsewhere.jsonl"], **arguments)
    is_kept = is_kept or [True] * len(lengths)
    return packing_yield(arguments, tokenizer, lengths, is_kept, short=short, **SETTINGS)


@pytest.mark.parametrize("minimum", [0, 100])
@pytest.mark.parametrize("window", [0, 7])
def test_single(tokenizer, window, minimum):
    result = yield_of(tokenizer, LENGTHS, shuffle_window=window, min_document_length=minimum)
    used = [n for n in LENGTHS if n >= max(LENGTH, minimum)]
    assert result.rows == sum(n // LENGTH for n in used)
    assert result.tokens == result.rows * LENGTH
    assert result.whole == sum(n == LENGTH for n in used)
    assert result.cut == sum(n > LENGTH for n in used)
    assert result.left_out == len(LENGTHS) - len(used)
    assert result.left_out_tokens == sum(LENGTHS) - result.tokens
    assert result.padding == 0


@pytest.mark.parametrize("packing", ["concatenate", "masked"])
def test_one_after_another(tokenizer, packing):
    result = yield_of(tokenizer, LENGTHS, packing=packing)
    ends = list(itertools.accumulate(LENGTHS))
    rows = ends[-1] // LENGTH
    spans = [(end - n, end) for n, end in zip(LENGTHS, ends, strict=True)]
    placed = [(start, end) for start, end in spans if start < rows * LENGTH]
    whole = [s for s in placed if s[0] // LENGTH == (s[1] - 1) // LENGTH]
    assert (result.rows, result.whole, result.cut) == (rows, len(whole), len(placed) - len(whole))
    assert (result.left_out, result.left_out_tokens) == (0, 0)
    assert (result.tokens, result.padding) == (rows * LENGTH, 0)


def test_short_rows(tokenizer):
    result = yield_of(tokenizer, LENGTHS, short=True, short_share=0.2, short_length=25)
    pieces, taken = [], 0
    for document, length in enumerate(LENGTHS):
        left = length
        while left:
            size = min(left, 25, LENGTH - taken % LENGTH)
            pieces.append((document, size, taken // LENGTH))
            taken, left = taken + size, left - size
    rows = taken // LENGTH
    placed = {document for document, _, row in pieces if row < rows}
    whole = {d for d, size, row in pieces if row < rows and size == LENGTHS[d]}
    assert (result.rows, result.whole, result.cut) == (rows, len(whole), len(placed - whole))


def test_equal_to_the_rows_of_a_run(tokenizer, source):
    path, _ = source("a.jsonl", LENGTHS)
    for packing in ("single", "concatenate", "masked"):
        result = yield_of(tokenizer, LENGTHS, packing=packing, shuffle_window=5)
        arguments = DataArguments(data=[path], packing=packing, shuffle_window=5)
        rows = itertools.islice(PackedRows(arguments, tokenizer, **SETTINGS), result.rows + 1)
        epochs = [row["row"]["counts"][path]["epochs"] for row in rows]
        assert epochs == [0] * result.rows + [1]


def test_documents_that_are_too_short_give_no_row(tokenizer):
    result = yield_of(tokenizer, [5, 0, 47])
    assert (result.rows, result.whole, result.cut, result.left_out) == (0, 0, 0, 3)
    assert result.left_out_tokens == 52


@pytest.mark.parametrize("packing", ["best_fit", "best_fit_unmasked"])
@pytest.mark.parametrize("window", [1, 5, 400])
def test_best_fit(tokenizer, source, packing, window):
    """One pass has its share of what the windows of a long run have."""
    lengths = [n + 1 for n in LENGTHS]
    result = yield_of(tokenizer, lengths, packing=packing, packing_window=window)
    assert (result.left_out, result.left_out_tokens) == (0, 0)
    assert result.whole + result.cut == pytest.approx(len(lengths), abs=1)
    assert result.cut == sum(n > LENGTH for n in lengths)
    assert result.tokens + result.padding == pytest.approx(result.rows * LENGTH, abs=LENGTH)
    assert result.tokens == pytest.approx(sum(lengths), rel=0.1)
    path, _ = source("a.jsonl", lengths)
    arguments = DataArguments(data=[path], packing=packing, packing_window=window)
    rows = PackedRows(arguments, tokenizer, **SETTINGS)
    *_, last = itertools.islice(rows, 10 * result.rows)
    counts = last["row"]["state"]["row_yield"]
    padding = counts["padding"] / (counts["padding"] + counts["tokens"])
    assert result.padding / (result.rows * LENGTH) == pytest.approx(padding, abs=0.02)


def test_best_fit_leaves_short_documents_out(tokenizer):
    result = yield_of(tokenizer, [5, 30, 40, 7], packing="best_fit", min_document_length=10)
    assert (result.left_out, result.left_out_tokens, result.whole, result.cut) == (2, 12, 2, 0)
    assert (result.rows, result.padding) == (2, 2 * LENGTH - 70)


@pytest.mark.parametrize("packing", ["single", "concatenate", "best_fit"])
def test_filtered_documents_are_not_packed(tokenizer, packing):
    lengths, is_kept = [100, 20, 150, 90, 20], [True, True, False, True, False]
    result = yield_of(
        tokenizer, lengths, is_kept=is_kept, packing=packing, min_document_length=30,
        packing_window=1,
    )  # fmt: skip
    plain = yield_of(
        tokenizer, [100, 90], packing=packing, min_document_length=30, packing_window=1
    )
    assert (result.left_out, result.filtered) == (2, 1)
    assert (result.rows, result.whole, result.cut) == (plain.rows, plain.whole, plain.cut)
    assert result.left_out_tokens == plain.left_out_tokens + 40
    none = yield_of(tokenizer, [100], is_kept=[False], packing=packing)
    assert (none.rows, none.filtered) == (0, 1)
    short = yield_of(tokenizer, lengths, is_kept=is_kept, packing=packing, short=True)
    assert (short.filtered, short.rows) == (0, sum(lengths) // LENGTH)
