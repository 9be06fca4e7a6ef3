"""Test averages of checkpoints against float64 means by NumPy, and what cannot be averaged."""

import json
import shutil
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers.tiny_models import make_model
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as distributed_checkpoint
from training_runs import (
    ASSETS,
    BOTH,
    TINY,
    VARIANTS,
    Child,
    arguments,
    curve,
    documents,
    equal_tensors,
    run,
    tensors,
)
from transformers import AutoModelForCausalLM

from rope_patch.training import averaging, checkpoints
from rope_patch.training.checkpoints import DATA_STATE
from rope_patch.training.settings import parse

LIMITED = {"save_total_limit": 1}  # fewer than are averaged
BASE = ASSETS / "tiny-llama"


@pytest.fixture(scope="module", params=BOTH)
def recipe(request):
    return request.param


@pytest.fixture(scope="module")
def averaged(recipe, tmp_path_factory):
    """Run a variant with an average of three checkpoints, once; return the run's folder."""
    folders = {}

    def run_once(variant):
        if variant not in folders:
            folder = tmp_path_factory.mktemp(f"averaged-{recipe}-{variant}") / "run"
            run(recipe, folder, **VARIANTS[variant], **LIMITED, average_checkpoints=3)
            folders[variant] = folder
        return folders[variant]

    return run_once


def saved_weights(folder):
    """Return a checkpoint's weights in float64 by plain names."""
    (path,) = folder.glob("*model.safetensors")
    return {
        name.removeprefix("base_model.model.").replace(".default", ""): tensor.double().numpy()
        for name, tensor in load_file(path).items()
    }


def float64_mean(folder, steps):
    """Return the mean of a run's checkpoints, LoRA merged, in float64."""
    saved = [saved_weights(folder / f"checkpoint-{step}") for step in steps]
    base = {name: t.double().numpy() for name, t in load_file(BASE / "model.safetensors").items()}
    result = {}
    for name, weight in base.items():
        stem = name.removesuffix(".weight")
        copies = [name, f"{stem}.modules_to_save.weight"]
        found = [copy for copy in copies if copy in saved[0] and "lora" not in copy]
        if f"{stem}.lora_A.weight" in saved[0]:
            products = [s[f"{stem}.lora_B.weight"] @ s[f"{stem}.lora_A.weight"] for s in saved]
            result[name] = weight + 16 / 4 * np.mean(products, axis=0)
        elif found:
            result[name] = np.mean([s[found[-1]] for s in saved], axis=0)
        else:
            result[name] = weight
    return result


@pytest.mark.parametrize("variant", ["plain", "lora"])
def test_the_finished_model_is_the_mean(averaged, variant):
    folder = averaged(variant)
    steps = checkpoints.steps_of_checkpoints(folder)
    assert steps == [2, 4, 6]  # the limit did not remove them
    got, expected = tensors(folder / "model"), float64_mean(folder, steps)
    last = float64_mean(folder, [6])
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        np.testing.assert_allclose(tensor.double(), expected[name], rtol=3e-7, atol=3e-8)
    changed = [name for name in got if np.abs(last[name] - expected[name]).max() > 1e-5]
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"} <= {*changed}
    card = (folder / "model" / "README.md").read_text()
    assert "; the mean of the checkpoints of steps 2, 4, 6 |" in card
    AutoModelForCausalLM.from_pretrained(folder / "model")


def test_the_mean_of_products_is_not_the_product_of_means(averaged):
    folder = averaged("lora")
    saved = [saved_weights(folder / f"checkpoint-{step}") for step in (2, 4, 6)]
    stem = "model.layers.0.self_attn.q_proj"
    a, b = (
        np.mean([s[f"{stem}.lora_{part}.weight"] for s in saved], axis=0) for part in ("A", "B")
    )
    wrong = load_file(BASE / "model.safetensors")[f"{stem}.weight"].double().numpy() + 4 * b @ a
    got = tensors(folder / "model")[f"{stem}.weight"].double().numpy()
    assert np.abs(got - wrong).max() > 1e-6  # the test above allows 6e-8


def test_averaging_changes_no_step(averaged, recipe, reference_run):
    assert curve(averaged("plain")) == curve(reference_run(recipe))
    assert equal_tensors(averaged("plain") / "checkpoint-6", reference_run(recipe) / "checkpoint-6")


class HangWhileAveraging:
    """Make a run hang after it has read some tensors."""

    def __init__(self, flag):
        self.flag = flag

    def __call__(self):
        mean, calls = averaging.mean, []

        def hang(values):
            calls.append(1)
            if len(calls) == 5:
                self.flag.touch()
                time.sleep(600)
            return mean(values)

        averaging.mean = hang


def test_a_run_killed_while_averaging_resumes_to_the_same_model(averaged, recipe, tmp_path):
    folder, flag = tmp_path / "run", tmp_path / "flag"
    child = Child(recipe, folder, HangWhileAveraging(flag), **LIMITED, average_checkpoints=3)
    child.kill_when(flag.exists)
    assert not (folder / "model").exists()
    run(recipe, folder, resume="auto", **LIMITED, average_checkpoints=3)
    assert equal_tensors(folder / "model", averaged("plain") / "model")
    assert curve(folder) == curve(averaged("plain"))


def test_a_finished_run_may_be_averaged_otherwise(averaged, recipe, reference_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(reference_run(recipe), folder)
    run(recipe, folder, resume="auto", average_checkpoints=3)
    assert equal_tensors(folder / "model", averaged("plain") / "model")
    run(recipe, folder, resume="auto", average_checkpoints=2)
    expected = float64_mean(folder, [4, 6])
    for name, tensor in tensors(folder / "model").items():
        np.testing.assert_allclose(tensor.double(), expected[name], rtol=3e-7, atol=3e-8)
    run(recipe, folder, resume="auto")
    assert equal_tensors(folder / "model", reference_run(recipe) / "model")
    assert "mean of" not in (folder / "model" / "README.md").read_text()


@pytest.fixture
def finished(reference_run, tmp_path):
    shutil.copytree(reference_run("finetune"), tmp_path / "run")
    return tmp_path / "run"


def refuse(folder, **changes):
    before = {p: p.stat().st_mtime_ns for p in (folder / "model").rglob("*")}
    with pytest.raises(ValueError) as error:  # noqa: PT011
        run("finetune", folder, resume="auto", average_checkpoints=3, **changes)
    assert {p: p.stat().st_mtime_ns for p in (folder / "model").rglob("*")} == before
    return str(error.value)


def test_damaged_checkpoints_are_not_averaged(finished):
    (finished / "checkpoint-4" / "model.safetensors").unlink()
    message = refuse(finished)
    assert "checkpoint-4 cannot be averaged: model.safetensors is missing" in message
    assert "Remove it to average the ones before it" in message


def test_too_few_checkpoints_are_refused_before_the_first_step(finished, tmp_path):
    shutil.rmtree(finished / "checkpoint-2")
    message = refuse(finished)
    assert "average_checkpoints: 3 needs as many checkpoints, but the run has 2" in message
    assert "expected smaller save_steps, or average_checkpoints: 2" in message
    with pytest.raises(ValueError, match=r"the run has 1 .*average_checkpoints: 0"):
        run("loop", tmp_path / "new", average_checkpoints=2, save_steps=100)
    assert not (tmp_path / "new" / "log.jsonl").exists()
    with pytest.raises(
        ValueError, match=r"expected 3 checkpoints .*got checkpoint-4, checkpoint-6"
    ):
        checkpoints.last_complete(finished, 3)


def test_checkpoints_of_another_rotation_are_refused(finished):
    folder = finished / "checkpoint-4"
    state = json.loads((folder / DATA_STATE).read_text())
    assert state["rotation"]["method"] == "yarn"
    state["rotation"] |= {"method": "linear"}
    (folder / DATA_STATE).write_text(json.dumps(state))
    checkpoints._write_manifest(folder)
    message = refuse(finished)
    assert "checkpoint-4 and " in message
    assert "of different runs: method was linear, in checkpoint-6 yarn" in message


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_weights_of_another_model_are_refused(change, finished):
    path = finished / "checkpoint-2" / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    if change == "missing":
        del weights["model.norm.weight"]
    else:
        weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, path)
    checkpoints._write_manifest(path.parent)
    expected = {
        "missing": "checkpoint-2 has no tensor model.norm.weight",
        "shape": "has model.norm.weight in the shape (3,), expected (128,)",
    }
    assert expected[change] in refuse(finished)


def test_settings_that_cannot_be_averaged_are_refused(tmp_path):
    for changes, message in (
        ({"average_checkpoints": 1}, "must be 0, or 2 or more, got 1"),
        (
            {"average_checkpoints": 2, "save_strategy": "no"},
            "expected save_strategy: steps, got no",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            parse(arguments(tmp_path / "run", **changes))


def test_adapters_that_a_later_stage_needs_are_not_merged(tmp_path):
    path = tmp_path / "stages.yaml"
    keys = {key: str(value) if key == "model" else value for key, value in TINY.items()}
    keys |= {"data": str(documents(tmp_path)), "lora_rank": 4, "average_checkpoints": 2}
    path.write_text(yaml.safe_dump(keys | {"stages": [{"max_steps": 4}, {"max_steps": 6}]}))
    with pytest.raises(ValueError, match=r"stage 1 of 2: average_checkpoints merges LoRA's"):
        run("loop", tmp_path / "run", config=path)


def test_means_of_16_bits_are_accumulated_in_float32():
    values = [torch.full((4,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    assert averaging.mean(values).dtype == torch.float32
    assert averaging.mean(values).tolist() == [64.75] * 4  # in bfloat16, 256 + 1 is 256
    assert averaging.mean([values[0].double()]).dtype == torch.float64


def write_form(form, folder, weights):
    """Write weights as one of the launchers does."""
    folder.mkdir()
    if form == "DDP":
        save_file(
            {f"module.{name}": t for name, t in weights.items()}, folder / "model.safetensors"
        )
    elif form == "files":
        names = sorted(weights)
        for number, part in enumerate((names[::2], names[1::2]), start=1):
            file = folder / f"model-0000{number}-of-00002.safetensors"
            save_file({name: weights[name] for name in part}, file)
    elif form == "FSDP, full":
        torch.save(weights, folder / "pytorch_model_fsdp.bin")
    elif form == "FSDP, sharded":
        distributed_checkpoint.save(
            {"model": weights},
            storage_writer=distributed_checkpoint.FileSystemWriter(folder / "pytorch_model_fsdp_0"),
            no_dist=True,
        )


@pytest.mark.parametrize("form", ["DDP", "files", "FSDP, full", "FSDP, sharded"])
def test_weights_are_read_from_every_form_of_checkpoint(form, tmp_path):
    models = [make_model("llama") for _ in range(2)]
    with torch.no_grad():
        for number, model in enumerate(models):
            for parameter in model.parameters():
                parameter += number
    folders = [tmp_path / str(number) for number in range(2)]
    for model, folder in zip(models, folders, strict=True):
        write_form(form, folder, {n: p.detach().clone() for n, p in model.named_parameters()})
    expected = [(a + b) / 2 for a, b in zip(*(m.parameters() for m in models), strict=True)]
    averaging.average_into(models[1], folders)
    for parameter, tensor in zip(models[1].parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, tensor)


def test_unknown_forms_of_checkpoints_are_refused(tmp_path):
    (tmp_path / "global_step2").mkdir()
    with (
        pytest.raises(ValueError, match=r"no weights that can be averaged: .*With DeepSpeed"),
        averaging.open_weights(tmp_path),
    ):
        pass


def test_tied_weights_are_found_under_either_name(tmp_path):
    model = make_model("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight") + 1
    write_form("files", tmp_path / "a", weights)
    averaging.average_into(model, [tmp_path / "a"])
    assert torch.equal(model.model.embed_tokens.weight, weights["lm_head.weight"])


def test_tensors_are_read_one_after_the_other(monkeypatch, tmp_path):
    model, alive, most = make_model("llama"), set(), []
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def read(name):
        tensor = weights[name].clone()
        alive.add(id(tensor))
        weakref.finalize(tensor, alive.discard, id(tensor))
        most.append(len(alive))
        return tensor

    class Opened:
        def __init__(self, folder):
            pass

        def __enter__(self):
            return {name: lambda name=name: read(name) for name in weights}

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(averaging, "open_weights", Opened)
    averaging.average_into(model, [Path(str(number)) for number in range(5)])
    assert len(most) == 5 * len(weights)
    assert max(most) <= 2
