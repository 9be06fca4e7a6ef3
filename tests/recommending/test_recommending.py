"""Recommendations on a model that really recalls: what is measured, kept, continued and said."""

import json
import os
import re
import signal
from types import SimpleNamespace

import pytest
import torch
from helpers.processes import FORK, together
from helpers.search_fixtures import load, questions
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.inference.scorer import Scorer
from rope_patch.recommending import bench, budget, variants
from rope_patch.recommending.pipeline import recommend
from rope_patch.searching.journal import JOURNAL_FILE
from rope_patch.searching.result.search_result import SearchResult
from rope_patch.utils.journal import JournalFile

LENGTH, TRAINED = 1024, 256
LONG_BLOCK = 6 * 1023 / 1000  # seconds on the machine below


class Machine:
    """One that takes a millisecond for each token, so that budgets do not depend on this one.

    Attributes:
        now: Its clock, in seconds.
        scored: Samples.
    """

    def __init__(self, patch):
        self.now, self.scored = 0.0, 0
        score = Scorer.score

        def timed(scorer, unit):
            self.now += scorer.cost(unit) / 1000
            self.scored += len(unit)
            return score(scorer, unit)

        patch.setattr(Scorer, "score", timed)
        for module in (bench, budget):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@pytest.fixture(scope="module")
def model():
    return load()


def samples(long=12, short=12, length=LENGTH):
    return questions(length, long, seed=1) + questions(TRAINED, short, seed=2)


def ask(model, **changes):
    given = {
        "length": LENGTH,
        "budget": 10,
        "samples": samples(),
        "search": False,
        "progress": False,
        "command": "made by a test",
    }
    return recommend(model, **(given | changes))


def row(found, name):
    return next(row for row in found.rows if row["name"] == name)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A run with all that there is, a search as well; its folder; what it scored."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch)
        found = ask(model, samples=samples(36, 24), search=True, budget=4, folder=folder)
    return found, folder, machine


def test_it_recommends_what_holds(whole):
    found, _, _ = whole
    assert found.outcome == "use"
    assert found.method not in ("plain", "linear", "dynamic-linear", None)
    chosen = row(found, found.method)
    assert chosen["long"]["accuracy"][0] > 0.9
    assert f"Use {found.method} at 1,024 tokens" in found.verdict
    assert row(found, "plain")["long"]["accuracy"][0] < 0.5
    assert row(found, "linear")["long"]["accuracy"][0] < 0.6
    assert row(found, "linear")["behind"]["nll"][1] > 0
    for name in ("linear", "plain", "dynamic-linear"):
        assert "worse" in row(found, name)["status"]


def test_a_row_is_what_the_patched_model_answers(whole, model):
    """By transformers' own forward, all logits and the argmax."""
    found, folder, _ = whole
    said = row(found, "ntk")
    count = said["long"]["samples"]
    kept = [json.loads(line) for line in (folder / JOURNAL_FILE).read_text().splitlines()[1:]]
    groups = [
        group
        for line in kept
        if re.match(r'long/\d/\["ntk"', line["key"])
        for group in line["value"]["groups"]
    ]
    assert len(groups) == count
    ours = [sample for sample in questions(LENGTH, 36, seed=1) if sample.group in groups]
    ids = torch.tensor([sample.ids for sample in ours])
    with rope_patch.patch(model, "ntk", length=LENGTH), torch.no_grad():
        logits = model(ids).logits.float()
    places = torch.tensor([sample.positions for sample in ours])
    wanted = ids.gather(1, places)
    before = logits.gather(1, (places - 1)[:, :, None].expand(-1, -1, logits.shape[-1]))
    nll = -before.log_softmax(-1).gather(2, wanted[:, :, None])
    assert said["long"]["accuracy"][0] == pytest.approx(
        (before.argmax(-1) == wanted).double().mean()
    )
    assert said["long"]["nll"][0] == pytest.approx(nll.double().mean().item(), rel=1e-4)


def test_following_methods_are_the_static_ones_there_and_the_plain_model_here(whole):
    found, _, _ = whole
    for name in ("yarn", "ntk-by-parts", "llama3", "linear"):
        assert row(found, f"dynamic-{name}")["long"] == row(found, name)["long"]
        assert row(found, f"dynamic-{name}")["price"]["nll"] == [0, 0, 0]
        assert row(found, f"dynamic-{name}")["leaves_short"]
        assert not row(found, name)["leaves_short"]
    assert row(found, "dynamic")["long"] == row(found, "ntk")["long"]
    assert row(found, "linear")["price"]["nll"][1] > 0.5  # it halves what the model can
    assert row(found, "linear")["engines"] == row(found, "plain")["engines"]
    assert row(found, "dynamic-yarn")["engines"] == []


def test_nothing_is_measured_twice_and_the_best_on_more(whole):
    found, folder, machine = whole
    keys = [
        json.loads(line)["key"] for line in (folder / JOURNAL_FILE).read_text().splitlines()[1:]
    ]
    keys = [key for key in keys if key != bench.CLOCK_KEY]
    assert len(keys) == len(set(keys))
    first = [key for key in keys if key.startswith("long/0/")]
    assert len(first) == 6 + any(key.startswith("search/") for key in keys)
    assert found.samples > 6
    assert row(found, "linear")["long"]["samples"] == 6
    assert row(found, found.method)["long"]["samples"] == found.samples
    assert machine.now <= 4 * 60 + LONG_BLOCK
    assert found.seconds == pytest.approx(machine.now)


def test_the_search_ends_with_its_time_and_is_compared_on_other_samples(whole, model):
    found, folder, _ = whole
    assert found.found is not None
    assert len(found.found.history) > 10
    searched = next(row for row in found.rows if row["name"].startswith("searched"))
    assert searched["long"]["samples"] >= 6
    loaded = SearchResult.load(folder / "searched")
    assert loaded.arguments() == found.found.arguments()
    assert loaded.held_out["found"]["nll"] == searched["long"]["nll"][0]
    assert loaded.strategy in ("yarn-rcd", "curve")
    kept = next(row for row in found.rows if row["name"].endswith("short kept"))
    assert kept["long"] == searched["long"]
    with rope_patch.patch(model, "longrope", **loaded) as handle:
        (short,) = handle.frequencies_at(TRAINED).values()
        (plain,) = handle.original_frequencies.values()
        assert torch.allclose(short.inv_freq, plain.inv_freq, rtol=1e-6)


def test_what_is_written_says_the_same(whole):
    found, folder, _ = whole
    said = json.loads((folder / "recommendation.json").read_text())
    assert said["verdict"] == found.verdict
    assert [row["name"] for row in said["rows"]] == [row["name"] for row in found.rows]
    page, shown = (folder / "recommendation.md").read_text(), str(found)
    for text in (page, shown):
        assert found.verdict in text
        assert found.python in text
        assert all(row["name"] in text for row in found.rows)
        assert "documents" in text  # not measured: the samples come without texts
    assert page.count("| dynamic-llama3 |") == 1
    model = load()
    handle = eval(found.python, {"rope_patch": rope_patch, "model": model})
    assert handle.length == LENGTH


def test_the_same_again_measures_nothing(whole, model, machine):
    found, folder, _ = whole
    before = (folder / JOURNAL_FILE).read_text().count('"groups"')
    again = ask(model, samples=samples(36, 24), search=True, budget=4, folder=folder)
    assert machine.scored == 0
    assert (folder / JOURNAL_FILE).read_text().count('"groups"') == before
    assert (again.verdict, again.reasons) == (found.verdict, found.reasons)
    for ours, theirs in zip(again.rows, found.rows, strict=True):
        assert ours == theirs
    assert again.found.history == found.found.history


@pytest.mark.slow
def test_a_larger_budget_goes_on(model, machine, tmp_path):
    small = ask(model, budget=1.4, samples=samples(24, 24), folder=tmp_path)
    spent, scored = machine.now, machine.scored
    assert spent <= 1.4 * 60 + LONG_BLOCK
    large = ask(model, budget=4, samples=samples(24, 24), folder=tmp_path)
    assert large.samples > small.samples
    fresh = ask(model, budget=4, samples=samples(24, 24))
    assert large.verdict == fresh.verdict
    assert large.seconds == pytest.approx(machine.now - spent - fresh.seconds + spent)
    assert scored > 0


@pytest.mark.parametrize("after", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_a_killed_run_goes_on(model, tmp_path, machine, after):
    process = FORK.Process(target=_killed, args=(after, tmp_path))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    lines = (tmp_path / JOURNAL_FILE).read_text().splitlines()
    assert len(lines) == 1 + after
    on = ask(model, folder=tmp_path, most=6)
    rest = machine.scored
    unbroken = ask(model, most=6)
    measured = sum(len(json.loads(line)["value"].get("nll", ())) for line in lines[1:])
    assert rest + measured == machine.scored - rest
    assert (on.verdict, on.rows, on.reasons) == (unbroken.verdict, unbroken.rows, unbroken.reasons)


def _killed(after, folder):
    append, calls = JournalFile.append, []

    def counted(self, *entries):
        if len(calls) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        calls.append(entries)
        append(self, *entries)

    JournalFile.append = counted
    ask(load(), folder=folder, most=6)


def test_a_budget_that_is_too_small_says_what_is_enough(model, machine, tmp_path):
    with pytest.raises(ValueError, match="the budget is too small") as refused:
        ask(model, budget=0.2, folder=tmp_path)
    assert machine.now <= 0.2 * 60 + LONG_BLOCK
    minutes = float(re.search(r"about ([\d.]+) minutes", str(refused.value)).group(1))
    assert 0.4 < minutes < 1.0  # three blocks at the length, three within, and a margin
    machine.now = 0.0
    enough = ask(model, budget=minutes, folder=tmp_path)
    assert {row["name"] for row in enough.rows if row["long"]} >= {"plain", "yarn"}
    late = [row for row in enough.rows if row["long"] is None]
    assert all("budget ended" in row["status"] for row in late)
    assert late
    assert machine.now <= 60 * minutes + LONG_BLOCK


def test_a_model_that_cannot_answer_gets_no_recommendation(machine):
    torch.manual_seed(0)
    untrained = AutoModelForCausalLM.from_config(load().config)
    found = ask(untrained)
    assert (found.method, found.outcome, found.python) == (None, "cannot answer", "")
    assert "Nothing can be recommended" in found.verdict
    assert machine.scored == 12  # before anything long was read
    assert found.verdict in str(found)


def test_it_says_where_nothing_holds(model, machine, monkeypatch):
    monkeypatch.setattr(variants, "STATIC_METHODS", ("linear",))
    found = ask(model)
    assert (found.method, found.outcome, found.python) == (None, "nothing holds", "")
    assert "Nothing here holds at 1,024 tokens" in found.verdict
    assert "Fine-tune" in found.verdict
    assert "less than 50%" in " ".join(found.reasons)


def test_the_model_is_as_before(model):
    ids = torch.tensor([questions(TRAINED, 1)[0].ids])
    model.train()
    with torch.no_grad():
        before = model(ids).logits
        ask(model, samples=samples(6, 6), most=6)
        assert torch.equal(model(ids).logits, before)
    assert model.training
    assert rope_patch.current(model) is None
    model.eval()


def test_what_fails_is_out_and_said(model, machine, monkeypatch):
    measure = bench.Fitness.measure

    def failing(self, candidate, against=None):
        if candidate is not None and candidate.method == "yarn":
            raise AssertionError("not reached") if self is None else RuntimeError("no memory")
        return measure(self, candidate, against)

    def failed(self, candidate, against=None):
        try:
            return failing(self, candidate, against)
        except RuntimeError as error:
            found = measure(self, None)
            return type(found)(**{**vars(found), "error": str(error), "complete": False})

    monkeypatch.setattr(bench.Fitness, "measure", failed)
    found = ask(model)
    assert row(found, "yarn")["status"] == "failed: no memory"
    assert row(found, "dynamic-yarn")["long"] is None
    assert found.method in ("llama3", "ntk-by-parts", "dynamic-llama3", "dynamic-ntk-by-parts")


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
def test_what_is_refused(model, changes, message):
    with pytest.raises(ValueError, match=message):
        ask(model, **changes)


def test_a_budget_is_a_number(model):
    with pytest.raises(TypeError, match="number of minutes"):
        ask(model, budget="10")


def test_a_patched_model_and_a_foreign_folder_are_refused(model, machine, tmp_path):
    with (
        rope_patch.patch(model, "yarn", factor=2),
        pytest.raises(ValueError, match="patched already"),
    ):
        ask(model)
    ask(model, samples=samples(6, 6), folder=tmp_path)
    before = (tmp_path / JOURNAL_FILE).read_bytes()
    with pytest.raises(ValueError, match="seed is 42 there and 1 here"):
        ask(model, samples=samples(6, 6), folder=tmp_path, seed=1)
    assert (tmp_path / JOURNAL_FILE).read_bytes() == before


@pytest.mark.slow
def test_several_processes_find_the_same(model, tmp_path):
    def job():
        found = ask(load(), folder=tmp_path, most=6)
        return found.verdict, found.rows

    alone = ask(model, most=6)
    for verdict, rows in together(job, patience=240):
        assert verdict == alone.verdict
        for ours, theirs in zip(rows, alone.rows, strict=True):
            assert ours["name"] == theirs["name"]
            if ours["long"]:
                assert ours["long"]["nll"] == pytest.approx(theirs["long"]["nll"], rel=1e-5)
    assert json.loads((tmp_path / "recommendation.json").read_text())["verdict"] == alone.verdict
