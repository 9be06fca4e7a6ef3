"""Test reading documents: every source format, and errors for damaged or hostile ones."""

import gzip
import json
import re
import sys
from unittest import mock

import pytest
import torch

from rope_patch.tasks import read_text
from rope_patch.training import find_source, fingerprint, tokenize_document

END = 1
TORN = gzip.compress(b"split_words" * 99, mtime=0)[:-9]
TEXTS = ["Emma was handsome.", "Mr. Weston rose — late.", "Nobody came."]


@pytest.fixture
def read(tokenizer):
    """Read a source's documents as (location, ids, labels)."""

    def read_source(source, column="text", start=0):
        readers = find_source(str(source), column)
        entries = [entry for reader in readers for entry in reader.read(start)]
        documents = [tokenize_document(entry, tokenizer, column) for entry in entries]
        return [(d.location, d.ids.tolist(), d.labels.tolist()) for d in documents]

    return read_source


@pytest.fixture
def write(tmp_path):
    """Write a file, from bytes, text or the objects of its lines."""

    def write_file(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(line) + "\n" for line in content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file


def records(column="text"):
    return [{column: text} for text in TEXTS]


def expected(tokenizer):
    return [[*tokenizer(text).input_ids, END] for text in TEXTS]


def test_text_files_are_read(read, write, tokenizer):
    for name, raw in (
        ("a.txt", TEXTS[1].encode()),
        ("b.MD", b"\xef\xbb\xbf" + TEXTS[1].encode()),
        ("c.txt.gz", gzip.compress(TEXTS[1].encode(), mtime=0)),
    ):
        path = write(name, raw)
        assert read(path) == [(str(path), expected(tokenizer)[1], expected(tokenizer)[1])]


def test_saved_datasets_are_read(read, tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(records("body"))
    dataset.save_to_disk(tmp_path / "all" / "one")
    path = tmp_path / "all" / "one"
    assert [ids for _, ids, _ in read(path.parent, "body")] == expected(tokenizer)
    datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match=r"several splits: expected one .*both/test, .*both/train"):
        find_source(str(tmp_path / "both"), "body")
    (path / "data-00000-of-00001.arrow").write_bytes(b"no")
    with pytest.raises(ValueError, match=f"cannot read {path}: .*again"):
        read(path, "body")


def test_hub_is_streamed(read, monkeypatch, tokenizer):
    datasets, requests = pytest.importorskip("datasets"), []

    def load(name, config, **options):
        requests.append((name, config, options["split"]))
        assert options["streaming"]
        return datasets.Dataset.from_list(records()).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    documents = read("hub:some/name")
    assert [ids for _, ids, _ in documents] == expected(tokenizer)
    assert documents[2][0] == "hub:some/name, row 3"
    assert read("hub:some/name,de@test", start=1)[0][0] == "hub:some/name,de@test, row 2"
    assert requests == [("some/name", None, "train"), ("some/name", "de", "test")]


def test_an_unreachable_hub_is_an_error(read, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", mock.Mock(side_effect=ConnectionError("offline")))
    with pytest.raises(ValueError, match=r"hub:a/b: offline; expected hub:NAME"):
        read("hub:a/b")


def test_novels_of_the_package_are_read_by_name(read, tokenizer):
    ((location, ids, _),) = read("novels:persuasion")
    assert location == "novels:persuasion"
    assert ids == [*tokenizer(read_text("persuasion")).input_ids, END]
    with pytest.raises(ValueError, match=r"no novel 'ema' \(did you mean 'emma'\?\): .*persuasion"):
        read("novels:ema")


def test_folders_and_globs_are_sorted(read, write, tmp_path):
    for name in ("b.txt", "a/z.txt", "a/b/c.md", "c.jsonl", ".hidden/no.txt", "a/no.csv"):
        write(f"all/{name}", TEXTS[0] if not name.endswith("l") else records()[:1])
    names = {
        "all": ["a/b/c.md", "a/z.txt", "b.txt", "c.jsonl:1"],
        "all/*": ["a/b/c.md", "a/z.txt", "b.txt", "c.jsonl:1"],
        "all/*.txt": ["b.txt"],
        "all/**/*.txt": ["a/z.txt", "b.txt"],
    }
    for source, files in names.items():
        assert [w for w, *_ in read(tmp_path / source)] == [f"{tmp_path}/all/{n}" for n in files]


def test_tokenised_records_keep_their_labels(read, write):
    path = write(
        "a.jsonl",
        [
            {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
            {"input_ids": [5, END], "text": "not this"},
            {"input_ids": [5, END], "labels": [-100, END]},
            {"input_ids": []},
        ],
    )
    assert [row[1:] for row in read(path)] == [
        ([5, 6, 7, END], [-100, 6, 7, -100]),
        ([5, END], [5, END]),
        ([5, END], [-100, END]),
        ([], []),
    ]


def test_tokenised_parquet_keeps_its_labels(read, tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"input_ids": [[5, 6], [7]], "labels": [[-100, 6], None], "text": ["", ""]})
    parquet.write_table(table, tmp_path / "a.parquet")
    rows = [([5, 6, END], [-100, 6, -100]), ([7, END], [7, END])]
    assert [row[1:] for row in read(tmp_path / "a.parquet")] == rows


def test_missing_sources_are_refused(read, write, tmp_path):
    path = write("novel.txt", "words")
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("nowel.txt", rf"no data .*mean '{path.name}'.*hub:NAME"),
        ("none*", r"no documents in .*none\*'"),
        ("folder", r"no documents in .*folder'.*\.jsonl"),
    ):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name)


@pytest.mark.parametrize("read_source", [lambda name: find_source(name, "text"), fingerprint])
def test_a_device_is_no_data(read_source):
    with pytest.raises(ValueError, match=r"/dev/zero: .*got a device"):
        read_source("/dev/zero")


@pytest.mark.parametrize(("name", "place"), [("big.jsonl.gz", "gz:2"), ("big.txt.gz", "gz")])
def test_a_small_file_that_holds_much_is_refused_before_memory_is_full(
    read, write, name, place, monkeypatch
):
    monkeypatch.setattr("rope_patch.training.data.readers._MAX_DOCUMENT_BYTES", 2**20)
    path = write(name, gzip.compress(b'{"text": "a"}\n' + b"a" * 2**22))
    assert path.stat().st_size < 2**14
    with pytest.raises(ValueError, match=rf"{place}: .* of at most 1 MiB"):
        read(path)


def test_a_line_of_the_largest_size_is_read(read, write, monkeypatch):
    monkeypatch.setattr("rope_patch.training.data.readers._MAX_DOCUMENT_BYTES", 14)
    assert len(read(write("data.jsonl", '{"text": "a"}\n' * 3))) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", r"a\.txt is empty: .*remove"),
        ("a.csv", "x", r"a\.csv: .*\.parquet, got '\.csv'"),
        ("a", "x", r"a: .*\.parquet, got 'no suffix'"),
        ("a.txt", "naïve".encode("latin1"), r"a\.txt .* byte 2 .*iconv -f latin1"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"a\.jsonl:2 .* byte 24 .*iconv"),
        ("a.jsonl", '{"text": "a"}\n{"text"\n', r"a\.jsonl:2: broken JSON: .* column .*repair"),
        pytest.param("a.jsonl", "[" * 200_000, r"a\.jsonl:1: .* nested too deep", id="deep"),
        ("a.json", '{\n"text": "a"}\n', r"a\.json:1: broken JSON: .*jq -c \. FILE"),
        ("a.json", [[{"text": "a"}]], r"a\.json:1: .* list; .*jq -c"),
        ("a.jsonl", [{"id": 1, "txet": "a"}], r"jsonl:1 .*mean 'txet'\?\): .*'id', .*text_column"),
        ("a.jsonl", [{}], r"a\.jsonl:1 has no column 'text': it has none"),
        ("a.jsonl", [{"text": 5}], r"a\.jsonl:1: expected text in 'text', got int"),
        ("a.jsonl", [{"text": None}], r"a\.jsonl:1: expected text in 'text', got NoneType"),
        ("a.jsonl", [{"text": "ab\ud800c"}], r"jsonl:1: .*\\ud800\) at character 3"),
        ("a.jsonl", [{"input_ids": [3, 512]}], r":1: expected input_ids of 0 to 511, got 512"),
        ("a.jsonl", [{"input_ids": [-1]}], r":1: expected input_ids of 0 to 511, got -1"),
        *[
            ("a.jsonl", [{"input_ids": ids}], r":1: .*whole numbers in 'input_ids'")
            for ids in ([1.5], "abc", [[1]])
        ],
        ("a.jsonl", [{"input_ids": [1, 2], "labels": [1]}], r"label for each of 2 .*, got 1; -100"),
        ("a.jsonl", [{"input_ids": [1], "labels": [600]}], r":1, labels: .*511, got 600"),
        ("a.jsonl.gz", "not gzip", r"cannot read .*a\.jsonl\.gz: .*again"),
        ("a.txt.gz", TORN, r"cannot read .*a\.txt\.gz: .*again"),
        ("a.parquet", "not parquet", r"cannot read .*a\.parquet: .*again"),
    ],
)
def test_damaged_documents_are_refused_with_their_location(read, write, name, content, message):
    with pytest.raises(ValueError, match=message) as error:
        read(write(name, content))
    assert "Traceback" not in str(error.value)


def test_parquet_without_the_column_is_refused(read, tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"content": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'text'.*it has 'content'"):
        read(tmp_path / "a.parquet")


def test_missing_packages_are_named(read, write, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=re.escape("pip install '.[train]'")):
        read(write("a.parquet", "x"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="needs the package datasets"):
        read("hub:some/name")


def test_documents_without_an_end_token_stay_as_they_are(write):
    class Bare:
        eos_token_id = None

        def __call__(self, text, verbose):
            return type("Encoded", (), {"input_ids": [7] * len(text)})

    ((entry,),) = [
        list(reader.read()) for reader in find_source(str(write("a.txt", "abc")), "text")
    ]
    assert torch.equal(tokenize_document(entry, Bare(), "text").ids, torch.tensor([7, 7, 7]))
