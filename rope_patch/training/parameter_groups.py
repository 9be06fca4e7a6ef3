"""The optimizer's groups of parameters: those with weight decay, and those without."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

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
