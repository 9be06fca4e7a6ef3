"""The optimizer: its groups of parameters, its learning rates, and the precision of a step."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler


def mixed_precision(training: Any) -> str:
    """Return accelerate's `mixed_precision`: the number format of matrix products.

    As in the Trainer, accelerate's config decides if the recipe does not.
    """
    launcher_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return "bf16" if training.bf16 else launcher_precision


# Names of norms and biases, as transformers' Trainer has them.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decayed_names(model: nn.Module, *, decay_embeddings: bool) -> list[str]:
    """Return the names of the parameters with weight decay: all but norms and biases.

    Args:
        model: The model, before or after PEFT or accelerate wrap it.
        decay_embeddings: Whether embeddings decay, too. A head that is tied to them is one; a head
            of its own decays.
    """
    undecayed_types: tuple[type[nn.Module], ...] = (nn.LayerNorm,)
    if not decay_embeddings:
        undecayed_types += (nn.Embedding,)
    undecayed = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, undecayed_types)
        for parameter in module.parameters()
    }
    return [
        name
        for name, parameter in model.named_parameters()
        if id(parameter) not in undecayed and not _UNDECAYED.search(name.lower())
    ]


def require_undecayed_embeddings(model: nn.Module, optimizer: Any) -> None:
    """Raise if an optimizer made groups of its own, in which embeddings decay.

    Raises:
        ValueError: Embeddings are in a group with weight decay.
    """
    undecayed = {
        id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
    }
    for group in optimizer.param_groups:
        if group.get("weight_decay") and any(id(p) in undecayed for p in group["params"]):
            raise ValueError(
                f"decay_embeddings: false is not followed by {type(optimizer).__name__}, which "
                "makes groups of parameters of its own: expected optim: adamw_torch_fused, or "
                "decay_embeddings: true"
            )


def make_scheduler(training: Any, optimizer: Any, steps: int) -> Any:
    """Return a recipe's learning-rate scheduler, as the Trainer makes it.

    Args:
        training: transformers' TrainingArguments.
        optimizer: The optimizer to schedule.
        steps: Total optimizer steps.
    """
    return get_scheduler(
        training.lr_scheduler_type,
        optimizer,
        num_warmup_steps=training.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=training.lr_scheduler_kwargs,
    )


def keep_settings(optimizer: Any, load_state: Callable[[], Any]) -> None:
    """Load another run's optimizer state, but keep this run's learning rate, betas and decay.

    Args:
        optimizer: The optimizer.
        load_state: Loads the state into it.

    Raises:
        ValueError: The state is of other weights.
    """
    own = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        load_state()
    except (ValueError, RuntimeError, KeyError) as error:
        raise ValueError(
            f"carry_optimizer: the state of the stage before is of other weights ({error}): "
            "expected stages that train the same weights in the same groups, or carry_optimizer: "
            "false"
        ) from error
    for group, values in zip(optimizer.param_groups, own, strict=True):
        group.update(values)


def same_rates(training: Any, steps: int, other_steps: int, steps_done: int) -> bool:
    """Return whether runs of two lengths have the same learning rates up to a step.

    Args:
        training: transformers' TrainingArguments of both runs.
        steps: Total optimizer steps of one run.
        other_steps: Total optimizer steps of the other run.
        steps_done: The last step to compare; both runs must reach it.
    """
    if steps_done > min(steps, other_steps):
        return False
    weight = torch.zeros(1, requires_grad=True)
    factors = []
    for number in (steps, other_steps):
        optimizer = torch.optim.SGD([weight], lr=training.learning_rate)
        # A scheduler that reacts to losses has no predictable rates.
        functions = getattr(make_scheduler(training, optimizer, number), "lr_lambdas", None)
        if functions is None:
            return False
        factors.append([functions[0](step) for step in range(steps_done)])
    return factors[0] == factors[1]
