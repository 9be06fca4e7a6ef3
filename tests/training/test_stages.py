"""Test recipes with stages: each goes on from the weights before, and a kill changes no bit."""

import json
import re
import shutil

import pytest
import torch
import yaml
from helpers.commands import run_in_this_process
from safetensors.torch import load_file
from training_runs import (
    BOTH,
    RECIPES,
    TINY,
    curve,
    documents,
    equal_tensors,
    run,
    tensors,
)

import rope_patch
from rope_patch.training import parse_settings, step_of

TRAINED = 256  # tokens; of tiny-llama
# YaRN in both stages, as DeepSeek-V3, but at another factor, rate, row length and batch.
STAGES = [
    {"factor": 2, "max_steps": 1, "train_length": 64},
    {"factor": 4, "max_steps": 2, "learning_rate": 5e-4, "train_length": 96},
]
QUICK = {"train_length": 64, "per_device_train_batch_size": 1}
TINY_LORA_SCALE = 16 / 4  # lora_alpha / lora_rank
SHORT = {"gradient_accumulation_steps": 1}
LORA = {"lora_rank": 4, "lora_trains": ["norms", "embeddings"]}

both = pytest.mark.parametrize("recipe", BOTH)


def recipe_file(folder, stages=STAGES, **changes):
    """Write a recipe with stages; return its file."""
    keys = TINY | {"data": str(documents(folder)), "model": str(TINY["model"])} | SHORT | changes
    for key in ("factor", "max_steps"):
        if all(isinstance(stage, dict) and key in stage for stage in stages or [{}]):
            del keys[key]
    path = folder / "stages.yaml"
    path.write_text(yaml.safe_dump({**keys, "stages": stages}))
    return path


def run_stages(recipe, folder, stages=STAGES, resume="no", **changes):
    config = recipe_file(folder.parent, stages, **changes)
    return run(recipe, folder, config=config, resume=resume)


def require_same(folder, reference):
    """Fail unless two runs of two stages have the same losses, norms and finished weights."""
    for stage in ("stage-1", "stage-2"):
        assert curve(folder / stage) == curve(reference / stage)
        assert equal_tensors(folder / stage / "model", reference / stage / "model")
    assert equal_tensors(folder / "model", reference / "model")


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """Run two stages without interruption, once a recipe; return their folder."""
    folders = {}

    def run_once(recipe):
        if recipe not in folders:
            folders[recipe] = tmp_path_factory.mktemp(f"{recipe}-stages") / "run"
            run_stages(recipe, folders[recipe])
        return folders[recipe]

    return run_once


def stopped_copy(reference, folder, stage, after):
    """Copy a run as if it was killed in a stage, some steps after a checkpoint."""
    shutil.copytree(reference, folder)
    shutil.rmtree(folder / "model")
    for later in range(stage + 1, 3):
        shutil.rmtree(folder / f"stage-{later}")
    stopped = folder / f"stage-{stage}"
    shutil.rmtree(stopped / "model")
    (stopped / "finished.json").unlink()
    for checkpoint in stopped.glob("checkpoint-*"):
        if step_of(checkpoint) > after:
            shutil.rmtree(checkpoint)
    return folder


@both
def test_two_stages_equal_two_runs_by_hand(recipe, staged, tmp_path):
    folder = staged(recipe)
    first = run(recipe, tmp_path / "first", **SHORT, **STAGES[0])
    # Stages count from the original model; a finished one starts from its trained length.
    run(recipe, tmp_path / "second", model=first, trained_length=TRAINED, **SHORT, **STAGES[1])
    for stage, by_hand in (("stage-1", "first"), ("stage-2", "second")):
        assert curve(folder / stage) == curve(tmp_path / by_hand)
        assert equal_tensors(folder / stage / "model", tmp_path / by_hand / "model")
    assert equal_tensors(folder / "model", tmp_path / "second" / "model")


def test_the_rotation_is_that_of_the_original_model_extended_once(staged):
    folder = staged("finetune")
    config = json.loads((folder / "model" / "config.json").read_text())
    assert config["rope_parameters"]["factor"] == 4
    assert config["rope_parameters"]["original_max_position_embeddings"] == TRAINED
    assert config["max_position_embeddings"] == 4 * TRAINED
    plain = rope_patch.load(TINY["model"], "yarn", factor=4)
    for model in (rope_patch.load(folder / "model"), rope_patch.load(folder / "stage-2" / "model")):
        assert rope_patch.current(model).trained_length == TRAINED
        ours, expected = (
            rope_patch.current(m).frequencies_at(TRAINED)[None] for m in (model, plain)
        )
        assert torch.equal(ours.inv_freq, expected.inv_freq)
        assert ours.attention_factor == expected.attention_factor


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"method": "dynamic-yarn"}, {"method": "yarn", "factor": 2}, "yarn"),
        ({"method": "linear", "factor": 2}, {"method": "abf", "factor": 4}, "default"),
    ],
)
def test_methods_of_stages_replace_one_another(first, second, expected, tmp_path):
    steps = {"max_steps": 1, "train_length": 128}
    stages = [first | steps, second | steps]
    model = run_stages("finetune", tmp_path / "run", stages, factor=None, save_strategy="no")
    parameters = json.loads((model / "config.json").read_text())["rope_parameters"]
    assert parameters["rope_type"] == expected
    original = json.loads((model / "rope_patch.json").read_text())["original"]
    assert original["rope_parameters"]["rope_type"] == "default"
    assert original["max_position_embeddings"] == TRAINED


@both
@pytest.mark.parametrize(("stage", "after"), [(1, 0), (2, 0), (2, 1)])
def test_a_run_stopped_in_a_stage_resumes_there(recipe, stage, after, staged, tmp_path):
    folder = stopped_copy(staged(recipe), tmp_path / "run", stage, after)
    first = folder / "stage-1" / "model" / "model.safetensors"
    written = first.stat().st_mtime_ns if stage == 2 else None
    run_stages(recipe, folder, resume="auto")
    require_same(folder, staged(recipe))
    if stage == 2:
        assert first.stat().st_mtime_ns == written


# LoRA and the optimizer.


@both
def test_lora_goes_on_with_its_adapter(recipe, tmp_path):
    stages = [{"factor": 2, "max_steps": 2}, {"factor": 4, "max_steps": 1, "learning_rate": 0.0}]
    run_stages(recipe, tmp_path / "run", stages, **LORA, **QUICK)
    first, second = (tmp_path / "run" / f"stage-{number}" for number in (1, 2))
    trained, kept = load_file(first / "lora.safetensors"), load_file(second / "lora.safetensors")
    # A rate of 0 changes nothing, so the second stage ends with the adapter of the first.
    assert trained.keys() == kept.keys()
    assert all(torch.equal(trained[name], kept[name]) for name in trained)
    assert sum("lora_B" in name and bool(tensor.any()) for name, tensor in trained.items()) > 0
    assert any("embed_tokens" in name for name in trained)
    assert equal_tensors(first / "model", second / "model")
    # The merged weights are those of the original model with this adapter.
    name = "model.layers.0.self_attn.q_proj"
    factors = [trained[f"base_model.model.{name}.lora_{each}.default.weight"] for each in "BA"]
    change = factors[0].double() @ factors[1].double() * TINY_LORA_SCALE
    expected = load_file(TINY["model"] / "model.safetensors")[f"{name}.weight"].double() + change
    merged = tensors(second / "model")[f"{name}.weight"].double()
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-6)
    assert "went on with its LoRA adapter" in (second / "model" / "README.md").read_text()


@both
def test_a_carried_optimizer_continues_one_run(recipe, tmp_path):
    # All rows are the same, so two stages with one optimizer take the steps of a single run.
    row = [token % 400 + 10 for token in range(64)]
    data = tmp_path / "same.jsonl"
    data.write_text(json.dumps({"input_ids": row}) + "\n")
    keys = QUICK | {"data": str(data), "lr_scheduler_type": "constant", "factor": 2}
    run(recipe, tmp_path / "single", max_steps=3, **SHORT, **keys)
    single = [loss for _, loss, _ in curve(tmp_path / "single")]
    for carry in (True, False):
        folder = tmp_path / f"carry {carry}"
        stages = [{"max_steps": 1}, {"max_steps": 2, "carry_optimizer": carry}]
        run_stages(recipe, folder, stages, **keys)
        losses = [loss for n in (1, 2) for _, loss, _ in curve(folder / f"stage-{n}")]
        assert losses[:2] == single[:2]
        assert (losses == single) is carry
        assert equal_tensors(folder / "model", tmp_path / "single" / "model") is carry


def test_the_carried_state_has_the_rate_and_decay_of_its_own_stage(tmp_path):
    stages = [{"max_steps": 1}, {"max_steps": 2, "carry_optimizer": True, "learning_rate": 5e-4}]
    for recipe in RECIPES:
        run_stages(recipe, tmp_path / recipe, stages, weight_decay=0.1, **QUICK)
        lines = map(json.loads, (tmp_path / recipe / "stage-2" / "log.jsonl").open())
        assert [line["learning_rate"] for line in lines] == [5e-4, 2.5e-4]
    assert curve(tmp_path / "finetune" / "stage-2") == curve(tmp_path / "loop" / "stage-2")


def test_carrying_needs_the_checkpoint_of_the_stage_before(tmp_path):
    stages = [{"save_strategy": "no"}, {"carry_optimizer": True}]
    with pytest.raises(ValueError, match=r"stage 2 of 2: carry_optimizer: .*checkpoint-1"):
        run_stages("finetune", tmp_path / "run", stages, max_steps=1, **QUICK)


# Identity.


def test_a_stage_that_has_not_begun_may_change_and_a_begun_one_may_not(staged, tmp_path):
    folder = stopped_copy(staged("finetune"), tmp_path / "run", 2, 1)
    first, second = STAGES
    refused = {
        r"stage 1 of 2: cannot resume .*stage-1.*learning_rate was 0.001, got 0.1": [
            first | {"learning_rate": 0.1}, second,
        ],
        r"stage 1 of 2: its steps were 1, got 5, and the next stage has begun": [
            first | {"max_steps": 5}, second,
        ],
        r"stage 2 of 2: cannot resume .*stage-2.*factor was 4.0, got 8.0": [
            first, second | {"factor": 8},
        ],
        r"holds stage 2 of a run, and the recipe has 1 stages": [first],
    }  # fmt: skip
    for message, stages in refused.items():
        with pytest.raises(ValueError, match=message):
            run_stages("finetune", folder, stages, resume="auto")
    with pytest.raises(ValueError, match=r"stage 1 of 2: .*loop was false, got true"):
        run_stages("loop", folder, resume="auto")
    with pytest.raises(ValueError, match="holds stage 2 of an earlier run: expected --resume auto"):
        run_stages("finetune", folder)
    with pytest.raises(ValueError, match="holds stage-1 of a recipe with stages"):
        run("finetune", folder, resume="auto", **SHORT)
    with pytest.raises(ValueError, match=r"cannot resume .*: stage 2 has begun"):
        run_stages("finetune", folder, resume=folder / "stage-1" / "checkpoint-1")
    with pytest.raises(ValueError, match=r"no checkpoint .*nowhere of a stage"):
        run_stages("finetune", folder, resume=tmp_path / "nowhere")

    shutil.rmtree(folder / "stage-2")
    changed = {"factor": 3, "train_length": 64, "max_steps": 1}
    model = run_stages("finetune", folder, [first, changed], resume="auto")
    assert json.loads((model / "rope_patch.json").read_text())["factor"] == 3


def test_a_stage_is_added_after_the_end(staged, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(staged("finetune"), folder)
    stages = [*STAGES, {"factor": 8, "max_steps": 1, "train_length": 64}]
    model = run_stages("finetune", folder, stages, resume="auto")
    assert len(curve(folder / "stage-3")) == 1
    assert equal_tensors(model, folder / "stage-3" / "model")
    assert equal_tensors(folder / "stage-2" / "model", staged("finetune") / "model")
    card = (model / "README.md").read_text()
    methods = re.findall(r"## Stage (\d)\n\n.*\n.*\n\| method \| (.*) \|", card)
    assert methods == [("1", "yarn ×2"), ("2", "yarn ×4"), ("3", "yarn ×8")]


def test_a_finished_run_trains_no_more_and_gets_its_model_back(staged, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(staged("finetune"), folder)
    shutil.rmtree(folder / "model")
    before = (folder / "stage-2" / "log.jsonl").stat().st_mtime_ns
    run_stages("finetune", folder, resume="auto")
    assert equal_tensors(folder / "model", staged("finetune") / "model")
    assert (folder / "stage-2" / "log.jsonl").stat().st_mtime_ns == before


def test_a_damaged_model_is_written_again_from_its_last_checkpoint(staged, tmp_path, caplog):
    folder = stopped_copy(staged("finetune"), tmp_path / "run", 2, 0)
    weights = folder / "stage-1" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    run_stages("finetune", folder, resume="auto")
    require_same(folder, staged("finetune"))
    assert "stage 1 of 2 is finished once more" in caplog.text


def test_a_run_without_stages_is_not_continued_with_them(tmp_path):
    run("finetune", tmp_path / "run", max_steps=1, train_length=64, save_strategy="no")
    with pytest.raises(ValueError, match="holds the run of a recipe without stages"):
        run_stages("finetune", tmp_path / "run", resume="auto")


# Settings and plan.


def read(folder, stages, *words, **changes):
    return parse_settings(["--config", str(recipe_file(folder, stages, **changes)), *words])[0]


def test_a_stage_has_its_own_keys_over_those_beside(tmp_path):
    stages = [{"tokens": 5e6}, {"length": 2048, "options": {"beta_fast": 16.0}, "data": "a.txt"}]
    settings = read(tmp_path, stages, factor=2, max_steps=7, options={"beta_slow": 2.0})
    first, second = settings.stages
    assert (first.extension.tokens, first.training.max_steps) == (5e6, -1)
    assert (second.extension.tokens, second.training.max_steps) == (None, 7)
    assert (first.extension.factor, first.extension.length) == (2, None)
    assert (second.extension.factor, second.extension.length) == (None, 2048)
    assert first.method_options == {"beta_slow": 2.0}
    assert second.method_options == {"beta_fast": 16.0}
    assert second.data.data == ["a.txt"]
    assert [s.training.output_dir for s in (settings, first, second)] == [
        "out/finetune", "out/finetune/stage-1", "out/finetune/stage-2"
    ]  # fmt: skip


def test_the_command_line_overrides_every_stage(tmp_path):
    settings = read(tmp_path, STAGES, "--learning_rate", "0.25", "--max_steps", "9")
    assert [stage.training.learning_rate for stage in settings.stages] == [0.25, 0.25]
    assert [stage.training.max_steps for stage in settings.stages] == [9, 9]


def test_resolved_stages_are_a_recipe_with_the_same_settings(tmp_path):
    stages = [{"tokens": 5e6}, {"length": 2048, "options": {"beta_fast": 16.0}}]
    settings = read(tmp_path, stages, factor=2, max_steps=7)
    resolved = tmp_path / "recipe.yaml"
    resolved.write_text(yaml.safe_dump(settings.resolved(), sort_keys=False))
    again = parse_settings(["--config", str(resolved)])[0]
    assert again.resolved() == settings.resolved()
    for one, other in zip(again.stages, settings.stages, strict=True):
        assert one.resolved() == other.resolved()


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "got an empty list"),
        ({"factor": 2}, "got {'factor': 2}"),
        ([{"factor": 2}, "yarn"], "stage 2 in .* got 'yarn'"),
        ([{}, {"lenght": 9}], "'lenght' of stage 2 .*'length'"),
        ([{}, {"output_dir": "x"}], "stage 2 in .*: output_dir goes beside"),
        ([{}, {"resume": "auto"}], "stage 2 in .*: resume goes beside"),
        ([{}, {"seed": 7}], "stage 2: seed .* 42 .* 7"),
        ([{}, {"model": "x"}], "stage 2: model "),
        ([{"lora_rank": 4}, {}], "stage 2: lora_rank .* 4 .* 0"),
        ([{}, {"max_steps": "abc"}], "stage 2 of 2: max_steps"),
        ([{}, {"push_to_hub": True}], "stage 2 of 2: recipes have no key push_to_hub"),
        ([{}, {"loss": "small"}], "stage 2 of 2: loss"),
    ],
)
def test_bad_stages_are_refused_by_name(stages, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, stages)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"factor": 1.5}, "stage 2 of 2: .* 384 .* 512"),
        ({"method": "none", "factor": None}, "stage 2 of 2: .* 256 .* 512"),
        ({"options": {"beta": 3}}, "stage 2 of 2: .*beta"),
        ({"data": "nowhere.jsonl"}, "stage 2 of 2: .*nowhere.jsonl"),
        ({"short_share": 2.0}, "stage 2 of 2: short_share"),
    ],
)
def test_every_stage_is_checked_before_the_first_is_trained(second, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_stages("finetune", tmp_path / "run", [{"factor": 2}, second])
    assert not (tmp_path / "run").exists()


def test_the_plan_has_every_stage(tmp_path):
    stages = [{"factor": 2, "train_length": 512}, {"factor": 4, "train_length": 1024}]
    config = recipe_file(tmp_path, stages)
    words = ["--config", str(config), "--plan"]
    text = run_in_this_process("finetune", *words).stdout
    assert re.search(r"stage 1, .*rows of 512 tokens(.|\n)*stage 2, .*rows of 1,024 tokens", text)
    plans = json.loads(run_in_this_process("finetune", *words, "--json").stdout)["stages"]
    keys = yaml.safe_load(config.read_text())
    del keys["stages"]
    single = tmp_path / "single.yaml"
    single.write_text(yaml.safe_dump(keys | stages[1]))
    alone = json.loads(
        run_in_this_process("finetune", "--config", str(single), "--plan", "--json").stdout
    )
    assert plans[1]["need"] == alone["need"]
    assert plans[0]["need"]["total"] < plans[1]["need"]["total"]
