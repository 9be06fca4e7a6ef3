"""Test best-fit packing: against a second implementation in quadratic time, and by its rows."""

import itertools
import json
import random
import time
from collections import Counter

import pytest
import torch
from packed_rows import LENGTH, SETTINGS, lengths, make_rows

from rope_patch.training import best_fit_decreasing

WHOLE = [5, 30, 19, 20, 40, 9, 47, 2, 13, 28, 8, 26, 33, 15, 21, 3]


def plain_best_fit(sizes, capacity):
    """Pack in quadratic time; return the bins' contents."""
    bins = []
    for size in sorted(sizes, reverse=True):
        fitting = [b for b in bins if sum(b) + size <= capacity]
        if fitting:
            max(fitting, key=sum).append(size)
        else:
            bins.append([size])
    return bins


@pytest.mark.parametrize("capacity", [7, 1023, 1024, 5000, 2_000_000])
def test_each_item_goes_into_the_fullest_bin_with_room(capacity):
    rng = random.Random(capacity)
    for most in (capacity, capacity // 2, max(1, capacity // 7)):
        sizes = [rng.randint(1, most) for _ in range(300)]
        packed = best_fit_decreasing(sizes, capacity)
        assert sorted(itertools.chain(*packed)) == list(range(len(sizes)))
        bins = [[sizes[i] for i in items] for items in packed]
        # Bins of equal room are interchangeable, so their sums agree, not always their items.
        assert sorted(map(sum, bins)) == sorted(map(sum, plain_best_fit(sizes, capacity)))


def test_packing_takes_about_the_same_time_for_each_item():
    def seconds(count):
        rng = random.Random(0)
        sizes = [min(65536, int(rng.lognormvariate(8, 1.5)) + 1) for _ in range(count)]
        start = time.process_time()
        best_fit_decreasing(sizes, 65536)
        return time.process_time() - start

    assert seconds(100_000) < 40 * seconds(10_000)  # ten times as many; quadratic time: 100


def test_bad_sizes_are_refused():
    assert best_fit_decreasing([], 5) == []
    for size in (0, 6):
        with pytest.raises(ValueError, match=f"expected sizes from 1 to 5, got {size}"):
            best_fit_decreasing([3, size], 5)


def pieces(row):
    """Return a row's documents without their padding, as tuples of tokens."""
    starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
    spans = itertools.pairwise([*starts, LENGTH])
    parts = [row["input_ids"][a:b].tolist() for a, b in spans]
    assert all(1 in part for part in parts)
    return [tuple(part[: part.index(1) + 1]) for part in parts]


def test_rows_hold_whole_documents_each_once_an_epoch(tokenizer, source):
    path, documents = source("a.jsonl", WHOLE)
    total = sum(WHOLE)
    rows = make_rows(tokenizer, 40, [path], packing="best_fit", packing_window=4)
    counts = Counter(piece for row in rows for piece in pieces(row))
    assert set(counts) == {tuple(ids) for ids in documents}
    assert max(counts.values()) - min(counts.values()) <= 1
    packed = rows[-1]["row"]["state"]["row_yield"]
    assert packed["tokens"] + packed["padding"] == 40 * LENGTH
    assert packed["tokens"] == sum(len(piece) * n for piece, n in counts.items())
    assert packed["documents"] == counts.total()
    assert packed["cut"] == 0
    assert packed["padding"] < 0.2 * 40 * LENGTH
    assert total * 4 < 40 * LENGTH  # several epochs


def test_best_fit_cuts_fewer_documents(tokenizer, source):
    path, _ = source("a.jsonl", [random.Random(n).randrange(4, 60) for n in range(200)])
    shares = {}
    for packing in ("masked", "best_fit"):
        rows = make_rows(tokenizer, 100, [path], packing=packing, packing_window=32)
        packed = rows[-1]["row"]["state"]["row_yield"]
        shares[packing] = packed["cut"] / packed["documents"]
        assert packed["padding"] <= (0.04 * 100 * LENGTH if packing == "best_fit" else 0)
    too_long = sum(random.Random(n).randrange(4, 60) > LENGTH for n in range(200)) / 200
    assert shares["best_fit"] == pytest.approx(too_long, abs=0.05)
    assert shares["masked"] > 2 * shares["best_fit"]


def test_longer_documents_are_cut_at_row_length_and_lose_nothing(tokenizer, source):
    sizes = [130, 7, LENGTH, 2 * LENGTH, 60, 49]
    path, documents = source("a.jsonl", sizes)
    expected = Counter()
    for ids in documents:
        expected += Counter(tuple(ids[n : n + LENGTH]) for n in range(0, len(ids), LENGTH))
    window = -(-sum(sizes) // LENGTH)
    rows = make_rows(tokenizer, 40, [path], packing="best_fit", packing_window=window)
    numbers = [row["row"]["state"]["window"]["number"] for row in rows]
    first = [row for row, number in zip(rows, [0, *numbers], strict=False) if number == 0]
    found = Counter()
    for row in first:
        restarts = (row["position_ids"] == 0).nonzero().flatten().tolist()
        ends = [*restarts[1:], LENGTH]
        for a, b in zip(restarts, ends, strict=True):
            part = tuple(row["input_ids"][a:b].tolist())
            found[next(e for e in expected if part[: len(e)] == e)] += 1
    assert found >= expected
    assert found.total() - expected.total() <= 1  # the window ends with the next epoch's beginning
    packed = first[-1]["row"]["state"]["row_yield"]
    assert packed["cut"] == 4 + (found.total() > expected.total())


def test_padding_has_no_label_and_is_no_document(tokenizer, source):
    path, documents = source("a.jsonl", [30, 31, 40])
    rows = make_rows(tokenizer, 6, [path], packing="best_fit", packing_window=3)
    for row in rows:
        size = len(pieces(row)[0])
        assert (row["labels"][size:] == -100).all()
        assert row["labels"][0] == -100
        assert row["labels"][1:size].equal(row["input_ids"][1:size])
        assert row["position_ids"].equal(torch.arange(LENGTH))
        assert (row["input_ids"][size:] == tokenizer.pad_token_id).all() or (
            row["input_ids"][size:] == 1
        ).all()
    assert {pieces(row)[0] for row in rows} == {tuple(ids) for ids in documents}


def test_padding_does_not_lengthen_rows_whose_length_counts(tokenizer, source):
    path, _ = source("a.jsonl", [30, 11, 40, 25, 5, 5])
    for follows in (False, True):
        rows = make_rows(
            tokenizer, 12, [path], SETTINGS | {"follows_length": follows}, packing="best_fit",
            packing_window=2,
        )  # fmt: skip
        marks = [row["position_ids"].max().item() + 1 for row in rows]
        longest = [max(16, *map(len, padded_pieces(row))) for row in rows]
        if follows:
            assert marks == longest
        else:
            assert any(a > b for a, b in zip(marks, longest, strict=True))


def padded_pieces(row):
    """Return a row's documents; padding has no labels, documents no inner ones of -100."""
    size = (row["labels"] != -100).nonzero().max().item() + 1
    starts = [n for n in (row["position_ids"] == 0).nonzero().flatten().tolist() if n < size]
    return [row["input_ids"][a:b] for a, b in zip(starts, [*starts[1:], size], strict=True)]


def test_unmasked_rows_are_one_text(tokenizer, source):
    path, _ = source("a.jsonl", WHOLE)
    options = {"packing": "best_fit_unmasked", "packing_window": 4}
    masked = make_rows(tokenizer, 8, [path], packing="best_fit", packing_window=4)
    rows = make_rows(tokenizer, 8, [path], **options)
    for row, other in zip(rows, masked, strict=True):
        assert row["position_ids"].equal(torch.arange(LENGTH))
        assert Counter(row["row"]["documents"]) == Counter(other["row"]["documents"])
        assert sorted(row["input_ids"].tolist()) == sorted(other["input_ids"].tolist())
    skipping = make_rows(
        tokenizer, 8, [path], SETTINGS | {"target_length": 500}, positions="skip", **options
    )
    for row, other in zip(skipping, rows, strict=True):
        assert row["input_ids"].equal(other["input_ids"])
        assert row["labels"].equal(other["labels"])
        assert (row["position_ids"].diff() != 1).sum() <= 1
    assert max(row["position_ids"].max().item() for row in skipping) > LENGTH


def test_labels_of_records_are_kept(tokenizer, tmp_path):
    records = [
        {"input_ids": [5, 6, 7, 8, 1], "labels": [-100, -100, 7, 8, 1]},
        {"input_ids": [9, 10, 11, 1]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    (row,) = make_rows(
        tokenizer, 1, [str(tmp_path / "a.jsonl")], packing="best_fit_unmasked", packing_window=1
    )
    for n in range(LENGTH):
        token, label = row["input_ids"][n].item(), row["labels"][n].item()
        if token in (5, 6):
            assert label == -100
        elif token > 1:
            assert label == token


def test_rows_depend_on_the_seed_alone(tokenizer, source):
    path, _ = source("a.jsonl", WHOLE * 3)

    def order(seed):
        rows = make_rows(
            tokenizer, 6, [path], SETTINGS | {"seed": seed}, packing="best_fit", packing_window=12
        )
        return [row["input_ids"].tolist() for row in rows]

    assert order(0) == order(0)
    assert order(0) != order(1)


def test_data_weights_hold_to_within_a_window(tokenizer, source):
    paths = [source(f"{n}.jsonl", lengths(n, most=most))[0] for n, most in enumerate((9, 90))]
    rows = make_rows(
        tokenizer, 60, paths, packing="best_fit", packing_window=6, data_weights=[1, 3]
    )
    token_counts = [rows[-1]["row"]["counts"][path]["tokens"] for path in paths]
    assert token_counts[0] == pytest.approx(sum(token_counts) / 4, abs=LENGTH)
