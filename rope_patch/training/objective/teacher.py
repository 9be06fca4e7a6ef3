"""The original model, which short rows are distilled from."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from rope_patch.patching.undo_log import UndoLog
from rope_patch.pretrained.loading import load, read_model
from rope_patch.pretrained.sidecar import patch_to_restore
from rope_patch.training.precision import mixed_precision


class Teacher:
    """A frozen model that returns its head's inputs, from which logits are made in chunks.

    Args:
        model: The model in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.requires_grad_(False).eval()
        self.head: nn.Module = model.get_output_embeddings()
        self._hidden: torch.Tensor | None = None
        self._swaps = UndoLog()
        self._swaps.set(self.head, "forward", self._keep_hidden)

    def place(self, accelerator: Any) -> None:
        """Move the model to the process's device; under FSDP2, shard it like the trained one."""
        self._accelerator = accelerator
        self.is_sharded = bool(getattr(accelerator, "is_fsdp2", False))
        if self.is_sharded:
            from accelerate.utils import fsdp2_prepare_model

            fsdp2_prepare_model(accelerator, self.model)
        else:
            self.model.to(accelerator.device)

    @torch.no_grad()
    def read(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the head's inputs `[B, S, H]`.

        Args:
            input_ids: Tokens, `[B, S]`.
            position_ids: Their positions, which start anew at each document, `[B, S]`.
        """
        with self._accelerator.autocast():
            self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        return hidden

    def head_weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the head's weight and bias, whole and of a dtype."""
        bias: Any = getattr(self.head, "bias", None)
        weight, bias = (_whole(t, dtype) for t in (self.head.weight, bias))
        return weight, bias

    def _keep_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        self._hidden = hidden
        return hidden


def shares_teacher_weights(settings: Any) -> bool:
    """Return whether the original model computes with the tensors of the trained one.

    LoRA leaves the weights as loaded. FSDP replaces them by shards, so the original model is
    sharded on its own there.
    """
    fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return settings.extension.lora_rank > 0 and not fsdp


def teacher_dtype(settings: Any) -> torch.dtype:
    """Return the dtype of an original model with weights of its own: that of matrix products."""
    is_bf16 = mixed_precision(settings.training) == "bf16"
    dtype: torch.dtype = torch.bfloat16 if is_bf16 else getattr(torch, settings.extension.dtype)
    return dtype


def load_teacher(
    path: Any, student: nn.Module, *, shares_weights: bool, **load_options: Any
) -> Any:
    """Load the model that a recipe begins with, without the recipe's patch.

    A folder that `rope_patch.save` wrote is rotated as recorded there, as its weights were trained.

    Args:
        path: The recipe's model.
        student: The recipe's model as loaded, without adapters.
        shares_weights: Whether the student's weights stay as loaded, so that the teacher computes
            with the same tensors.
        **load_options: Arguments of `from_pretrained`.
    """
    with torch.random.fork_rng(devices=[]):  # the run's random numbers are those without a teacher
        model = (read_model if patch_to_restore(path) is None else load)(path, **load_options)
    if shares_weights:
        share_weights(model, dict(student.named_parameters(remove_duplicate=False)))
    model.config.use_cache = False
    return model


def share_weights(model: nn.Module, originals: dict[str, nn.Parameter]) -> None:
    """Replace a model's parameters by given ones of the same names, tied ones included."""
    for name, _ in list(model.named_parameters(remove_duplicate=False)):
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, originals[name])


def _whole(tensor: Any, dtype: torch.dtype) -> Any:
    """Return a tensor of a dtype, gathered from all processes if it is sharded."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).to(dtype)
