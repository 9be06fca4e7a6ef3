"""Test the estimate of a step's operations against torch's own count, and its time."""

import check_memory_plan
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from rope_patch.training.memory.step_time import PEAKS, UTILISATION, StepWork, step_work

LENGTH = 64
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
    ids = torch.randint(0, config.vocab_size, (2, LENGTH))
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
    work = step_work(config, length=LENGTH, rows=2, checkpointing=checkpointing)
    assert work.linear == linear
    # torch's eager backward is twice its forward pass; FlashAttention's is counted as 2.5.
    passes = (1 + 2.5 + checkpointing) / (1 + 2 + checkpointing)
    assert work.attention / passes == pytest.approx(attention / 2 * (LENGTH + 1) / LENGTH)


def test_model_operations_leave_recomputation_out():
    config = check_memory_plan.llama(hidden=64, layers=3, vocab=100)
    works = [step_work(config, length=LENGTH, rows=1, checkpointing=c) for c in (False, True)]
    assert works[0].model == works[1].model
    assert works[1].total > works[0].total > works[0].model


def test_frozen_weights_need_no_gradients():
    config = check_memory_plan.llama(hidden=64, layers=3, vocab=100)
    full, lora = (
        step_work(config, length=LENGTH, rows=1, checkpointing=False, trains_all=all_weights)
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
    work = [step_work(config, length=LENGTH, rows=1).linear for config in (dense, experts)]
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
    causal = sum(range(1, LENGTH + 1))
    windowed = sum(min(position, 8) for position in range(1, LENGTH + 1))
    shares = [step_work(config, length=LENGTH, rows=1).attention for config in (windows, full)]
    assert shares[0] / shares[1] == pytest.approx((3 * windowed + causal) / (4 * causal))


def test_time_falls_with_devices_and_utilisation():
    work = StepWork(linear=3e15, attention=1e15, model=3e15)
    assert work.seconds(1) == pytest.approx(4e15 / (PEAKS["H100"] * UTILISATION))
    assert work.seconds(8) == pytest.approx(work.seconds(1) / 8)
    assert work.seconds(1, PEAKS["B200"], 1.0) < work.seconds(1)


@pytest.mark.parametrize(
    "wrong", [{"devices": 0}, {"devices": 1, "utilisation": 1.5}, {"devices": 1, "peak": 0}]
)
def test_impossible_devices_are_refused(wrong):
    with pytest.raises(ValueError, match=r"expected at least 1 device, .* got"):
        StepWork(1.0, 1.0, 1.0).seconds(**wrong)


def test_impossible_rows_are_refused():
    with pytest.raises(ValueError, match="at least 1, got 0 and 1"):
        step_work(check_memory_plan.llama(), length=0, rows=1)
