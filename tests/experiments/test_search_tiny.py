"""The recipe that searches on the tiny models, small: what it writes is what its numbers say."""

import json
import math
import re
from pathlib import Path

import pytest
import search_tiny
import search_tiny_tables as tables
import torch
import train_tiny
from transformers import AutoModelForCausalLM

import rope_patch

ROOT = Path(__file__).parents[2]
LENGTH = 512
KEYS = 24
BUDGETS = {"curve": 11, "longrope2": 20, "longrope": 20, "yarn-rcd": 2, "ntk-rcd": 2}
SIZES = search_tiny.Sizes(search=2, held_out=4)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the folders of a small run: its results and its journals."""
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
    (found,) = [line for line in cells if line[0].strip() == name and len(line) == columns]
    return [cell.strip() for cell in found]


def test_best_so_far_is_the_history_s_without_yarn(written):
    case = case_of(written)
    for name, history in case["history"].items():
        assert history[0]["method"] == "yarn"
        assert len(history) - 1 <= BUDGETS[name]
        cells = row(written, name, 11)
        expected, ended = [], False
        for count in (10, 20, 40, 100, 200):
            best = None
            for entry in history[1 : count + 1]:
                if entry["complete"] and (best is None or entry["fitness"] < best):
                    best = entry["fitness"]
            shown = "given up" if best is None else f"{best:.4f}"
            expected.append("" if ended else shown)
            ended = count >= len(history) - 1
        assert cells[1:6] == expected
        assert cells[6] == shown
        assert cells[8] == str(len(history) - 1)
        assert cells[9] == str(sum(not e["complete"] for e in history[1:]))


def test_curve_is_compared_with_where_evolutions_end(written):
    case = case_of(written)
    (said,) = results(written)["summary"].values()
    for name in ("longrope2", "longrope"):
        target = min(e["fitness"] for e in case["history"][name][1:] if e["complete"])
        needed = None
        for entry in case["history"]["curve"][1:]:
            if needed is None and entry["complete"] and entry["fitness"] <= target:
                needed = entry["number"]
        fifth = needed is not None and needed <= (len(case["history"][name]) - 1) / 5
        assert said["curve needs"][name] == {"evaluations": needed, "at most a fifth": fifth}
        assert row(written, name, 11)[10] == (str(needed) if needed else "not reached")


@pytest.mark.parametrize(
    "name", ["curve", "curve early", "longrope", "yarn", "ntk", "linear", "none"]
)
def test_held_out_numbers_are_the_model_s(written, name):
    """Against plain forward passes of a model that is patched here."""
    case = case_of(written)
    generator = torch.Generator().manual_seed(search_tiny.HELD_OUT_SEED)
    input_ids, labels = train_tiny.recall_batch(generator, SIZES.held_out, LENGTH, KEYS)
    model = AutoModelForCausalLM.from_pretrained("tests/assets/tiny-llama").eval()
    if name != "none":
        said = case["found"].get(name, {"method": name, "options": {}})
        rope_patch.patch(model, said["method"], length=LENGTH, **said["options"])
    with torch.no_grad():
        logits = model(input_ids, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="sum"
    )
    hits = train_tiny.correct_tokens(logits, labels).sum().item()
    cells = row(written, name, 9)
    assert float(cells[1]) == pytest.approx(losses.item() / labels.ne(-100).sum().item(), abs=1e-4)
    assert cells[3] == f"{hits} of {SIZES.held_out * KEYS}"
    yarn = case["held_out"]["yarn"]
    ours = case["held_out"][name]
    if name != "yarn":
        assert ours["against yarn"]["nll"] == pytest.approx(ours["nll"] - yarn["nll"])
        assert cells[5] == f"{ours['nll'] - yarn['nll']:+.4f}"


def test_early_is_the_best_of_a_fifth_of_the_evolutions_evaluations(written):
    case = json.loads((written / "work/llama-512-24/case.json").read_text())  # with all options
    whole = [entry for entry in case["history"]["curve"][:5] if entry["complete"]]
    best = min(whole, key=lambda entry: entry["fitness"])
    found = case["found"]["curve early"]
    assert found == {key: best[key] for key in ("origin", "method", "options")}
    held_out = case["held_out"]
    for evolution in ("longrope2", "longrope"):
        against = held_out["curve early"][f"against {evolution}"]
        behind = held_out["curve early"]["nll"] - held_out[evolution]["nll"]
        assert against["nll"] == pytest.approx(behind)
    said = (written / "out/README.md").read_text()
    assert "in its first 4 evaluations has less loss than what longrope2 found in 20" in said


def test_what_was_not_measured_is_named(written):
    assert results(written)["missing"] == ["Qwen3, 512", "Gemma 3, 512"]
    assert "Not measured here: Qwen3, 512; Gemma 3, 512." in (written / "out/README.md").read_text()


def test_statements_go_both_ways():
    def against(low, high, accuracy=0.0, p=1.0):
        return {"interval": [low, high], "accuracy": accuracy, "p": p}

    assert tables.verdict(against(-0.2, -0.1), "nll") == "better"
    assert tables.verdict(against(0.1, 0.2), "nll") == "worse"
    assert tables.verdict(against(-0.1, 0.2), "nll") == "open"
    assert tables.verdict(against(0, 0), "nll") == "same"
    assert tables.verdict(against(0, 0, 0.1, 0.01), "recall") == "better"
    assert tables.verdict(against(0, 0, -0.1, 0.01), "recall") == "worse"
    assert tables.verdict(against(0, 0, 0.1, 0.2), "recall") == "open"


def test_given_up_is_never_the_best():
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


def test_what_was_measured_is_not_measured_again(written, monkeypatch):
    before = case_of(written)
    png = (written / "out/history.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    monkeypatch.setattr(
        search_tiny.Fitness, "measure", lambda *_, **__: pytest.fail("measured again")
    )
    (written / "work/llama-512-24/case.json").unlink()
    run(written)  # replays the searches
    assert case_of(written) == before
    run(written, "--report")
    assert case_of(written) == before


def test_a_report_of_nothing_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match="no finished case"):
        run(tmp_path, "--report")
    assert not (tmp_path / "out").exists()
