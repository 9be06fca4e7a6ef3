"""Test that the recipes of the package train: tiny models of the same family, shorter rows.

Everything else is the recipe's: method and options, packing, optimizer, schedule, loss. Two recipes
run in the default suite, in both entry points the others are slow.
"""

import json
import math
from pathlib import Path
from random import Random

import pytest
import torch
import transformers
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.training.loop import loop
from rope_patch.training.memory import plan
from rope_patch.training.memory.launch import read_environment
from rope_patch.training.monitor import read_log
from rope_patch.training.recipe_files import launches, recipes
from rope_patch.training.settings import parse
from rope_patch.training.trainer import finetune

ASSETS = Path(__file__).parents[1] / "assets"
SHAPES = plan.SHAPES
RUNNERS = {"finetune": finetune, "loop": loop}
STEPS = 2
TRAINED = 64  # tokens that the tiny models are "trained" on
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,  # the recipes' options count pairs of heads of this size
    "max_position_embeddings": TRAINED,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
HYBRID = [[kind] * 3 + ["full_attention"] for kind in ("sliding_attention", "linear_attention")]
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
LATENT = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
# Recipe -> class of the config, what differs in it, changed keys of the recipe, target length.
TINY = {
    "olmo3_64k": (
        "Olmo3",
        {"num_hidden_layers": 4, "sliding_window": 32, "layer_types": HYBRID[0]},
        {"attention": "sdpa", "tokens": 512.0 * STEPS, "compression_ratio": [0.01, 2.0]},
        512,
    ),
    "olmo_hybrid_drope": (
        "OlmoHybrid",
        {"num_hidden_layers": 4, "layer_types": HYBRID[1], **DELTA_NET},
        {"length": 256, "train_length": 256, "tokens": 256.0 * STEPS},
        256,
    ),
    "smollm3_64k": (
        "SmolLM3",
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
        },
        {"attention": "sdpa", "stages": [{"length": 128}, {"length": 256}]},
        256,
    ),
    "deepseek_v3_128k": (
        "DeepseekV3",
        LATENT,
        {"offload_activations": False, "stages": [{"train_length": 128}, {"train_length": 256}]},
        40 * TRAINED,
    ),
    "cope_64k": ("Llama", {}, {"length": 512, "attention": "sdpa"}, 512),
    "ultralong_1m": (
        "Llama",
        {"rope_parameters": LLAMA_3_ROPE, "max_position_embeddings": 256},
        {"tokens": 2048.0 * STEPS},
        2048,
    ),
    "qwen3_128k_yarn": ("Qwen3", {"max_position_embeddings": 80}, {}, 256),
    "pose_one_gpu": ("Llama", {}, {"train_length": 32}, 512),
    "evening_8b_lora": ("Llama", {}, {"retrieval_steps": 0, "stages": [{}, {}]}, 256),
}
QUICK = ("pose_one_gpu", "evening_8b_lora")
ALL = [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in TINY]
# Bytes of the devices that the headers name, and the layout of the launch line.
HARDWARE = {
    "cope_64k": ("80 GB", "fsdp2", "llama-3.1-8b"),
    "ultralong_1m": ("80 GB", "fsdp2_cp8", "llama-3.1-8b"),
    "evening_8b_lora": ("48 GB", "single", "llama-3.1-8b"),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_model(name, folder):
    """Write a tiny random model of a recipe's family, with the tests' tokenizer."""
    family, changes, _, _ = TINY[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ASSETS / "tiny-llama").save_pretrained(folder)


def write_documents(folder, count):
    """Write one file of documents of 40 to 3,000 tokens for each source of a recipe."""
    rng = Random(0)
    paths = []
    for number in range(count):
        path = folder / f"documents-{number}.jsonl"
        rows = [[rng.randrange(3, 512) for _ in range(n)] for n in (40, 3000, 300, 2500)]
        path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
        paths.append(str(path))
    return paths


def arguments(name, folder):
    """Write a recipe for a tiny model; return its command line."""
    recipe = yaml.safe_load(recipes()[name].read_text())
    changes = dict(TINY[name][2])
    write_model(name, folder / "tiny")
    keys = {
        "model": str(folder / "tiny"),
        "data": write_documents(folder, len(recipe["data"])),
        "gradient_accumulation_steps": 1,
        "warmup_steps": 1,
        "bf16": False,
        "dtype": "float32",
        "save_strategy": "no",
        "ignore_plan": True,
        "use_cpu": True,
        "output_dir": str(folder / "run"),
    }
    keys |= {} if "tokens" in recipe else {"max_steps": STEPS}
    stages = zip(recipe.get("stages", []), changes.pop("stages", []), strict=True)
    recipe |= keys | changes
    short = {key: keys[key] for key in ("gradient_accumulation_steps", "max_steps") if key in keys}
    if "stages" in recipe:
        recipe["stages"] = [stage | short | change for stage, change in stages]
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return ["--config", str(path)]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("runner", ["finetune", pytest.param("loop", marks=pytest.mark.slow)])
def test_a_recipe_runs_to_the_end(name, runner, tmp_path):
    settings, _ = parse(arguments(name, tmp_path))
    folder = RUNNERS[runner](settings)
    stages = [f"stage-{number}" for number in range(1, len(settings.stages) + 1)]
    for stage in stages or ["."]:
        log = read_log(tmp_path / "run" / stage)
        assert [line["step"] for line in log] == list(range(1, STEPS + 1))
        assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in log)
    target = TINY[name][3]
    model = rope_patch.load(folder)
    assert rope_patch.current(model) is None or rope_patch.current(model).length == target
    assert model.config.max_position_embeddings == target
    with torch.no_grad():
        assert model(torch.arange(3, 40)[None]).logits.isfinite().all()
    assert settings.extension.method in (folder / "README.md").read_text()


@pytest.mark.parametrize("name", TINY)
def test_a_recipe_has_a_plan(name, tmp_path):
    settings, _ = parse(arguments(name, tmp_path))
    page = plan.format_plan(settings)
    for stage in settings.stages or [settings]:
        extension = stage.extension
        by_factor = settings.stages and extension.factor
        target = int(extension.factor * TRAINED) if by_factor else TINY[name][3]
        length = extension.train_length or extension.length or target
        assert f"rows of {length:,} tokens" in page
    assert "memory on each device" in page


@pytest.mark.parametrize("name", HARDWARE)
def test_the_hardware_of_the_header_is_enough(name):
    device, launch, shape = HARDWARE[name]
    settings, _ = parse(["--config", name, "--model", str(SHAPES / shape), "--loss", "torch"])
    environment = read_environment(launches()[launch])
    memory = {**plan.DEVICES, "48 GB": 47 * plan.GIB}[device]
    for stage in settings.stages or [settings]:
        need = plan.from_settings(stage, environment=environment)
        assert need.total <= memory * (1 - plan.RESERVE)
