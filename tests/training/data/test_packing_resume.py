"""Test that packed rows resume exactly, and that processes and workers share them."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packed_rows import (
    KEYS,
    LENGTH,
    SETTINGS,
    CountingTokenizer,
    lengths,
    make_rows,
    packed,
    require_equal_rows,
    resumed_rows,
    tokens,
)
from torch.utils.data import DataLoader
from training_runs import novel

from rope_patch.training import RowShare, collate

WOVEN = {"row_length": 1024, "trained_length": 512, "seed": 0}
BOUNDS = [0.3, 0.65]  # leave out repetition below, noise above
# Rows of several sources with short ones among them, and of a novel: their arguments.
SOURCES = {
    "single": {},
    "single, short rows": {"short_share": 0.3, "shuffle_window": 3},
    "concatenate": {"shuffle_window": 100},
    "masked": {"shuffle_window": 3},
    "masked, short rows": {"short_share": 0.3},
    "best_fit": {"packing_window": 5, "shuffle_window": 3},
    "best_fit_unmasked, short rows": {"packing_window": 5, "short_share": 0.3},
}
NOVELS = {
    "masked": {"aggregation_share": 0.7, "compression_ratio": BOUNDS},
    "best_fit": {"aggregation_share": 0.7, "packing_window": 4, "shuffle_window": 3},
}


def require_exact_resumes(tokenizer, count, step, settings=SETTINGS, **arguments):
    """Fail unless rows resume at each `step`-th one, and from there three rows further on."""
    expected = make_rows(tokenizer, count, settings=settings, **arguments)
    require_equal_rows(make_rows(tokenizer, count, settings=settings, **arguments), expected)
    for next_index in range(1, count, step):
        state = expected[next_index - 1]["row"]["state"]
        for first in (next_index, min(next_index + 3, count - 1)):
            rows = resumed_rows(tokenizer, state, first, 3, settings=settings, **arguments)
            require_equal_rows(rows[: count - first], expected[first : first + 3])
    return expected


@pytest.mark.parametrize("name", SOURCES)
def test_rows_resume_exactly_at_every_row(tokenizer, source, tmp_path, name):
    (tmp_path / "all").mkdir()
    for n in range(3):
        source(f"all/{n}.jsonl", lengths(n, 4, 80))
    other, short = source("other.jsonl", lengths("other"))[0], source("b.jsonl", [7, 40, 3])[0]
    sources = {"data": [str(tmp_path / "all"), other], "data_weights": [1.0, 1.5]}
    options = {"packing": name.partition(",")[0], "min_document_length": 5} | SOURCES[name]
    rows = require_exact_resumes(tokenizer, 45, 1, short_data=[short], **sources, **options)
    assert min(counts["epochs"] for counts in rows[-1]["row"]["counts"].values()) >= 1
    if "packing_window" in options:
        assert rows[-1]["row"]["state"]["window"]["number"] > 3


@pytest.mark.parametrize("packing", NOVELS)
def test_woven_and_filtered_rows_resume_exactly(tokenizer, tmp_path, packing):
    path = novel(tmp_path)
    repetition = json.dumps({"text": "Number 7 came. " * 200})
    path.write_text(f"{repetition}\n{path.read_text()}")
    rows = require_exact_resumes(
        tokenizer, 14, 3, WOVEN, data=[str(path)], packing=packing, **NOVELS[packing]
    )
    counts = rows[-1]["row"]["counts"][str(path)]
    assert counts["questions"] > 0
    assert (counts["repetitive"] > 0) == (packing == "masked")


def test_resuming_tokenises_one_document(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} came. " * 20}) + "\n" for n in range(300)))
    counting_tokenizer = CountingTokenizer(tokenizer)
    arguments = {"data": [str(path)], "packing": "concatenate", "shuffle_window": 10}
    rows = make_rows(counting_tokenizer, 200, **arguments)
    assert counting_tokenizer.calls > 50
    counting_tokenizer.calls = 0
    state = rows[-2]["row"]["state"]
    require_equal_rows(resumed_rows(counting_tokenizer, state, 199, 1, **arguments), rows[-1:])
    assert counting_tokenizer.calls <= 2


@pytest.mark.parametrize("window", [0, 3])
def test_checkpoints_without_cursors_resume(tokenizer, source, window):
    """Version 0.1 wrote none: the reader counts records."""
    path, _ = source("a.jsonl", lengths("a"))
    arguments = {"data": [path], "packing": "concatenate", "shuffle_window": window}
    expected = make_rows(tokenizer, 30, **arguments)
    for first in range(1, 24, 4):
        state = json.loads(json.dumps(expected[first - 1]["row"]["state"]))
        for source_state in state["long"]:
            assert "byte" in source_state.pop("cursor")
        rows = resumed_rows(tokenizer, state, first, 6, **arguments)
        wanted = expected[first : first + 6]
        assert tokens(rows) == tokens(wanted)
        assert [r["row"]["counts"] for r in rows] == [r["row"]["counts"] for r in wanted]
        if window == 0:  # within a block the cursor is that of the block's first record
            require_equal_rows(rows[-1:], wanted[-1:])


def test_resuming_changed_data_or_settings_is_refused(tokenizer, source):
    path, _ = source("a.jsonl", [90, 200, 70])
    state = make_rows(tokenizer, 2, [path])[1]["row"]["state"]
    for settings, arguments, message in (
        (SETTINGS, {"packing": "masked"}, "packing was single, got masked"),
        (SETTINGS | {"seed": 1}, {}, "seed was 0, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            packed(tokenizer, [path], settings, **arguments).resume(state, 2)
    with pytest.raises(ValueError, match=r"cannot resume at row 1: .* row 2"):
        packed(tokenizer, [path]).resume(state, 1)
    source("a.jsonl", [90, 201, 70])
    with pytest.raises(ValueError, match=r"jsonl:2 has 201 tokens, it had 200"):
        resumed_rows(tokenizer, state, 2, 1, [path])


def test_runs_of_other_packings_resume_without_the_window(tokenizer, source):
    path, _ = source("a.jsonl", lengths("a"))
    (row,) = make_rows(tokenizer, 1, [path], packing="masked")
    assert "packing_window" not in row["row"]["state"]["settings"]
    packed(tokenizer, [path], packing="masked", packing_window=7).resume(row["row"]["state"], 1)


def test_data_that_has_moved_resumes(tokenizer, source):
    path, _ = source("a.jsonl", [90, 200, 70])
    moved, rows = path.replace("a.jsonl", "b.jsonl"), make_rows(tokenizer, 4, [path])
    Path(path).rename(moved)
    state = rows[1]["row"]["state"]
    assert tokens(resumed_rows(tokenizer, state, 2, 2, [moved])) == tokens(rows[2:])


@pytest.mark.parametrize(
    ("packing", "batch", "world"), [("masked", 2, 2), ("masked", 3, 1), ("best_fit", 1, 3)]
)
def test_ranks_share_the_rows(tokenizer, source, packing, batch, world):
    path, _ = source("a.jsonl", lengths("a"))
    options = {"packing": packing, "packing_window": 4}
    expected = make_rows(tokenizer, 24, [path], **options)
    shares = [
        make_rows(
            tokenizer, 24 // world, [path],
            SETTINGS | {"share": RowShare(batch, rank, world)}, **options,
        )
        for rank in range(world)
    ]  # fmt: skip
    for rank, share in enumerate(shares):
        assert all(r["row"]["index"] // batch % world == rank for r in share)
    require_equal_rows(
        sorted(itertools.chain(*shares), key=lambda row: row["row"]["index"]), expected
    )


def test_one_worker_gives_the_same_batches_as_none(tokenizer, source):
    path, _ = source("a.jsonl", lengths("a"))
    rows = packed(
        tokenizer,
        [path],
        SETTINGS | {"share": RowShare(batch=2)},
        packing="masked",
        shuffle_window=3,
    )
    rows.resume(next(iter(rows))["row"]["state"], 4)
    batches = [
        list(itertools.islice(DataLoader(rows, 2, collate_fn=collate, num_workers=n), 6))
        for n in (0, 1)
    ]
    for batch, other in zip(*batches, strict=True):
        assert batch["input_ids"].shape == (2, LENGTH)
        assert all(torch.equal(batch[key], other[key]) for key in KEYS)
        assert batch["rows"] == other["rows"]
    assert batches[0][0]["rows"][0]["index"] == 4


def test_several_workers_are_refused(tokenizer, monkeypatch):
    worker = SimpleNamespace(num_workers=2)  # real ones that fail take torch 10 s to shut down
    monkeypatch.setattr("rope_patch.training.data.packing.get_worker_info", lambda: worker)
    with pytest.raises(ValueError, match=r"dataloader_num_workers of 0 or 1, got 2"):
        make_rows(tokenizer, 1, ["novels:emma"])
