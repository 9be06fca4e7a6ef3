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
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.training.loop import loop
from rope_patch.training.memory import plan
from rope_patch.training.memory.launch import read_environment
from rope_patch.training.monitor import read_log
from rope_patch.training.recipe_files import launches
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
HYBRID = [
    [kind] * 3 + ["full_attention"] for kind in ("sliding_attention", "linear_attention")
]
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
# Recipe -> class of the config, what differs in it, changed keys of the recipe, target length.
TINY = {
    "olmo3_64k": (
        "Olmo3",
        {"num_hidden_layers": 4, "sliding_window": 32, "layer_types": HYBRID[0]},
        {"attention": "sdpa", "tokens": 512.0 * STEPS, "compression_ratio": (0.01, 2.0)},
        512,
    ),
    "olmo_hybrid_drope": (
        "OlmoHybrid",
        {"num_hidden_layers": 4, "layer_types": HYBRID[1], **DELTA_NET},
        {"length": 256, "train_length": 256, "tokens": 256.0 * STEPS},
        256,
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
    "evening_8b_lora": ("Llama", {}, {"retrieval_steps": 0}, 256),
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
    """Return the command line of a recipe on a tiny model."""
    sources = parse(["--config", name])[0].data.data
    write_model(name, folder / "tiny")
    keys = {
        "config": name,
        "model": folder / "tiny",
        "max_steps": STEPS,
        "gradient_accumulation_steps": 2,
        "warmup_steps": 1,
        "bf16": False,
        "dtype": "float32",
        "save_strategy": "no",
        "ignore_plan": True,
        "use_cpu": True,
        "output_dir": folder / "run",
        **TINY[name][2],
    }
    if "tokens" in keys:
        del keys["max_steps"]
        keys["gradient_accumulation_steps"] = 1
    words = [
        word
        for key, value in keys.items()
        for word in (f"--{key}", *map(str, value if isinstance(value, tuple) else (value,)))
    ]
    return [*words, "--data", *write_documents(folder, len(sources))]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("runner", ["finetune", pytest.param("loop", marks=pytest.mark.slow)])
def test_a_recipe_runs_to_the_end(name, runner, tmp_path):
    settings, _ = parse(arguments(name, tmp_path))
    folder = RUNNERS[runner](settings)
    log = read_log(tmp_path / "run")
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
    assert f"rows of {settings.extension.train_length or TINY[name][3]:,} tokens" in page
    assert "memory on each device" in page


@pytest.mark.parametrize("name", HARDWARE)
def test_the_hardware_of_the_header_is_enough(name):
    device, launch, shape = HARDWARE[name]
    settings, _ = parse(["--config", name, "--model", str(SHAPES / shape), "--loss", "torch"])
    environment = read_environment(launches()[launch])
    need = plan.from_settings(settings, environment=environment)
    memory = {**plan.DEVICES, "48 GB": 47 * plan.GIB}[device]
    assert need.total <= memory * (1 - plan.RESERVE)
