"""Test recommendations for a model that recalls: measurements, files, resumption and refusals."""

import json
import os
import re
import signal
from html import unescape
from types import SimpleNamespace

import pytest
import torch
from helpers.processes import FORK, run_forked
from helpers.search_fixtures import load, questions
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.inference.scorer import Scorer
from rope_patch.recommending import bench, budget, variants
from rope_patch.recommending.pipeline import recommend
from rope_patch.searching.journal import JOURNAL_FILE
from rope_patch.searching.measure import fitness
from rope_patch.searching.result.search_result import SearchResult
from rope_patch.utils.journal import JournalFile

LENGTH, TRAINED = 1024, 256
LONG_BLOCK = 6 * 1023 / 1000  # seconds on the machine below


class Machine:
    """A simulated machine that takes 1 ms a token, so that budgets do not depend on the real one.

    Attributes:
        now: The machine's clock, in seconds.
        scored: The number of samples scored so far.
    """

    def __init__(self, patch):
        self.now, self.scored = 0.0, 0
        score = Scorer.score

        def timed(scorer, unit):
            self.now += scorer.cost(unit) / 1000
            self.scored += len(unit)
            return score(scorer, unit)

        patch.setattr(Scorer, "score", timed)
        for module in (bench, budget, fitness):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def samples(long=12, short=12, length=LENGTH):
    return questions(length, long, seed=1) + questions(TRAINED, short, seed=2)


def recommend_on_samples(model, **changes):
    arguments = {
        "length": LENGTH,
        "budget": 10,
        "samples": samples(),
        "search": False,
        "progress": False,
        "command": "made by a test",
    }
    return recommend(model, **(arguments | changes))


def row(recommendation, name):
    return next(row for row in recommendation.rows if row["name"] == name)


@pytest.fixture(scope="module")
def finished_run(model, tmp_path_factory):
    """Return the recommendation, the folder and the machine of a run that includes a search."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch)
        recommendation = recommend_on_samples(
            model, samples=samples(36, 24), search=True, budget=6, folder=folder
        )
    return recommendation, folder, machine


def test_a_method_that_holds_is_recommended(finished_run):
    recommendation, _, _ = finished_run
    assert recommendation.outcome == "use"
    assert recommendation.method not in ("plain", "linear", "dynamic-linear", None)
    best = row(recommendation, recommendation.method)
    assert best["long"]["accuracy"][0] > 0.9
    assert f"Use {recommendation.method} at 1,024 tokens" in recommendation.verdict
    assert row(recommendation, "plain")["long"]["accuracy"][0] < 0.5
    assert row(recommendation, "linear")["long"]["accuracy"][0] < 0.6
    assert row(recommendation, "linear")["behind"]["nll"][1] > 0
    for name in ("linear", "plain", "dynamic-linear"):
        assert "worse" in row(recommendation, name)["status"]


@pytest.mark.parametrize("name", ["ntk", "self-extend", "jet-long", "rerope"])
def test_a_row_equals_the_scores_of_the_patched_model(finished_run, model, name):
    """The reference is transformers' forward with all logits and their argmax."""
    recommendation, folder, _ = finished_run
    measured = row(recommendation, name)
    count = measured["long"]["samples"]
    entries = [json.loads(line) for line in (folder / JOURNAL_FILE).read_text().splitlines()[1:]]
    groups = [
        group
        for line in entries
        if re.match(rf'long/\d/\["{name}"', line["key"])
        for group in line["value"]["groups"]
    ]
    assert len(groups) == count
    row_samples = [sample for sample in questions(LENGTH, 36, seed=1) if sample.group in groups]
    ids = torch.tensor([sample.ids for sample in row_samples])
    with rope_patch.patch(model, name, length=LENGTH), torch.no_grad():
        logits = model(ids).logits.float()
    positions = torch.tensor([sample.positions for sample in row_samples])
    targets = ids.gather(1, positions)
    answer_logits = logits.gather(1, (positions - 1)[:, :, None].expand(-1, -1, logits.shape[-1]))
    nll = -answer_logits.log_softmax(-1).gather(2, targets[:, :, None])
    assert measured["long"]["accuracy"][0] == pytest.approx(
        (answer_logits.argmax(-1) == targets).double().mean()
    )
    assert measured["long"]["nll"][0] == pytest.approx(nll.double().mean().item(), rel=1e-4)


def test_dynamic_methods_equal_static_ones_at_length_and_the_plain_model_within(finished_run):
    recommendation, _, _ = finished_run
    for name in ("yarn", "ntk-by-parts", "llama3", "linear"):
        assert row(recommendation, f"dynamic-{name}")["long"] == row(recommendation, name)["long"]
        assert row(recommendation, f"dynamic-{name}")["price"]["nll"] == [0, 0, 0]
        assert row(recommendation, f"dynamic-{name}")["leaves_short"]
        assert not row(recommendation, name)["leaves_short"]
    for name in variants.MAPS:
        assert row(recommendation, name)["price"]["nll"] == [0, 0, 0]
        assert row(recommendation, name)["leaves_short"]
        assert row(recommendation, name)["engines"] == []
    assert row(recommendation, "dynamic")["long"] == row(recommendation, "ntk")["long"]
    assert row(recommendation, "linear")["price"]["nll"][1] > 0.5  # it halves what the model can
    assert row(recommendation, "linear")["engines"] == row(recommendation, "plain")["engines"]
    assert row(recommendation, "dynamic-yarn")["engines"] == []


def test_nothing_is_measured_twice_and_the_best_gets_more_samples(finished_run):
    recommendation, folder, machine = finished_run
    keys = [
        json.loads(line)["key"] for line in (folder / JOURNAL_FILE).read_text().splitlines()[1:]
    ]
    assert keys.count("budget/6.0") == 1
    assert len(keys) == len(set(keys))
    first = [key for key in keys if key.startswith("long/0/")]
    assert len(first) == 9 + any(key.startswith("search/") for key in keys)
    assert recommendation.samples > 6
    assert row(recommendation, "linear")["long"]["samples"] == 6
    assert row(recommendation, recommendation.method)["long"]["samples"] == recommendation.samples
    assert machine.now <= 6 * 60 + LONG_BLOCK
    assert recommendation.seconds == pytest.approx(machine.now)


def test_the_search_ends_in_time_and_is_compared_on_held_out_samples(finished_run, model):
    recommendation, folder, _ = finished_run
    assert recommendation.found is not None
    assert len(recommendation.found.history) > 10
    searched = next(row for row in recommendation.rows if row["name"].startswith("searched"))
    assert searched["long"]["samples"] >= 6
    loaded = SearchResult.load(folder / "searched")
    assert loaded.arguments() == recommendation.found.arguments()
    assert loaded.held_out["found"]["nll"] == searched["long"]["nll"][0]
    assert loaded.strategy in ("yarn-rcd", "curve")
    short_original = next(row for row in recommendation.rows if row["name"].endswith("short kept"))
    assert short_original["long"] == searched["long"]
    with rope_patch.patch(model, "longrope", **loaded) as handle:
        (short,) = handle.frequencies_at(TRAINED).values()
        (plain,) = handle.original_frequencies.values()
        assert torch.allclose(short.inv_freq, plain.inv_freq, rtol=1e-6)


def test_files_hold_the_printed_recommendation(finished_run):
    recommendation, folder, _ = finished_run
    record = json.loads((folder / "recommendation.json").read_text())
    assert record["verdict"] == recommendation.verdict
    assert [row["name"] for row in record["rows"]] == [row["name"] for row in recommendation.rows]
    page, printed = (folder / "recommendation.md").read_text(), str(recommendation)
    for text in (page, printed):
        assert recommendation.verdict in text
        assert recommendation.python in text
        assert all(row["name"] in text for row in recommendation.rows)
        assert "documents" in text  # not measured: the samples come without texts
    assert page.count("| dynamic-llama3 |") == 1
    model = load()
    handle = eval(recommendation.python, {"rope_patch": rope_patch, "model": model})
    assert handle.length == LENGTH


def test_a_repeated_run_measures_nothing(finished_run, model, machine):
    recommendation, folder, _ = finished_run
    before = (folder / JOURNAL_FILE).read_text().count('"groups"')
    repeated = recommend_on_samples(
        model, samples=samples(36, 24), search=True, budget=6, folder=folder
    )
    assert machine.scored == 0
    assert (folder / JOURNAL_FILE).read_text().count('"groups"') == before
    assert (repeated.verdict, repeated.reasons) == (recommendation.verdict, recommendation.reasons)
    for ours, theirs in zip(repeated.rows, recommendation.rows, strict=True):
        assert ours == theirs
    assert repeated.found.history == recommendation.found.history


@pytest.mark.parametrize("line", ["plan/search", "search/9", "long/1", "last"])
def test_a_run_killed_within_its_budget_comes_to_the_same_choices(
    finished_run, model, machine, tmp_path, line
):
    """Cut the journal where a kill would have: rounds, samples and the search go by the time."""
    recommendation, folder, _ = finished_run
    lines = (folder / JOURNAL_FILE).read_text().splitlines(keepends=True)
    keys = [json.loads(each)["key"] for each in lines[1:]]
    stop = (
        len(keys) if line == "last" else next(i for i, k in enumerate(keys) if k.startswith(line))
    )
    (tmp_path / JOURNAL_FILE).write_text("".join(lines[: stop + 1]))
    machine.now = 200.0  # the time that was lost
    resumed = recommend_on_samples(
        model, samples=samples(36, 24), search=True, budget=6, folder=tmp_path
    )
    resumed_lines = (tmp_path / JOURNAL_FILE).read_text().splitlines()[1:]
    assert [json.loads(each)["key"] for each in resumed_lines] == keys
    assert resumed.rows == recommendation.rows
    assert (resumed.verdict, resumed.reasons) == (recommendation.verdict, recommendation.reasons)
    assert resumed.not_measured == recommendation.not_measured
    assert resumed.seconds == pytest.approx(recommendation.seconds)


@pytest.mark.slow
def test_a_larger_budget_continues_the_run(model, machine, tmp_path):
    small = recommend_on_samples(model, budget=1.4, samples=samples(24, 24), folder=tmp_path)
    spent, scored = machine.now, machine.scored
    assert spent <= 1.4 * 60 + LONG_BLOCK
    large = recommend_on_samples(model, budget=4, samples=samples(24, 24), folder=tmp_path)
    assert large.samples > small.samples
    fresh = recommend_on_samples(model, budget=4, samples=samples(24, 24))
    assert large.verdict == fresh.verdict
    assert large.seconds == pytest.approx(machine.now - spent - fresh.seconds + spent)
    assert scored > 0


@pytest.mark.parametrize("after", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_a_killed_run_resumes(model, tmp_path, machine, after):
    process = FORK.Process(target=_recommend_until_killed, args=(after, tmp_path))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    lines = (tmp_path / JOURNAL_FILE).read_text().splitlines()
    assert len(lines) == 1 + after
    resumed = recommend_on_samples(model, folder=tmp_path, most=6)
    resumed_count = machine.scored
    unbroken = recommend_on_samples(model, most=6)
    journal_count = sum(len(json.loads(line)["value"].get("nll", ())) for line in lines[1:])
    assert resumed_count + journal_count == machine.scored - resumed_count
    assert (resumed.verdict, resumed.rows, resumed.reasons) == (
        unbroken.verdict,
        unbroken.rows,
        unbroken.reasons,
    )


def _recommend_until_killed(after, folder):
    append, calls = JournalFile.append, []

    def append_or_kill(self, *entries):
        if len(calls) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        calls.append(entries)
        append(self, *entries)

    JournalFile.append = append_or_kill
    recommend_on_samples(load(), folder=folder, most=6)


def test_a_budget_that_is_too_small_is_refused_with_a_sufficient_one(model, machine, tmp_path):
    with pytest.raises(ValueError, match="the budget is too small") as refusal:
        recommend_on_samples(model, budget=0.2, folder=tmp_path)
    assert machine.now <= 0.2 * 60 + LONG_BLOCK
    minutes = float(re.search(r"about ([\d.]+) minutes", str(refusal.value)).group(1))
    assert 0.4 < minutes < 1.0  # three blocks at the length, three within, and a margin
    machine.now = 0.0
    sufficient = recommend_on_samples(model, budget=minutes, folder=tmp_path)
    assert {row["name"] for row in sufficient.rows if row["long"]} >= {"plain", "yarn"}
    unmeasured = [row for row in sufficient.rows if row["long"] is None]
    assert all("budget ended" in row["status"] for row in unmeasured)
    assert unmeasured
    assert machine.now <= 60 * minutes + LONG_BLOCK


def test_a_model_that_cannot_answer_gets_no_recommendation(machine):
    torch.manual_seed(0)
    untrained = AutoModelForCausalLM.from_config(load().config)
    recommendation = recommend_on_samples(untrained)
    assert (recommendation.method, recommendation.outcome, recommendation.python) == (
        None,
        "cannot answer",
        "",
    )
    assert "Nothing can be recommended" in recommendation.verdict
    assert machine.scored == 12  # before anything long was read
    assert recommendation.verdict in str(recommendation)
    assert str(recommendation).splitlines()[0] in unescape(recommendation._repr_html_())


def test_no_method_is_recommended_if_none_holds(model, machine, monkeypatch):
    monkeypatch.setattr(variants, "STATIC_METHODS", ("linear",))
    monkeypatch.setattr(variants, "MAPS", ())
    recommendation = recommend_on_samples(model)
    assert (recommendation.method, recommendation.outcome, recommendation.python) == (
        None,
        "nothing holds",
        "",
    )
    assert "Nothing here holds at 1,024 tokens" in recommendation.verdict
    assert "Fine-tune" in recommendation.verdict
    assert "less than 50%" in " ".join(recommendation.reasons)


def test_the_model_is_unchanged_afterwards(model):
    ids = torch.tensor([questions(TRAINED, 1)[0].ids])
    model.train()
    with torch.no_grad():
        before = model(ids).logits
        recommend_on_samples(model, samples=samples(6, 6), most=6)
        assert torch.equal(model(ids).logits, before)
    assert model.training
    assert rope_patch.current(model) is None
    model.eval()


def test_a_failing_method_is_excluded_and_reported(model, machine, monkeypatch):
    measure = bench.Fitness.measure

    def measure_or_raise(self, candidate, against=None):
        if candidate is not None and candidate.method == "yarn":
            raise AssertionError("not reached") if self is None else RuntimeError("no memory")
        return measure(self, candidate, against)

    def measure_with_error(self, candidate, against=None):
        try:
            return measure_or_raise(self, candidate, against)
        except RuntimeError as error:
            measurement = measure(self, None)
            return type(measurement)(
                **{**vars(measurement), "error": str(error), "complete": False}
            )

    monkeypatch.setattr(bench.Fitness, "measure", measure_with_error)
    recommendation = recommend_on_samples(model)
    assert row(recommendation, "yarn")["status"] == "failed: no memory"
    assert row(recommendation, "dynamic-yarn")["long"] is None
    assert recommendation.method in (
        "llama3",
        "ntk-by-parts",
        "dynamic-llama3",
        "dynamic-ntk-by-parts",
        *variants.MAPS,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 0}, "more than 0 minutes"),
        ({"budget": -1.0}, "more than 0 minutes"),
        ({"budget": float("nan")}, "more than 0 minutes"),
        ({"most": 5}, "at least 6"),
        ({"length": 200}, "trained"),
        ({"short_length": 300}, "at most the trained length of 256"),
        ({"length": 600}, "samples of up to 1,024 tokens"),
        ({"samples": samples(5, 12)}, "5 of 17 samples have more than the trained 256"),
        ({"samples": samples(12, 3)}, "3 of 15 samples have at most the trained 256"),
        ({"samples": None}, "tokenizer"),
        ({"text": "emma"}, "tokenizer"),
    ],
)
def test_bad_arguments_are_refused(model, changes, message):
    with pytest.raises(ValueError, match=message):
        recommend_on_samples(model, **changes)


def test_a_budget_that_is_no_number_is_refused(model):
    with pytest.raises(TypeError, match="number of minutes"):
        recommend_on_samples(model, budget="10")


def test_a_patched_model_and_a_foreign_folder_are_refused(model, machine, tmp_path):
    with (
        rope_patch.patch(model, "yarn", factor=2),
        pytest.raises(ValueError, match="patched already"),
    ):
        recommend_on_samples(model)
    recommend_on_samples(model, samples=samples(6, 6), folder=tmp_path)
    before = (tmp_path / JOURNAL_FILE).read_bytes()
    with pytest.raises(ValueError, match="seed is 42 there and 1 here"):
        recommend_on_samples(model, samples=samples(6, 6), folder=tmp_path, seed=1)
    assert (tmp_path / JOURNAL_FILE).read_bytes() == before


@pytest.mark.slow
def test_several_processes_give_the_same_recommendation(model, tmp_path):
    def recommend_in_folder():
        recommendation = recommend_on_samples(load(), folder=tmp_path, most=6)
        return recommendation.verdict, recommendation.rows

    alone = recommend_on_samples(model, most=6)
    for verdict, rows in run_forked(recommend_in_folder, patience=500):
        assert verdict == alone.verdict
        for ours, theirs in zip(rows, alone.rows, strict=True):
            assert ours["name"] == theirs["name"]
            if ours["long"]:
                assert ours["long"]["nll"] == pytest.approx(theirs["long"]["nll"], rel=1e-5)
    assert json.loads((tmp_path / "recommendation.json").read_text())["verdict"] == alone.verdict
