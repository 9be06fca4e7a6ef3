"""Test the recipes of the package: their values are the published ones, and tiny models train.

In training, everything but the model and the rows' length is the recipe's: method and options,
packing, optimizer, schedule, loss. Two recipes run in the default suite, the others are slow.
"""

import json
import math
import re
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
import transformers
import yaml
from training_runs import ASSETS, run
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

import rope_patch
from rope_patch.methods import Geometry
from rope_patch.training import (
    check_data_arguments,
    find_launch,
    parse_settings,
    read_environment,
    read_log,
    require_no_document_masks,
)
from rope_patch.training.memory import plan

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "recipes" / "configs").glob("*.yaml"))
LAUNCHES = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
NAMES = [path.stem for path in CONFIGS]

LLAMA = Geometry(head_dim=128, theta=1e4, trained_length=2048)
LLAMA_2 = Geometry(head_dim=128, theta=1e4, trained_length=4096)
LLAMA_3 = Geometry(head_dim=128, theta=5e5, trained_length=8192)
GEOMETRIES = {
    "huggyllama/llama-7b": LLAMA,
    "meta-llama/Llama-2-7b-hf": LLAMA_2,
    "meta-llama/Meta-Llama-3-8B": LLAMA_3,
    "meta-llama/Meta-Llama-3-8B-Instruct": LLAMA_3,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_3,  # start: unscaled
    "models/olmo-3-7b-stage2": LLAMA_3,  # the same head, theta and length
    "models/olmo-hybrid-7b-stage2": LLAMA_3,
    "models/smollm3-stage3": Geometry(head_dim=128, theta=5e4, trained_length=4096),
    "models/deepseek-v3-4k": Geometry(head_dim=64, theta=1e4, trained_length=4096),
    "Qwen/Qwen3-0.6B": Geometry(head_dim=128, theta=1e6, trained_length=40960),
    "HuggingFaceTB/SmolLM2-360M": Geometry(head_dim=64, theta=1e5, trained_length=8192),
    "HuggingFaceTB/SmolLM-360M": Geometry(head_dim=64, theta=1e4, trained_length=2048),
    "demo": Geometry(head_dim=64, theta=1e5, trained_length=8192),
    "out/yarn_64k/model": LLAMA_2,  # a second stage extends the original model again
    "out/prolong_64k/model": LLAMA_3,
}

ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.95}
YARN = ADAM | {
    "rows": 64, "learning_rate": 2e-5, "schedule": "linear", "warmup_steps": 20, "weight_decay": 0.0
}  # fmt: skip
PROLONG = ADAM | {
    "schedule": "cosine_with_min_lr", "floor": 0.1, "warmup_steps": 0.1, "weight_decay": 0.1,
    "max_grad_norm": 1.0,
}  # fmt: skip
OLMO = ADAM | {
    "trained": 8192, "target": 65536, "rows": 64, "row_length": 65536,
    "learning_rate": 0.00020712352850360292, "schedule": "linear", "warmup_steps": 200,
    "weight_decay": 0.1, "decay_embeddings": False, "z_loss": 1e-5, "max_grad_norm": 1.0,
}  # fmt: skip
SMOLLM3 = ADAM | {
    "method": "abf", "trained": 4096, "learning_rate": 2e-5, "schedule": "cosine",
    "warmup_steps": 1000, "weight_decay": 0.1, "decay_embeddings": False, "packing": "masked",
    "data_weights": [0.9, 0.1],
}  # fmt: skip
DEEPSEEK = ADAM | {
    "method": "yarn", "factor": 40, "beta_fast": 32.0, "beta_slow": 1.0, "trained": 4096,
    "attention_factor": 0.1 * math.log(40) + 1, "steps": 1000, "learning_rate": 7.3e-6,
    "schedule": "constant", "weight_decay": 0.1, "max_grad_norm": 1.0,
}  # fmt: skip
EVENING = ADAM | {
    "method": "yarn", "trained": 8192, "schedule": "linear", "warmup_steps": 20,
    "weight_decay": 0.0, "lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj"],
}  # fmt: skip
# Values of the papers and their code. Keys that they leave open are missing here.
PUBLISHED = {
    "pi_8k": ADAM
    | {
        "method": "linear", "trained": 2048, "target": 8192, "steps": 1000, "rows": 64,
        "row_length": 8192, "learning_rate": 2e-5, "warmup_steps": 20, "weight_decay": 0.0,
    },
    "pose_16k": {
        "method": "yarn", "trained": 2048, "target": 16384, "steps": 1000, "rows": 64,
        "row_length": 2048, "learning_rate": 2e-5, "schedule": "linear", "warmup_steps": 10,
        "positions": "skip",
    },
    "ntk_8k": YARN | {"method": "ntk", "target": 8192, "steps": 400, "row_length": 8192},
    "abf_32k": ADAM
    | {
        "method": "abf", "theta": 5e5, "target": 32768, "row_length": 32768, "learning_rate": 2e-5,
        "schedule": "cosine", "warmup_steps": 2000 / 100_000, "weight_decay": 0.1,
    },
    "yarn_64k": YARN | {"method": "yarn", "target": 65536, "steps": 400, "row_length": 65536},
    "yarn_128k": YARN | {"method": "yarn", "target": 131072, "steps": 200, "row_length": 65536},
    "longlora_32k": ADAM
    | {
        "method": "linear", "target": 32768, "steps": 1000, "rows": 64, "row_length": 32768,
        "learning_rate": 2e-5, "schedule": "constant_with_warmup", "warmup_steps": 20,
        "weight_decay": 0.0, "lora_rank": 8, "lora_alpha": 16.0,
        "lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "lora_trains": ["embeddings", "norms"],
    },
    "longrope_128k": {
        "method": "longrope", "target": 131072, "steps": 400, "rows": 32, "row_length": 131072,
        "learning_rate": 2e-5, "schedule": "linear",
    },
    "longrope2_mixed": {
        "method": "mixed-longrope", "trained": 8192, "target": 131072, "tokens": 10e9,
        "short_share": 0.1, "short_length": 8192, "data_weights": [4.5, 2.5, 2.0],
    },
    "prolong_64k": PROLONG
    | {
        "method": "abf", "theta": 8e6, "target": 65536, "steps": 5000, "rows": 64,
        "row_length": 65536, "learning_rate": 1e-5, "packing": "masked",
    },
    "prolong_512k": PROLONG
    | {
        "method": "abf", "theta": 1.28e8, "target": 524288, "steps": 2500, "rows": 16,
        "row_length": 524288, "learning_rate": 5e-6, "packing": "masked",
    },
    "drope_smollm": {
        "method": "nope", "trained": 2048, "row_length": 2048, "rows": 512, "tokens": 30e9,
        "learning_rate": 3e-4, "temperature": "drope:0.103",
    },
    "prope_32k": {"method": "proportional", "share": 0.75},
    # arXiv:2512.13961, section 3.6; github.com/allenai/OLMo-core, src/scripts: train/OLMo3/
    # OLMo3-7B-long-context.py, official/OLMo3/OLMo-3-1025-7B-long-context.py
    "olmo3_64k": OLMO
    | {
        "method": "yarn", "factor": 8, "beta_fast": 32.0, "beta_slow": 1.0,
        "attention_factor": 0.1 * math.log(8) + 1, "layer_types": ["full_attention"],
        "tokens": 50e9, "data_weights": [0.34, 0.66], "packing": "best_fit",
    },
    # official/OLMo-hybrid/OLMo-hybrid-7B-long-context.py there
    "olmo_hybrid_drope": OLMO
    | {"method": "nope", "tokens": 100e9, "packing": "best_fit_unmasked"},
    # nanotron files in github.com/huggingface/smollm, text/pretraining/smollm3
    "smollm3_64k#1": SMOLLM3 | {"theta": 2e6, "target": 32768, "steps": 20_000, "rows": 72},
    "smollm3_64k#2": SMOLLM3 | {"theta": 5e6, "target": 65536, "steps": 22_000, "rows": 36},
    # arXiv:2412.19437, section 4.3
    "deepseek_v3_128k#1": DEEPSEEK | {"row_length": 32768, "rows": 1920},
    "deepseek_v3_128k#2": DEEPSEEK | {"row_length": 131072, "rows": 480},
    # train_64K.sh and modeling_flash_llama_cope.py in github.com/hrlics/CoPE
    "cope_64k": PROLONG
    | {
        "method": "clipped-abf", "theta": 1e7, "clipped_pairs": 20, "trained": 8192,
        "target": 65536, "steps": 5000, "rows": 256, "row_length": 65536, "learning_rate": 1e-5,
        "data_weights": [0.3, 0.3, 0.1, 0.1, 0.04, 0.04, 0.03, 0.03, 0.03, 0.03],
    },
    # arXiv:2504.06214
    "ultralong_1m": {
        "method": "yarn", "factor": 128, "beta_fast": 4.0, "beta_slow": 1.0, "trained": 8192,
        "target": 2**20, "row_length": 2**20, "tokens": 1e9, "packing": "concatenate",
        "start": "unscaled",
    },
    # github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3316
    "qwen3_128k_yarn": {
        "method": "yarn", "factor": 3.2, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "attention_factor": 1.0, "trained": 40960, "target": 131072, "row_length": 131072,
        "rows": 8, "learning_rate": 1e-6, "schedule": "constant_with_warmup", "warmup_steps": 10,
    },
    # arXiv:2309.10400 and its script; arXiv:2309.00071
    "pose_one_gpu": ADAM
    | {
        "method": "yarn", "trained": 8192, "target": 65536, "row_length": 4096, "rows": 16,
        "learning_rate": 2e-5, "schedule": "linear", "warmup_steps": 10, "positions": "skip",
    },
    # arXiv:2309.00071; LoRA's targets: arXiv:2309.12307
    "evening_8b_lora#1": EVENING | {"target": 16384, "row_length": 16384, "rows": 16},
    "evening_8b_lora#2": EVENING | {"target": 32768, "row_length": 32768, "rows": 8},
    "smollm2_32k_yarn": YARN
    | {"method": "yarn", "trained": 8192, "target": 32768, "rows": 4, "steps": 200},
    "smollm2_32k_mixed": YARN
    | {"method": "mixed-yarn", "trained": 8192, "target": 32768, "rows": 4, "steps": 200},
}  # fmt: skip
TUNED = (
    "max_steps", "tokens", "learning_rate", "lr_scheduler_type", "warmup_steps", "adam_beta1",
    "adam_beta2", "weight_decay", "max_grad_norm", "gradient_accumulation_steps", "factor",
    "length", "bf16",
)  # fmt: skip


@cache
def read(name):
    """Return the settings of a recipe, or of one of its stages: `NAME#1`."""
    name, _, stage = name.partition("#")
    settings = parse_settings(["--config", name])[0]
    return settings.stages[int(stage) - 1] if stage else settings


def runs(name):
    """Return the names of a recipe's stages, or its own."""
    stages = len(read(name).stages)
    return [f"{name}#{number}" for number in range(1, stages + 1)] or [name]


RUNS = [run for name in NAMES for run in runs(name)]


def text(name):
    return (ROOT / "recipes" / "configs" / f"{name.partition('#')[0]}.yaml").read_text()


def header(name):
    """Return the comment at the top, before any key."""
    return text(name).partition("\n\n")[0]


LAUNCH_LINE = (
    r"rope-patch recipes (\w+) > \1.yaml; accelerate launch --config_file \1.yaml "
    r"(?:--num_processes (\d+) )?-m "
)


def launcher(name):
    """Return the accelerate file that the launch line copies and names."""
    match = re.search(LAUNCH_LINE, header(name))
    return ROOT / "recipes" / "accelerate" / f"{match[1] if match else 'single'}.yaml"


def method_of(settings):
    """Return a recipe's method on its model's geometry, and the target length."""
    geometry = GEOMETRIES[settings.extension.model]
    method, target = settings.request().resolve(geometry.trained_length)
    return method, target or geometry.trained_length


def resolved_values(name):
    """Return a recipe's resolved values under the keys of PUBLISHED."""
    settings = read(name)
    extension, training, rows = settings.extension, settings.training, settings.data
    method, target = method_of(settings)
    launch = yaml.safe_load(launcher(name).read_text())
    shared = launch.get("parallelism_config", {})
    sizes = (shared.get(f"parallelism_config_{kind}_size", 1) for kind in ("cp", "sp", "tp"))
    match = re.search(LAUNCH_LINE, header(name))
    processes = int(match[2]) if match and match[2] else launch["num_processes"]
    replicas = processes // math.prod(sizes)
    return {
        "method": extension.method,
        "trained": GEOMETRIES[extension.model].trained_length,
        "target": target,
        "factor": extension.factor,
        "layer_types": extension.layer_types,
        "z_loss": extension.z_loss,
        "decay_embeddings": extension.decay_embeddings,
        "start": extension.start,
        "beta_fast": getattr(method, "beta_fast", None),
        "beta_slow": getattr(method, "beta_slow", None),
        "truncate": getattr(method, "truncate", None),
        "attention_factor": method.frequencies(GEOMETRIES[extension.model]).attention_factor,
        "clipped_pairs": getattr(method, "clipped_pairs", None),
        "theta": getattr(method, "new_theta", None),
        "temperature": getattr(method, "temperature", None),
        "share": getattr(method, "partial_rotary_factor", None),
        "steps": training.max_steps,
        "tokens": extension.tokens,
        "rows": training.per_device_train_batch_size
        * training.gradient_accumulation_steps
        * replicas,
        "row_length": extension.train_length or target,
        "learning_rate": training.learning_rate,
        "schedule": training.lr_scheduler_type.value,
        "floor": (training.lr_scheduler_kwargs or {}).get("min_lr_rate"),
        "warmup_steps": training.warmup_steps,
        "adam_beta1": training.adam_beta1,
        "adam_beta2": training.adam_beta2,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "lora_rank": extension.lora_rank,
        "lora_alpha": extension.lora_alpha,
        "lora_targets": extension.lora_targets,
        "lora_trains": extension.lora_trains,
        "short_share": rows.short_share,
        "short_length": rows.short_length,
        "data_weights": rows.data_weights,
        "packing": rows.packing,
        "positions": rows.positions,
    }


def test_every_recipe_has_published_values_to_check():
    assert set(RUNS) == set(PUBLISHED) | {"smoke_cpu"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_can_be_read_on_any_machine(name):
    settings = read(name)
    assert settings.training.output_dir == f"out/{name}"
    assert settings.training.use_cpu is (
        name == "smoke_cpu"
    )  # the recipe's value, not this machine's


@pytest.mark.parametrize("name", NAMES)
def test_a_header_names_papers_hardware_tokens_and_launch_command(name):
    lines = header(name).splitlines()
    assert all(line.startswith("# ") for line in lines)
    for what in (r"Papers?: arXiv:\d{4}\.\d{5}", "Hardware: ", "Tokens: "):
        assert any(re.match(f"# {what}", line) for line in lines)
    assert lines[-1].endswith(f" --config {name}")
    assert lines[-1].startswith(
        "# rope-patch finetune " if name == "smoke_cpu" else "# rope-patch "
    )
    assert (name == "smoke_cpu") != ("-m rope_patch.recipes.finetune --config" in lines[-1])
    assert launcher(name) in LAUNCHES


@pytest.mark.parametrize("name", NAMES)
def test_every_tuned_number_has_a_comment_with_its_source(name):
    if name == "smoke_cpu":
        assert "all numbers are ours" in header(name)
        return
    for line in text(name).splitlines():
        if line.strip(" -").partition(":")[0] in TUNED:
            assert re.search(r"\S +# .", line), line


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_numbers_in_yaml(name):
    def words(value):
        if isinstance(value, dict | list):
            parts = value.values() if isinstance(value, dict) else value
            return [word for part in parts for word in words(part)]
        return [value] if isinstance(value, str) else []

    keys = yaml.safe_load(text(name))
    for word in words(keys):
        with pytest.raises(ValueError, match="could not convert"):
            float(word)
    assert isinstance(keys["learning_rate"], float)


@pytest.mark.parametrize("name", PUBLISHED)
def test_values_are_the_published_ones(name):
    ours = resolved_values(name)
    assert {key: ours[key] for key in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize("name", RUNS)
def test_tokens_are_those_of_the_header(name):
    ours = resolved_values(name)
    tokens = ours["tokens"] or ours["steps"] * ours["rows"] * ours["row_length"]
    line = next(line for line in header(name).splitlines() if line.startswith("# Tokens: "))
    units = {"billion": 1e9, "million": 1e6}
    numbers = [
        float(number.replace(",", "")) * units.get(unit, 1)
        for number, unit in re.findall(r"(\d[\d,.]*\d|\d)(?: (billion|million))?", line)
    ]
    assert any(math.isclose(tokens, number, rel_tol=0.1) for number in numbers), (tokens, line)


@pytest.mark.parametrize("name", RUNS)
def test_the_method_fits_the_model(name):
    settings = read(name)
    geometry = GEOMETRIES[settings.extension.model]
    method, target = method_of(settings)
    inv_freq = method.frequencies(geometry).inv_freq
    assert inv_freq.shape == (geometry.head_dim // 2,)
    assert torch.isfinite(inv_freq).all()
    assert not torch.equal(inv_freq, geometry.inv_freq())
    assert target > geometry.trained_length or method.is_dynamic
    assert (settings.extension.train_length or target) <= target


@pytest.mark.parametrize("name", RUNS)
def test_the_launcher_supports_the_rows(name):
    settings, ours = read(name), resolved_values(name)
    check_data_arguments(settings.data, ours["row_length"])
    launch = yaml.safe_load(launcher(name).read_text())
    parallelism = launch.get("parallelism_config", {})
    if (cp_size := parallelism.get("parallelism_config_cp_size", 1)) > 1:
        require_no_document_masks(settings.data)
        assert settings.extension.attention == "sdpa"
        assert ours["row_length"] % (2 * cp_size) == 0
    if parallelism.get("parallelism_config_sp_size", 1) > 1:
        implementation = parallelism["parallelism_config_sp_attn_implementation"]
        assert settings.extension.attention == implementation
    if settings.data.masks_documents and ours["row_length"] > 32768:
        assert settings.extension.attention == "flash_attention_2"


@pytest.mark.parametrize("name", [n for n in NAMES if read(n).extension.model.startswith("out/")])
def test_a_second_stage_starts_from_the_model_of_the_first(name):
    first = read(Path(read(name).extension.model).parent.name)
    assert read(name).extension.model == f"{first.training.output_dir}/model"


def test_the_stretches_of_longrope_are_those_of_yarn_and_never_fall():
    stretch = read("longrope_128k").method_options["long_factor"]
    yarn = rope_patch.frequencies(
        "yarn", head_dim=128, theta=1e4, trained_length=4096, factor=32.0
    ).inv_freq
    torch.testing.assert_close(
        torch.tensor(stretch, dtype=torch.float64), LLAMA_2.inv_freq() / yarn, rtol=1e-3, atol=0
    )
    assert stretch == sorted(stretch)


def test_the_stretches_of_longrope2_are_ntk_up_to_the_critical_dimension():
    options = read("longrope2_mixed").method_options
    expected = [16 ** (min(pair, 30) / 30) for pair in range(64)]
    assert options["long_factor"] == pytest.approx(expected, rel=1e-3)


def test_mixed_recipes_keep_the_original_rotation_of_short_sequences():
    for name in ("longrope2_mixed", "smollm2_32k_mixed"):
        settings = read(name)
        geometry = GEOMETRIES[settings.extension.model]
        method, target = method_of(settings)
        short = method.frequencies(geometry, geometry.trained_length)
        assert torch.equal(short.inv_freq, geometry.inv_freq())
        assert not torch.equal(method.frequencies(geometry, target).inv_freq, short.inv_freq)
        assert settings.data.short_share > 0


def test_the_two_small_recipes_differ_only_in_the_mixing():
    yarn, mixed = (read(f"smollm2_32k_{kind}").resolved() for kind in ("yarn", "mixed"))
    different_keys = {key for key in yarn.keys() | mixed.keys() if yarn.get(key) != mixed.get(key)}
    assert different_keys - {"logging_dir"} == {"method", "short_share", "output_dir"}


def test_the_warmup_of_position_interpolation_starts_at_a_tenth():
    training = read("pi_8k").training
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=training.learning_rate)
    scheduler = get_scheduler(
        training.lr_scheduler_type,
        optimizer,
        num_warmup_steps=training.get_warmup_steps(training.max_steps),
        num_training_steps=training.max_steps,
        scheduler_specific_kwargs=training.lr_scheduler_kwargs,
    )
    rates = []
    for _ in range(training.max_steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[0] == pytest.approx(2e-6)
    assert rates[20:] == pytest.approx([2e-5] * 980)


# Training of tiny models of the same families.

TINY_STEPS = 2
TINY_TRAINED = 64  # tokens that the tiny models are "trained" on
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,  # the recipes' options count pairs of heads of this size
    "max_position_embeddings": TINY_TRAINED,
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
        {"attention": "sdpa", "tokens": 512.0 * TINY_STEPS, "compression_ratio": [0.01, 2.0]},
        512,
    ),
    "olmo_hybrid_drope": (
        "OlmoHybrid",
        {"num_hidden_layers": 4, "layer_types": HYBRID[1], **DELTA_NET},
        {"length": 256, "train_length": 256, "tokens": 256.0 * TINY_STEPS},
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
        40 * TINY_TRAINED,
    ),
    "cope_64k": ("Llama", {}, {"length": 512, "attention": "sdpa"}, 512),
    "ultralong_1m": (
        "Llama",
        {"rope_parameters": LLAMA_3_ROPE, "max_position_embeddings": 256},
        {"tokens": 2048.0 * TINY_STEPS},
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


def write_recipe(name, folder):
    """Write a recipe for a tiny model; return its file."""
    recipe = yaml.safe_load(text(name))
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
    keys |= {} if "tokens" in recipe else {"max_steps": TINY_STEPS}
    stages = zip(recipe.get("stages", []), changes.pop("stages", []), strict=True)
    recipe |= keys | changes
    short = {key: keys[key] for key in ("gradient_accumulation_steps", "max_steps") if key in keys}
    if "stages" in recipe:
        recipe["stages"] = [stage | short | change for stage, change in stages]
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("runner", ["finetune", pytest.param("loop", marks=pytest.mark.slow)])
def test_a_recipe_runs_to_the_end(name, runner, tmp_path):
    path = write_recipe(name, tmp_path)
    folder = run(runner, tmp_path / "run", config=path)
    settings = parse_settings(["--config", str(path)])[0]
    stages = [f"stage-{number}" for number in range(1, len(settings.stages) + 1)]
    for stage in stages or ["."]:
        log = read_log(tmp_path / "run" / stage)
        assert [line["step"] for line in log] == list(range(1, TINY_STEPS + 1))
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
    settings = parse_settings(["--config", str(write_recipe(name, tmp_path))])[0]
    page = plan.format_plan(settings)
    for stage in settings.stages or [settings]:
        extension = stage.extension
        by_factor = settings.stages and extension.factor
        target = int(extension.factor * TINY_TRAINED) if by_factor else TINY[name][3]
        length = extension.train_length or extension.length or target
        assert f"rows of {length:,} tokens" in page
    assert "memory on each device" in page


@pytest.mark.parametrize("name", HARDWARE)
def test_the_hardware_of_the_header_is_enough(name):
    device, launch, shape = HARDWARE[name]
    settings, _ = parse_settings(
        ["--config", name, "--model", str(plan.SHAPES / shape), "--loss", "torch"]
    )
    environment = read_environment(find_launch(Path(launch)))
    memory = {**plan.DEVICES, "48 GB": 47 * plan.GIB}[device]
    for stage in settings.stages or [settings]:
        need = plan.from_settings(stage, environment=environment)
        assert need.total <= memory * (1 - plan.RESERVE)
