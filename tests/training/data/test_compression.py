"""Test the filter of documents by how well they compress."""

import gzip
import json
import random
import string

import pytest
from packed_rows import CountingTokenizer, make_rows

from rope_patch.tasks import read_text
from rope_patch.training import DataArguments, compression_ratio, summarize

BOUNDS = [0.3, 0.65]


@pytest.fixture
def kinds(tmp_path, tokenizer):
    """Write prose, repetition and noise as text and as tokens; return both files and the texts."""
    rng, novel = random.Random(0), read_text("emma")
    letters = string.ascii_letters + string.digits
    documents = []
    for n in range(6):
        documents.append(("prose", novel[20_000 * n : 20_000 * n + 3000]))
        documents.append(("repetitive", f"Number {n} came. " * 150))
        documents.append(("noisy", "".join(rng.choices(letters, k=3000))))
    rows = [{"text": text} for _, text in documents]
    tokens = [{"input_ids": tokenizer(text).input_ids} for _, text in documents]
    paths = []
    for name, records in (("text.jsonl", rows), ("tokens.jsonl", tokens)):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        paths.append(str(tmp_path / name))
    return paths, documents


def test_the_ratio_is_that_of_gzip():
    for text in (read_text("emma")[:50_000], "ab" * 9000, "Ça va? — " * 40):
        raw = text.encode()
        header = 18 - 6  # gzip's header and trailer are that much longer than zlib's
        expected = (len(gzip.compress(raw, 6, mtime=0)) - header) / len(raw)
        assert compression_ratio(text) == pytest.approx(expected, abs=1e-12)
    assert compression_ratio("") == float("inf")


@pytest.mark.parametrize("number", [0, 1], ids=["text", "tokens"])
@pytest.mark.parametrize("packing", ["single", "best_fit"])
def test_repetition_and_noise_are_left_out(tokenizer, kinds, number, packing):
    path, documents = kinds[0][number], kinds[1]
    rows = make_rows(tokenizer, 400, [path], packing=packing, packing_window=50,
        compression_ratio=BOUNDS)  # fmt: skip
    used = {place for row in rows for place in row["row"]["documents"]}
    expected = {
        f"{path}:{n + 1}"
        for n, (_, text) in enumerate(documents)
        if BOUNDS[0] <= len(gzip.compress(text.encode(), 6)) / len(text.encode()) <= BOUNDS[1]
    }
    assert used == expected == {f"{path}:{n + 1}" for n in range(0, 18, 3)}
    counts = rows[-1]["row"]["counts"][path]
    passes = counts["documents"] / 6
    assert passes > 1
    for key in ("repetitive", "noisy"):
        assert abs(counts[key] - 6 * passes) <= 1
    assert counts["left_out"] == 0


def test_the_log_says_what_was_left_out(tokenizer, kinds, caplog):
    make_rows(tokenizer, 300, [kinds[0][0]], compression_ratio=BOUNDS)
    (message,) = [m for m in caplog.messages if "compression_ratio" in m]
    assert "[0.3, 0.65] left out 6 documents below it and 6 above, and kept 6" in message


@pytest.mark.parametrize("packing", ["masked", "best_fit"])
def test_the_summary_counts_what_was_read(tokenizer, kinds, packing):
    """A window of documents is read ahead of its rows, and a run can end within it."""
    path, settings = kinds[0][0], {"row_length": 1024, "trained_length": 512, "seed": 0}
    options = {"packing": packing, "compression_ratio": BOUNDS, "aggregation_share": 1.0}
    (row,) = make_rows(tokenizer, 1, [path], settings, **options)
    counts = row["row"]["counts"][path]
    assert counts["documents"] > 0
    assert counts["questions"] > 0
    arguments = DataArguments(data=[path], **options)
    summary = summarize(arguments, json.loads(json.dumps(row["row"]["state"])))
    assert summary["filter"] == (
        f"compression ratio 0.3 to 0.65: {counts['repetitive']} documents left out below, "
        f"{counts['noisy']} above, {counts['documents']} kept"
    )
    assert summary["aggregation tasks"].startswith(f"{counts['questions']} questions (")


def test_short_rows_are_not_filtered(tokenizer, kinds):
    rows = make_rows(tokenizer, 100, [kinds[0][0]], compression_ratio=BOUNDS, short_share=0.5)
    counts = rows[-1]["row"]["counts"]
    assert counts[f"short: {kinds[0][0]}"]["noisy"] == 0
    assert counts[kinds[0][0]]["noisy"] > 0


def test_bounds_without_any_document_are_refused(tokenizer, kinds):
    message = r"18 documents compress below .*\[0\.98, 0\.99\], 0 above, .*wider"
    with pytest.raises(ValueError, match=message):
        make_rows(tokenizer, 1, [kinds[0][0]], compression_ratio=[0.98, 0.99])


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0.3], r"such as \[0\.3, 0\.6\], got \[0\.3\]"),
        ([0.3, 0.5, 0.6], "lowest and the highest"),
        ([0.6, 0.3], r"got \[0\.6, 0\.3\]"),
        ([-0.1, 0.3], "lowest and the highest"),
        ([float("nan"), 0.3], "lowest and the highest"),
        ([1.2, 3.0], r"\[1\.2, 3\.0\] leaves out all text"),
    ],
)
def test_bad_bounds_are_refused(tokenizer, bounds, message):
    with pytest.raises(ValueError, match=message):
        make_rows(tokenizer, 1, ["novels:emma"], compression_ratio=bounds)


def test_tokens_that_cannot_be_decoded_are_refused(tokenizer, kinds):
    with pytest.raises(ValueError, match=r"jsonl:1: compression_ratio .* cannot decode"):
        make_rows(CountingTokenizer(tokenizer), 1, [kinds[0][1]], compression_ratio=BOUNDS)
