"""Test the script that measures the tiny models, at short lengths."""

import json
from pathlib import Path

import measure_tiny

ROOT = Path(__file__).parents[2]
COLUMNS = [("cached", "288"), ("stale", "288"), ("change", "288")]


def test_tables_hold_the_results(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(measure_tiny, "ONE_PASS_LENGTHS", (64,))
    monkeypatch.setattr(measure_tiny, "DECODED_LENGTHS", (288,))
    measure_tiny.main(["--models", "llama", "--sequences", "1", "--out", str(tmp_path)])
    readme = (tmp_path / "README.md").read_text()
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["command"] in readme
    rows = results["results"]["llama"]
    assert len(rows) == 26
    for name, row in rows.items():
        is_length_dependent = name == "longrope" or name.startswith("dynamic")
        assert ("stale" in row) == is_length_dependent
        assert not is_length_dependent or row["change"]["288"] > 0
        low, high = row["one pass, low"]["64"], row["one pass, high"]["64"]
        assert low <= row["one pass"]["64"] <= high
        assert f"| {name} | {row['one pass']['64']:.3f} ({low:.3f}–{high:.3f}) |" in readme
        cells = [f"{row[group][n]:.3f}" if group in row else "" for group, n in COLUMNS]
        assert f"| {name} | " + " | ".join(cells) + " |" in readme
