"""Test memory plans against measured peaks, and the refusal of recipes that do not fit."""

import json
import os
from dataclasses import replace

import check_memory_plan
import pytest
import torch
from helpers.encoding_models import encoding_model
from helpers.tiny_models import make_model
from transformers import Gemma3TextConfig, Qwen3Config

from rope_patch import Refused
from rope_patch.training import (
    DataArguments,
    ExtensionArguments,
    MemoryNeed,
    ObjectiveArguments,
    Settings,
    TrainArguments,
    longest_row,
    memory_need,
    suggest_changes,
    training_setup,
)
from rope_patch.training.memory import plan as planning

GIB, RESERVE = 2**30, 0.08
LLAMA_8B = planning.SHAPES / "llama-3.1-8b"
LLAMA_1B = planning.SHAPES / "llama-3.2-1b"
CONFIG_8B, CONFIG_1B = map(planning.read_config, (LLAMA_8B, LLAMA_1B))
QUICK = (
    "distilled, autocast",
    "two rows, tied",
    "LoRA, all kept",
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


@pytest.mark.parametrize("name", QUICK)
def test_plans_match_the_peaks_of_short_steps(name):
    config, setup = check_memory_plan.small_cases()[name]
    config.num_hidden_layers = min(2, config.num_hidden_layers)
    assert_close({name: (config, setup | {"length": 256})})


@pytest.mark.slow
def test_plans_match_the_peaks_of_steps():
    assert_close(check_memory_plan.small_cases())


@pytest.mark.slow
def test_plans_match_the_peaks_of_long_steps():
    assert_close(check_memory_plan.large_cases())


SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 768,
    "vocab_size": 4000,
}


@pytest.mark.parametrize(
    "config",
    [Qwen3Config(**SIZES), Gemma3TextConfig(**SIZES, sliding_window=128)],
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
    config = planning.read_config(folder)
    before = config.to_json_string()
    assert sum(p.numel() for p in planning.empty_model(folder, config).parameters()) == parameters
    assert memory_need(config, length=1024).parameters == 4 * parameters
    assert memory_need(config, length=1024).optimizer == 8 * parameters
    assert config.to_json_string() == before


def test_the_longest_row_fits_and_a_longer_one_does_not():
    memory = planning.DEVICES["80 GB"]
    length = longest_row(CONFIG_1B, memory, **BF16)
    assert length % 1024 == 0
    assert memory_need(CONFIG_1B, length=length, **BF16).total <= memory * (1 - RESERVE)
    assert memory_need(CONFIG_1B, length=length + 1024, **BF16).total > memory * (1 - RESERVE)
    assert longest_row(CONFIG_8B, planning.DEVICES["24 GB"]) == 0  # the weights do not fit


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
    length = {"length": 131072, **BF16}
    need = [memory_need(CONFIG_8B, **length, **changes).total for changes in (less, more)]
    assert need[0] < need[1]


def test_a_device_that_is_too_small_is_refused_with_the_need():
    need = MemoryNeed(5 * GIB, 4 * GIB, 3 * GIB, 2 * GIB, 0, GIB, "loss")
    planning.require_memory(need, 20 * GIB)
    with pytest.raises(ValueError, match=r"15\.00 GiB .*parameters 5\.00 GiB.*12\.00 GiB"):
        planning.require_memory(need, 12 * GIB)
    with pytest.raises(ValueError, match=r"train_length: 5"):
        planning.require_memory(need, 12 * GIB, ["train_length: 5"])


def test_a_device_that_is_too_small_is_refused_with_remedies(settings, monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": 80 * 2**18}.get)
    with pytest.raises(ValueError, match=r"lora_rank: 8 \(.*8 GPUs with FSDP \("):
        planning.require_device(settings(loss="torch"))
    with pytest.raises(ValueError, match=r"expected one of: .*train_length: \d+ or less"):
        planning.require_device(settings(loss="torch", lora_rank=8, train_length=10**6))
    planning.require_device(settings(loss="torch", lora_rank=8, train_length=8192))
    monkeypatch.delattr(os, "sysconf")  # as on Windows
    planning.require_device(settings())


def test_every_remedy_makes_the_recipe_fit(settings):
    recipe = settings(train_length=65536, loss="full", dtype="bfloat16")
    setup = training_setup(recipe, CONFIG_8B, environment={})
    remedies = suggest_changes(CONFIG_8B, 65536, setup, 100 * GIB)
    assert any("loss: torch" in remedy for remedy in remedies)
    for name, change in {"loss: torch": {"loss": "torch"}, "lora_rank": {"lora_rank": 8}}.items():
        total = memory_need(CONFIG_8B, length=65536, **(vars(setup) | change)).total
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


def test_averages_count_beside_weights_and_optimizer():
    """Only where a step takes less than its own: a large table that is not trained."""
    config = CONFIG_8B
    setup = {"length": 1024, "dtype": torch.bfloat16, "lora_rank": 8, "lora_trains": ()}
    setup["offload_activations"] = True
    plain, averaged = memory_need(config, **setup), memory_need(config, **setup, averages=True)
    table = 128_256 * 4096
    assert averaged.moment == "averaging"
    assert averaged.total == averaged.parameters + averaged.optimizer + 2 * 4 * table
    assert averaged.total > plain.total
    sharded = setup | {"shards": 8}
    assert memory_need(config, **sharded, averages=True) == memory_need(config, **sharded)


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
    setup = training_setup(recipe, CONFIG_8B, environment=environment)
    assert setup.distils
    assert setup.teacher_dtype == dtype
    need = planning.from_settings(recipe, environment=environment)
    weights = 2 * 8_030_261_248 // setup.shards if dtype else 0
    assert need.teacher == weights
    if not environment:
        assert ("  teacher" in planning.format_plan(recipe)) == bool(dtype)


def test_soft_caps_need_the_full_loss(settings):
    capped = make_model("gemma2").config
    for loss, expected in (("auto", "full"), ("torch", "torch")):
        recipe = settings(loss=loss)
        recipe.training.use_cpu = False  # where auto is full for any model
        assert training_setup(recipe, capped, environment={}).loss == expected


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


@pytest.mark.parametrize("ask", [planning.require_device, planning.format_plan])
def test_models_that_do_not_rotate_are_refused(tmp_path, settings, ask):
    encoding_model("GPT2LMHeadModel").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(Refused, match=r"\(gpt2\) does not"):
        ask(settings(tmp_path / "gpt2"))
