"""Test `--plan`: what a run would take and could decide, without a run; and kept budgets."""

import json
import time
from pathlib import Path

import pytest
from helpers.commands import run_in_this_process
from helpers.search_fixtures import TRAINED, load, questions

import rope_patch
from rope_patch.evaluation import PassTime

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("recommend TINY --length 1024 --minutes 60", ["8 of 8 rotations", "after Holm over"]),
        ("recommend TINY --length 1024 --minutes 0.001", ["not enough", "it takes about"]),
        ("extend TINY --to 4x --budget 1h", ["a comparison on about"]),
        ("extend TINY --to 4x --budget 1s --for vllm", ["not enough", "it takes about"]),
        ("compare TINY --factor 4 --tasks rp_recall_ll", ["5 methods", "10 texts at 1,024 tokens"]),
        ("compare TINY --factor 4 --tasks rp_recall_ll --samples 3", ["3 texts, 8 decide; it tak"]),
        ("search TINY --length 512 --evaluations 20", ["YaRN and 20 candidates", "6 decide"]),
        ("lab --quick --encodings rope,alibi", ["2 encodings: rope, alibi", "2 seeds", "about"]),
    ],
)
def test_a_plan_says_time_and_decision_and_leaves_nothing(tmp_path, monkeypatch, words, facts):
    monkeypatch.chdir(tmp_path)
    result = run_in_this_process(*(TINY if w == "TINY" else w for w in words.split()), "--plan")
    assert result.returncode == 0, result.stderr
    assert "takes: about " in result.stdout
    for fact in facts:
        assert fact in result.stdout
    assert not list(tmp_path.iterdir())


def test_a_plan_is_json_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["recommend", TINY, "--length", 1024, "--minutes", 60, "--plan", "--json"]
    plan = json.loads(run_in_this_process(*words).stdout)
    assert 0 < plan["seconds"] <= plan["budget"] == 3600
    assert plan["missing"] == ""


@pytest.fixture
def slow_model(monkeypatch):
    """Return a model on a simulated machine that takes a millisecond a token, and its clock."""
    model, now = load(), [0.0]

    def read(module, arguments):
        now[0] += arguments[0].numel() / 1000

    model.register_forward_pre_hook(read)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return model, now


def test_the_time_of_a_pass_is_what_the_machine_takes(slow_model):
    model, now = slow_model
    times = PassTime(model, 1024)
    assert times.seconds(1024) == pytest.approx(1.024)
    assert 2 < times.seconds(2048) / times.seconds(1024) < 4  # tokens, and pairs of tokens
    assert now[0] < 30


def test_a_budget_too_small_is_refused_before_anything_is_measured(slow_model, tmp_path):
    model, now = slow_model
    samples = questions(1024, 12, seed=1) + questions(TRAINED, 12, seed=2)
    with pytest.raises(rope_patch.Refused, match=r"not|too small.* it takes about \d+"):
        rope_patch.recommend(
            model, length=1024, budget=0.1, samples=samples, folder=tmp_path, progress=False
        )
    assert now[0] < 3  # seconds, half of the budget
    assert not (tmp_path / "state.jsonl").exists()


def test_a_search_keeps_its_minutes(slow_model):
    model, now = slow_model
    request = {
        "length": 512,
        "method": "yarn-rcd",
        "samples": questions(512, 6, seed=3),
        "held_out": questions(512, 6, seed=4),
        "progress": False,
    }
    with pytest.raises(ValueError, match="it takes about"):
        rope_patch.search(model, minutes=0.1, **request)
    assert now[0] < 6
    now[0] = 0.0
    found = rope_patch.search(model, minutes=1, budget=11, **request)
    assert now[0] <= 66
    assert len(found.history) > 5
    assert time.monotonic() == now[0]  # the simulated clock is the one that was asked
