"""Frequencies on a live rotary module, in float32, under the module's own forward.

The forward stays as it is, and with it the layout of cos and sin, accelerate's hooks around it and
torch.compile's view of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rope_patch.methods import Frequencies
from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.undo_log import UndoLog

logger = logging.getLogger("rope_patch")


def warn_about_cast(rotaries: list[RotaryModule]) -> None:
    """Warn if live frequencies had been cast to a narrower type."""
    cast = [
        (f"{prefix}inv_freq", type(rotary.module).__name__, live.dtype)
        for rotary in rotaries
        for prefix in rotary.prefixes.values()
        if (live := getattr(rotary.module, f"{prefix}inv_freq")).dtype != torch.float32
    ]
    if cast:
        names, kinds, dtypes = (sorted({str(c[i]) for c in cast}) for i in range(3))
        logger.warning(
            "%s of %s had been cast to %s, which rotates far positions wrongly; while patched it "
            "is exact again. To keep it exact, load with dtype=... instead of casting.",
            " and ".join(names),
            " and ".join(kinds),
            " and ".join(dtypes).replace("torch.", ""),
        )


def set_frequencies(
    rotary: RotaryModule,
    before: dict[str | None, Frequencies],
    after: dict[str | None, Frequencies],
    undo_log: UndoLog,
) -> None:
    """Set a rotary module's frequencies and keep them in float32 through casts and moves.

    Other layer types change only if their live frequencies had been cast.

    Args:
        rotary: The module.
        before: Frequencies that transformers computes from the unpatched config.
        after: New frequencies, for each layer type that changes.
        undo_log: Log of the changes.
    """
    module: Any = rotary.module
    exact = exact_buffers(rotary, before, after)
    for layer_type, prefix in rotary.prefixes.items():
        name = f"{prefix}inv_freq"
        live = getattr(module, name)
        if layer_type not in after and live.dtype == torch.float32:
            continue
        # A buffer on meta has no values to restore, but the model may be materialised meanwhile.
        old = before[layer_type].inv_freq.float() if live.is_meta else live
        # A copy, because in-place writes to the buffer must not reach the exact values.
        undo_log.set(module, name, exact[name].to(live.device, copy=True), old=old)
    rope_type: Any = module.rope_type
    for layer_type in rotary.prefixes.keys() & after.keys():
        prefix = rotary.prefixes[layer_type]
        undo_log.set(module, f"{prefix}attention_scaling", after[layer_type].attention_factor)
        # Stops transformers' own updates ("dynamic", "longrope"), which read rope_type.
        rope_type = "default" if layer_type is None else {**rope_type, layer_type: "default"}
    undo_log.set(module, "rope_type", rope_type)
    undo_log.set(module, "_apply", Float32BufferGuard(module, exact))


def exact_buffers(
    rotary: RotaryModule,
    before: dict[str | None, Frequencies],
    after: dict[str | None, Frequencies],
) -> dict[str, torch.Tensor]:
    """Return the float32 values of a patched rotary module's buffers, by name.

    Args:
        rotary: The module.
        before: Frequencies that transformers computes from the unpatched config.
        after: New frequencies, for each layer type that changes.
    """
    return {
        f"{prefix}inv_freq": after.get(layer_type, before[layer_type]).inv_freq.float()
        for layer_type, prefix in rotary.prefixes.items()
    }


def forward_per_row(
    names: dict[str | None, tuple[str, str]],
    module: Any,
    forward: Callable[..., Any],
    x: torch.Tensor,
    position_ids: torch.Tensor,
    layer_type: str | None = None,
) -> Any:
    """Call a rotary module's forward row by row, where it accepts no frequencies per row.

    Args:
        names: The module's attributes for each layer type's frequencies and attention factor.
        module: The module.
        forward: Its original forward.
        x: Argument of the forward.
        position_ids: Argument of the forward, `[B, S]` or `[A, B, S]`.
        layer_type: Argument of the forward.
    """
    extra = () if layer_type is None else (layer_type,)
    name, scale_name = names.get(layer_type, ("", ""))
    rows = getattr(module, name) if name else None
    if rows is None or rows.ndim == 1:
        return forward(x, position_ids, *extra)
    scales = getattr(module, scale_name)
    outputs = []
    positions = position_ids.expand(*position_ids.shape[:-2], len(rows), -1)
    for index, (row, scale) in enumerate(zip(rows, scales, strict=True)):
        setattr(module, name, row[0])
        setattr(module, scale_name, scale)
        outputs.append(forward(x, positions[..., index : index + 1, :], *extra))
    if isinstance(outputs[0], torch.Tensor):  # complex numbers, not cos and sin (Llama 4)
        return torch.cat(outputs)
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


class Float32BufferGuard:
    """`nn.Module._apply` (to, half, bfloat16, to_empty, ...) that leaves frequencies in float32.

    A model cast to bfloat16 would otherwise rotate by rounded frequencies, cos off by up to 2.
    """

    def __init__(self, module: Any, exact: dict[str, torch.Tensor]) -> None:
        self.module = module
        self.buffers = exact
        self.has_logged = False

    def __call__(self, fn: Any, recurse: bool = True) -> nn.Module:
        module = self.module
        type(module)._apply(module, fn, recurse)
        dtypes = {module._buffers[name].dtype for name in self.buffers} - {torch.float32}
        for name, inv_freq in self.buffers.items():
            module._buffers[name] = inv_freq.to(module._buffers[name].device, copy=True)
        if dtypes and not self.has_logged:
            self.has_logged = True
            logger.info(
                "the model is cast to %s; the frequencies of %s stay in float32",
                str(dtypes.pop()).removeprefix("torch."),
                type(module).__name__,
            )
        return module
