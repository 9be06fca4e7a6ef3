"""Test evaluation requests: refusals before weights are read, task types, default lengths."""

import json
import re
import shutil

import pytest
from helpers.evaluations import TINY, request

from rope_patch.evaluation import profiles
from rope_patch.evaluation.comparison import comparison_request
from rope_patch.evaluation.pipeline import evaluate
from rope_patch.evaluation.request import EvalRequest
from rope_patch.evaluation.session import Session


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ()}, "at least one task, one method and one length"),
        ({"methods": ()}, "at least one task, one method and one length"),
        ({"lengths": ()}, "at least one task, one method and one length"),
        ({"tasks": ("rp_niah_singel_2",)}, "did you mean 'rp_niah_single_2'"),
        ({"tasks": ("rp_rulr",)}, "did you mean 'rp_ruler'"),
        ({"tasks": ("rp_short_clozes",)}, "did you mean 'rp_short_cloze'"),
        pytest.param(
            {"tasks": ("no such task of anybody",)},
            "no such task of anybody",
            marks=pytest.mark.slow,  # lm-eval reads all of its own tasks first
        ),
        ({"methods": ("yran",)}, "did you mean 'yarn'"),
        ({"factor": None}, "exactly one of factor and length"),
        ({"length": 512}, "exactly one of factor and length"),
        ({"options": {"beta_fsat": 1}}, "has the option 'beta_fsat'"),
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"documents": 0}, "documents must be at least 1, got 0"),
        ({"max_samples": 0}, "max_samples must be at least 1, got 0"),
        ({"per_text": 0}, "per_text must be at least 1, got 0"),
        ({"perplexity_length": 0}, "perplexity_length must be at least 1, got 0"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"control_context": 0}, "control_context must be at least 2, got 0"),
        ({"trained_length": 0}, "trained_length must be at least 1, got 0"),
        ({"precision": 0.0}, "above 0 and below 0.5"),
        ({"precision": 5.0}, "above 0 and below 0.5"),
        ({"until_decided": True, "precision": 0.05}, "expected one of them, got both"),
        ({"until_decided": True, "tasks": ("perplexity",)}, "expected a retrieval task, got perp"),
        ({"until_decided": True, "methods": ("none",)}, "--method none and at least one more"),
        ({"until_decided": True, "methods": ("yarn", "ntk")}, "--method none and at least one"),
        (
            {"until_decided": True, "samples": 8, "max_samples": 8},
            "expected max_samples above the 8 samples",
        ),
        (
            {"until_decided": True, "lengths": (256,), "tasks": ("rp_recall_ll",)},
            "beyond the trained 256 tokens: expected a longer one among --lengths, got 256",
        ),
        (
            {"lengths": (64,), "tasks": ("rp_niah_single_2",)},
            "too short for rp_niah_single_2",
        ),
        ({"depths": (120,), "tasks": ("rp_niah_single_2",)}, "percentages from 0 to 100"),
        ({"control_context": 8}, "longer than the window"),
        ({"window": 100}, "multiple of 64 tokens"),
        ({"tasks": ("sliding",), "stride": 336}, "longer than the 336 tokens scored"),
        ({"tasks": ("speed",), "methods": ("yarn",)}, "give at least two methods"),
        ({"texts": ("no-such-book",)}, "no text 'no-such-book'"),
        ({"haystacks": ("emm",)}, "did you mean 'emma'"),
        ({"include_paths": ("/no/such/folder",)}, "/no/such/folder is not there"),
        ({"perplexity_length": 10**7}, "10,000,000 are needed"),
        ({"model": "/no/such/model"}, "no such folder"),
        ({"dtype": "float33"}, "dtype must be one of auto, float32"),
        (
            {"questions": "/no/such/file.json", "tasks": ("rp_qa_1",), "lengths": (4096,)},
            "file.json",
        ),
    ],
)
def test_bad_requests_read_no_weights_and_write_nothing(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(Session, "load", lambda _: pytest.fail("weights were read"))
    folder = tmp_path / "out"
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        evaluate(request(folder, **changes))
    assert not folder.exists()


def test_a_users_task_with_a_name_of_ours_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Session, "load", lambda _: pytest.fail("weights were read"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "a.yaml").write_text("task: rp_vt\n")
    with pytest.raises(ValueError, match=r"tasks has a task 'rp_vt', which is a task of this pack"):
        evaluate(request(tmp_path / "out", include_paths=(str(folder),)))
    # Other names that begin as ours do are the user's.
    (folder / "a.yaml").write_text("task: rp_mine\n")
    included = request(tmp_path / "out", include_paths=(str(folder),), tasks=("rp_mine",))
    assert included.harness == ["rp_mine"]
    with pytest.raises(ValueError, match=r"the task 'rp_mine' of .*tasks cannot be built"):
        evaluate(included)


def test_tasks_are_sorted_by_type():
    eval_request = EvalRequest(
        model=TINY,
        methods=("none",),
        tasks=("rp_ruler", "rp_vt", "perplexity", "rp_short", "rp_copy_ll", "lambada"),
    )
    assert len(eval_request.retrieval) == 14  # RULER's 13, of which rp_vt is one, and rp_copy_ll
    assert eval_request.retrieval[-1] == "rp_copy_ll"
    assert len(eval_request.short) == 5
    assert eval_request.harness == ["lambada"]
    overlapping = EvalRequest(model=TINY, methods=("none",), tasks=("rp_short", "rp_short_cloze"))
    assert overlapping.short.count("rp_short_cloze") == 1


def test_longest_is_the_longest_sample_or_document():
    eval_request = EvalRequest(model=TINY, methods=("none",), lengths=(512, 1024))
    assert eval_request.longest == 1024
    assert EvalRequest(model=TINY, methods=("none",), perplexity_length=9999).longest == 9999


def test_options_go_to_the_methods_that_have_them():
    eval_request = EvalRequest(
        model=TINY, methods=("yarn", "ntk"), factor=2, options={"beta_fast": 16}
    )
    assert eval_request.extension("yarn").options == {"beta_fast": 16}
    assert eval_request.extension("ntk").options == {}


def test_profiles_are_chosen_by_name_or_machine(caplog):
    assert profiles.choose_profile("paper").samples == 500
    with pytest.raises(ValueError, match=r"unknown profile 'standrad' .*did you mean 'standard'"):
        profiles.choose_profile("standrad")
    with caplog.at_level("INFO", "rope_patch"):
        assert profiles.choose_profile(None) in profiles.PROFILES.values()
    assert "profile: " in caplog.text


@pytest.mark.parametrize("name", profiles.PROFILES)
def test_a_profiles_tasks_all_exist(name):
    profile = profiles.PROFILES[name]
    eval_request = EvalRequest(model=TINY, methods=("none",), tasks=profile.tasks)
    assert eval_request.harness == []


@pytest.mark.parametrize(
    ("target_options", "expected"),
    [
        ((2.0, None, None), (128, 256, 512)),
        ((None, 700, None), (128, 256, 512, 700)),
        ((8.0, None, 128), (64, 128, 256, 512, 1024)),
        ((None, None, None), (128, 256, 512)),
        ((None, 256, None), (128, 256)),
    ],
)
def test_default_lengths_go_from_half_the_trained_length_to_the_target(target_options, expected):
    assert profiles.default_lengths(TINY, *target_options, "auto", None) == expected


@pytest.fixture
def scaled_model(tmp_path):
    """Return a copy of the tiny model whose config scales to four times its trained length."""
    folder = shutil.copytree(TINY, tmp_path / "scaled")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0}
    config["rope_parameters"]["original_max_position_embeddings"] = 256
    config["max_position_embeddings"] = 1024
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_start_selects_the_base_of_a_scaled_config(scaled_model, tmp_path):
    assert profiles.default_lengths(scaled_model, 2.0, None, None, "unscaled", None) == (
        128,
        256,
        512,
    )
    assert profiles.default_lengths(scaled_model, 2.0, None, None, "running", None) == (
        512,
        1024,
        2048,
    )
    changes = {
        "model": scaled_model,
        "methods": ("ntk",),
        "tasks": ("perplexity",),
        "lengths": (2048,),
    }
    results = {
        start: evaluate(request(tmp_path / start, **changes, factor=2.0, start=start))
        for start in ("unscaled", "running")
    }
    assert [results[start]["run"]["trained_length"] for start in results] == [256, 1024]
    slowest = {
        start: results[start]["methods"][0]["frequencies"]["all"]["inv_freq"][-1]
        for start in results
    }
    # YaRN by 4 had stretched the slowest pair already; NTK by 2 stretches it by 2.
    assert slowest["unscaled"] == pytest.approx(4 * slowest["running"])


def test_profile_of_the_plain_model_alone_asks_for_no_ratio_of_times():
    alone, compared = (
        comparison_request(TINY, methods, factor=2, profile="quick").tasks
        for methods in (("none",), ("yarn",))
    )
    assert set(compared) - set(alone) == {"speed"}
