"""Test `rope-patch finetune --inspect-data`: what it counts, prints, writes and refuses."""

import gzip
import json
import random
import re
import signal
import sys
from pathlib import Path

import pytest
from helpers.commands import run_in_this_process
from packed_rows import END, TINY, make_rows

from rope_patch.training import CleanFolder, RowShare, find_source

SENTENCE = "when the party broke up she had been listening to it with a smile of great pleasure"
WORDS = SENTENCE.split()
RECIPE = ["--model", TINY, "--method", "yarn", "--factor", "2", "--max_steps", "10"]
RECIPE += ["--per_device_train_batch_size", "2"]
TRAINED, TARGET = 256, 512


@pytest.fixture
def foreground_sigint():
    """Handle SIGINT as in a shell's foreground; background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def text(seed, words):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def write(path, records):
    lines = [json.dumps(record) + "\n" for record in records]
    path.write_text("".join(lines))
    return path


@pytest.fixture
def books(tmp_path):
    """Write documents of which two are exact duplicates and one a near duplicate."""
    texts = [text(seed, size) for seed, size in enumerate([700, 30, 250, 90, 400, 1200])]
    texts.insert(3, texts[1].upper().replace(" ", "  "))
    texts += [texts[5], texts[0] + " indeed"]
    return write(tmp_path / "books.jsonl", [{"text": t, "id": i} for i, t in enumerate(texts)])


def inspect(*words):
    result = run_in_this_process("finetune", *RECIPE, *map(str, words), "--inspect-data")
    assert result.returncode == 0, result.stderr
    return result.stdout


def inspect_json(*words):
    return json.loads(inspect(*words, "--json"))


def token_lengths(path, tokenizer):
    records = map(json.loads, path.read_text().splitlines())
    return [len(tokenizer(record["text"]).input_ids) + 1 for record in records]


def test_it_counts_documents_tokens_and_lengths(books, tokenizer, tmp_path):
    notes = write(tmp_path / "notes.jsonl", [{"input_ids": [5] * n + [END]} for n in (9, 99, 999)])
    report = inspect_json("--data", books, notes, "--packing", "masked")
    lengths = {str(books): token_lengths(books, tokenizer), str(notes): [10, 100, 1000]}
    assert (report["trained_length"], report["target_length"]) == (TRAINED, TARGET)
    for source in report["sources"]:
        own = lengths[source["source"]]
        assert (source["documents"], source["tokens"]) == (len(own), sum(own))
        assert (source["median"], source["longest"]) == (sorted(own)[len(own) // 2], max(own))
        assert source["is_complete"]
        for name, limit in (("trained", TRAINED), ("target", TARGET)):
            above = sum(n for n in own if n > limit) / sum(own)
            assert source[f"share_above_{name}"] == pytest.approx(above)
    every = [n for own in lengths.values() for n in own]
    for each in report["lengths"]:
        inside = [n for n in every if each["shortest"] <= n <= each["longest"]]
        assert (each["documents"], each["tokens"]) == (len(inside), sum(inside))
    assert sum(each["documents"] for each in report["lengths"]) == len(every)
    for row in report["rows"]:
        assert row["rows"] == sum(lengths[row["source"]]) // TARGET


def test_the_text_says_the_same(books, tokenizer):
    lengths = token_lengths(books, tokenizer)
    printed = inspect("--data", books)
    row = next(line for line in printed.splitlines() if line.startswith(str(books)))
    above = [sum(n for n in lengths if n > limit) / sum(lengths) for limit in (TRAINED, TARGET)]
    numbers = [len(lengths), sum(lengths), sorted(lengths)[len(lengths) // 2], max(lengths)]
    assert row.split()[1:] == [*(f"{n:,}" for n in numbers), *(f"{a:.1%}" for a in above)]
    assert "<- trained 256" in printed
    assert "<- target 512" in printed
    rows = [n // TARGET for n in lengths if n >= TARGET]
    result = next(line for line in printed.splitlines()[5:] if line.startswith(str(books)))
    left_out = sum(n < TARGET for n in lengths)
    assert result.split()[1:6] == [str(sum(rows)), "0.0%", "0", str(len(rows)), str(left_out)]
    assert f"{result.split()[-1]}" == f"{10 * 2 / sum(rows):,.2f}"
    assert "duplicates" not in printed


def test_a_limit_reads_the_first_documents(books, tokenizer):
    report = inspect_json("--data", books, "--inspect-limit", 4)
    (source,) = report["sources"]
    assert source["tokens"] == sum(token_lengths(books, tokenizer)[:4])
    assert not source["is_complete"]
    assert f"{books} (the first ones)  " in inspect("--data", books, "--inspect-limit", 4)
    for limit in (9, 99):
        (source,) = inspect_json("--data", books, "--inspect-limit", limit)["sources"]
        assert (source["documents"], source["is_complete"]) == (9, True)


def test_duplicates_are_counted_and_named(books, tokenizer):
    pytest.importorskip("datasketch")
    lengths = token_lengths(books, tokenizer)
    (source,) = inspect_json("--data", books, "--duplicates")["sources"]
    assert (source["exact_duplicates"], source["near_duplicates"]) == (2, 1)
    assert source["exact_duplicate_tokens"] == lengths[3] + lengths[7]
    assert source["near_duplicate_tokens"] == lengths[8]
    named = [(d["location"], d["original"], d["is_exact"]) for d in source["duplicates"]]
    assert named == [
        (f"{books}:4", f"{books}:2", True),
        (f"{books}:8", f"{books}:6", True),
        (f"{books}:9", f"{books}:1", False),
    ]
    printed = inspect("--data", books, "--duplicates")
    assert f"{books}:4 equals {books}:2\n" in printed
    assert re.search(rf"{books}:9 resembles \(Jaccard (0\.9\d|1\.00)\) {books}:1\n", printed)


def test_texts_and_their_tokens_are_duplicates(books, tokenizer, tmp_path):
    pytest.importorskip("datasketch")
    first = json.loads(books.read_text().splitlines()[0])["text"]
    ids = write(tmp_path / "ids.jsonl", [{"input_ids": tokenizer(first).input_ids}])
    (_, source) = inspect_json("--data", books, ids, "--duplicates")["sources"]
    assert [(d["original"], d["is_exact"]) for d in source["duplicates"]] == [(f"{books}:1", True)]


def test_documents_without_duplicates_are_written(books, tmp_path, tokenizer):
    pytest.importorskip("datasketch")
    other = tmp_path / "x" / "books.jsonl.gz"
    other.parent.mkdir()
    record = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    lines = [json.dumps(each) for each in (record, {"text": text("other", 40)})]
    other.write_bytes(gzip.compress("\n".join(lines).encode()))
    single = tmp_path / "one.txt"
    single.write_text(text("single", 50) + "\n– ä")
    folder = tmp_path / "clean" / "data"
    printed = inspect("--data", books, other, single, "--write-deduplicated", folder)
    assert f"the other 9 documents are in {folder}" in printed
    assert sorted(p.name for p in folder.iterdir()) == ["books-2.jsonl", "books.jsonl", "one.jsonl"]
    lines = books.read_text().splitlines()
    kept = [json.loads(lines[i]) for i in (0, 1, 2, 4, 5, 6)]
    assert [json.loads(line) for line in (folder / "books.jsonl").open()] == kept
    assert json.loads((folder / "books-2.jsonl").read_text().splitlines()[0]) == record
    assert json.loads((folder / "one.jsonl").read_text()) == {"text": single.read_text()}
    (source,) = inspect_json("--data", folder, "--duplicates")["sources"]  # it is a source itself
    assert (source["documents"], source["duplicates"]) == (9, [])
    assert [p.name for p in folder.parent.iterdir()] == ["data"]
    assert folder.stat().st_mode & 0o777 == other.parent.stat().st_mode & 0o777


def test_nothing_is_overwritten(books, tmp_path):
    pytest.importorskip("datasketch")
    (tmp_path / "clean").mkdir()
    (tmp_path / "clean" / "mine").write_text("")
    words = ["--data", books, "--write-deduplicated", tmp_path / "clean", "--inspect-data"]
    result = run_in_this_process("finetune", *RECIPE, *words)
    assert result.returncode == 1
    assert "clean is not empty: expected a new folder, as nothing is overwritten" in result.stderr
    assert [p.name for p in (tmp_path / "clean").iterdir()] == ["mine"]


def test_a_damaged_document_is_one_error_and_nothing_is_written(books, tmp_path):
    pytest.importorskip("datasketch")
    with books.open("a") as file:
        file.write('{"text"\n')
    words = ["--data", books, "--write-deduplicated", tmp_path / "clean", "--inspect-data"]
    result = run_in_this_process("finetune", *RECIPE, *words)
    assert result.returncode == 1
    assert f"error: {books}:10: broken JSON" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["books.jsonl"]


def test_ctrl_c_leaves_nothing_behind(books, tmp_path, monkeypatch, foreground_sigint):
    datasketch = pytest.importorskip("datasketch")
    query, seen = datasketch.MinHashLSH.query, []

    def interrupted(self, *arguments):
        seen.append(arguments)
        if len(seen) == 4:
            signal.raise_signal(signal.SIGINT)
        return query(self, *arguments)

    monkeypatch.setattr(datasketch.MinHashLSH, "query", interrupted)
    words = ["--data", books, "--write-deduplicated", tmp_path / "clean", "--inspect-data"]
    result = run_in_this_process("finetune", *RECIPE, *words)
    assert result.returncode == 130
    assert "stopped; --inspect-limit N reads fewer documents" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["books.jsonl"]


def test_the_picture_is_written(books, tmp_path):
    pytest.importorskip("matplotlib")
    inspect("--data", books, "--picture", tmp_path / "lengths.svg")
    svg = (tmp_path / "lengths.svg").read_text()
    assert "trained 256" in svg
    assert "target 512" in svg


def test_passes_are_those_of_a_run(books, tokenizer, tmp_path):
    notes = write(tmp_path / "notes.jsonl", [{"text": text(n, 40 + n)} for n in range(60)])
    mixing = {"data_weights": [1.0, 3.0], "packing": "concatenate", "short_share": 0.25}
    settings = {"row_length": TARGET, "trained_length": TRAINED, "seed": 42}
    settings["share"] = RowShare(batch=2)
    words = ["--data", books, notes, "--short_data", notes, "--data_weights", 1, 3]
    words += ["--packing", "concatenate", "--short_share", 0.25, "--max_steps", 100]
    report = inspect_json(*words)
    assert report["tokens"] == 200 * TARGET
    sources = [str(books), str(notes)]
    *_, last = make_rows(tokenizer, 200, sources, settings, short_data=sources[1:], **mixing)
    for row in report["rows"]:
        counts = last["row"]["counts"]["short: " * row["short"] + row["source"]]
        own = sum(token_lengths(Path(row["source"]), tokenizer))
        used = counts["tokens"] / own
        assert row["passes"] == pytest.approx(used, rel=0.05)


def test_each_stage_is_inspected(books, tmp_path):
    pytest.importorskip("datasketch")
    pytest.importorskip("matplotlib")
    notes = write(tmp_path / "notes.jsonl", [{"text": text(n, 900)} for n in range(3)])
    keys = {"model": str(TINY), "method": "yarn", "max_steps": 4, "data": str(books)}
    stages = [{"factor": 2}, {"factor": 4, "data": str(notes)}]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(keys | {"stages": stages}))
    words = ["--config", recipe, "--inspect-data", "--picture", tmp_path / "a.svg"]
    words += ["--write-deduplicated", tmp_path / "clean"]
    printed = run_in_this_process("finetune", *words).stdout
    first, second = printed.split("stage 2\n")
    assert "<- target 512" in first
    assert "<- target 1,024" in second
    assert (str(books) in first, str(books) in second) == (True, False)
    assert [p.name for p in sorted((tmp_path / "clean").rglob("*"))] == [
        *("stage-1", "books.jsonl", "stage-2", "notes.jsonl")
    ]
    assert sorted(p.name for p in tmp_path.glob("*.svg")) == ["a-stage-1.svg", "a-stage-2.svg"]
    report = json.loads(run_in_this_process("finetune", *words[:3], "--json").stdout)
    assert [stage["target_length"] for stage in report["stages"]] == [512, 1024]
    recipe.write_text(json.dumps(keys | {"stages": [stages[0], {"data": "none.jsonl"}]}))
    result = run_in_this_process("finetune", *words[:3])
    assert (result.returncode, "stage 2 of 2: " in result.stderr) == (1, True)


def test_a_source_that_gives_no_row_is_named(tmp_path):
    notes = write(tmp_path / "notes.jsonl", [{"text": text(0, 40)}])
    printed = inspect("--data", notes)
    assert f"{notes} gives no row: its longest document has " in printed
    assert "and 0 are filtered; say a shorter train_length, another packing or a wider" in printed


def test_the_compression_filter_is_counted_as_in_a_run(books, tokenizer, tmp_path):
    with books.open("a") as file:
        file.write(json.dumps({"text": "again and " * 400}) + "\n")
        file.write(json.dumps({"input_ids": [5] * 700}) + "\n")
    bounds = [0.2, 1.0]
    (row,) = inspect_json("--data", books, "--compression_ratio", *bounds)["rows"]
    settings = {"row_length": TARGET, "trained_length": TRAINED, "seed": 42}
    *_, last = make_rows(
        tokenizer, row["rows"] + 1, [str(books)], settings, compression_ratio=bounds
    )
    counts = last["row"]["counts"][str(books)]
    assert counts["epochs"] == 1
    assert row["filtered"] == counts["repetitive"] + counts["noisy"] == 2
    assert row["left_out"] == counts["left_out"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--duplicates"], "--duplicates is for --inspect-data: expected both, or neither"),
        (["--inspect-limit", 3], "--inspect-limit is for --inspect-data"),
        (["--write-deduplicated", "new"], "--write-deduplicated is for --inspect-data"),
        (["--picture", "a.png"], "--picture is for --inspect-data"),
        (["--inspect-data", "--plan"], "--inspect-data trains nothing: expected no --plan"),
        (["--inspect-data", "--inspect-limit", 0], "--inspect-limit"),
        (["--inspect-data", "--picture", "a.pdf"], "a picture is an .svg or a .png file"),
        (["--inspect-data", "--data", "none.jsonl"], "no data 'none.jsonl'"),
        (["--inspect-data", "--packing", "packed"], "packing must be one of"),
        (["--inspect-data", "--lenght", "3"], "unknown key 'lenght'"),
    ],
)
def test_wrong_words_are_one_error(books, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    result = run_in_this_process("finetune", *RECIPE, "--data", books, *words)
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["books.jsonl"]


def test_an_empty_source_is_refused(tmp_path):
    blank = tmp_path / "blank.jsonl"
    blank.write_text("\n\n")
    result = run_in_this_process("finetune", *RECIPE, "--data", blank, "--inspect-data")
    assert result.returncode == 1
    assert "no documents in " in result.stderr


def test_a_missing_package_is_named_before_anything_is_read(books, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with books.open("a") as file:
        file.write("damaged\n")
    result = run_in_this_process(
        "finetune", *RECIPE, "--data", books, "--inspect-data", "--duplicates"
    )
    assert result.returncode == 1
    assert "pip install '.[train]'" in result.stderr


def test_a_source_for_long_and_short_rows_is_read_once(books):
    report = inspect_json("--data", books, "--short_share", 0.5, "--inspect-limit", 9)
    assert [source["source"] for source in report["sources"]] == [str(books)]
    assert [(row["short"], row["share"]) for row in report["rows"]] == [(False, 0.5), (True, 0.5)]


def test_files_are_named_after_their_sources(tmp_path):
    names = {
        "a/x.jsonl": "x.jsonl",
        "b/X.jsonl.gz": "X-2.jsonl",
        "hub:some/name,de@test": "some_name_de@test.jsonl",
        "novels:emma": "emma.jsonl",
        "data/*.txt": "unnamed.jsonl",
        "folder": "folder.jsonl",
        "b/x.parquet": "x-3.jsonl",
    }
    with CleanFolder(tmp_path / "clean", list(names), "text") as writer:
        for source in names:
            writer.write(source, source)
    for source, name in names.items():
        assert json.loads((tmp_path / "clean" / name).read_text()) == {"text": source}


def test_a_folder_that_was_filled_meanwhile_stays(tmp_path):
    folder = tmp_path / "clean"
    writer = CleanFolder(folder, ["a"], "text").__enter__()
    writer.write("a", "text")
    folder.mkdir()
    (folder / "mine").write_text("")
    with pytest.raises(OSError, match="the documents could not be written"):
        writer.__exit__(None, None, None)
    assert [p.name for p in tmp_path.iterdir()] == ["clean"]
    assert [p.name for p in folder.iterdir()] == ["mine"]


def test_half_of_a_surrogate_pair_is_written_as_it_was(tmp_path):
    folder = tmp_path / "clean"
    with CleanFolder(folder, ["a.jsonl"], "body") as writer:
        writer.write("a.jsonl", "ä\ud800")
        writer.write("a.jsonl", {"id": 1, "body": "ä"})
    assert (folder / "a.jsonl").read_bytes().endswith('{"id": 1, "body": "ä"}\n'.encode())
    (reader,) = find_source(str(folder), "body")
    assert [ref.load()["body"] for ref in reader.read()] == ["ä\ud800", "ä"]
