"""Test the comparison of ingredients: its documents, its table, and that runs are not repeated."""

import math

import extend_tiny
import pytest
import tiny_ingredients as experiment


def test_documents_have_lengths_of_all_magnitudes():
    lengths = experiment.draw_lengths(2_000_000, seed=0)
    assert 2_000_000 <= sum(lengths) < 2_000_000 + experiment.TARGET
    assert min(lengths) >= experiment.SHORTEST
    assert max(lengths) <= experiment.TARGET
    doublings = [sum(2**n <= length < 2 ** (n + 1) for length in lengths) for n in range(6, 11)]
    share = len(lengths) / 5
    assert all(abs(count - share) < 5 * math.sqrt(share) for count in doublings)


def test_a_document_is_as_long_as_asked_and_its_questions_have_labels():
    lengths = [64, 257, 2048, 100]
    records = list(extend_tiny.documents(lengths, seed=3))
    # The reader adds the end token.
    assert [len(record["input_ids"]) + 1 for record in records] == lengths
    for record in records:
        scored = [
            (token, label)
            for token, label in zip(record["input_ids"], record["labels"], strict=True)
            if label != -100
        ]
        assert scored
        assert all(token == label for token, label in scored)


def test_the_table_has_means_with_student_s_intervals_over_seeds():
    def result(price):
        return {"short price": price, "recall, 2,048": 1.0}

    results = {
        experiment.BASELINE: [result(price) for price in (0.11, 0.12, 0.13)],
        "distilled": [result(price) for price in (0.01, 0.02, 0.03)],
    }
    lines = experiment.table(results).splitlines()
    # 4.303 is Student's t for two degrees of freedom: 4.303 * 1% / sqrt(3) is 2.5%.
    assert lines[2] == "| YaRN | 3 | +12.0% (+9.5% to +14.5%) | 1.000 (1.000 to 1.000) |  |"
    assert lines[3] == (
        "| distilled | 3 | +2.0% (-0.5% to +4.5%) | 1.000 (1.000 to 1.000) | "
        "-10.0% (-10.0% to -10.0%) |"
    )


@pytest.mark.slow
def test_a_finished_run_is_not_repeated(tmp_path, capsys):
    runs = ["together", "PoSE"]
    arguments = ["--runs", *runs, "--seeds", "0", "--steps", "2"]
    arguments += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    experiment.main(arguments)
    first = capsys.readouterr().out
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*.safetensors")}
    assert files
    experiment.main(arguments)
    assert capsys.readouterr().out == first
    assert {path: path.stat().st_mtime_ns for path in files} == files
    page = (tmp_path / "out" / "README.md").read_text()
    assert all(f"| {name} | 1 |" in page for name in (experiment.BASELINE, *runs))
