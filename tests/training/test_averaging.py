"""Test averages of checkpoints against float64 means by NumPy, and what cannot be averaged."""

import hashlib
import json
import shutil
import time
import weakref

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
    curve,
    documents,
    equal_tensors,
    run,
    settings_of,
    tensors,
)
from transformers import AutoModelForCausalLM

from rope_patch.training import average_into, last_complete

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
    steps = [1, 2, 3]
    names = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert names == [f"checkpoint-{step}" for step in steps]  # the limit did not remove them
    got, expected = tensors(folder / "model"), float64_mean(folder, steps)
    last = float64_mean(folder, [3])
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        np.testing.assert_allclose(tensor.double(), expected[name], rtol=3e-7, atol=3e-8)
    changed = [name for name in got if np.abs(last[name] - expected[name]).max() > 1e-5]
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"} <= {*changed}
    card = (folder / "model" / "README.md").read_text()
    assert "; the mean of the checkpoints of steps 1, 2, 3 |" in card
    AutoModelForCausalLM.from_pretrained(folder / "model")


def test_the_mean_of_products_is_not_the_product_of_means(averaged):
    folder = averaged("lora")
    saved = [saved_weights(folder / f"checkpoint-{step}") for step in (1, 2, 3)]
    stem = "model.layers.0.self_attn.q_proj"
    a, b = (
        np.mean([s[f"{stem}.lora_{part}.weight"] for s in saved], axis=0) for part in ("A", "B")
    )
    wrong = load_file(BASE / "model.safetensors")[f"{stem}.weight"].double().numpy() + 4 * b @ a
    got = tensors(folder / "model")[f"{stem}.weight"].double().numpy()
    assert np.abs(got - wrong).max() > 1e-6  # the test above allows 6e-8


def test_averaging_changes_no_step(averaged, recipe, reference_run):
    assert curve(averaged("plain")) == curve(reference_run(recipe))
    last = "checkpoint-3"
    assert equal_tensors(averaged("plain") / last, reference_run(recipe) / last)


class HangWhileAveraging:
    """Make a run hang after it has read some tensors of checkpoints."""

    def __init__(self, flag):
        self.flag = flag

    def __call__(self):
        promote, calls = torch.promote_types, []
        last_checkpoint = self.flag.parent / "run" / "checkpoint-3"

        def hang(*types):
            calls.extend([types] if last_checkpoint.exists() else [])
            if len(calls) == 5:
                self.flag.touch()
                time.sleep(600)
            return promote(*types)

        torch.promote_types = hang


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
    expected = float64_mean(folder, [2, 3])
    for name, tensor in tensors(folder / "model").items():
        np.testing.assert_allclose(tensor.double(), expected[name], rtol=3e-7, atol=3e-8)
    run(recipe, folder, resume="auto")
    assert equal_tensors(folder / "model", reference_run(recipe) / "model")
    assert "mean of" not in (folder / "model" / "README.md").read_text()


@pytest.fixture
def finished(reference_run, tmp_path):
    shutil.copytree(reference_run("finetune"), tmp_path / "run")
    return tmp_path / "run"


def refuse(folder, match):
    """Fail unless the average of three checkpoints is refused, and the model stays."""
    before = {p: p.stat().st_mtime_ns for p in (folder / "model").rglob("*")}
    with pytest.raises(ValueError, match=match):
        run("finetune", folder, resume="auto", average_checkpoints=3)
    assert {p: p.stat().st_mtime_ns for p in (folder / "model").rglob("*")} == before


def write_manifest(checkpoint):
    """List a changed checkpoint's files as whole."""
    files = [path for path in checkpoint.iterdir() if path.name != "whole.json"]
    contents = {path.name: path.read_bytes() for path in files}
    listed = {name: [len(raw), hashlib.sha256(raw).hexdigest()] for name, raw in contents.items()}
    (checkpoint / "whole.json").write_text(json.dumps(listed))


def test_damaged_checkpoints_are_not_averaged(finished):
    (finished / "checkpoint-2" / "model.safetensors").unlink()
    refuse(finished, "checkpoint-2 cannot be averaged: model.safetensors is missing.*Remove it")


def test_too_few_checkpoints_are_refused_before_the_first_step(finished, tmp_path):
    shutil.rmtree(finished / "checkpoint-1")
    refuse(finished, "average_checkpoints: 3 .* the run has 2.*save_steps, or .*_checkpoints: 2")
    with pytest.raises(ValueError, match=r"the run has 1 .*average_checkpoints: 0"):
        run("loop", tmp_path / "new", average_checkpoints=2, save_steps=100)
    assert not (tmp_path / "new" / "log.jsonl").exists()
    with pytest.raises(ValueError, match=r"3 checkpoints .*got checkpoint-2, checkpoint-3"):
        last_complete(finished, 3)


def test_checkpoints_of_another_rotation_are_refused(finished):
    path = finished / "checkpoint-2" / "rows.json"
    state = json.loads(path.read_text())
    assert state["rotation"]["method"] == "yarn"
    state["rotation"] |= {"method": "linear"}
    path.write_text(json.dumps(state))
    write_manifest(path.parent)
    refuse(finished, "checkpoint-2 and .*method was linear, in checkpoint-3 yarn")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, "no tensor model.norm.weight"),
        (torch.ones(3), r"model.norm.weight .*\(3,\).*\(128,\)"),
    ],
    ids=["missing", "shape"],
)
def test_weights_of_another_model_are_refused(tensor, message, finished):
    path = finished / "checkpoint-1" / "model.safetensors"
    weights = {name: values.clone() for name, values in load_file(path).items()}
    del weights["model.norm.weight"]
    save_file(weights | ({} if tensor is None else {"model.norm.weight": tensor}), path)
    write_manifest(path.parent)
    refuse(finished, f"checkpoint-1 .*{message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"average_checkpoints": 1}, "0, or 2 or more, got 1"),
        ({"average_checkpoints": 2, "save_strategy": "no"}, "save_strategy: steps, got no"),
    ],
)
def test_settings_that_cannot_be_averaged_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        settings_of(tmp_path / "run", **changes)


def test_adapters_that_a_later_stage_needs_are_not_merged(tmp_path):
    path = tmp_path / "stages.yaml"
    keys = {key: str(value) if key == "model" else value for key, value in TINY.items()}
    keys |= {"data": str(documents(tmp_path)), "lora_rank": 4, "average_checkpoints": 2}
    path.write_text(yaml.safe_dump(keys | {"stages": [{"max_steps": 4}, {"max_steps": 6}]}))
    with pytest.raises(ValueError, match=r"stage 1 of 2: average_checkpoints merges LoRA's"):
        run("loop", tmp_path / "run", config=path)


def test_means_of_16_bits_are_accumulated_in_float32(tmp_path):
    model = torch.nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    folders = [tmp_path / str(number) for number in range(4)]
    for folder, value in zip(folders, (256.0, 1.0, 1.0, 1.0), strict=True):
        write_form("files", folder, {"weight": torch.full((1, 4), value, dtype=torch.bfloat16)})
    average_into(model, folders)
    # 64.75, rounded once; in bfloat16, 256 + 1 is 256.
    assert model.weight.tolist() == torch.full((1, 4), 64.75).bfloat16().tolist() != [[64.0] * 4]


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
    average_into(models[1], folders)
    for parameter, tensor in zip(models[1].parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, tensor)


def test_unknown_forms_of_checkpoints_are_refused(tmp_path):
    (tmp_path / "global_step2").mkdir()
    with pytest.raises(ValueError, match=r"averaged: .*With DeepSpeed"):
        average_into(make_model("llama"), [tmp_path])


def test_tied_weights_are_found_under_either_name(tmp_path):
    model = make_model("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight") + 1
    write_form("files", tmp_path / "a", weights)
    average_into(model, [tmp_path / "a"])
    assert torch.equal(model.model.embed_tokens.weight, weights["lm_head.weight"])


def test_tensors_are_read_one_after_the_other(monkeypatch, tmp_path):
    model, alive, most = make_model("llama"), set(), []
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    folders = [tmp_path / str(number) for number in range(5)]
    for folder in folders:
        write_form("FSDP, full", folder, weights)
    clone = torch.Tensor.clone

    def watched(tensor, *args, **kwargs):
        copy = clone(tensor, *args, **kwargs)
        alive.add(id(copy))
        weakref.finalize(copy, alive.discard, id(copy))
        most.append(len(alive))
        return copy

    monkeypatch.setattr(torch.Tensor, "clone", watched)
    average_into(model, folders)
    assert len(most) == 5 * len(weights)
    assert max(most) <= 2
