"""Test the launch files for accelerate: valid keys, and the settings that reach each process."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import ParallelismConfig
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from transformers import LlamaForCausalLM

from rope_patch.training.settings import parse

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "assets" / "tiny-llama"
LAUNCHES = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))


def read(name):
    return parse(["--config", str(ROOT / "recipes" / "configs" / f"{name}.yaml")])[0]


def launch(path, monkeypatch):
    """Return accelerate's arguments and the environment of the launched processes."""
    for key in [key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_"))]:
        monkeypatch.delenv(key)
    words = ["--config_file", str(path), "--main_process_port", "0"]
    words += ["-m", "rope_patch.recipes.finetune"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""
        environment = prepare_deepspeed_cmd_env(arguments)[1]
    elif arguments.use_fsdp:
        environment = prepare_multi_gpu_env(arguments)
    else:
        environment = prepare_simple_launcher_cmd_env(arguments)[1]
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    return arguments, SimpleNamespace(**environment)


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_accelerate_knows_every_key_of_a_launch_file(path):
    parser = vars(launch_command_parser().parse_args(["script.py"]))
    config = load_config_from_file(str(path))
    for part in (config.fsdp_config, config.deepspeed_config, config.parallelism_config):
        assert set(part) <= set(parser)
    assert path.read_text().startswith("# ")


def test_a_single_process_leaves_the_precision_to_the_recipe(monkeypatch):
    arguments, environment = launch(ROOT / "recipes/accelerate/single.yaml", monkeypatch)
    assert arguments.num_processes == 1
    assert environment.ACCELERATE_MIXED_PRECISION == "no"
    assert read("yarn_64k").training.mixed_precision == "bf16"
    assert read("smoke_cpu").training.mixed_precision == "no"


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_cp8"])
def test_fsdp2_settings_reach_the_processes(name, monkeypatch):
    arguments, environment = launch(ROOT / f"recipes/accelerate/{name}.yaml", monkeypatch)
    assert arguments.num_processes == 8
    assert environment.ACCELERATE_USE_FSDP == "true"
    assert environment.ACCELERATE_MIXED_PRECISION == "bf16"
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert not plugin.activation_checkpointing  # recipes set gradient_checkpointing
    assert not plugin.cpu_ram_efficient_loading
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    model = LlamaForCausalLM.from_pretrained(TINY)
    plugin.set_auto_wrap_policy(model)
    assert plugin.auto_wrap_policy.keywords["transformer_layer_cls"] == {
        type(model.model.layers[0])
    }


def test_context_parallel_settings_reach_the_processes(monkeypatch):
    arguments, environment = launch(ROOT / "recipes/accelerate/fsdp2_cp8.yaml", monkeypatch)
    assert environment.ACCELERATE_USE_PARALLELISM_CONFIG == "true"
    parallelism = ParallelismConfig()
    assert parallelism.cp_size == parallelism.total_size == arguments.num_processes
    assert parallelism.cp_handler.cp_comm_strategy == "allgather"


def test_sequence_parallel_settings_reach_the_processes(monkeypatch):
    arguments, environment = launch(ROOT / "recipes/accelerate/deepspeed_sp8.yaml", monkeypatch)
    assert environment.ACCELERATE_USE_DEEPSPEED == "true"
    assert environment.ACCELERATE_DEEPSPEED_ZERO_STAGE == "3"
    assert environment.ACCELERATE_DEEPSPEED_ZERO3_INIT == "false"
    assert environment.ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL == "true"
    assert environment.ACCELERATE_MIXED_PRECISION == "bf16"
    parallelism = ParallelismConfig()
    assert parallelism.sp_size == parallelism.total_size == arguments.num_processes
    assert parallelism.sp_handler.sp_attn_implementation == "flash_attention_2"
    assert parallelism.sp_handler.sp_seq_length_is_variable


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_accumulation_and_clipping_are_left_to_the_recipe(path, monkeypatch):
    _, environment = launch(path, monkeypatch)
    assert not hasattr(environment, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    assert not hasattr(environment, "ACCELERATE_GRADIENT_CLIPPING")
