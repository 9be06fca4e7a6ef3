"""Test accelerate's launch files: their keys, what reaches each process, and plans of them."""

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import ParallelismConfig
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from training_runs import TINY
from transformers import LlamaForCausalLM

from rope_patch.training import find_launch, parse_settings, read_environment, training_setup
from rope_patch.training.memory import plan

ROOT = Path(__file__).parents[3]
LAUNCHES = sorted(path.stem for path in (ROOT / "recipes" / "accelerate").glob("*.yaml"))
CONFIG = plan.read_config(plan.SHAPES / "llama-3.1-8b")
ARGUMENTS = [
    *("--model", str(plan.SHAPES / "llama-3.1-8b"), "--method", "yarn", "--factor", "4"),
    *("--train_length", "65536", "--data", "novels:emma", "--max_steps", "10"),
    *("--use_cpu", "true", "--bf16", "true"),
]


def launch_file(name):
    return find_launch(Path(name))


@pytest.fixture
def launch(monkeypatch):
    """Return a function: launch file -> accelerate's arguments and the processes' environment."""

    def launched(name):
        for key in [k for k in os.environ if k.startswith(("ACCELERATE_", "FSDP_", "PARALL"))]:
            monkeypatch.delenv(key)
        words = ["--config_file", str(launch_file(name)), "--main_process_port", "0"]
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

    return launched


@pytest.mark.parametrize("name", LAUNCHES)
def test_accelerate_knows_every_key_and_leaves_the_steps_to_the_recipe(name, launch):
    parser = vars(launch_command_parser().parse_args(["script.py"]))
    config = load_config_from_file(str(launch_file(name)))
    for part in (config.fsdp_config, config.deepspeed_config, config.parallelism_config):
        assert set(part) <= set(parser)
    assert launch_file(name).read_text().startswith("# ")
    _, environment = launch(name)
    assert not hasattr(environment, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    assert not hasattr(environment, "ACCELERATE_GRADIENT_CLIPPING")


def test_a_single_process_leaves_the_precision_to_the_recipe(launch):
    arguments, environment = launch("single")
    assert arguments.num_processes == 1
    assert environment.ACCELERATE_MIXED_PRECISION == "no"
    for recipe, precision in (("yarn_64k", "bf16"), ("smoke_cpu", "no")):
        assert parse_settings(["--config", recipe])[0].training.mixed_precision == precision


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_cp8"])
def test_fsdp2_settings_reach_the_processes(name, launch):
    arguments, environment = launch(name)
    assert arguments.num_processes == 8
    assert environment.ACCELERATE_USE_FSDP == "true"
    assert environment.ACCELERATE_MIXED_PRECISION == "bf16"
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert not plugin.activation_checkpointing  # recipes set gradient_checkpointing
    assert not plugin.cpu_ram_efficient_loading
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    model = LlamaForCausalLM.from_pretrained(TINY["model"])
    plugin.set_auto_wrap_policy(model)
    assert plugin.auto_wrap_policy.keywords["transformer_layer_cls"] == {
        type(model.model.layers[0])
    }
    if name == "fsdp2_cp8":
        assert environment.ACCELERATE_USE_PARALLELISM_CONFIG == "true"
        parallelism = ParallelismConfig()
        assert parallelism.cp_size == parallelism.total_size == arguments.num_processes
        assert parallelism.cp_handler.cp_comm_strategy == "allgather"


def test_sequence_parallel_settings_reach_the_processes(launch):
    arguments, environment = launch("deepspeed_sp8")
    assert environment.ACCELERATE_USE_DEEPSPEED == "true"
    assert environment.ACCELERATE_DEEPSPEED_ZERO_STAGE == "3"
    assert environment.ACCELERATE_DEEPSPEED_ZERO3_INIT == "false"
    assert environment.ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL == "true"
    assert environment.ACCELERATE_MIXED_PRECISION == "bf16"
    parallelism = ParallelismConfig()
    assert parallelism.sp_size == parallelism.total_size == arguments.num_processes
    assert parallelism.sp_handler.sp_attn_implementation == "flash_attention_2"
    assert parallelism.sp_handler.sp_seq_length_is_variable


# Plans.


def setup_of(environment, processes=None, **keys):
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    settings = parse_settings([*ARGUMENTS, *words])[0]
    return training_setup(settings, CONFIG, processes, environment)


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_file_has_the_variables_that_accelerate_sets(name, launch, monkeypatch):
    arguments, environment = launch(name)
    monkeypatch.undo()  # or the recipe would be parsed as in such a process
    theirs = vars(environment) if arguments.use_deepspeed or arguments.use_fsdp else {}
    ours = read_environment(launch_file(name))
    assert ours["WORLD_SIZE"] == str(arguments.num_processes)
    for key in set(ours) & set(theirs):
        assert ours[key].lower() == theirs[key].lower(), key
    setups = [setup_of(each, arguments.num_processes) for each in (ours, theirs)]
    assert setups[0] == setups[1]


def test_kinds_of_sharing_and_offloading_come_from_the_launch_file(tmp_path):
    def setup(name, **changes):
        text = yaml.safe_load(launch_file(name).read_text())
        for part, keys in changes.items():
            text[part] |= keys
        path = tmp_path / "launch.yaml"
        path.write_text(yaml.safe_dump(text))
        return setup_of(read_environment(path))

    assert setup("fsdp2_cp8").context_kind == "allgather"
    alltoall = {"parallelism_config_cp_comm_strategy": "alltoall"}
    assert setup("fsdp2_cp8", parallelism_config=alltoall).context_kind == "ring"
    assert setup("deepspeed_sp8").context_kind == "ulysses"
    assert not setup("fsdp2").offload_weights
    assert setup("fsdp2", fsdp_config={"fsdp_offload_params": True}).offload_weights
    offload = {"offload_optimizer_device": "cpu"}
    assert setup("deepspeed_sp8", deepspeed_config=offload).offload_optimizer
    assert not setup("deepspeed_sp8", deepspeed_config=offload).offload_weights


def test_other_files_are_no_launch_files(tmp_path):
    path = tmp_path / "launch.yaml"
    for content, message in (
        ("model: demo\n", "a launch file of accelerate"),
        ("a: [", "not YAML"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_environment(path)


def test_processes_have_to_fit_the_sharing():
    path = launch_file("fsdp2_cp8")
    assert read_environment(path, 16)["WORLD_SIZE"] == "16"
    with pytest.raises(ValueError, match=r"multiple of 8, got 12"):
        read_environment(path, 12)


def test_the_environment_decides_the_sharding():
    fsdp = {"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "8"}
    setups = [setup_of(e) for e in ({}, fsdp, {**fsdp, "PARALLELISM_CONFIG_CP_SIZE": "8"})]
    assert [(setup.shards, setup.context_parallel) for setup in setups] == [(1, 1), (8, 1), (8, 8)]
    assert setup_of({"ACCELERATE_USE_FSDP": "true"}, 8) == setups[1]
    replicated = setup_of({"WORLD_SIZE": "2"})
    assert (replicated.replicated, replicated.shards) == (True, 1)


def test_a_plan_follows_the_recipe():
    keys = {"packing": "masked", "gradient_accumulation_steps": 2, "lora_rank": 4, "loss": "full"}
    setup = vars(setup_of({}, **keys, z_loss=1e-5, average_checkpoints=2))
    expected = {
        "dtype": torch.float32,
        "compute_dtype": torch.bfloat16,
        "packed_masks": True,
        "accumulates": True,
        "lora_rank": 4,
        "loss": "full",
        "loss_terms": True,
        "checkpointing": True,
        "averages": True,
    }
    assert {name: setup[name] for name in expected} == expected


def test_the_command_plans_a_recipe_on_a_launch_file_s_devices(capsys, monkeypatch):
    options = ["--launch", "fsdp2_cp8", "--offload_activations", "true"]
    monkeypatch.setattr(sys, "argv", ["plan", *ARGUMENTS, *options])
    monkeypatch.delitem(sys.modules, plan.__name__)
    runpy.run_module(plan.__name__, run_name="__main__")  # as `python -m` does
    page = capsys.readouterr().out
    assert "8 processes, weights in 8 shards, rows in 8 parts (allgather)" in page
    assert "in CPU memory" in page
    assert "if H100s reach 50% of their peak" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*ARGUMENTS, "--launch", "fsdp2_cp9"], "no launch file fsdp2_cp9 (did you mean"),
        (["--config", "yarn_64q"], "no recipe yarn_64q"),
        (["--launch", "fsdp2_cp8"], "expected a recipe to plan"),
    ],
)
def test_the_command_says_what_is_wrong(capsys, arguments, message):
    with pytest.raises(SystemExit):
        plan.main(arguments)
    assert message in capsys.readouterr().err
