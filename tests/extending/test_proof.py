"""Test the decision by measured and made-up results, and the candidates of a recommendation."""

import copy
import os
import signal

import pytest
from extensions import LENGTH, TINY, TRAINED, step_result
from helpers.processes import FORK

from rope_patch.evaluation import RunStatistics, add_other_weights
from rope_patch.extending import (
    Candidate,
    ExtendRequest,
    base_request,
    compared_candidates,
    decide,
    plan_samples,
    read_results,
    trained_candidate,
)
from rope_patch.inference import AnswerStore

TUNED = "mixed-yarn ×4, fine-tuned"


@pytest.fixture(scope="module")
def results(finished):
    _, out = finished
    return read_results(out / "work" / "report")


def with_samples_of(results, labels):
    """Return results in which methods have the answers of others."""
    changed = copy.deepcopy(results)
    for part in (*changed["retrieval"], *changed["short"]):
        part["samples"] |= {to: part["samples"][of] for to, of in labels.items()}
    if changed["perplexity"]:
        losses = changed["perplexity"]["losses"]
        losses |= {to: losses[of] for to, of in labels.items()}
    return changed


def alone(results, label):
    """Return the results of one method, as a run on other weights has them."""
    own = copy.deepcopy(results)
    own["methods"] = [m for m in own["methods"] if m["label"] == label]
    for part in (*own["retrieval"], *own["short"]):
        part["samples"] = {label: part["samples"][label]}
    if own["perplexity"]:
        own["perplexity"]["losses"] = {label: own["perplexity"]["losses"][label]}
    own["run"]["weights"] = "sampled-sha256:another"
    return own


def labels(results):
    return [method["label"] for method in results["methods"][1:]]


def test_the_first_candidate_that_helps_is_chosen(results):
    first, *others = labels(results)
    assert decide(results, LENGTH, None).label == first
    assert others
    worse = with_samples_of(results, {first: "none"})
    decision = decide(worse, LENGTH, None)
    assert decision.label == others[0]
    assert f"{first} changes the likelihood of no right answer" in decision.sentences[0]


def test_one_that_no_engine_runs_gives_way_to_another_that_helps(results):
    first, second, *_ = labels(results)
    decision = decide(results, LENGTH, None, [first])
    assert decision.label == second
    assert f"No engine runs {first}" in decision.sentences[-1]
    alone_helps = with_samples_of(results, {second: "none"})
    assert decide(alone_helps, LENGTH, None, [first]).label == first


def test_nothing_is_chosen_where_no_answer_is_likelier(results):
    same = with_samples_of(results, dict.fromkeys(labels(results), "none"))
    decision = decide(same, LENGTH, None)
    assert decision.label is None
    assert len([each for each in decision.sentences if "not shown to be likelier" in each]) == 2


def test_a_trained_model_must_beat_the_rotation_alone(results):
    first, *_ = labels(results)
    equal = add_other_weights(results, alone(results, first), {first: TUNED})
    decision = decide(equal, LENGTH, TUNED)
    assert decision.label == first
    assert f"That training adds to {first} is not shown" in decision.sentences[-1]
    # Where no rotation helps and the trained model does, it is chosen.
    bad = with_samples_of(results, dict.fromkeys(labels(results), "none"))
    both = add_other_weights(bad, alone(results, first), {first: TUNED})
    assert decide(both, LENGTH, TUNED).label == TUNED


def test_runs_of_other_questions_and_taken_labels_are_refused(results):
    first, *_ = labels(results)
    other = alone(results, first)
    with pytest.raises(ValueError, match=first):
        add_other_weights(results, other, {first: first})
    for row in other["retrieval"][0]["samples"][first]:
        row["id"] += " of another seed"
    with pytest.raises(ValueError, match="questions"):
        add_other_weights(results, other, {first: TUNED})


# -- made-up answers -------------------------------------------------------------------------------


MADE_UP_TUNED = "yarn, fine-tuned"
TEXTS = 8


def made_up_rows(losses):
    return [
        {
            "id": str(text),
            "text": text,
            "length": LENGTH,
            "depth": 50,
            "score": 0.0,
            "log_likelihood": -4 * loss,
            "target_tokens": 4,
        }
        for text, loss in enumerate(losses)
    ]


def made_up_results(changes):
    """Return answers under which training changes the loss of each text by a number of nats."""
    losses = {"none": [3 + 0.1 * i for i in range(TEXTS)], "yarn": [1.0] * TEXTS}
    losses[MADE_UP_TUNED] = [1.0 + change for change in changes]
    task = {
        "task": "rp_niah_multikey_1_ll",
        "lengths": [LENGTH],
        "depths": [50],
        "samples": {label: made_up_rows(values) for label, values in losses.items()},
    }
    methods = [{"label": label, "method": None if label == "none" else label} for label in losses]
    return {"run": {"trained_length": TRAINED}, "methods": methods, "retrieval": [task]}


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ([-0.3 - 0.01 * i for i in range(TEXTS)], MADE_UP_TUNED),
        ([-0.3, 0.2, -0.3, 0.2, -0.3, 0.2, -0.3, 0.2], "yarn"),  # better on average
        ([0.3 + 0.01 * i for i in range(TEXTS)], "yarn"),
    ],
)
def test_a_trained_model_is_chosen_where_it_is_shown_to_be_better(changes, chosen):
    record = made_up_results(changes)
    difference = RunStatistics(record).loss_difference(MADE_UP_TUNED, "yarn", LENGTH)
    assert difference.mean.estimate == pytest.approx(sum(changes) / TEXTS)
    decision = decide(record, LENGTH, MADE_UP_TUNED)
    assert decision.label == chosen
    reason = "not shown" if chosen == "yarn" else "Training makes them likelier still (p "
    assert reason in decision.sentences[-1]


# -- candidates and the pilot ----------------------------------------------------------------------


def row(name, nats, **changes):
    entry = {
        "name": name,
        "method": name,
        "options": {},
        "engines": ["vllm", "mlx"],
        "everywhere": True,
        "leaves_short": False,
        "long": {"nll": [nats, 0, 9]},
    }
    return entry | changes


def recommendation(method, *rows):
    return {"method": method, "rows": [row("plain", 0.01, method=None), *rows]}


def test_the_recommended_method_is_first_and_one_for_all_engines_second():
    rows = [
        row("rerope", 0.1, engines=[], everywhere=False, leaves_short=True),
        row("linear", 0.5),
        row("yarn", 0.2),
        row("llama3", "Infinity"),
        row("ntk", 0.0, long=None),
    ]
    measured = recommendation("rerope", *rows)
    rerope = Candidate("rerope", runs_nowhere=True)
    assert compared_candidates(measured) == [rerope, Candidate("yarn")]
    assert compared_candidates(measured | {"method": "linear"}) == [Candidate("linear")]
    assert compared_candidates(measured | {"method": None}) == [rerope, Candidate("yarn")]
    only_mlx = row("llama3", 0.1, engines=["mlx"], everywhere=False)
    required = recommendation("llama3", only_mlx, *rows) | {"engines": ["mlx"]}
    assert compared_candidates(required) == [Candidate("llama3")]
    assert compared_candidates(recommendation(None)) == []


def test_what_is_trained_has_one_set_of_frequencies_and_leaves_short_rows():
    rows = [row("rerope", 0.1), row("dynamic-yarn", 0.1), row("ntk-by-parts", 0.2)]
    assert trained_candidate(recommendation(None, *rows)) == Candidate("mixed-ntk-by-parts")
    searched = row("searched", 0.1, method="yarn", options={"beta_fast": 16})
    assert trained_candidate(recommendation(None, searched)) == Candidate("yarn", {"beta_fast": 16})
    assert trained_candidate(recommendation(None, rows[0])) is None
    static = trained_candidate(recommendation(None, *rows), lambda each: "mixed" not in each.method)
    assert static == Candidate("ntk-by-parts")


def test_the_recommendation_of_the_shared_run_has_its_candidates(finished, results):
    _, out = finished
    stored = step_result(out, "recommend")["recommendation"]
    methods = [method["method"] for method in results["methods"][1:]]
    assert methods == [candidate.method for candidate in compared_candidates(stored)]


def set_clock(patch, tick):
    """Set a clock that goes on by some seconds whenever it is read."""
    now = [0.0]

    def monotonic():
        now[0] += tick
        return now[0]

    patch.setattr("time.monotonic", monotonic)


def plan_pilot(folder):
    request = ExtendRequest(model=TINY, to="4x", out=folder, budget=100.0)
    pilot = base_request(request, [Candidate("yarn")], TRAINED, LENGTH, (), folder)
    return plan_samples(pilot, 300.0, 96, with_trained=False)


def plan_until_killed(folder, answers):
    """Plan in a process that is killed once it has stored a number of answers."""
    process = FORK.Process(target=_plan_until, args=(folder, answers))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL


def _plan_until(folder, answers):
    put, calls = AnswerStore.put, []

    def put_and_count(*arguments):
        put(*arguments)
        calls.append(arguments)
        if len(calls) == answers:
            os.kill(os.getpid(), signal.SIGKILL)

    AnswerStore.put = put_and_count
    plan_pilot(folder)


@pytest.mark.slow
def test_a_killed_pilot_comes_to_the_same_number_of_samples(tmp_path, monkeypatch):
    """Kill it within the first answers, between methods and after the last answer."""
    monkeypatch.setattr("rope_patch.extending.proof._PILOT_SHORT", 1)
    set_clock(monkeypatch, 0.25)
    expected = plan_pilot(tmp_path / "whole")
    assert 2 < expected["samples"] < 96  # by the time
    stored = (tmp_path / "whole" / "cache" / "answers-0.jsonl").read_text().count("\n")
    out = tmp_path / "killed"
    for answers in (3, stored // 2, stored - 3 - stored // 2):
        plan_until_killed(out, answers)
    assert (out / "cache" / "answers-0.jsonl").read_text().count("\n") == stored
    # What is left is to count, on a machine that is far slower by now.
    set_clock(monkeypatch, 25.0)
    assert plan_pilot(out) == expected
