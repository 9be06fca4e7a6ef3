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
    require_equal_rows,
    tokens,
)
from torch.utils.data import DataLoader

from rope_patch.training.data.arguments import DataArguments
from rope_patch.training.data.packing import PackedRows, collate


@pytest.mark.parametrize("window", [0, 3, 100])
@pytest.mark.parametrize("packing", ["single", "concatenate", "masked"])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_rows_resume_exactly_at_every_row(tokenizer, source, tmp_path, packing, window, share):
    (tmp_path / "all").mkdir()
    for n in range(3):
        source(f"all/{n}.jsonl", lengths(n, 4, 80))
    other, short = source("other.jsonl", lengths("other"))[0], source("b.jsonl", [7, 40, 3])[0]
    arguments = DataArguments(
        data=[str(tmp_path / "all"), other],
        data_weights=[1.0, 1.5],
        short_data=[short],
        short_share=share,
        packing=packing,
        min_document_length=10,
        shuffle_window=window,
    )
    count = 64
    expected = list(itertools.islice(PackedRows(arguments, tokenizer, **SETTINGS), count))
    require_equal_rows(
        list(itertools.islice(PackedRows(arguments, tokenizer, **SETTINGS), count)), expected
    )
    assert min(c["epochs"] for c in expected[-1]["row"]["counts"].values()) >= 1
    for row in expected[:-1]:
        next_index = row["row"]["index"] + 1
        state = json.loads(json.dumps(row["row"]["state"]))
        for first in (next_index, min(next_index + 3, count - 1)):
            resumed = PackedRows(arguments, tokenizer, **SETTINGS)
            resumed.resume(state, first)
            last = min(first + 4, count)
            require_equal_rows(list(itertools.islice(resumed, last - first)), expected[first:last])


def test_resuming_tokenises_one_document(tokenizer, source, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} came. " * 20}) + "\n" for n in range(1000)))
    counting_tokenizer = CountingTokenizer(tokenizer)
    arguments = DataArguments(data=[str(path)], packing="concatenate", shuffle_window=10)
    rows = list(itertools.islice(PackedRows(arguments, counting_tokenizer, **SETTINGS), 400))
    assert counting_tokenizer.calls > 50
    resumed = PackedRows(arguments, counting_tokenizer, **SETTINGS)
    resumed.resume(rows[-2]["row"]["state"], 399)
    counting_tokenizer.calls = 0
    require_equal_rows([next(iter(resumed))], rows[-1:])
    assert counting_tokenizer.calls <= 2


@pytest.mark.parametrize("window", [0, 3])
def test_checkpoints_without_cursors_resume(tokenizer, source, window):
    """Version 0.1 wrote none: the reader counts records."""
    path, _ = source("a.jsonl", lengths("a"))
    arguments = {"packing": "concatenate", "shuffle_window": window}
    expected = make_rows(tokenizer, 30, [path], **arguments)
    for row in expected[:-1:4]:
        state = json.loads(json.dumps(row["row"]["state"]))
        for source_state in state["long"]:
            assert "byte" in source_state.pop("cursor")
        resumed = PackedRows(DataArguments(data=[path], **arguments), tokenizer, **SETTINGS)
        resumed.resume(state, row["row"]["index"] + 1)
        first = row["row"]["index"] + 1
        last = min(first + 6, len(expected))
        rows = list(itertools.islice(resumed, last - first))
        assert tokens(rows) == tokens(expected[first:last])
        assert [r["row"]["counts"] for r in rows] == [
            r["row"]["counts"] for r in expected[first:last]
        ]
        if window == 0:  # within a block the cursor is that of the block's first record
            require_equal_rows(rows[-1:], expected[last - 1 : last])


def test_resuming_changed_data_or_settings_is_refused(tokenizer, source, tmp_path):
    path, _ = source("a.jsonl", [90, 200, 70])
    rows = make_rows(tokenizer, 2, [path])
    state = rows[1]["row"]["state"]
    other = PackedRows(DataArguments(data=[path], packing="masked"), tokenizer, **SETTINGS)
    with pytest.raises(ValueError, match="packing was single, got masked: set it back"):
        other.resume(state, 2)
    other = PackedRows(DataArguments(data=[path]), tokenizer, **SETTINGS | {"seed": 1})
    with pytest.raises(ValueError, match="seed was 0, got 1"):
        other.resume(state, 2)
    resumed = PackedRows(DataArguments(data=[path]), tokenizer, **SETTINGS)
    with pytest.raises(ValueError, match="cannot resume at row 1: the state is of row 2"):
        resumed.resume(state, 1)
    source("a.jsonl", [90, 201, 70])
    resumed.resume(state, 2)
    with pytest.raises(ValueError, match=r"jsonl:2 has 201 tokens, it had 200 .* bring back"):
        next(iter(resumed))


def test_data_that_has_moved_resumes(tokenizer, source):
    path, _ = source("a.jsonl", [90, 200, 70])
    moved, rows = path.replace("a.jsonl", "b.jsonl"), make_rows(tokenizer, 4, [path])
    Path(path).rename(moved)
    resumed = PackedRows(DataArguments(data=[moved]), tokenizer, **SETTINGS)
    resumed.resume(rows[1]["row"]["state"], 2)
    assert tokens(itertools.islice(resumed, 2)) == tokens(rows[2:])


@pytest.mark.parametrize(("batch", "world"), [(2, 2), (1, 3), (3, 1)])
def test_ranks_share_the_rows(tokenizer, source, batch, world):
    path, _ = source("a.jsonl", lengths("a"))
    expected = make_rows(tokenizer, 24, [path], packing="masked")
    shares = [
        make_rows(
            tokenizer, 24 // world, [path], packing="masked",
            settings=SETTINGS | {"batch": batch, "world": world, "rank": rank},
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
    rows = PackedRows(DataArguments(data=[path], packing="masked", shuffle_window=3), tokenizer,
                **SETTINGS | {"batch": 2})  # fmt: skip
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
    rows = PackedRows(DataArguments(data=["novels:emma"]), tokenizer, **SETTINGS)
    worker = SimpleNamespace(num_workers=2)  # real ones that fail take torch 10 s to shut down
    monkeypatch.setattr("rope_patch.training.data.packing.get_worker_info", lambda: worker)
    with pytest.raises(ValueError, match=r"dataloader_num_workers of 0 or 1, got 2"):
        next(iter(rows))
