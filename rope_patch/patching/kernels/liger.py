"""Warning about Liger's rotation in the place of transformers' own.

`TrainingArguments(use_liger_kernel=True)` replaces the rotation in the modeling file when training
starts, for every model of that file in the process, and never restores it.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import nn

from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.undo_log import UndoLog

logger = logging.getLogger("rope_patch")

# What Liger replaces: in most files, in Qwen 2 VL's, in Llama 4's.
_ROTATIONS = ("apply_rotary_pos_emb", "apply_multimodal_rotary_pos_emb", "apply_rotary_emb")


def is_liger_function(function: Any) -> bool:
    """Return whether a function is one of Liger's."""
    return str(getattr(function, "__module__", "")).partition(".")[0] == "liger_kernel"


class LigerWarning:
    """Warning, once for each patched model, that Liger's rotation is installed."""

    def __init__(self, rotary: RotaryModule, ours: bool) -> None:
        self.file = type(rotary.module).__module__
        self.uses_our_kernels = ours
        self.has_warned = False

    def __call__(self, *_: Any) -> None:
        if self.has_warned or torch.compiler.is_compiling():
            return
        module = sys.modules.get(self.file)
        for name in _ROTATIONS:
            if is_liger_function(getattr(module, name, None)):
                self.has_warned = True
                logger.warning(
                    _MESSAGE, name, self.file, _OURS if self.uses_our_kernels else _THEIRS
                )


_MESSAGE = (
    "Liger's rotation stands in the place of %s of %s, as the Trainer's use_liger_kernel=True puts "
    "it there: %s. To leave it out, and keep all else of Liger, train with "
    "liger_kernel_config={'rope': False}."
)
_OURS = "this model goes on rotating by rope_patch's own, which Liger's does not reach"
_THEIRS = (
    "it rotates this model now, by the frequencies of the patch; that is right only for heads that "
    "rotate as Llama's do, in halves"
)


def warn_about_liger(
    owner: nn.Module, rotary: RotaryModule, *, uses_our_kernels: bool, undo_log: UndoLog
) -> None:
    """Warn if Liger's rotation is installed now, or as soon as a forward meets it.

    Args:
        owner: The parent of a rotary module, called in every forward.
        rotary: The rotary module.
        uses_our_kernels: Whether the attentions' rotation is rope_patch's.
        undo_log: Log of the changes.
    """
    watch = LigerWarning(rotary, uses_our_kernels)
    watch()
    undo_log.hook(owner, before=watch)
