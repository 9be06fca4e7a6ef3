"""Test plans on several devices: how a row is shared, what is offloaded, launch files."""

import os

import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from transformers import LlamaConfig

from rope_patch.pretrained.loading import read_config
from rope_patch.training import recipe_files
from rope_patch.training.memory import plan, tables
from rope_patch.training.memory.context import exchange_bytes
from rope_patch.training.memory.launch import read_environment
from rope_patch.training.memory.model import host_memory_need, memory_need
from rope_patch.training.memory.model_shape import model_shape
from rope_patch.training.memory.recipe_setup import training_setup
from rope_patch.utils.errors import Refused

LLAMA_8B = plan.SHAPES / "llama-3.1-8b"
SHARED = {"length": 2**20, "compute_dtype": torch.bfloat16, "shards": 8, "context_parallel": 8}
README = plan.SHAPES.parent / "README.md"
ARGUMENTS = [
    *("--model", str(LLAMA_8B), "--method", "yarn", "--factor", "4", "--train_length", "65536"),
    *("--data", "novels:emma", "--max_steps", "10", "--use_cpu", "true", "--bf16", "true"),
]


def narrow_mlp(**sizes):
    """Return the config of a model whose attention needs most of a layer's memory."""
    return LlamaConfig(
        hidden_size=1024,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        vocab_size=1000,
        **sizes,
    )


def test_gathered_keys_grow_with_the_row_and_passed_ones_with_its_part():
    config = narrow_mlp(num_key_value_heads=8)
    kinds = {}
    for kind in ("allgather", "ring", "ulysses"):
        small, large = (
            memory_need(
                config,
                length=2**14 * parts,
                shards=8,
                context_parallel=parts,
                context_kind=kind,
            ).workspace
            for parts in (2, 8)
        )
        kinds[kind] = large - small
    # The same part of rows that are four times as long: only the gathered keys and values grow.
    assert kinds == {"allgather": 6 * 2**14 * 2 * 1024 * 4, "ring": 0, "ulysses": 0}


def test_devices_beyond_the_key_heads_hold_copies():
    sizes = {"tokens": 2**11, "row_tokens": 2**14, "parts": 8, "number_size": 4}
    held = [
        exchange_bytes("ulysses", model_shape(narrow_mlp(num_key_value_heads=heads)), **sizes)
        for heads in (1, 2, 8)
    ]
    # A head of keys for each device, whether they are its own or copies.
    assert held == [2**11 * 2 * (1024 + 2 * 1024) * 4] * 3


def test_one_device_exchanges_nothing():
    shape = model_shape(narrow_mlp(num_key_value_heads=8))
    sizes = {"tokens": 2**14, "row_tokens": 2**14, "parts": 1, "number_size": 4}
    assert exchange_bytes("allgather", shape, **sizes) == 0


def test_ulysses_needs_whole_heads():
    with pytest.raises(Refused, match=r"divides 32 heads .*\(1, 2, 4, 8, 16, 32\), got 64.*a ring"):
        memory_need(
            read_config(LLAMA_8B), **(SHARED | {"context_parallel": 64, "context_kind": "ulysses"})
        )


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="one of allgather, ring, ulysses, got 'zigzag'"):
        memory_need(read_config(LLAMA_8B), **SHARED, context_kind="zigzag")


def test_what_leaves_the_device_is_in_the_memory_of_the_host():
    config = read_config(LLAMA_8B)
    all_here = memory_need(config, **SHARED)
    assert host_memory_need(config, **SHARED) == 0
    weights = SHARED | {"offload_weights": True}
    need = memory_need(config, **weights)
    assert need.parameters == need.gradients == need.optimizer == 0
    assert host_memory_need(config, **weights) == 16 * 8_030_261_248 // 8
    optimizer = SHARED | {"offload_optimizer": True}
    need = memory_need(config, **optimizer)
    assert (need.parameters, need.gradients, need.optimizer) == (all_here.parameters, 0, 0)
    assert host_memory_need(config, **optimizer) == 12 * 8_030_261_248 // 8
    activations = SHARED | {"offload_activations": True}
    assert host_memory_need(config, **activations) == 32 * 2**17 * 4096 * 2


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_weight"),
    [("adamw_torch_fused", 8), ("adamw_bnb_8bit", 2), ("adamw_torch_4bit", 1), ("sgd", 0)],
)
def test_optimizers_with_fewer_bits(optimizer, bytes_per_weight):
    need = memory_need(read_config(LLAMA_8B), length=1024, optimizer=optimizer)
    assert need.optimizer == bytes_per_weight * 8_030_261_248


# -- launch files ----------------------------------------------------------------------------------


def accelerate_environment(path, monkeypatch):
    """Return the variables that accelerate's launcher sets for a launch file."""
    for key in [key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_", "PARALL"))]:
        monkeypatch.delenv(key)
    words = ["--config_file", str(path), "--main_process_port", "0", "script.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""
        return prepare_deepspeed_cmd_env(arguments)[1], arguments.num_processes
    if arguments.use_fsdp:
        return prepare_multi_gpu_env(arguments), arguments.num_processes
    return {}, arguments.num_processes


@pytest.mark.parametrize("name", recipe_files.launches())
def test_a_launch_file_has_the_variables_that_accelerate_sets(name, monkeypatch):
    path = recipe_files.launches()[name]
    theirs, processes = accelerate_environment(path, monkeypatch)
    ours = read_environment(path)
    assert ours["WORLD_SIZE"] == str(processes)
    for key in set(ours) & set(theirs):
        assert ours[key].lower() == theirs[key].lower(), key
    settings, _ = plan.parse(ARGUMENTS)
    config = plan._read_config(settings)
    setups = [
        training_setup(settings, config, processes, environment) for environment in (ours, theirs)
    ]
    assert setups[0] == setups[1]


def test_kinds_of_sharing_and_offloading_come_from_the_launch_file(tmp_path):
    settings, _ = plan.parse(ARGUMENTS)
    config = plan._read_config(settings)

    def setup(name, **changes):
        text = yaml.safe_load(recipe_files.launches()[name].read_text())
        for part, keys in changes.items():
            text[part] |= keys
        path = tmp_path / "launch.yaml"
        path.write_text(yaml.safe_dump(text))
        return training_setup(settings, config, environment=read_environment(path))

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
    path.write_text("model: demo\n")
    with pytest.raises(ValueError, match="expected a launch file of accelerate"):
        read_environment(path)
    path.write_text("a: [")
    with pytest.raises(ValueError, match=r"launch\.yaml is not YAML"):
        read_environment(path)


def test_processes_have_to_fit_the_sharing():
    path = recipe_files.launches()["fsdp2_cp8"]
    assert read_environment(path, 16)["WORLD_SIZE"] == "16"
    with pytest.raises(ValueError, match=r"8 devices share a row, .* multiple of 8, got 12"):
        read_environment(path, 12)


def test_the_command_plans_a_recipe_on_a_launch_file_s_devices(capsys):
    plan.main([*ARGUMENTS, "--launch", "fsdp2_cp8", "--offload_activations", "true"])
    page = capsys.readouterr().out
    assert "8 processes, weights in 8 shards, rows in 8 parts (allgather)" in page
    assert "in CPU memory" in page
    assert "if H100s reach 50% of their peak" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*ARGUMENTS, "--launch", "fsdp2_cp9"], "no launch file fsdp2_cp9 (did you mean"),
        (["--config", "yarn_64q"], "no recipe yarn_64q"),
    ],
)
def test_the_command_says_what_is_wrong(capsys, arguments, message):
    with pytest.raises(SystemExit):
        plan.main(arguments)
    assert message in capsys.readouterr().err


# -- tables ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_tables():
    return tables.million_table(), tables.published_table()


def test_the_readme_has_the_current_tables(long_tables):
    text = README.read_text(encoding="utf-8")
    for table in long_tables:
        assert table in text


def test_the_table_has_a_line_for_every_length_and_layout(long_tables):
    lines = long_tables[0].splitlines()
    assert len(lines) == 2 + 2 * 3 * 2
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(
    "run", tables.PUBLISHED, ids=lambda run: f"{run.source[:8]} {run.published}"
)
def test_plans_are_near_the_published_measurements(run):
    """No number was fitted to them; what differs is explained in the README."""
    published = float(run.published.split()[0].replace(",", ""))
    assert 0.8 <= run.planned() / published <= 1.15


def test_models_of_published_runs_have_their_size():
    assert memory_need(tables._sized_config("Qwen3-8B"), length=1).parameters == 4 * 8_190_735_360
    assert memory_need(tables._sized_config("Qwen3-0.6B"), length=1).parameters == 4 * 596_049_920
