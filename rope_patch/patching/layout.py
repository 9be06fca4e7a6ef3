"""How an architecture turns its keys, found out by asking its own code."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from typing import Any

import torch
from torch import nn

from rope_patch.geometry import by_layer_type
from rope_patch.ops.reference import rotate
from rope_patch.patching.find import Rotary

_NOT_YET = "cannot be followed in a cache yet: use a method whose frequencies stay, such as yarn"

# Layers that share another one's keys cache none of their own.
_HARMLESS = {"self.is_kv_shared_layer"}


def is_interleaved(rotary: Rotary, config: Any, *, single: bool = False) -> bool:
    """Whether a model's rotated pairs are neighbours, rather than halves apart.

    A random key goes through the `apply_rotary_pos_emb` of the model's modeling file, and the
    result is compared with ours in both layouts.

    Args:
        rotary: The model's rotary module.
        config: Its text config.
        single: Whether the function takes one tensor, rather than queries and keys.

    Raises:
        ValueError: Neither is what the model does.
    """
    kind, prefix = next(iter(rotary.prefixes.items()))
    with torch.device("cpu"):
        fresh: Any = type(rotary.module)(config)
        inv_freq = getattr(fresh, f"{prefix}inv_freq").float()
        positions = torch.tensor([[0, 1, 7, 30]])
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(1, 2, 4, 2 * len(inv_freq), generator=generator)
    angle = positions[..., None] * inv_freq
    scale = float(getattr(fresh, f"{prefix}attention_scaling"))
    cos, sin = (f(angle)[:, None] * scale for f in (torch.cos, torch.sin))
    apply: Any = getattr(sys.modules[type(fresh).__module__], "apply_rotary_pos_emb", None)
    if apply is not None:
        try:
            given = fresh(keys, positions) if kind is None else fresh(keys, positions, kind)
            got = apply(keys, *given) if single else apply(keys, keys, *given)[1]
        except (TypeError, ValueError, RuntimeError, AttributeError):
            got = None  # another signature: another kind of rotation
        for interleaved in (False, True):
            expected = rotate(keys, cos, sin, interleaved=interleaved)
            if isinstance(got, torch.Tensor) and torch.allclose(got, expected, atol=1e-5):
                return interleaved
    raise ValueError(
        f"{type(rotary.module).__name__} turns keys neither as pairs of neighbours nor of halves, "
        f"and other ways {_NOT_YET}"
    )


def repeats_neighbours(rotary: Rotary, config: Any) -> bool:
    """Whether cos and sin hold each number twice in a row (Cohere), rather than all of them twice.

    Args:
        rotary: The model's rotary module.
        config: Its text config.
    """
    with torch.device("cpu"):
        fresh: Any = type(rotary.module)(config)
        x, positions = torch.zeros(1, 2, 4), torch.tensor([[1, 2]])
    kind = next(iter(rotary.prefixes))
    cos = fresh(x, positions)[0] if kind is None else fresh(x, positions, kind)[0]
    return torch.equal(cos[..., 0::2], cos[..., 1::2])


def takes_rows(rotary: Rotary, config: Any) -> bool:
    """Whether a rotary module's own forward takes other frequencies for each row, `[B, 1, R / 2]`.

    That of transformers 5.0 does not yet.

    Args:
        rotary: The model's rotary module.
        config: Its text config.
    """
    with torch.device("cpu"):
        fresh: Any = type(rotary.module)(config)
        x, positions = torch.zeros(2, 3, 4), torch.arange(3)[None]
    kind, prefix = next(iter(rotary.prefixes.items()))
    own = getattr(fresh, f"{prefix}inv_freq")
    given = (x, positions) if kind is None else (x, positions, kind)
    apart = []
    for inv_freq in (own, own / 2):
        setattr(fresh, f"{prefix}inv_freq", inv_freq)
        apart.append(fresh(*given))
    setattr(fresh, f"{prefix}inv_freq", torch.stack([own, own / 2])[:, None])
    try:
        together = fresh(*given)
    except RuntimeError:
        return False
    expected = [torch.cat(parts) for parts in zip(*apart, strict=True)]
    return all(torch.equal(a, b) for a, b in zip(together, expected, strict=True))


def rotated_layers(decoder: nn.Module, config: Any) -> list[str | None]:
    """The layer type of every layer that rotates its keys, "" for those that do not (NoPE).

    Args:
        decoder: The module that holds the layers.
        config: The model's text config.

    Raises:
        ValueError: The keys are cached in a form that cannot be followed, or only some layers
            rotate and it is unknown which.
    """
    if hasattr(config, "qk_rope_head_dim"):
        raise ValueError(
            f"{type(config).__name__} caches compressed keys (multi-head latent attention), which "
            f"{_NOT_YET}"
        )
    spelled = by_layer_type(config.rope_parameters)
    if any("mrope_section" in parameters for parameters in spelled.values()):
        raise ValueError(
            f"{type(config).__name__} gives a token several positions (M-RoPE), which {_NOT_YET}"
        )
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    return [
        (None if None in spelled else kinds[index]) if rotates else ""
        for index, rotates in enumerate(_rotates(decoder, config, kinds))
    ]


def _rotates(decoder: nn.Module, config: Any, kinds: list[str | None]) -> list[bool]:
    if getattr(config, "no_rope_layers", None):  # SmolLM3, Llama 4: 1 where a layer rotates
        return [bool(rotates) for rotates in config.no_rope_layers]
    if config.model_type in ("cohere2", "exaone4", "exaone_moe"):  # windows rotate, the rest not
        sliding = [kind == "sliding_attention" for kind in kinds]
        whole = config.model_type != "cohere2" and getattr(config, "sliding_window", None) is None
        return [whole or window for window in sliding]
    for kind in {type(module) for module in decoder.modules()}:
        if conditions := _conditions(kind) - _HARMLESS:
            raise ValueError(
                f"{kind.__name__} rotates only if {', '.join(sorted(conditions))}: layers that do "
                f"not rotate {_NOT_YET}"
            )
    return [True] * len(kinds)


def _conditions(kind: type) -> set[str]:
    """What a module class makes its rotation depend on, as its forward is written."""
    try:
        forward = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))  # type: ignore[attr-defined]
    except (OSError, TypeError, AttributeError, SyntaxError):
        return set()
    return {
        ast.unparse(choice.test)
        for choice in ast.walk(forward)
        if isinstance(choice, ast.If)
        for part in (*choice.body, *choice.orelse)
        for call in ast.walk(part)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "apply_rotary_pos_emb"
    }
