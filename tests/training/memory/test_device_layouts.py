"""Test plans on several devices, published runs, and the time of a step by counts of torch."""

import check_memory_plan
import memory_tables
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from rope_patch.training import (
    StepWork,
    exchange_bytes,
    host_memory_need,
    memory_need,
    model_shape,
    step_work,
)
from rope_patch.training.memory import plan

CONFIG = plan.read_config(plan.SHAPES / "llama-3.1-8b")
SHARED = {"length": 2**20, "compute_dtype": torch.bfloat16, "shards": 8, "context_parallel": 8}
README = plan.SHAPES.parent / "README.md"


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

    sizes |= {"row_tokens": 2**11, "parts": 1}
    shape = model_shape(narrow_mlp(num_key_value_heads=8))
    assert exchange_bytes("allgather", shape, **sizes) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_parallel": 64, "context_kind": "ulysses"}, r"32 heads .*got 64.*a ring"),
        ({"context_kind": "zigzag"}, "allgather, ring, ulysses, got 'zigzag'"),
        ({"length": 0}, "at least 1"),
        ({"loss": "auto"}, "full, torch or liger, got 'auto'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        memory_need(CONFIG, **SHARED | changes)


def test_what_leaves_the_device_is_in_the_memory_of_the_host():
    all_here = memory_need(CONFIG, **SHARED)
    assert host_memory_need(CONFIG, **SHARED) == 0
    weights = SHARED | {"offload_weights": True}
    need = memory_need(CONFIG, **weights)
    assert need.parameters == need.gradients == need.optimizer == 0
    assert host_memory_need(CONFIG, **weights) == 16 * 8_030_261_248 // 8
    optimizer = SHARED | {"offload_optimizer": True}
    need = memory_need(CONFIG, **optimizer)
    assert (need.parameters, need.gradients, need.optimizer) == (all_here.parameters, 0, 0)
    assert host_memory_need(CONFIG, **optimizer) == 12 * 8_030_261_248 // 8
    activations = SHARED | {"offload_activations": True}
    assert host_memory_need(CONFIG, **activations) == 32 * 2**17 * 4096 * 2


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_weight"),
    [("adamw_torch_fused", 8), ("adamw_bnb_8bit", 2), ("adamw_torch_4bit", 1), ("sgd", 0)],
)
def test_optimizers_with_fewer_bits(optimizer, bytes_per_weight):
    need = memory_need(CONFIG, length=1024, optimizer=optimizer)
    assert need.optimizer == bytes_per_weight * 8_030_261_248


@pytest.mark.parametrize(
    ("table", "lines"),
    [
        (memory_tables.lengths_table, 2 + 2 * 3 * 3),
        (memory_tables.million_table, 2 + 2 * 3 * 2),
        (memory_tables.published_table, 2 + len(memory_tables.PUBLISHED)),
    ],
)
def test_the_readme_has_the_current_tables_with_a_line_for_every_setup(table, lines):
    text = table()
    assert text in README.read_text(encoding="utf-8")
    assert len(text.splitlines()) == lines
    assert len({line.count("|") for line in text.splitlines()}) == 1


@pytest.mark.parametrize(
    "run", memory_tables.PUBLISHED, ids=lambda run: f"{run.source[:8]} {run.published}"
)
def test_plans_are_near_the_published_measurements(run):
    """No number was fitted to them; what differs is explained in the README."""
    published = float(run.published.split()[0].replace(",", ""))
    assert 0.8 <= run.planned() / published <= 1.15


def test_models_of_published_runs_have_their_size():
    for model, weights in (("Qwen3-8B", 8_190_735_360), ("Qwen3-0.6B", 596_049_920)):
        need = memory_need(memory_tables._sized_config(model), length=1)
        assert need.parameters == 4 * weights


TOKENS = 64
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 100,
}


def counted(config, checkpointing):
    """Return the operations of linear layers and of attention that torch counts in a step.

    Eager attention computes all pairs, twice as many as the causal ones without the diagonal.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, config.vocab_size, (2, TOKENS))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    counts = {str(name): number for name, number in counter.get_flop_counts()["Global"].items()}
    linear = sum(number for name, number in counts.items() if name in ("aten.mm", "aten.addmm"))
    return linear, counts["aten.bmm"]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        check_memory_plan.llama(hidden=64, layers=3, vocab=100),
        Qwen3Config(**SIZES, intermediate_size=96),
    ],
    ids=["llama", "qwen3"],
)
def test_operations_are_those_that_torch_counts(config, checkpointing):
    linear, attention = counted(config, checkpointing)
    work = step_work(config, length=TOKENS, rows=2, checkpointing=checkpointing)
    assert work.linear == linear
    # torch's eager backward is twice its forward pass; FlashAttention's is counted as 2.5.
    passes = (1 + 2.5 + checkpointing) / (1 + 2 + checkpointing)
    assert work.attention / passes == pytest.approx(attention / 2 * (TOKENS + 1) / TOKENS)


def test_model_operations_leave_recomputation_out():
    config = check_memory_plan.llama(hidden=64, layers=3, vocab=100)
    works = [step_work(config, length=TOKENS, rows=1, checkpointing=c) for c in (False, True)]
    assert works[0].model == works[1].model
    assert works[1].total > works[0].total > works[0].model


def test_frozen_weights_need_no_gradients():
    config = check_memory_plan.llama(hidden=64, layers=3, vocab=100)
    full, lora = (
        step_work(config, length=TOKENS, rows=1, checkpointing=False, trains_all=all_weights)
        for all_weights in (True, False)
    )
    assert lora.linear == pytest.approx(full.linear * 2 / 3)
    assert lora.attention == full.attention


def test_experts_count_as_those_a_token_passes_through():
    dense = Qwen3Config(**SIZES, intermediate_size=64)
    experts = Qwen3MoeConfig(
        **SIZES,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
    )
    work = [step_work(config, length=TOKENS, rows=1).linear for config in (dense, experts)]
    assert work[1] == pytest.approx(work[0], rel=1e-2)


def test_windows_limit_the_pairs():
    sizes = SIZES | {"num_hidden_layers": 4}
    windows = Qwen3Config(
        **sizes,
        intermediate_size=96,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )
    full = Qwen3Config(**sizes, intermediate_size=96)
    causal = sum(range(1, TOKENS + 1))
    windowed = sum(min(position, 8) for position in range(1, TOKENS + 1))
    shares = [step_work(config, length=TOKENS, rows=1).attention for config in (windows, full)]
    assert shares[0] / shares[1] == pytest.approx((3 * windowed + causal) / (4 * causal))


def test_time_falls_with_devices_and_utilisation():
    work = StepWork(linear=3e15, attention=1e15, model=3e15)
    assert work.seconds(1) == pytest.approx(4e15 / (989.4e12 * 0.5))
    assert work.seconds(8) == pytest.approx(work.seconds(1) / 8)
    assert work.seconds(1, 2.25e15, 1.0) < work.seconds(1)


@pytest.mark.parametrize(
    "wrong", [{"devices": 0}, {"devices": 1, "utilisation": 1.5}, {"devices": 1, "peak": 0}]
)
def test_impossible_devices_are_refused(wrong):
    with pytest.raises(ValueError, match=r"expected at least 1 device, .* got"):
        StepWork(1.0, 1.0, 1.0).seconds(**wrong)


def test_impossible_rows_are_refused():
    with pytest.raises(ValueError, match="at least 1, got 0 and 1"):
        step_work(check_memory_plan.llama(), length=0, rows=1)
