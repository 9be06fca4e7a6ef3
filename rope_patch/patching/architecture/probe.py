"""What a rotary module gets: other frequencies, kept in float32, under its own forward.

The module's forward is left alone, so its layout of cos and sin, accelerate's hooks around it and
torch.compile's view of it stay what they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rope_patch.methods import Frequencies, registered_methods
from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.defaults import torch_defaults
from rope_patch.patching.undo_log import UndoLog


def require_buffer_is_used(
    rotary: RotaryModule, config: Any, before: dict[str | None, Frequencies]
) -> None:
    """Tries other frequencies on a module of the same kind.

    Args:
        rotary: A model's rotary module.
        config: Its text config.
        before: What the module rotates by when made from that (`reference_frequencies`).

    Raises:
        ValueError: They change nothing, since its forward computes its own.
    """
    module = make_probe(rotary, config)
    with torch.device("cpu"):
        x = torch.zeros(1, 2, 4)
        positions = torch.tensor([[3, 5]])
    plain = _probe_outputs(module, rotary, x, positions)
    halved = {
        kind: Frequencies(found.inv_freq / 2, 2.0 * found.attention_factor)
        for kind, found in before.items()
    }
    set_frequencies(RotaryModule(module, rotary.prefixes), before, halved, UndoLog())
    changed = _probe_outputs(module, rotary, x, positions)
    if plain and changed and any(torch.equal(a, b) for a, b in zip(plain, changed, strict=True)):
        raise ValueError(
            f"{type(rotary.module).__name__} computes its frequencies anew in every forward, so "
            "none that are set on it act: this architecture is not supported"
        )


def _probe_outputs(module: Any, rotary: RotaryModule, x: Any, positions: Any) -> list[torch.Tensor]:
    """What a module makes of positions for each of its layer types."""
    found = []
    for kind in rotary.prefixes:
        try:
            made = call_rotary(module, x, positions, kind)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
            return []  # called in a way of its own: nothing is known
        made = made[0] if isinstance(made, tuple) else made
        found.append(torch.view_as_real(made) if made.is_complex() else made)
    return found


logger = logging.getLogger("rope_patch")


def make_probe(rotary: RotaryModule, config: Any) -> Any:
    """A module of a rotary's kind, made from a config on the CPU, whose frequencies stay.

    Args:
        rotary: The module whose kind to make.
        config: The text config to read.
    """
    with torch.device("cpu"):
        module: Any = type(rotary.module)(config)
    # transformers' own updates look at rope_type, and would come between any comparison.
    several = isinstance(module.rope_type, dict)
    module.rope_type = dict.fromkeys(module.rope_type, "default") if several else "default"
    return module


def call_rotary(
    module: Any, x: torch.Tensor, positions: torch.Tensor, layer_type: str | None
) -> Any:
    """What a rotary module makes of positions, whether it wants one for each token or three.

    Args:
        module: The module.
        x: Anything with the dtype and device that it should give.
        positions: `[B, S]`.
        layer_type: The layer type, where it has several.
    """
    kinds = () if layer_type is None else (layer_type,)
    if hasattr(module, "mrope_section"):
        positions = positions[None].expand(3, *positions.shape)
    return module(x, positions, *kinds)


@torch_defaults()
def reference_frequencies(rotary: RotaryModule, config: Any) -> dict[str | None, Frequencies]:
    """The frequencies that transformers itself computes from a config, whatever the live ones are.

    Args:
        rotary: The module whose kind to make.
        config: The text config to read.
    """
    try:
        own = make_probe(rotary, config)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
    ) as error:
        hint = "compare it with the checkpoint's config.json"
        if isinstance(error, KeyError) and error.args[0] in registered_methods():
            hint = "it names one of rope_patch's scalings: call rope_patch.register() first"
        raise ValueError(
            f"{type(rotary.module).__name__} cannot be made from what the config says "
            f"({type(error).__name__}: {error}): {hint}"
        ) from error
    return {
        kind: Frequencies(
            getattr(own, f"{prefix}inv_freq").double(),
            float(getattr(own, f"{prefix}attention_scaling")),
        )
        for kind, prefix in rotary.prefixes.items()
    }


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
    """Gives a rotary module its frequencies and keeps them exact through casts and moves.

    Layer types that are not to change are touched only where their live frequencies had been cast.

    Args:
        rotary: The module.
        before: What transformers computes for it from the unpatched config.
        after: What it is to turn by, for each layer type to change.
        undo_log: Where the changes are recorded.
    """
    module: Any = rotary.module
    exact: dict[str, torch.Tensor] = {}
    for kind, prefix in rotary.prefixes.items():
        name = f"{prefix}inv_freq"
        live = getattr(module, name)
        exact[name] = after.get(kind, before[kind]).inv_freq.float()
        if kind not in after and live.dtype == torch.float32:
            continue
        # Nothing stands on meta to go back to; a model that is materialised meanwhile needs values.
        old = before[kind].inv_freq.float() if live.is_meta else live
        undo_log.set(module, name, exact[name].to(live.device), old=old)
    rope_type: Any = module.rope_type
    for kind in rotary.prefixes.keys() & after.keys():
        prefix = rotary.prefixes[kind]
        undo_log.set(module, f"{prefix}attention_scaling", after[kind].attention_factor)
        # transformers' own updates ("dynamic", "longrope") look at rope_type; ours must stand.
        rope_type = "default" if kind is None else {**rope_type, kind: "default"}
    undo_log.set(module, "rope_type", rope_type)
    undo_log.set(module, "_apply", Float32BufferGuard(module, exact))


def forward_per_row(
    names: dict[str | None, tuple[str, str]],
    module: Any,
    forward: Callable[..., Any],
    x: torch.Tensor,
    position_ids: torch.Tensor,
    layer_type: str | None = None,
) -> Any:
    """In place of a rotary module's forward that takes no rows: one row after another.

    Args:
        names: What the module calls each layer type's frequencies and attention factor.
        module: The module.
        forward: Its own forward.
        x: See there.
        position_ids: See there.
        layer_type: See there.
    """
    kind = () if layer_type is None else (layer_type,)
    name, scale_name = names.get(layer_type, ("", ""))
    rows = getattr(module, name) if name else None
    if rows is None or rows.ndim == 1:
        return forward(x, position_ids, *kind)
    scales = getattr(module, scale_name)
    done = []
    for row, scale, at in zip(rows, scales, position_ids.expand(len(rows), -1), strict=True):
        setattr(module, name, row[0])
        setattr(module, scale_name, scale)
        done.append(forward(x, at[None], *kind))
    return tuple(torch.cat(parts) for parts in zip(*done, strict=True))


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
            module._buffers[name] = inv_freq.to(module._buffers[name].device)
        if dtypes and not self.has_logged:
            self.has_logged = True
            logger.info(
                "the model is cast to %s; the frequencies of %s stay in float32",
                str(dtypes.pop()).removeprefix("torch."),
                type(module).__name__,
            )
        return module
