"""Test that recipes on several processes train the same model as one process.

For each kind of parallelism, two CPU processes are started once and run all recipes; see
recipe_worker.py. The reference is one process that runs the same recipes.
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
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.tasks import read_text
from rope_patch.training import find_damage, read_log

ASSETS = Path(__file__).parent.parent / "assets"
CONFIGS = Path(__file__).parent.parent.parent / "recipes" / "accelerate"
LENGTH = 256
STEPS = 2
CLOSE = 1e-4
PATIENCE = 600  # seconds; a mode takes 15 on an idle machine

pytestmark = pytest.mark.skipif(
    shims.unsupported_reason() is not None, reason=str(shims.unsupported_reason())
)

RECIPE = {
    "model": str(ASSETS / "tiny-llama"),
    "method": "yarn",
    "factor": 2,
    "train_length": LENGTH,
    "max_steps": STEPS,
    "loss": "torch",  # in chunks, with a sharded head
    "learning_rate": 1e-3,
    "gradient_accumulation_steps": 2,
    "save_steps": 1,
    "ignore_plan": True,
    "use_cpu": True,
}
NEEDLES = {"retrieval_steps": 2, "retrieval_samples": 2, "retrieval_length": 400}
KINDS = {
    # Large numbers, so that a wrong one shows.
    "full": {
        "z_loss": 0.02,
        "weight_decay": 2.0,
        "decay_embeddings": False,
        "average_checkpoints": 2,
        "save_total_limit": 1,
    },
    "lora": {"lora_rank": 4, "average_checkpoints": 2, **NEEDLES},
    # The length of a single process's part is within the trained length.
    "following": {
        "method": "dynamic-yarn",
        "factor": None,
        "trained_length": LENGTH // 2,
        **NEEDLES,
    },
    # The original model shares LoRA's frozen weights, but with FSDP.
    "distilled": {
        "method": "mixed-yarn",
        "trained_length": 64,
        "factor": 4,
        "packing": "masked",
        "short_share": 0.5,
        "distillation_weight": 1.0,
        "lora_rank": 4,
    },
    "woven": {
        "train_length": 512,
        "packing": "best_fit",
        "packing_window": 3,
        "compression_ratio": [0.3, 0.9],
        "aggregation_share": 1.0,
    },
}
_STAGES = [
    {"factor": 2, "max_steps": 1, "train_length": LENGTH // 2},
    {"factor": 4, "max_steps": 2, "carry_optimizer": True},
]
STAGED = {"stages": {"stages": _STAGES}, "stages lora": {"stages": _STAGES, "lora_rank": 4}}
RECIPES = ["finetune", pytest.param("loop", marks=pytest.mark.slow)]  # their steps are equal
# Mode -> its kinds, and those of them that are resumed.
RUNS = {
    "data parallel": (["full", "lora", "distilled", "woven", "stages"], ["full", "stages"]),
    "FSDP2": (
        ["full", "lora", "distilled", "bfloat16", "stages", "stages lora"],
        ["full", "lora", "stages lora"],
    ),
    "context parallel": (["full", "lora", "following"], ["full"]),
}
MODES = list(RUNS)
REFUSED = {
    "packed": {"packing": "masked"},
    "indivisible": {"train_length": 254},
    "sliding": {"model": str(ASSETS / "tiny-gemma3"), "method": "yarn", "factor": 2},
}


def jobs_of(mode, recipe):
    """Return the runs of a mode's processes: name -> (kind, changes, resumed run)."""
    changes = KINDS | STAGED | {"bfloat16": KINDS["full"]}
    if mode == "one":
        return {kind: (kind, changes[kind], None) for kind in KINDS | STAGED}
    kinds, resumed = RUNS[mode]
    jobs = {f"{recipe} {kind}": (kind, changes[kind], None) for kind in kinds}
    for kind in resumed:
        jobs[f"{recipe} {kind} resumed"] = (kind, changes[kind], f"{recipe} {kind}")
    if mode == "context parallel":
        jobs |= {f"{recipe} {name}": (name, keys, None) for name, keys in REFUSED.items()}
    return jobs


def variables(mode):
    """Return the launcher's environment for the recipes' configs on two processes."""
    if mode in ("one", "data parallel"):
        return {}
    config = {"FSDP2": "fsdp2.yaml", "context parallel": "fsdp2_cp8.yaml"}[mode]
    options = ["--config_file", str(CONFIGS / config), "--num_processes", "2"]
    options += ["--main_process_port", "0"]
    if mode == "context parallel":
        options += ["--parallelism_config_cp_size", "2"]
    parsed = launch_command_parser().parse_args([*options, "recipe_worker.py"])
    environment = prepare_multi_gpu_env(_validate_launch_command(parsed)[0])
    return {name: value for name, value in environment.items() if os.environ.get(name) != value}


def run(mode, recipe, tmp_path_factory):
    """Return a mode's folder and its processes' observations; the first to ask starts them."""
    processes = 1 if mode == "one" else 2
    rows = 2 if mode in ("one", "context parallel") else 1
    with shared_folder(tmp_path_factory, f"{recipe}_{mode.replace(' ', '_')}") as folder:
        paths = [folder / f"{rank}.json" for rank in range(processes)]
        if not all(report.exists() for report in paths):
            jobs, documents = [], str(write_documents(folder))
            for name, (_, changes, resumes) in jobs_of(mode, recipe).items():
                recipe_keys = (
                    RECIPE | {"data": [documents], "per_device_train_batch_size": rows} | changes
                )
                recipe_keys = {
                    key: value for key, value in recipe_keys.items() if value is not None
                }
                (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe_keys))
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
        return folder, [json.loads(report.read_text()) for report in paths]


def write_documents(folder):
    """Write documents that end within rows, some shorter than a row."""
    text = read_text("emma")
    path = folder / "documents.jsonl"
    with path.open("w") as file:
        for length in [2500, 300, 6000, 90, 1200, 4000, 700, 10000]:
            file.write(json.dumps({"text": text[:length]}) + "\n")
            text = text[length:]
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a mode's folder and its processes' observations."""
    return cache(lambda mode, recipe="finetune": run(mode, recipe, tmp_path_factory))


def cases(kinds_of):
    """Return (mode, recipe, kind) of the kinds that a function gives for a mode."""
    return [
        pytest.param(mode, recipe, kind, marks=pytest.mark.slow if recipe == "loop" else ())
        for mode in MODES
        for recipe in ("finetune", "loop")
        for kind in kinds_of(mode)
    ]


CASES = cases(lambda mode: [kind for kind in RUNS[mode][0] if kind in KINDS])
STAGED_CASES = cases(lambda mode: [kind for kind in RUNS[mode][0] if kind in STAGED])
RESUMED = cases(lambda mode: [kind for kind in RUNS[mode][1] if kind in KINDS])


def curve(folder):
    """Return loss and gradient norm of every step, `[steps, 2]`."""
    lines = read_log(folder)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return torch.tensor([[line["loss"], line["grad_norm"]] for line in lines])


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def max_difference(model, other):
    assert model.keys() == other.keys()
    return max((model[name] - other[name]).abs().max() for name in model)


def distance(model, other):
    return torch.cat([(model[name] - other[name]).flatten() for name in model]).norm()


@pytest.mark.parametrize(("mode", "recipe", "kind"), CASES)
def test_losses_and_gradients_equal_those_of_one_process(runs, mode, recipe, kind):
    folder, reports = runs(mode, recipe)
    reference, _ = runs("one")
    assert [report[f"{recipe} {kind}"]["code"] for report in reports] == [0, 0]
    torch.testing.assert_close(
        curve(folder / f"{recipe} {kind}"), curve(reference / kind), rtol=0, atol=CLOSE
    )
    if kind == "full":
        got, expected = (
            torch.tensor([line["z_loss"] for line in read_log(run)])
            for run in (folder / f"{recipe} {kind}", reference / kind)
        )
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=0)
        assert expected.min() > 0.01


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_averages_are_of_the_last_checkpoints(runs, mode, recipe, kind):
    folder, _ = runs(mode, recipe)
    card = (folder / f"{recipe} {kind}" / "model" / "README.md").read_text()
    assert "the mean of the checkpoints of steps 1, 2 |" in card
    if kind == "full":
        reference, _ = runs("one")
        last = load_file(reference / kind / "checkpoint-2" / "model.safetensors")
        got = weights(folder / f"{recipe} {kind}" / "model")
        assert max_difference({name: got[name] for name in last}, last) > 2 * CLOSE


@pytest.mark.parametrize(
    ("mode", "recipe", "kind"), [case for case in CASES if "distilled" in case.values[2]]
)
def test_divergences_are_averaged_over_the_tokens_of_all_processes(runs, mode, recipe, kind):
    folder, _ = runs(mode, recipe)
    reference, _ = runs("one")
    logs = (read_log(folder / f"{recipe} {kind}"), read_log(reference / kind))
    for got, expected in zip(*logs, strict=True):
        assert got["distillation_tokens"] == expected["distillation_tokens"] > 0
        for term in ("distillation_loss", "language_loss"):
            assert got[term] == pytest.approx(expected[term], abs=CLOSE)


@pytest.mark.parametrize(("mode", "recipe", "kind"), STAGED_CASES)
def test_stages_equal_those_of_one_process_and_resume(runs, mode, recipe, kind):
    folder, reports = runs(mode, recipe)
    reference, _ = runs("one")
    before = weights(RECIPE["model"])
    for name in [n for n in jobs_of(mode, recipe) if n.removesuffix(" resumed").endswith(kind)]:
        assert [report[name]["code"] for report in reports] == [0, 0]
        for stage in ("stage-1", "stage-2"):
            ours, expected = (read_log(f / stage) for f in (folder / name, reference / kind))
            for key in ("loss", "grad_norm", "learning_rate"):
                got = [line[key] for line in ours]
                assert got == pytest.approx([line[key] for line in expected], abs=CLOSE)
        trained, expected = (weights(f / "model") for f in (folder / name, reference / kind))
        assert distance(trained, expected) < 5 * CLOSE * distance(expected, before)


@pytest.mark.parametrize(("mode", "recipe", "kind"), CASES)
def test_the_finished_model_equals_that_of_one_process(runs, mode, recipe, kind):
    folder, _ = runs(mode, recipe)
    reference, _ = runs("one")
    trained, expected = (
        weights(f / "model") for f in (folder / f"{recipe} {kind}", reference / kind)
    )
    # Adam's steps hardly depend on a gradient's size, so rounding decides over single weights whose
    # gradient is near 0. Hence the distance over all weights is compared with the trained change.
    before = weights(RECIPE["model"])
    assert distance(trained, expected) < 5 * CLOSE * distance(expected, before)
    assert max_difference(trained, expected) < RECIPE["learning_rate"]
    assert max_difference(expected, before) > 10 * CLOSE


@pytest.mark.parametrize("mode", ["one", *MODES])
def test_transformers_rotates_the_finished_model_as_it_was_trained(runs, mode):
    folder, _ = runs(mode)
    ids = tokens(2 * LENGTH)
    for kind in ("full", "lora"):
        trained = AutoModelForCausalLM.from_pretrained(
            folder / (kind if mode == "one" else f"finetune {kind}") / "model"
        )
        base = AutoModelForCausalLM.from_pretrained(RECIPE["model"])
        base.load_state_dict(trained.state_dict())
        plain = forward(base, ids)
        rope_patch.patch(base, "yarn", factor=2)
        # Logits are up to 20, and transformers rounds frequencies earlier.
        torch.testing.assert_close(forward(trained, ids), forward(base, ids), rtol=0, atol=1e-3)
        assert (forward(trained, ids) - plain).abs().mean() > 1


@pytest.mark.parametrize(
    ("mode", "recipe", "kind"),
    [case for case in CASES if "retrieval_steps" in KINDS.get(case.values[2], {})],
)
def test_retrieval_scores_equal_those_of_one_process(runs, mode, recipe, kind):
    folder, _ = runs(mode, recipe)
    reference, _ = runs("one")
    expected, got = (
        [json.loads(line) for line in (run / "retrieval.jsonl").open()]
        for run in (reference / kind, folder / f"{recipe} {kind}")
    )
    assert [scores["step"] for scores in got] == [0, 2]
    for expected_scores, got_scores in zip(expected, got, strict=True):
        assert got_scores["retrieval_hits"] == expected_scores["retrieval_hits"]
        assert got_scores["retrieval_probability"] == pytest.approx(
            expected_scores["retrieval_probability"], rel=1e-3
        )


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_compute_in_the_precision_of_the_launch_file(runs, recipe):
    folder, _ = runs("FSDP2", recipe)
    got, exact = curve(folder / f"{recipe} bfloat16"), curve(folder / f"{recipe} full")
    trainer = curve(runs("FSDP2")[0] / "finetune bfloat16")
    torch.testing.assert_close(got, trainer, rtol=0, atol=CLOSE)
    assert 10 * CLOSE < (got - exact).abs().max() < 0.1
    losses = got[:, 0]
    assert not losses.equal(losses.bfloat16().float())  # bfloat16 losses would have three digits


def test_losses_differ_if_a_process_uses_the_length_of_its_part():
    model = AutoModelForCausalLM.from_pretrained(RECIPE["model"])
    handle = rope_patch.patch(model, "dynamic-yarn", trained_length=LENGTH // 2)
    losses = []
    for length in (LENGTH, LENGTH // 2):
        handle.fix_length(length)
        ids = tokens(LENGTH)
        losses.append(model(ids, labels=ids, use_cache=False).loss)
    assert abs(losses[0] - losses[1]) > 10 * CLOSE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_and_rows_are_placed_as_the_mode_says(runs, mode, recipe):
    length = LENGTH // 2 if mode == "context parallel" else LENGTH
    for report in runs(mode, recipe)[1]:
        assert report[f"{recipe} full"]["lengths"] == [length]
        for observed in (report[f"{recipe} {kind}"] for kind in ("full", "lora")):
            if mode == "data parallel":
                assert observed["wrapped"][0] == "DistributedDataParallel"
                assert (observed["sharded"], observed["here"]) == (0, observed["elements"])
            else:
                assert observed["wrapped"][0].startswith("FSDP")
                assert "FSDPModule" in observed["wrapped"]
                assert observed["sharded"] > 0
                assert observed["here"] == observed["elements"] / 2


@pytest.mark.parametrize(("mode", "recipe", "kind"), RESUMED)
def test_checkpoints_are_whole(runs, mode, recipe, kind):
    folder, _ = runs(mode, recipe)
    for step in (1, 2):
        checkpoint = folder / f"{recipe} {kind}" / f"checkpoint-{step}"
        assert find_damage(checkpoint) is None
        names = {str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*") if p.is_file()}
        listed = json.loads((checkpoint / "whole.json").read_text()).keys()
        assert names == {*listed, "whole.json"}


@pytest.mark.parametrize(("mode", "recipe", "kind"), RESUMED)
def test_a_resumed_run_equals_an_uninterrupted_one(runs, mode, recipe, kind):
    folder, reports = runs(mode, recipe)
    uninterrupted, resumed = folder / f"{recipe} {kind}", folder / f"{recipe} {kind} resumed"
    assert [report[resumed.name]["code"] for report in reports] == [0, 0]
    torch.testing.assert_close(curve(resumed), curve(uninterrupted), rtol=0, atol=CLOSE)
    assert max_difference(weights(resumed / "model"), weights(uninterrupted / "model")) < CLOSE
    # Only the steps after the checkpoint were repeated.
    line_pairs = zip(read_log(uninterrupted), read_log(resumed), strict=True)
    assert [before == after for before, after in line_pairs] == [True, False]


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("packed", "no mask: expected packing single"),
        ("indivisible", "divisible by 4, .* got 254: .* example 256"),
        ("sliding", "sliding_attention"),
    ],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_context_parallelism_refuses_unsupported_recipes(runs, recipe, problem, message):
    for report in runs("context parallel", recipe)[1]:
        observation = report[f"{recipe} {problem}"]
        assert observation["code"] == 1
        assert re.search(f"error: .*{message}", observation["said"])
        assert "Traceback" not in observation["said"]
        assert observation["lengths"] == []
