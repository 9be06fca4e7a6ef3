"""Test a run's identity: only the same recipe resumes it; a refusal changes no file."""

import hashlib
import json
import re
import shutil

import pytest
import torch
from filelock import FileLock
from helpers.commands import run_in_this_process
from helpers.plugins import write_method
from safetensors.torch import load_file, save_file
from training_runs import (
    ASSETS,
    STEPS,
    arguments,
    copy_stopped_run,
    curve,
    documents,
    equal_tensors,
    require_same,
    run,
    settings_of,
)
from transformers import get_scheduler

from rope_patch.methods import registry
from rope_patch.training import CHANGEABLE_KEYS, fingerprint, known_keys, same_rates

# Changes of a run's settings -> the differences that the refusal names.
OTHERS = [
    ({"learning_rate": 1e-5}, ["learning_rate was 0.001, got 1e-05"]),
    (
        {"method": "linear", "factor": 8, "adam_beta2": 0.9, "lora_rank": 4, "seed": 7},
        [
            "method was yarn, got linear",
            "factor was 2.0, got 8.0",
            "lora_rank was 0, got 4",
            "adam_beta2 was 0.95, got 0.9",
            "seed was 42, got 7",
        ],
    ),
    (
        {
            "model": ASSETS / "tiny-qwen3",
            "options": "{beta_fast: 16}",
            "packing": "masked",
            "gradient_accumulation_steps": 4,
            "data": "novels:emma",
        },
        [
            "model was .*tiny-llama.*, got .*tiny-qwen3",
            'options was {}, got {"beta_fast": 16}',
            "packing was single, got masked",
            "rows of a step was 4, got 8",
            "data was .*documents.jsonl.*, got .*novels:emma",
        ],
    ),
    (
        {"packing": "best_fit", "packing_window": 9, "compression_ratio": [0.01, 2]},
        [
            "packing was single, got best_fit; packing_window was null, got 9",
            r"compression_ratio was null, got \[0.01, 2.0\]; compressor was null, got zlib",
        ],
    ),
]


def snapshot(folder):
    """Return every path of a folder with its content and time of change, except the lock.

    Older releases of filelock open it for writing.
    """
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *sorted(folder.rglob("*"))]
        if path.name != ".lock"
    }


@pytest.fixture
def interrupted(reference_run, tmp_path):
    return copy_stopped_run(reference_run("finetune"), tmp_path / "run", 1)


def error_of_refused_run(folder, *words, **changes):
    """Return the command's error; fail if it changed the folder."""
    before = snapshot(folder)
    command = [*arguments(folder, resume="auto", **changes), *words]
    result = run_in_this_process("finetune", *command)
    assert result.returncode == 1
    assert snapshot(folder) == before
    assert result.stderr.count("error: ") == 1
    return result.stderr


def test_another_recipe_is_refused_and_nothing_changes(interrupted, reference_run, tmp_path):
    finished = tmp_path / "finished"
    shutil.copytree(reference_run("finetune"), finished)
    for folder, (changes, messages) in [(finished, OTHERS[0]), *((interrupted, c) for c in OTHERS)]:
        error = error_of_refused_run(folder, **changes)
        assert f"cannot resume {folder}" in error
        for message in messages:
            assert re.search(message, error), error
        assert "--output_dir" in error
    before = snapshot(interrupted)
    with pytest.raises(ValueError, match="loop was false, got true"):
        run("loop", interrupted, resume="auto")
    assert snapshot(interrupted) == before


@pytest.mark.usefixtures("own_registry")
def test_a_method_from_outside_is_identified_by_its_numbers(tmp_path):
    changes = {"method": "outside", "plugin": tmp_path / "mine.py", "max_steps": 1}
    write_method(changes["plugin"])
    model = run("finetune", tmp_path / "run", **changes)
    assert json.loads((model / "rope_patch.json").read_text())["outside"]["file"] == "mine.py"
    changes["plugin"] = changes["plugin"].rename(tmp_path / "moved.py")
    registry._REGISTRY.pop("outside")  # as in another process
    assert run("finetune", tmp_path / "run", resume="auto", **changes) == model
    write_method(changes["plugin"], divisor="9")
    error = error_of_refused_run(tmp_path / "run", **changes)
    assert "frequencies was " in error


def test_a_second_run_in_a_folder_is_refused(interrupted):
    message = f"another process works in {interrupted}"
    with FileLock(interrupted / ".lock"):
        assert message in error_of_refused_run(interrupted)
        before = snapshot(interrupted)
        with pytest.raises(ValueError, match=re.escape(message)):
            run("loop", interrupted, resume="auto")
        assert snapshot(interrupted) == before


def test_contents_decide_the_identity_and_paths_do_not(interrupted, reference_run, tmp_path):
    model, data = tmp_path / "moved", tmp_path / "moved.jsonl"
    shutil.copytree(ASSETS / "tiny-llama", model)
    shutil.copy(documents(tmp_path), data)
    other = tmp_path / "other.jsonl"
    other.write_text(data.read_text().replace("11", "12", 1))
    assert other.stat().st_size == data.stat().st_size
    assert "data was" in error_of_refused_run(interrupted, data=other)

    # Copies, since some releases of safetensors map the file that is written over below.
    weights = {n: tensor.clone() for n, tensor in load_file(model / "model.safetensors").items()}
    changed_weights = {
        name: tensor * (1.001 if "norm" in name else 1) for name, tensor in weights.items()
    }
    save_file(changed_weights, model / "model.safetensors", metadata={"format": "pt"})
    assert "model was" in error_of_refused_run(interrupted, model=model)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    config = (model / "config.json").read_text()
    config_values = json.loads(config)
    (model / "config.json").write_text(json.dumps(config_values | {"attention_dropout": 0.5}))
    assert "config.attention_dropout was 0.0, got 0.5" in error_of_refused_run(
        interrupted, model=model
    )
    (model / "config.json").write_text(config)

    allowed = {"save_steps": 3, "logging_steps": 2, "save_total_limit": 1, "log_level": "error"}
    allowed |= {"gradient_checkpointing": False, "run_name": "again"}
    run("finetune", interrupted, resume="auto", model=model, data=data, **allowed)
    require_same(interrupted, reference_run("finetune"))


def test_batch_size_and_accumulation_may_change_together(interrupted, reference_run):
    shape = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    run("finetune", interrupted, resume="auto", **shape)
    expected = torch.tensor(curve(reference_run("finetune")))
    torch.testing.assert_close(torch.tensor(curve(interrupted)), expected, rtol=1e-4, atol=0)


def test_more_steps_continue_a_constant_rate(reference_run, tmp_path):
    constant = {"lr_scheduler_type": "constant"}
    uninterrupted = reference_run("finetune", "constant")
    folder = tmp_path / "run"
    run("finetune", folder, max_steps=2, **constant)
    assert "steps was 2, got 1 (2 are taken)" in error_of_refused_run(
        folder, max_steps=1, **constant
    )
    run("finetune", folder, resume="auto", **constant)
    require_same(folder, uninterrupted)
    assert json.loads((folder / "identity.json").read_text())["identity"]["steps"] == STEPS


def test_more_steps_of_a_decaying_schedule_warn(reference_run, tmp_path, caplog):
    folder = copy_stopped_run(reference_run("finetune"), tmp_path / "run", 2)
    run("finetune", folder, resume="auto", max_steps=STEPS + 2)
    assert (
        f"was begun for {STEPS} steps and goes on for {STEPS + 2}: its 2 steps had" in caplog.text
    )
    rates = [json.loads(line)["learning_rate"] for line in (folder / "log.jsonl").open()]
    training = settings_of(folder).training
    # The checkpoint holds the rate of the step after it.
    for steps, part in ((STEPS, slice(0, 3)), (STEPS + 2, slice(3, STEPS + 2))):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=training.learning_rate)
        warmup = training.get_warmup_steps(steps)
        scheduler = get_scheduler(training.lr_scheduler_type, optimizer, warmup, steps)
        expected = [training.learning_rate * scheduler.lr_lambdas[0](step) for step in range(steps)]
        assert rates[part] == pytest.approx(expected[part])


DAMAGES = {
    "cut": (lambda text: text[: len(text) // 2], "identity.json: it is damaged"),
    "edited": (lambda text: text.replace("yarn", "ntk"), "identity.json: it is damaged"),
    "deep": (lambda text: "[" * 200_000, "identity.json: it is damaged"),
    "missing": (lambda text: None, "without identity.json"),
    "another format": (
        lambda text: changed_identity(text, format="rope_patch.recipes/0"),
        "expected format",
    ),
}


def changed_identity(text, **keys):
    body = json.loads(text) | keys
    del body["digest"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps(body | {"digest": hashlib.sha256(text.encode()).hexdigest()})


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_with_a_damaged_or_missing_identity_is_refused(damage, interrupted):
    path = interrupted / "identity.json"
    change, message = DAMAGES[damage]
    text = change(path.read_text())
    path.unlink() if text is None else path.write_text(text)
    error = error_of_refused_run(interrupted)
    assert message in error
    assert "--output_dir" in error


def test_a_run_without_resume_refuses_to_overwrite_a_finished_model(tmp_path, reference_run):
    folder = copy_stopped_run(reference_run("finetune"), tmp_path / "run", 0)
    shutil.copytree(reference_run("finetune") / "model", folder / "model")
    before = snapshot(folder)
    with pytest.raises(ValueError, match="finished model"):
        run("finetune", folder)
    with pytest.raises(ValueError, match="method was yarn, got linear"):
        run("finetune", folder, resume="auto", method="linear")
    assert snapshot(folder) == before


def test_logs_of_an_earlier_run_are_discarded(reference_run, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "log.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
    (folder / "retrieval.jsonl").write_text('{"step": 2, "retrieval_hits": 1.0}\n{"st')
    run("finetune", folder, max_steps=1, lr_scheduler_type="constant")
    assert curve(folder) == curve(reference_run("finetune"))[:1]
    assert (folder / "retrieval.jsonl").read_text() == ""
    assert not equal_tensors(folder / "model", ASSETS / "tiny-llama")


def test_checkpoints_without_an_optimizer_are_refused(tmp_path):
    only = {"save_only_model": True, "max_steps": 1}
    run("finetune", tmp_path / "run", **only)
    assert "it lacks the state of the optimizer" in error_of_refused_run(tmp_path / "run", **only)


def test_another_version_warns(reference_run, tmp_path, caplog):
    folder = copy_stopped_run(reference_run("finetune"), tmp_path / "run", STEPS)
    path = folder / "identity.json"
    body = json.loads(path.read_text())
    body["versions"]["transformers"] = "4.0.0"
    body["identity"]["group_by_length"] = False  # a key of that version
    path.write_text(changed_identity(json.dumps(body)))
    assert "method was yarn, got linear" in error_of_refused_run(folder, method="linear")
    run("finetune", folder, resume="auto")
    assert "began with" in caplog.text
    assert "transformers 4.0.0" in caplog.text


@pytest.mark.parametrize(
    ("schedule", "warmup", "steps", "agrees"),
    [
        ("constant", 0, 90, True),
        ("constant_with_warmup", 5, 90, True),
        ("constant_with_warmup", 0.2, 90, False),
        ("linear", 0, 90, False),
        ("cosine", 0, 90, False),
        ("constant", 0, 29, False),
    ],
)
def test_schedules_agree_if_all_rates_do(schedule, warmup, steps, agrees, tmp_path):
    keys = {"lr_scheduler_type": schedule, "warmup_steps": warmup, "max_steps": 60}
    training = settings_of(tmp_path / "run", **keys).training
    assert same_rates(training, 60, steps, 30) is agrees


def test_keys_that_may_change_are_known_and_marked_in_the_list():
    version_dependent = {  # of other versions of transformers
        "logging_dir", "activation_checkpointing", "dataloader_in_order", "ddp_static_graph",
        "dataloader_multiprocessing_context", "trackio_bucket_id", "trackio_static_space_id",
        "enable_jit_checkpoint",
    }  # fmt: skip
    assert CHANGEABLE_KEYS - version_dependent <= known_keys().keys()
    lines = run_in_this_process("finetune", "--keys").stdout.splitlines()
    changeable_keys = {
        line.split()[0] for line in lines if line.endswith("(may change when a run goes on)")
    }
    assert changeable_keys == CHANGEABLE_KEYS & {line.split()[0] for line in lines}


def test_fingerprints_are_of_contents(tmp_path):
    large = bytes(range(256)) * (80 << 10)  # 20 MiB
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_bytes(large)
        (tmp_path / folder / "b.txt").write_text("b")
        (tmp_path / folder / "picture.png").write_text(folder)
    one, two = (str(tmp_path / folder) for folder in ("one", "two"))
    assert fingerprint(one) == fingerprint(two) == fingerprint(f"{two}/*.txt")
    for content in (large[:-1] + b"!", b"!" + large[1:], large + b"!"):
        (tmp_path / "two" / "a.txt").write_bytes(content)
        assert fingerprint(one) != fingerprint(two)
    assert fingerprint("novels:emma") != fingerprint("novels:persuasion")
