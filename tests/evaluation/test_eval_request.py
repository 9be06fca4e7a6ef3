"""Test evaluation requests: refusals before weights are read, task types, default lengths."""

import json
import shutil

import pytest
from helpers.evaluations import TINY, request

from rope_patch.evaluation import (
    PROFILES,
    EvalRequest,
    choose_profile,
    comparison_request,
    default_lengths,
    evaluate,
)

# Fields of a request that are refused, and what the error names.
REFUSED = [
    ({"tasks": ()}, "at least one task, one method and one length"),
    ({"methods": ()}, "at least one task, one method and one length"),
    ({"lengths": ()}, "at least one task, one method and one length"),
    ({"tasks": ("rp_niah_singel_2",)}, "'rp_niah_single_2'"),
    ({"tasks": ("rp_rulr",)}, "'rp_ruler'"),
    ({"tasks": ("rp_short_clozes",)}, "'rp_short_cloze'"),
    pytest.param(
        {"tasks": ("no such task of anybody",)},
        "no such task of anybody",
        marks=pytest.mark.slow,  # lm-eval reads all of its own tasks first
    ),
    ({"methods": ("yran",)}, "'yarn'"),
    ({"factor": None}, "factor and length"),
    ({"length": 512}, "factor and length"),
    ({"options": {"beta_fsat": 1}}, "'beta_fsat'"),
    *(
        ({name: 0}, f"{name} must be at least {least}, got 0")
        for name, least in {
            **dict.fromkeys(("samples", "documents", "max_samples", "per_text"), 1),
            **dict.fromkeys(("perplexity_length", "window", "trained_length"), 1),
            "control_context": 2,
        }.items()
    ),
    ({"precision": 0.0}, "above 0 and below 0.5"),
    ({"precision": 5.0}, "above 0 and below 0.5"),
    ({"until_decided": True, "precision": 0.05}, "got both"),
    ({"until_decided": True, "tasks": ("perplexity",)}, "a retrieval task"),
    ({"until_decided": True, "methods": ("none",)}, "--method none and at least one more"),
    ({"until_decided": True, "methods": ("yarn", "ntk")}, "--method none and at least one"),
    ({"until_decided": True, "samples": 8, "max_samples": 8}, "max_samples above the 8"),
    ({"until_decided": True, "lengths": (256,), "tasks": ("rp_recall_ll",)}, "256 tokens"),
    ({"lengths": (64,), "tasks": ("rp_niah_single_2",)}, "rp_niah_single_2"),
    ({"depths": (120,), "tasks": ("rp_niah_single_2",)}, "0 to 100"),
    ({"control_context": 8}, "longer than the window"),
    ({"window": 100}, "multiple of 64"),
    ({"tasks": ("sliding",), "stride": 336}, "336 tokens"),
    ({"tasks": ("speed",), "methods": ("yarn",)}, "at least two methods"),
    ({"texts": ("no-such-book",)}, "'no-such-book'"),
    ({"haystacks": ("emm",)}, "'emma'"),
    ({"include_paths": ("/no/such/folder",)}, "/no/such/folder"),
    ({"perplexity_length": 10**7}, "10,000,000"),
    ({"model": "/no/such/model"}, "no such folder"),
    ({"dtype": "float33"}, "dtype"),
    *(({"device_map": m}, "device_map") for m in ("xpu", "nonsense", "mps:0", {"": "xpu:1"})),
    ({"questions": "/no/file.json", "tasks": ("rp_qa_1",), "lengths": (4096,)}, "file.json"),
]


@pytest.fixture
def unread(monkeypatch):
    """Fail if weights are read."""
    monkeypatch.setattr(
        "rope_patch.evaluation.session.read_model",
        lambda *_, **__: pytest.fail("weights were read"),
    )


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(("changes", "fact"), REFUSED)
def test_bad_requests_read_no_weights_and_write_nothing(tmp_path, changes, fact):
    with pytest.raises((ValueError, OSError)) as refusal:
        evaluate(request(tmp_path / "out", **changes))
    assert fact in str(refusal.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("device_map", [None, "auto", "cpu", {"model": "cpu", "lm_head": "disk"}])
def test_known_devices_are_not_refused(tmp_path, device_map):
    with pytest.raises(pytest.fail.Exception, match="weights were read"):
        evaluate(request(tmp_path, device_map=device_map, tasks=("perplexity",)))


@pytest.mark.usefixtures("unread")
def test_a_users_task_with_a_name_of_ours_is_refused(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "a.yaml").write_text("task: rp_vt\n")
    with pytest.raises(ValueError, match="tasks has a task 'rp_vt'"):
        evaluate(request(tmp_path / "out", include_paths=(str(folder),)))
    # Other names that begin as ours do are the user's.
    (folder / "a.yaml").write_text("task: rp_mine\n")
    included = request(tmp_path / "out", include_paths=(str(folder),), tasks=("rp_mine",))
    assert included.harness == ["rp_mine"]
    with pytest.raises(ValueError, match=r"'rp_mine' of .*tasks cannot be built"):
        evaluate(included)


def plain_request(**changes):
    return EvalRequest(**{"model": TINY, "methods": ("none",), **changes})


def test_tasks_are_sorted_by_type():
    eval_request = plain_request(
        tasks=("rp_ruler", "rp_vt", "perplexity", "rp_short", "rp_copy_ll", "lambada")
    )
    assert len(eval_request.retrieval) == 14  # RULER's 13, of which rp_vt is one, and rp_copy_ll
    assert eval_request.retrieval[-1] == "rp_copy_ll"
    assert len(eval_request.short) == 5
    assert eval_request.harness == ["lambada"]
    overlapping = plain_request(tasks=("rp_short", "rp_short_cloze"))
    assert overlapping.short.count("rp_short_cloze") == 1


def test_longest_is_the_longest_sample_or_document():
    assert plain_request(lengths=(512, 1024)).longest == 1024
    assert plain_request(perplexity_length=9999).longest == 9999


def test_options_go_to_the_methods_that_have_them():
    both = {"methods": ("yarn", "ntk"), "factor": 2}
    eval_request = plain_request(options={"beta_fast": 16}, **both)
    assert eval_request.extension("yarn").options == {"beta_fast": 16}
    assert eval_request.extension("ntk").options == {}


def test_profiles_are_chosen_by_name_or_machine(caplog):
    assert choose_profile("paper").samples == 500
    with pytest.raises(ValueError, match="'standard'"):
        choose_profile("standrad")
    with caplog.at_level("INFO", "rope_patch"):
        assert choose_profile(None) in PROFILES.values()
    assert "profile: " in caplog.text


@pytest.mark.parametrize("name", PROFILES)
def test_a_profiles_tasks_all_exist(name):
    assert plain_request(tasks=PROFILES[name].tasks).harness == []


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
    assert default_lengths(TINY, *target_options, "auto", None) == expected


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
    lengths = {"unscaled": (128, 256, 512), "running": (512, 1024, 2048)}
    for start, expected in lengths.items():
        assert default_lengths(scaled_model, 2.0, None, None, start, None) == expected
    changes = {"methods": ("ntk",), "tasks": ("perplexity",), "lengths": (1100,)}
    changes |= {"model": scaled_model, "factor": 2.0}
    results = {
        start: evaluate(request(tmp_path / start, **changes, start=start))
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
