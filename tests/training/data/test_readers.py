"""Test that readers start at a cursor as if they had read up to it, without reading that."""

import gzip
import json
from pathlib import Path

import pytest
from packed_rows import make_rows, resumed_rows, tokens

from rope_patch.tasks import read_text
from rope_patch.training import find_source

TEXTS = [f"{n} {'ä—x' * (n % 7)}" for n in range(50)]


def write_lines(path):
    raw = b"\xef\xbb\xbf" + "\n\n".join(json.dumps({"text": t}) for t in TEXTS).encode()
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)


def write_parquet(path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": TEXTS, "n": [0] * 50}), path, row_group_size=20)


def write_saved(path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(path)


WRITERS = {
    "a.jsonl": write_lines,
    "a.json": write_lines,
    "a.jsonl.gz": write_lines,
    "a.parquet": write_parquet,
    "saved": write_saved,
}


def reader_of(source):
    (reader,) = find_source(str(source), "text")
    return reader


def read(reader, number=0, cursor=None):
    """Read all: number, location, contents, and the cursor after a round trip through JSON."""
    return [
        (ref.number, ref.location, ref.load(), json.loads(json.dumps(ref.cursor)))
        for ref in reader.read(number, cursor)
    ]


@pytest.mark.parametrize("name", WRITERS)
def test_a_cursor_leads_to_its_document(tmp_path, name):
    WRITERS[name](tmp_path / name)
    reader = reader_of(tmp_path / name)
    documents = read(reader)
    assert [record["text"] for _, _, record, _ in documents] == TEXTS
    # Lines count from 1, with the blank ones between.
    places = [f":{2 * n + 1}" if "json" in name else f", row {n + 1}" for n in range(50)]
    assert [location for _, location, *_ in documents] == [f"{tmp_path / name}{p}" for p in places]
    for index, (number, _, _, cursor) in enumerate(documents):
        assert read(reader, number, cursor) == documents[index:]
        assert read(reader, number) == documents[index:]


@pytest.mark.parametrize("source", ["novels:persuasion", "a.txt"])
def test_a_text_is_one_document(tmp_path, source):
    if source == "a.txt":
        source = str(tmp_path / source)
        Path(source).write_text("Emma")
    text = read_text("persuasion") if source.startswith("novels") else "Emma"
    reader = reader_of(source)
    assert read(reader) == read(reader, 0, {}) == [(0, source, text, {})]
    assert read(reader, 1) == []


def test_lines_before_the_cursor_are_not_read(tmp_path):
    path = tmp_path / "a.jsonl"
    write_lines(path)
    documents = read(reader_of(path))
    number, _, _, cursor = documents[30]
    raw = path.read_bytes()
    path.write_bytes(b"\xff" * (cursor["byte"] - 1) + raw[cursor["byte"] - 1 :])
    assert read(reader_of(path), number, cursor) == documents[30:]


def test_row_groups_before_the_cursor_are_not_read(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path)
    reader = reader_of(path)
    documents = read(reader)
    number, _, _, cursor = documents[25]
    assert (number, cursor) == (25, {"row_group": 1, "row": 5})
    parquet = pytest.importorskip("pyarrow.parquet")
    column = parquet.ParquetFile(path).metadata.row_group(0).column(0)
    raw = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    raw[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(raw)
    assert read(reader, number, cursor) == documents[25:]
    with pytest.raises(ValueError, match=r"cannot read .*a\.parquet: .*again"):
        read(reader)


def test_a_row_group_gives_python_the_rows_from_the_cursor_on(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    write_parquet(path)
    monkeypatch.setattr("rope_patch.training.data.readers._PARQUET_BATCH_ROWS", 3)
    reader = reader_of(path)
    documents = read(reader)
    for index in range(50):
        number, _, _, cursor = documents[index]
        assert read(reader, number, cursor) == documents[index:]


@pytest.mark.parametrize(
    ("name", "number", "cursor", "message"),
    [
        ("a.jsonl", 2, {"byte": 5}, r"a\.jsonl .* no line starts at byte 5: br"),
        ("a.jsonl", 2, {"byte": 10**6}, r"byte 1,000,000: bring back"),
        ("a.jsonl.gz", 2, {"byte": 5}, r"a\.jsonl\.gz .* byte 5"),
        ("a.parquet", 25, {"row_group": 0, "row": 25}, r"a\.parquet .* row 26 is elsewhere"),
        ("a.parquet", 50, {"row_group": 3, "row": 0}, r"row 51 is elsewhere: bring back"),
        ("saved", 50, {"row": 50}, r"saved .* no row 51"),
    ],
)
def test_a_cursor_of_other_data_is_refused(tmp_path, name, number, cursor, message):
    WRITERS[name](tmp_path / name)
    reader = reader_of(tmp_path / name)
    with pytest.raises(ValueError, match=f"cannot resume: .*{message}"):
        read(reader, number, cursor)


class HubOfFiles:
    """Stand in for the Hub: `datasets.load_dataset` of local files, five files of ten records."""

    def __init__(self, folder, monkeypatch):
        self.datasets = pytest.importorskip("datasets")
        self.load = self.datasets.load_dataset
        self.files = [folder / f"{shard}.jsonl" for shard in range(5)]
        for shard, path in enumerate(self.files):
            lines = [json.dumps({"text": t}) + "\n" for t in TEXTS[shard * 10 :][:10]]
            path.write_text("".join(lines))
        monkeypatch.setattr(self.datasets, "load_dataset", self)

    def __call__(self, name, config, *, split, streaming):
        files = [str(path) for path in self.files]
        return self.load("json", data_files=files, split=split, streaming=streaming)


def test_streams_of_the_hub_start_at_their_state(tmp_path, monkeypatch):
    hub = HubOfFiles(tmp_path, monkeypatch)
    reader = reader_of("hub:some/name")
    documents = read(reader)
    assert [record["text"] for _, _, record, _ in documents] == TEXTS
    for number, _, _, cursor in documents[::3]:
        resumed = read(reader, number, cursor)
        assert [d[:3] for d in resumed] == [d[:3] for d in documents[number:]]
        later_number, _, _, later_cursor = resumed[len(resumed) // 2]  # of a resumed stream
        twice = read(reader, later_number, later_cursor)
        assert [d[:3] for d in twice] == [d[:3] for d in documents[later_number:]]
    number, _, _, cursor = documents[35]
    for path in hub.files[:3]:
        path.write_text('{"text": "another"}\n')
    assert [d[:3] for d in read(reader, number, cursor)] == [d[:3] for d in documents[35:]]


def test_a_state_of_another_version_of_datasets_is_not_used(tmp_path, monkeypatch):
    hub = HubOfFiles(tmp_path, monkeypatch)
    reader = reader_of("hub:some/name")
    documents = read(reader)
    cursor = {"datasets": "0.0", "state": {"of": "another version"}}
    counted = read(reader, 17, cursor)
    assert counted == documents[17:] == read(reader, 17)
    assert counted[0][3]["datasets"] == hub.datasets.__version__


@pytest.mark.parametrize("name", [*WRITERS, "hub"])
@pytest.mark.parametrize("window", [0, 4])
def test_rows_of_every_reader_resume_exactly(tokenizer, tmp_path, monkeypatch, name, window):
    if name == "hub":
        HubOfFiles(tmp_path, monkeypatch)
        source = "hub:some/name"
    else:
        WRITERS[name](tmp_path / name)
        source = str(tmp_path / name)
    arguments = {"data": [source], "packing": "concatenate", "shuffle_window": window}
    expected = make_rows(tokenizer, 40, **arguments)
    assert expected[-1]["row"]["counts"][source]["epochs"] >= 1
    for first in range(1, 40, 5):
        rows = resumed_rows(tokenizer, expected[first - 1]["row"]["state"], first, 4, **arguments)
        wanted = expected[first : first + 4]
        assert tokens(rows[: len(wanted)]) == tokens(wanted)
        for row, other in zip(rows, wanted, strict=False):
            assert row["row"]["documents"] == other["row"]["documents"]
