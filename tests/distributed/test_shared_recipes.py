"""Recipes on several processes: what one process would have learned, and nothing else.

For each way to share the work two processes are started once, on the CPU, and take one recipe after
another; see recipe_worker.py. One process that takes the same recipes is the truth.
"""

import json
import os
import re
from functools import cache
from pathlib import Path

import pytest
import shims
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from helpers.processes import launch, shared_folder
from helpers.tiny_models import forward, tokens
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.tasks import texts
from rope_patch.training.checkpoints import MANIFEST, find_damage
from rope_patch.training.monitor import read_log
from rope_patch.training.needle_callback import read_scores

ASSETS = Path(__file__).parent.parent / "assets"
CONFIGS = Path(__file__).parent.parent.parent / "recipes" / "accelerate"
LENGTH = 256
STEPS = 4
CLOSE = 1e-4
PATIENCE = 600  # seconds; it takes 20 to 40 where nothing else is going on

pytestmark = pytest.mark.skipif(shims.why_not() is not None, reason=str(shims.why_not()))

RECIPE = {
    "model": str(ASSETS / "tiny-llama"),
    "method": "yarn",
    "factor": 2,
    "train_length": LENGTH,
    "max_steps": STEPS,
    "loss": "torch",  # in chunks, of a head that lies in shards
    "learning_rate": 1e-3,
    "gradient_accumulation_steps": 2,
    "save_steps": 2,
    "ignore_plan": True,
    "use_cpu": True,
}
NEEDLES = {"retrieval_steps": 2, "retrieval_samples": 2, "retrieval_length": 400}
KINDS = {
    "full": {},
    "lora": {"lora_rank": 4, **NEEDLES},
    # The length that a process sees by itself is within the trained one.
    "following": {
        "method": "dynamic-yarn",
        "factor": None,
        "trained_length": LENGTH // 2,
        **NEEDLES,
    },
    "masked": {
        "method": "mixed-yarn",
        "trained_length": 64,
        "factor": 4,
        "packing": "masked",
        "short_share": 0.5,
    },
}
RECIPES = ["finetune", "loop"]
MODES = ["data parallel", "FSDP2", "context parallel"]
REFUSED = {
    "packed": {"packing": "masked"},
    "short": {"short_share": 0.5},
    "indivisible": {"train_length": 254},
    "sliding": {"model": str(ASSETS / "tiny-gemma3"), "method": "yarn", "factor": 2},
}


def jobs_of(mode):
    """Return the runs of a mode's processes: name -> (recipe, kind, changes, resumed run)."""
    if mode == "one":
        return {kind: ("finetune", kind, changes, None) for kind, changes in KINDS.items()}
    kinds = ["full", "lora"]
    more = {"data parallel": "masked", "FSDP2": "bfloat16", "context parallel": "following"}
    kinds.append(more[mode])
    found = {}
    for recipe in RECIPES:
        for kind in kinds:
            found[f"{recipe} {kind}"] = (recipe, kind, KINDS.get(kind, {}), None)
        for kind in ("full", "lora"):
            name = f"{recipe} {kind}"
            found[f"{name} resumed"] = (recipe, kind, KINDS[kind], name)
        if mode == "context parallel":
            for why, changes in REFUSED.items():
                found[f"{recipe} {why}"] = (recipe, why, changes, None)
    return found


def variables(mode):
    """Return the launcher's environment for the recipes' configs on two processes."""
    if mode in ("one", "data parallel"):
        return {}
    config = {"FSDP2": "fsdp2.yaml", "context parallel": "fsdp2_cp8.yaml"}[mode]
    given = ["--config_file", str(CONFIGS / config), "--num_processes", "2"]
    given += ["--main_process_port", "0"]
    if mode == "context parallel":
        given += ["--parallelism_config_cp_size", "2"]
    parsed = launch_command_parser().parse_args([*given, "recipe_worker.py"])
    found = prepare_multi_gpu_env(_validate_launch_command(parsed)[0])
    return {name: value for name, value in found.items() if os.environ.get(name) != value}


def run(mode, tmp_path_factory):
    """Return a mode's folder and its processes' observations; the first to ask starts them."""
    processes = 1 if mode == "one" else 2
    rows = 2 if mode in ("one", "context parallel") else 1
    with shared_folder(tmp_path_factory, "recipes_" + mode.replace(" ", "_")) as folder:
        reports = [folder / f"{rank}.json" for rank in range(processes)]
        if not all(report.exists() for report in reports):
            jobs, documents = [], str(write_documents(folder))
            for name, (recipe, _, changes, resumes) in jobs_of(mode).items():
                said = RECIPE | {"data": [documents], "per_device_train_batch_size": rows} | changes
                said = {key: value for key, value in said.items() if value is not None}
                (folder / f"{name}.yaml").write_text(yaml.safe_dump(said))
                jobs.append({"name": name, "recipe": recipe, "resumes": resumes})
                jobs[-1]["precision"] = "bf16" if "bfloat16" in name else "no"
            (folder / "jobs.json").write_text(json.dumps(jobs))
            launch(
                "recipe_worker.py",
                folder,
                processes=processes,
                patience=PATIENCE,
                **variables(mode),
            )
        return folder, [json.loads(report.read_text()) for report in reports]


def write_documents(folder):
    """Write documents that end within rows, some shorter than a row."""
    text = texts.read_text("emma")
    path = folder / "documents.jsonl"
    with path.open("w") as file:
        for length in [2500, 300, 6000, 90, 1200, 4000, 700, 10000]:
            file.write(json.dumps({"text": text[:length]}) + "\n")
            text = text[length:]
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a mode's folder and its processes' observations."""
    return cache(lambda mode: run(mode, tmp_path_factory))


CASES = [
    (mode, recipe, kind)
    for mode in MODES
    for recipe, kind, _, resumes in jobs_of(mode).values()
    if kind in KINDS and resumes is None
]
RESUMED = [(mode, recipe, kind) for mode, recipe, kind in CASES if kind in ("full", "lora")]


def curve(folder):
    """Return loss and gradient norm of every step, `[steps, 2]`."""
    lines = read_log(folder)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return torch.tensor([[line["loss"], line["grad_norm"]] for line in lines])


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def apart(model, other):
    assert model.keys() == other.keys()
    return max((model[name] - other[name]).abs().max() for name in model)


def distance(model, other):
    return torch.cat([(model[name] - other[name]).flatten() for name in model]).norm()


@pytest.mark.parametrize(("mode", "recipe", "kind"), CASES)
def test_losses_and_gradients_are_those_of_one_process(runs, mode, recipe, kind):
    folder, found = runs(mode)
    truth, _ = runs("one")
    assert [report[f"{recipe} {kind}"]["code"] for report in found] == [0, 0]
    torch.testing.assert_close(
        curve(folder / f"{recipe} {kind}"), curve(truth / kind), rtol=0, atol=CLOSE
    )


@pytest.mark.parametrize(("mode", "recipe", "kind"), CASES)
def test_the_finished_model_is_that_of_one_process(runs, mode, recipe, kind):
    folder, _ = runs(mode)
    truth, _ = runs("one")
    made, expected = (weights(f / "model") for f in (folder / f"{recipe} {kind}", truth / kind))
    # Adam moves a weight as far for a small gradient as for a large one, so rounding decides over
    # single weights whose gradient is near 0: all of them are held against what training changed.
    before = weights(RECIPE["model"])
    assert distance(made, expected) < 5 * CLOSE * distance(expected, before)
    assert apart(made, expected) < RECIPE["learning_rate"]
    assert apart(expected, before) > 10 * CLOSE


@pytest.mark.parametrize("mode", ["one", *MODES])
def test_transformers_rotates_the_finished_model_as_it_was_trained(runs, mode):
    folder, _ = runs(mode)
    ids = tokens(2 * LENGTH)
    for kind in ("full", "lora"):
        made = AutoModelForCausalLM.from_pretrained(
            folder / (kind if mode == "one" else f"loop {kind}") / "model"
        )
        base = AutoModelForCausalLM.from_pretrained(RECIPE["model"])
        base.load_state_dict(made.state_dict())
        plain = forward(base, ids)
        rope_patch.patch(base, "yarn", factor=2)
        # Logits are up to 20, and transformers rounds frequencies earlier.
        torch.testing.assert_close(forward(made, ids), forward(base, ids), rtol=0, atol=1e-3)
        assert (forward(made, ids) - plain).abs().mean() > 1


@pytest.mark.parametrize(
    ("mode", "recipe", "kind"),
    [case for case in CASES if "retrieval_steps" in KINDS.get(case[2], {})],
)
def test_needles_found_on_the_way_are_those_of_one_process(runs, mode, recipe, kind):
    folder, _ = runs(mode)
    truth, _ = runs("one")
    expected, got = read_scores(truth / kind), read_scores(folder / f"{recipe} {kind}")
    assert [said["step"] for said in got] == [0, 2, 4]
    for there, here in zip(expected, got, strict=True):
        assert here["retrieval_hits"] == there["retrieval_hits"]
        assert here["retrieval_probability"] == pytest.approx(
            there["retrieval_probability"], rel=1e-3
        )


def test_both_recipes_compute_in_the_precision_of_accelerates_config(runs):
    folder, _ = runs("FSDP2")
    trainer, loop, exact = (
        curve(folder / name) for name in ("finetune bfloat16", "loop bfloat16", "loop full")
    )
    torch.testing.assert_close(trainer, loop, rtol=0, atol=CLOSE)
    assert 10 * CLOSE < (trainer - exact).abs().max() < 0.1
    losses = trainer[:, 0]
    assert not losses.equal(losses.bfloat16().float())  # which would have three digits


def test_following_rows_would_show_a_process_that_goes_by_its_part():
    model = AutoModelForCausalLM.from_pretrained(RECIPE["model"])
    handle = rope_patch.patch(model, "dynamic-yarn", trained_length=LENGTH // 2)
    losses = []
    for length in (LENGTH, LENGTH // 2):
        handle.fix_length(length)
        ids = tokens(LENGTH)
        losses.append(model(ids, labels=ids, use_cache=False).loss)
    assert abs(losses[0] - losses[1]) > 10 * CLOSE


def test_each_data_parallel_process_has_all_weights(runs):
    _, found = runs("data parallel")
    for observed in (report[f"{recipe} full"] for report in found for recipe in RECIPES):
        assert observed["wrapped"][0] == "DistributedDataParallel"
        assert observed["here"] == observed["elements"]
        assert observed["sharded"] == 0


@pytest.mark.parametrize("mode", ["FSDP2", "context parallel"])
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_sharded(runs, mode, recipe, kind):
    _, found = runs(mode)
    for observed in (report[f"{recipe} {kind}"] for report in found):
        assert observed["wrapped"][0].startswith("FSDP")
        assert "FSDPModule" in observed["wrapped"]
        assert observed["sharded"] > 0
        assert observed["here"] == observed["elements"] / 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_context_parallel_processes_see_half_of_each_row(runs, recipe):
    for mode, length in zip(MODES, (LENGTH, LENGTH, LENGTH // 2), strict=True):
        for report in runs(mode)[1]:
            assert report[f"{recipe} full"]["lengths"] == [length]


@pytest.mark.parametrize(("mode", "recipe", "kind"), RESUMED)
def test_checkpoints_are_whole(runs, mode, recipe, kind):
    folder, _ = runs(mode)
    for step in (2, 4):
        checkpoint = folder / f"{recipe} {kind}" / f"checkpoint-{step}"
        assert find_damage(checkpoint) is None
        there = {str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*") if p.is_file()}
        assert there - {MANIFEST} == json.loads((checkpoint / MANIFEST).read_text()).keys()


@pytest.mark.parametrize(("mode", "recipe", "kind"), RESUMED)
def test_a_resumed_run_goes_on_as_if_it_had_not_been_stopped(runs, mode, recipe, kind):
    folder, found = runs(mode)
    whole, resumed = folder / f"{recipe} {kind}", folder / f"{recipe} {kind} resumed"
    assert [report[resumed.name]["code"] for report in found] == [0, 0]
    torch.testing.assert_close(curve(resumed), curve(whole), rtol=0, atol=CLOSE)
    assert apart(weights(resumed / "model"), weights(whole / "model")) < CLOSE
    # Steps before the checkpoint were not taken again, those after it were.
    again = zip(read_log(whole), read_log(resumed), strict=True)
    assert [before == after for before, after in again] == [True, True, False, False]


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("packed", "no mask: expected packing single or concatenate and short_share 0"),
        ("short", "no mask: expected packing single or concatenate and short_share 0"),
        ("indivisible", "train_length must be divisible by 4, .* got 254: .* example 256"),
        ("sliding", "does not support attention layers of type .'sliding_attention'."),
    ],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_context_parallelism_refuses_what_it_would_get_wrong(runs, recipe, why, said):
    for report in runs("context parallel")[1]:
        refused = report[f"{recipe} {why}"]
        assert refused["code"] == 1
        assert re.search(f"error: .*{said}", refused["said"])
        assert "Traceback" not in refused["said"]
        assert refused["lengths"] == []
