"""Test memory plans against measured peaks, and the refusal of recipes that do not fit."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import check_memory_plan
import pytest
import torch
from helpers.encoding_models import encoding_model
from transformers import Gemma3TextConfig, Qwen3Config

from rope_patch.pretrained.loading import empty_model, read_config
from rope_patch.training.data.arguments import DataArguments
from rope_patch.training.memory import plan as planning
from rope_patch.training.memory import recipe_setup
from rope_patch.training.memory.plan import (
    GIB,
    RESERVE,
    MemoryNeed,
    longest_row,
    memory_need,
    require_memory,
)
from rope_patch.training.memory.recipe_setup import training_setup
from rope_patch.training.memory.suggestions import suggest_changes
from rope_patch.training.objective.arguments import ObjectiveArguments
from rope_patch.training.settings import ExtensionArguments, Settings, TrainArguments
from rope_patch.utils.errors import Refused

LLAMA_8B = planning.SHAPES / "llama-3.1-8b"
LLAMA_1B = planning.SHAPES / "llama-3.2-1b"
QUICK = (
    "distilled, autocast",
    "two rows, tied",
    "LoRA, all kept",
    "autocast",
    "masked",
    "z-loss, all logits",
)
BF16 = {"compute_dtype": torch.bfloat16}


@pytest.fixture
def settings(tmp_path):
    """Make a recipe's settings for an 8B model."""

    def make(model=LLAMA_8B, data=None, accumulation=1, **extension):
        training = TrainArguments(
            output_dir=str(tmp_path),
            max_steps=10,
            bf16=True,
            use_cpu=True,
            gradient_accumulation_steps=accumulation,
        )
        options = {"model": str(model), "method": "yarn", "factor": 4.0} | extension
        arguments = DataArguments(**{"data": ["novels:emma"], **(data or {})})
        return Settings(ExtensionArguments(**options), arguments, training, {})

    return make


def assert_close(cases):
    for name, need, peak in check_memory_plan.compare_cases(cases):
        assert 0.99 <= need.total / peak <= 1.1, (name, need, peak)


def test_plans_match_the_peaks_of_steps():
    cases = check_memory_plan.small_cases()
    assert_close({name: cases[name] for name in QUICK})


@pytest.mark.slow
def test_plans_match_the_peaks_of_other_steps():
    cases = check_memory_plan.small_cases()
    assert_close({name: case for name, case in cases.items() if name not in QUICK})


@pytest.mark.slow
def test_plans_match_the_peaks_of_long_steps():
    assert_close(check_memory_plan.large_cases())


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=768,
            vocab_size=4000,
        ),
        Gemma3TextConfig(
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=768,
            vocab_size=4000,
            sliding_window=128,
        ),
    ],
    ids=["qwen3", "gemma3"],
)
def test_plans_of_other_architectures_are_near(config):
    setup = {"length": 512, "checkpointing": False, "loss": "full"}
    peak = check_memory_plan.measured_peak(config, **setup)
    assert 0.9 <= memory_need(config, **setup).total / peak <= 1.2


@pytest.mark.parametrize(
    ("folder", "parameters"), [(LLAMA_1B, 1_235_814_400), (LLAMA_8B, 8_030_261_248)]
)
def test_shapes_are_those_of_the_published_models(folder, parameters):
    config = read_config(folder)
    assert sum(p.numel() for p in empty_model(folder, config).parameters()) == parameters
    assert memory_need(config, length=1024).parameters == 4 * parameters
    assert memory_need(config, length=1024).optimizer == 8 * parameters


def test_the_longest_row_fits_and_a_longer_one_does_not():
    config = read_config(LLAMA_1B)
    memory = planning.DEVICES["80 GB"]
    length = longest_row(config, memory, **BF16)
    assert length % 1024 == 0
    assert memory_need(config, length=length, **BF16).total <= memory * (1 - RESERVE)
    assert memory_need(config, length=length + 1024, **BF16).total > memory * (1 - RESERVE)


def test_no_row_fits_if_the_weights_do_not():
    assert longest_row(read_config(LLAMA_8B), planning.DEVICES["24 GB"]) == 0


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({}, {"checkpointing": False}),
        ({"distils": True}, {"distils": True, "teacher_dtype": torch.bfloat16}),
        (
            {"distils": True, "teacher_dtype": torch.bfloat16, "shards": 8},
            {"distils": True, "teacher_dtype": torch.bfloat16},
        ),
        ({}, {"loss": "full"}),
        ({"loss_terms": True}, {"loss": "full", "loss_terms": True}),
        ({}, {"rows": 2}),
        ({}, {"replicated": True}),
        ({}, {"accumulates": True}),
        ({}, {"packed_masks": True}),
        ({"packed_masks": True, "attention": "flash_attention_2"}, {"packed_masks": True}),
        ({"offload_activations": True}, {}),
        ({"lora_rank": 8}, {}),
        ({"shards": 8}, {}),
        ({"shards": 8, "context_parallel": 8}, {"shards": 8}),
        ({"shards": 8}, {"shards": 8, "accumulates": True}),
        ({"optimizer": "adamw_bnb_8bit"}, {}),
    ],
    ids=str,
)
def test_settings_that_save_memory_are_planned_with_less(less, more):
    config, length = read_config(LLAMA_8B), {"length": 131072, **BF16}
    assert memory_need(config, **length, **less).total < memory_need(config, **length, **more).total


def test_arguments_are_checked():
    config = read_config(LLAMA_1B)
    with pytest.raises(ValueError, match="at least 1"):
        memory_need(config, length=0)
    with pytest.raises(ValueError, match="full, torch or liger, got 'auto'"):
        memory_need(config, length=1024, loss="auto")


def test_a_device_that_is_too_small_is_refused_with_the_need():
    need = MemoryNeed(5 * GIB, 4 * GIB, 3 * GIB, 2 * GIB, 0, GIB, "loss")
    require_memory(need, 20 * GIB)
    with pytest.raises(ValueError, match=r"needs 15\.00 GiB .*parameters 5\.00 GiB.*12\.00 GiB"):
        require_memory(need, 12 * GIB)
    with pytest.raises(ValueError, match=r"expected one of: train_length: 5"):
        require_memory(need, 12 * GIB, ["train_length: 5"])


def test_a_device_that_is_too_small_is_refused_with_remedies(settings, monkeypatch):
    monkeypatch.setattr(planning, "_device_memory", lambda _: 80 * GIB)
    with pytest.raises(ValueError, match=r"lora_rank: 8 \(.*8 GPUs with FSDP \("):
        planning.require_device(settings(loss="torch"))
    with pytest.raises(ValueError, match=r"expected one of: .*train_length: \d+ or less"):
        planning.require_device(settings(loss="torch", lora_rank=8, train_length=10**6))
    planning.require_device(settings(loss="torch", lora_rank=8, train_length=8192))
    monkeypatch.setattr(planning, "_device_memory", lambda _: None)
    planning.require_device(settings())


def test_every_remedy_makes_the_recipe_fit(settings):
    recipe = settings(train_length=65536, loss="full", dtype="bfloat16")
    config = planning._read_config(recipe)
    setup = training_setup(recipe, config, environment={})
    remedies = suggest_changes(config, 65536, setup, 100 * GIB)
    assert any("loss: torch" in remedy for remedy in remedies)
    for name, change in {"loss: torch": {"loss": "torch"}, "lora_rank": {"lora_rank": 8}}.items():
        total = memory_need(config, length=65536, **(vars(setup) | change)).total
        assert any(name in r and " with " not in r for r in remedies) == (
            total <= 100 * GIB * (1 - RESERVE)
        )


def test_a_recipe_s_row_has_the_target_length(settings):
    length = {
        "as asked": (settings(train_length=4096), 4096),
        "target": (settings(), 4 * 8192),
        "plain": (settings(method="none", factor=None), 8192),
    }
    for recipe, expected in length.values():
        assert planning.to_dict(recipe)["length"] == expected


def test_the_environment_of_accelerate_decides_the_sharding(settings):
    recipe = settings(train_length=65536)
    fsdp = {"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "8"}
    context = {**fsdp, "PARALLELISM_CONFIG_CP_SIZE": "8"}
    config = planning._read_config(recipe)
    setups = [training_setup(recipe, config, environment=e) for e in ({}, fsdp, context)]
    assert [(setup.shards, setup.context_parallel) for setup in setups] == [(1, 1), (8, 1), (8, 8)]
    ddp = training_setup(recipe, config, environment={"WORLD_SIZE": "2"})
    assert ddp.replicated
    assert ddp.shards == 1
    totals = [planning.from_settings(recipe, environment=e).total for e in ({}, fsdp, context)]
    assert totals == sorted(totals, reverse=True)
    eight = planning.from_settings(recipe, processes=8, environment={"ACCELERATE_USE_FSDP": "true"})
    assert eight.total == totals[1]


def test_a_plan_follows_the_recipe(settings):
    recipe = settings(
        data={"packing": "masked"}, accumulation=2, lora_rank=4, loss="full", z_loss=1e-5
    )
    setup = asdict(training_setup(recipe, planning._read_config(recipe), environment={}))
    expected = {
        "dtype": torch.float32,
        "compute_dtype": torch.bfloat16,
        "packed_masks": True,
        "accumulates": True,
        "lora_rank": 4,
        "loss": "full",
        "loss_terms": True,
        "checkpointing": True,
    }
    assert {name: setup[name] for name in expected} == expected


def test_averages_count_beside_weights_and_optimizer(settings):
    """Only where a step takes less than its own: a large table that is not trained."""
    config = read_config(LLAMA_8B)
    setup = {"length": 1024, "dtype": torch.bfloat16, "lora_rank": 8, "lora_trains": ()}
    setup["offload_activations"] = True
    plain, averaged = memory_need(config, **setup), memory_need(config, **setup, averages=True)
    table = 128_256 * 4096
    assert averaged.moment == "averaging"
    assert averaged.total == averaged.parameters + averaged.optimizer + 2 * 4 * table
    assert averaged.total > plain.total
    sharded = setup | {"shards": 8}
    assert memory_need(config, **sharded, averages=True) == memory_need(config, **sharded)
    recipe = settings(average_checkpoints=3)
    assert training_setup(recipe, planning._read_config(recipe), environment={}).averages


@pytest.mark.parametrize(
    ("lora_rank", "environment", "dtype"),
    [
        (0, {}, torch.bfloat16),
        (4, {}, None),  # shares the frozen weights
        (4, {"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "8"}, torch.bfloat16),
    ],
)
def test_the_original_model_is_planned_where_it_is_kept(settings, lora_rank, environment, dtype):
    recipe = settings(data={"short_share": 0.5}, lora_rank=lora_rank, train_length=4096)
    need = planning.from_settings(recipe, environment=environment)
    assert "teacher" not in need.parts()
    recipe = replace(recipe, objective=ObjectiveArguments(distillation_weight=1.0))
    setup = training_setup(recipe, planning._read_config(recipe), environment=environment)
    assert setup.distils
    assert setup.teacher_dtype == dtype
    need = planning.from_settings(recipe, environment=environment)
    weights = 2 * 8_030_261_248 // setup.shards if dtype else 0
    assert need.teacher == weights
    if not environment:
        assert ("  teacher" in planning.format_plan(recipe)) == bool(dtype)


def test_soft_caps_need_the_full_loss():
    capped = SimpleNamespace(final_logit_softcapping=30.0)
    config = SimpleNamespace(get_text_config=lambda decoder: capped)
    assert recipe_setup._resolved_loss("auto", config) == "full"
    assert recipe_setup._resolved_loss("torch", config) == "torch"


def test_text_and_json_have_the_same_numbers(settings):
    recipe = settings(model=LLAMA_1B, train_length=4096)
    record = json.loads(planning.format_plan(recipe, as_json=True))
    assert record["tokens"] == 10 * 4096
    assert record["need"]["total"] == sum(v for k, v in record["need"].items() if k != "total")
    text = planning.format_plan(recipe)
    assert f"{record['need']['total'] / GIB:,.2f} GiB" in text
    for longest in record["longest"].values():
        assert all(f"{tokens:,}" in text for tokens in longest.values())
    assert "packing window" not in text
    window = settings(
        model=LLAMA_1B, train_length=4096, data={"packing": "best_fit", "packing_window": 1 << 16}
    )
    assert "documents of a packing window, in each process:" in planning.format_plan(window)
    assert planning.to_dict(window)["packing_window"] == GIB  # 4 bytes a token


def test_the_table_has_a_line_for_every_setup():
    lines = planning.lengths_table().splitlines()
    assert len(lines) == 2 + 2 * 3 * 3
    assert len({line.count("|") for line in lines}) == 1


def test_planning_leaves_the_config_unchanged():
    config = read_config(LLAMA_1B)
    before = config.to_json_string()
    memory_need(config, length=1024)
    assert config.to_json_string() == before


def test_the_readme_has_the_current_table():
    assert planning.lengths_table() in (planning.SHAPES.parent / "README.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("ask", [planning.require_device, planning.format_plan])
def test_models_that_do_not_rotate_are_refused(tmp_path, settings, ask):
    encoding_model("GPT2LMHeadModel").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(Refused, match=r"\(gpt2\) does not: train the extended model"):
        ask(settings(tmp_path / "gpt2"))
