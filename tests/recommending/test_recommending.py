"""Test recommendations for a model that recalls: measurements, files, resumption and refusals."""

import json
import math
import os
import random
import re
import signal
from dataclasses import replace
from html import unescape
from statistics import fmean

import pytest
import torch
from helpers.processes import FORK, run_forked
from helpers.search_fixtures import load, questions
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.inference import Sample
from rope_patch.runs import JournalFile
from rope_patch.statistics import holm, mean_test

LENGTH, TRAINED = 1024, 256
LONG_BLOCK = 6 * 1023 / 1000  # seconds on the machine below
MAPS = ("self-extend", "jet-long", "rerope")


class Machine:
    """A simulated machine that takes 1 ms a token, so that budgets do not depend on the real one.

    Attributes:
        now: The machine's clock, in seconds.
        scored: The number of samples read so far.
        longest: The most tokens of a sample.
    """

    def __init__(self, model, patch):
        self.now, self.scored, self.longest = 0.0, 0, 0
        self.watch(model)
        patch.setattr("time.monotonic", lambda: self.now)

    def watch(self, model):
        """Let the clock go on with what a model reads."""

        def read(module, arguments):
            rows, tokens = arguments[0].shape
            self.now += rows * tokens / 1000
            self.scored += rows
            self.longest = max(self.longest, tokens)

        return model.register_forward_pre_hook(read)


@pytest.fixture
def machine(model, monkeypatch):
    machine = Machine(model, monkeypatch)
    yield machine
    model._forward_pre_hooks.clear()


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
    return rope_patch.recommend(model, **(arguments | changes))


WHOLE = {"samples": samples(36, 24), "search": True, "budget": 5}
SMALL = {"length": 512, "samples": samples(6, 6, 512), "most": 6}


def row(recommendation, name):
    return next(row for row in recommendation.rows if row["name"] == name)


def journal_lines(folder):
    return (folder / "state.jsonl").read_text().splitlines(keepends=True)


def journal_keys(folder):
    return [json.loads(line)["key"] for line in journal_lines(folder)[1:]]


@pytest.fixture(scope="module")
def finished_run(model, tmp_path_factory):
    """Return the recommendation, the folder and the machine of a run that includes a search."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(model, patch)
        recommendation = recommend_on_samples(model, folder=folder, **WHOLE)
    model._forward_pre_hooks.clear()
    return recommendation, folder, machine


def test_a_method_that_holds_is_recommended(finished_run):
    recommendation, _, _ = finished_run
    assert recommendation.outcome == "use"
    assert recommendation.method not in ("plain", "linear", "dynamic-linear", None)
    best = row(recommendation, recommendation.method)
    assert best["long"]["accuracy"][0] > 0.9
    assert f"Use {recommendation.method} at 1,024 tokens" in recommendation.verdict
    assert best["usable"]["lengths"][-1] == 1024
    assert "Usable length: " in recommendation.verdict
    assert row(recommendation, "plain")["long"]["accuracy"][0] < 0.5
    assert row(recommendation, "linear")["long"]["accuracy"][0] < 0.6
    assert row(recommendation, "linear")["behind"]["nll"][1] > 0
    for name in ("linear", "plain", "dynamic-linear"):
        assert "worse" in row(recommendation, name)["status"]


@pytest.mark.parametrize(
    "name",
    [
        "ntk",
        "self-extend",
        pytest.param("jet-long", marks=pytest.mark.slow),
        pytest.param("rerope", marks=pytest.mark.slow),
    ],
)
def test_a_row_equals_the_scores_of_the_patched_model(finished_run, model, name):
    """The reference is transformers' forward with all logits and their argmax."""
    recommendation, folder, _ = finished_run
    measured = row(recommendation, name)
    count = measured["long"]["samples"]
    groups = [
        group
        for line in map(json.loads, journal_lines(folder)[1:])
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
    for name in MAPS:
        assert row(recommendation, name)["price"]["nll"] == [0, 0, 0]
        assert row(recommendation, name)["leaves_short"]
        assert row(recommendation, name)["engines"] == []
    assert row(recommendation, "dynamic")["long"] == row(recommendation, "ntk")["long"]
    assert row(recommendation, "linear")["price"]["nll"][1] > 0.5  # it halves what the model can
    assert row(recommendation, "linear")["engines"] == row(recommendation, "plain")["engines"]
    assert row(recommendation, "dynamic-yarn")["engines"] == []


def test_nothing_is_measured_twice_and_the_best_gets_more_samples(finished_run):
    recommendation, folder, machine = finished_run
    keys = journal_keys(folder)
    assert keys.count("budget/5.0") == 1
    assert len(keys) == len(set(keys))
    first = [key for key in keys if key.startswith("long/0/")]
    assert len(first) == 9 + any(key.startswith("search/") for key in keys)
    assert recommendation.samples > 6
    assert row(recommendation, "linear")["long"]["samples"] == 6
    assert row(recommendation, recommendation.method)["long"]["samples"] == recommendation.samples
    assert machine.now <= 5 * 60 + LONG_BLOCK
    assert recommendation.seconds == pytest.approx(machine.now)


def test_the_verdict_is_that_of_a_paired_test_after_holm(finished_run):
    """Texts have one value each here, so each rotation's p comes from the journal's losses."""
    recommendation, folder, _ = finished_run
    losses = {}
    for entry in map(json.loads, journal_lines(folder)[1:]):
        if entry["key"].startswith("long/"):
            value = entry["value"]
            rotation = entry["key"].split("/", 2)[2]
            losses.setdefault(rotation, {}).update(zip(value["groups"], value["nll"], strict=True))
    plain = losses.pop("plain")
    p_values = []
    for own in losses.values():
        shared = [group for group in own if group in plain]
        p_values.append(mean_test([own[g] - plain[g] for g in shared], shared).p_value)
    expected = dict(zip(losses, holm(p_values), strict=True))
    chosen = row(recommendation, recommendation.method)
    loss = chosen["long"]["nll"][0]
    key = next(key for key, own in losses.items() if fmean(own.values()) == pytest.approx(loss))
    assert chosen["on_plain"]["p_value"] == pytest.approx(expected[key])
    assert (chosen["on_plain"]["outcome"] == "better") == (expected[key] < 0.05)
    assert f"after Holm over {len(losses)} rotations" in recommendation.reasons[-1]


def test_the_search_ends_in_time_and_is_compared_on_held_out_samples(finished_run, model):
    recommendation, folder, _ = finished_run
    assert recommendation.found is not None
    assert len(recommendation.found.history) > 10
    searched = next(row for row in recommendation.rows if row["name"].startswith("searched"))
    assert searched["long"]["samples"] >= 6
    loaded = rope_patch.SearchResult.load(folder / "searched")
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
    handle = eval(recommendation.python, {"rope_patch": rope_patch, "model": load()})
    assert handle.length == LENGTH


def test_differences_of_few_texts_are_printed_without_an_interval(finished_run):
    recommendation, _, _ = finished_run
    few = {"nll": [0.4, -math.inf, math.inf], "accuracy": None}
    cells = dict.fromkeys(("behind", "price", "prose_price"), few)
    text = str(replace(recommendation, rows=[row(recommendation, "yarn") | cells]))
    assert text.count("(no interval)") == 3
    assert text.count("+0.400 (no interval)") == 2
    assert not re.search(r"\binf\b", text)


def test_a_repeated_run_measures_nothing(finished_run, model, machine):
    recommendation, folder, _ = finished_run
    before = (folder / "state.jsonl").read_text().count('"groups"')
    repeated = recommend_on_samples(model, folder=folder, **WHOLE)
    assert machine.scored == 0
    assert (folder / "state.jsonl").read_text().count('"groups"') == before
    assert (repeated.verdict, repeated.reasons) == (recommendation.verdict, recommendation.reasons)
    assert repeated.rows == recommendation.rows
    assert repeated.found.history == recommendation.found.history


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("plan/search", marks=pytest.mark.slow),
        "search/19",
        pytest.param("long/1", marks=pytest.mark.slow),
        "last",
    ],
)
def test_a_run_killed_within_its_budget_comes_to_the_same_choices(
    finished_run, model, machine, tmp_path, line
):
    """Cut the journal where a kill would have: rounds, samples and the search go by the time."""
    recommendation, folder, _ = finished_run
    keys = journal_keys(folder)
    stop = (
        len(keys) if line == "last" else next(i for i, k in enumerate(keys) if k.startswith(line))
    )
    (tmp_path / "state.jsonl").write_text("".join(journal_lines(folder)[: stop + 1]))
    machine.now = 200.0  # the time that was lost
    resumed = recommend_on_samples(model, folder=tmp_path, **WHOLE)
    assert journal_keys(tmp_path) == keys
    assert resumed.rows == recommendation.rows
    assert (resumed.verdict, resumed.reasons) == (recommendation.verdict, recommendation.reasons)
    assert resumed.not_measured == recommendation.not_measured
    assert resumed.seconds == pytest.approx(recommendation.seconds)


@pytest.mark.slow
def test_a_larger_budget_continues_the_run(model, machine, tmp_path):
    request = {"samples": samples(24, 24)}
    small = recommend_on_samples(model, budget=1.4, folder=tmp_path, **request)
    spent = machine.now
    assert 0 < spent <= 1.4 * 60 + LONG_BLOCK
    large = recommend_on_samples(model, budget=4, folder=tmp_path, **request)
    assert large.samples > small.samples
    both = machine.now
    fresh = recommend_on_samples(model, budget=4, **request)
    assert large.verdict == fresh.verdict
    assert large.seconds == pytest.approx(both)


@pytest.fixture(scope="module")
def small_run(model, tmp_path_factory):
    """Return the recommendation and the folder of a run that leaves the model as it was."""
    folder = tmp_path_factory.mktemp("small")
    ids = torch.tensor([questions(TRAINED, 1)[0].ids])
    model.train()
    with torch.no_grad():
        before = model(ids).logits
        recommendation = recommend_on_samples(model, folder=folder, **SMALL)
        assert torch.equal(model(ids).logits, before)
    assert model.training
    assert rope_patch.current(model) is None
    model.eval()
    return recommendation, folder


@pytest.mark.parametrize("after", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_a_killed_run_resumes(small_run, model, tmp_path, after):
    unbroken, whole = small_run
    process = FORK.Process(target=_recommend_until_killed, args=(after, tmp_path))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    assert len(journal_lines(tmp_path)) == 1 + after
    resumed = recommend_on_samples(model, folder=tmp_path, **SMALL)
    assert sorted(journal_keys(tmp_path)) == sorted(journal_keys(whole))  # none of them twice
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
    recommend_on_samples(load(), folder=folder, **SMALL)


@pytest.mark.slow
def test_several_processes_give_the_same_recommendation(small_run, tmp_path):
    def recommend_in_folder():
        recommendation = recommend_on_samples(load(), folder=tmp_path, **SMALL)
        return recommendation.verdict, recommendation.rows

    alone, _ = small_run
    for verdict, rows in run_forked(recommend_in_folder, patience=500):
        assert verdict == alone.verdict
        for ours, theirs in zip(rows, alone.rows, strict=True):
            assert ours["name"] == theirs["name"]
            if ours["long"]:
                assert ours["long"]["nll"] == pytest.approx(theirs["long"]["nll"], rel=1e-5)
    assert json.loads((tmp_path / "recommendation.json").read_text())["verdict"] == alone.verdict


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


def test_a_model_that_cannot_answer_gets_no_recommendation(model, machine):
    torch.manual_seed(0)
    untrained = AutoModelForCausalLM.from_config(model.config)
    machine.watch(untrained)
    recommendation = recommend_on_samples(untrained)
    assert (recommendation.method, recommendation.outcome, recommendation.python) == (
        None,
        "cannot answer",
        "",
    )
    assert "Nothing can be recommended" in recommendation.verdict
    # Before anything long was read: 12 samples, a pass to warm up, and timed ones of 64 to 256.
    assert machine.scored == 12 + 4
    assert machine.longest <= TRAINED
    assert recommendation.verdict in str(recommendation)
    assert str(recommendation).splitlines()[0] in unescape(recommendation._repr_html_())


def test_no_method_is_recommended_if_none_holds(model, machine):
    """Of eight answers at the length, six are random: no method can know more than two."""
    draw = random.Random(0)
    blind = []
    for sample in questions(LENGTH, 6, seed=1):
        ids = list(sample.ids)
        for position in sample.positions[2:]:
            ids[position] = draw.randrange(260, 500)
        blind.append(Sample(tuple(ids), sample.answers, sample.group))
    recommendation = recommend_on_samples(
        model, samples=blind + questions(TRAINED, 6, seed=2), budget=1, most=6
    )
    assert (recommendation.method, recommendation.outcome, recommendation.python) == (
        None,
        "nothing holds",
        "",
    )
    assert "Nothing here holds at 1,024 tokens" in recommendation.verdict
    assert "Fine-tune" in recommendation.verdict
    assert "less than 50%" in " ".join(recommendation.reasons)


def test_a_failing_method_is_excluded_and_reported(model, machine, monkeypatch):
    layer = model.model.layers[0]
    forward = layer.forward

    def fail_with_yarn(*args, **kwargs):
        if "yarn" in str(rope_patch.current(model)):
            raise RuntimeError("no memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(layer, "forward", fail_with_yarn)
    recommendation = recommend_on_samples(model, budget=1.4, samples=samples(6, 6), most=6)
    assert row(recommendation, "yarn")["status"] == "failed: RuntimeError: no memory"
    assert row(recommendation, "dynamic-yarn")["long"] is None
    assert recommendation.outcome == "use"
    assert recommendation.method not in ("yarn", "dynamic-yarn", "plain")


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"budget": 0}, "more than 0 minutes"),
        ({"budget": -1.0}, "more than 0 minutes"),
        ({"budget": float("nan")}, "more than 0 minutes"),
        ({"most": 5}, "at least 6"),
        ({"length": 200}, "trained"),
        ({"short_length": 300}, "256"),
        ({"length": 600}, "1,024"),
        ({"samples": samples(5, 12)}, "5 of 17 .* more than .* 256"),
        ({"samples": samples(12, 3)}, "3 of 15 .* at most .* 256"),
        ({"samples": None}, "tokenizer"),
        ({"text": "emma"}, "tokenizer"),
    ],
)
def test_bad_arguments_are_refused(model, changes, fact):
    with pytest.raises(ValueError, match=fact):
        recommend_on_samples(model, **changes)


def test_a_budget_that_is_no_number_is_refused(model):
    with pytest.raises(TypeError, match="number of minutes"):
        recommend_on_samples(model, budget="10")


def test_a_patched_model_and_a_foreign_folder_are_refused(small_run, model):
    with (
        rope_patch.patch(model, "yarn", factor=2),
        pytest.raises(ValueError, match="patched already"),
    ):
        recommend_on_samples(model)
    _, folder = small_run
    before = (folder / "state.jsonl").read_bytes()
    with pytest.raises(ValueError, match="seed is 42 there and 1 here"):
        recommend_on_samples(model, folder=folder, seed=1, **SMALL)
    assert (folder / "state.jsonl").read_bytes() == before
