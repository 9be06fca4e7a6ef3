"""Test the scripts on tiny models: their tables and statements follow the results."""

import json
import math
import re
from pathlib import Path

import extend_tiny
import measure_tiny
import pytest
import search_tiny
import search_tiny_tables as tables
import tiny_ingredients as experiment
import torch
import train_tiny
from transformers import AutoModelForCausalLM

import rope_patch

pytestmark = pytest.mark.usefixtures("never_drawn")
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


LENGTH = 512
KEYS = 24
BUDGETS = {"curve": 11, "longrope2": 20, "longrope": 20, "yarn-rcd": 2, "ntk-rcd": 2}
SIZES = search_tiny.Sizes(search=2, held_out=4)


@pytest.fixture(scope="module")
def folder_of_run(tmp_path_factory):
    """Return the folder of a small run's results and journals."""
    folder = tmp_path_factory.mktemp("search_tiny")
    with pytest.MonkeyPatch.context() as patches:
        patches.chdir(ROOT)
        patches.setattr(search_tiny, "SIZES", {KEYS: {LENGTH: SIZES}})
        patches.setattr(search_tiny, "BUDGETS", BUDGETS)
        run(folder)
        yield folder


def run(folder, *more):
    places = ["--out", str(folder / "out"), "--work", str(folder / "work")]
    search_tiny.main(["--models", "llama", *places, *more])


def results(folder):
    return json.loads((folder / "out/results.json").read_text())


def case_of(folder):
    (case,) = results(folder)["cases"].values()
    return case


def row(folder, name, columns):
    """Return the cells of the single row with that name and length."""
    readme = (folder / "out/README.md").read_text()
    cells = [re.split(r" ?\| ?", line)[1:-1] for line in readme.splitlines() if line[:1] == "|"]
    (row_cells,) = [line for line in cells if line[0].strip() == name and len(line) == columns]
    return [cell.strip() for cell in row_cells]


def test_best_so_far_is_that_of_the_history_without_yarn(folder_of_run):
    case = case_of(folder_of_run)
    for name, history in case["history"].items():
        assert history[0]["method"] == "yarn"
        assert len(history) - 1 <= BUDGETS[name]
        cells = row(folder_of_run, name, 11)
        expected, is_ended = [], False
        for count in (10, 20, 40, 100, 200):
            best = None
            for entry in history[1 : count + 1]:
                if entry["complete"] and (best is None or entry["fitness"] < best):
                    best = entry["fitness"]
            cell = "given up" if best is None else f"{best:.4f}"
            expected.append("" if is_ended else cell)
            is_ended = count >= len(history) - 1
        assert cells[1:6] == expected
        assert cells[6] == cell
        assert cells[8] == str(len(history) - 1)
        assert cells[9] == str(sum(not e["complete"] for e in history[1:]))


def test_curve_is_compared_with_the_best_of_the_evolutions(folder_of_run):
    case = case_of(folder_of_run)
    (summary,) = results(folder_of_run)["summary"].values()
    for name in ("longrope2", "longrope"):
        target = min(e["fitness"] for e in case["history"][name][1:] if e["complete"])
        needed = None
        for entry in case["history"]["curve"][1:]:
            if needed is None and entry["complete"] and entry["fitness"] <= target:
                needed = entry["number"]
        within_a_fifth = needed is not None and needed <= (len(case["history"][name]) - 1) / 5
        assert summary["curve needs"][name] == {
            "evaluations": needed,
            "at most a fifth": within_a_fifth,
        }
        assert row(folder_of_run, name, 11)[10] == (str(needed) if needed else "not reached")


@pytest.mark.parametrize(
    "name", ["curve", "curve early", "longrope", "yarn", "ntk", "linear", "none"]
)
def test_held_out_results_equal_those_of_the_patched_model(folder_of_run, name):
    """The reference is plain forward passes of a model patched here."""
    case = case_of(folder_of_run)
    generator = torch.Generator().manual_seed(search_tiny.HELD_OUT_SEED)
    input_ids, labels = train_tiny.recall_batch(generator, SIZES.held_out, LENGTH, KEYS)
    model = AutoModelForCausalLM.from_pretrained("tests/assets/tiny-llama").eval()
    if name != "none":
        candidate = case["found"].get(name, {"method": name, "options": {}})
        rope_patch.patch(model, candidate["method"], length=LENGTH, **candidate["options"])
    with torch.no_grad():
        logits = model(input_ids, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="sum"
    )
    hits = train_tiny.correct_tokens(logits, labels).sum().item()
    cells = row(folder_of_run, name, 9)
    assert float(cells[1]) == pytest.approx(losses.item() / labels.ne(-100).sum().item(), abs=1e-4)
    assert cells[3] == f"{hits} of {SIZES.held_out * KEYS}"
    yarn = case["held_out"]["yarn"]
    ours = case["held_out"][name]
    if name != "yarn":
        assert ours["against yarn"]["nll"] == pytest.approx(ours["nll"] - yarn["nll"])
        assert cells[5] == f"{ours['nll'] - yarn['nll']:+.4f}"


def test_curve_early_is_the_best_of_a_fifth_of_the_evaluations(folder_of_run):
    case = json.loads(
        (folder_of_run / "work/llama-512-24/case.json").read_text()
    )  # with all options
    complete = [entry for entry in case["history"]["curve"][:5] if entry["complete"]]
    best = min(complete, key=lambda entry: entry["fitness"])
    early = case["found"]["curve early"]
    assert early == {key: best[key] for key in ("origin", "method", "options")}
    held_out = case["held_out"]
    for evolution in ("longrope2", "longrope"):
        against = held_out["curve early"][f"against {evolution}"]
        difference = held_out["curve early"]["nll"] - held_out[evolution]["nll"]
        assert against["nll"] == pytest.approx(difference)
    readme = (folder_of_run / "out/README.md").read_text()
    assert "in its first 4 evaluations has less loss than what longrope2 found in 20" in readme


def test_missing_measurements_are_named(folder_of_run):
    assert results(folder_of_run)["missing"] == ["Qwen3, 512", "Gemma 3, 512"]
    assert (
        "Not measured here: Qwen3, 512; Gemma 3, 512."
        in (folder_of_run / "out/README.md").read_text()
    )


def test_verdicts_are_symmetric():
    def against(low, high, accuracy=0.0, p=1.0):
        return {"interval": [low, high], "accuracy": accuracy, "p": p}

    assert tables.verdict(against(-0.2, -0.1), "nll") == "better"
    assert tables.verdict(against(0.1, 0.2), "nll") == "worse"
    assert tables.verdict(against(-0.1, 0.2), "nll") == "open"
    assert tables.verdict(against(0, 0), "nll") == "same"
    assert tables.verdict(against(0, 0, 0.1, 0.01), "recall") == "better"
    assert tables.verdict(against(0, 0, -0.1, 0.01), "recall") == "worse"
    assert tables.verdict(against(0, 0, 0.1, 0.2), "recall") == "open"


def test_candidates_that_stopped_early_are_never_the_best():
    history = [
        {"number": 0, "fitness": 0.5, "complete": True},
        {"number": 1, "fitness": 0.9, "complete": False},
        {"number": 2, "fitness": math.inf, "complete": False},
        {"number": 3, "fitness": 0.4, "complete": True},
    ]
    assert tables.best_after(history, 2) is None
    assert tables.best_after(history, 3) == 0.4
    assert tables.evaluations_until(history, 0.9) == 3
    assert tables.evaluations_until(history, 0.3) is None


def test_stored_measurements_are_not_repeated(folder_of_run, monkeypatch):
    before = case_of(folder_of_run)
    png = (folder_of_run / "out/history.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    monkeypatch.setattr(
        search_tiny.Fitness, "measure", lambda *_, **__: pytest.fail("measured again")
    )
    (folder_of_run / "work/llama-512-24/case.json").unlink()
    run(folder_of_run)  # replays the searches
    assert case_of(folder_of_run) == before
    run(folder_of_run, "--report")
    assert case_of(folder_of_run) == before


def test_a_report_of_nothing_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match="no finished case"):
        run(tmp_path, "--report")
    assert not (tmp_path / "out").exists()
