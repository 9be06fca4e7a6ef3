"""Layout of an architecture's rotation, found by probing its own code."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from typing import Any

import torch
from torch import nn

from rope_patch.ops.reference import rotate
from rope_patch.patching.architecture.attention_source import rotates_one_tensor
from rope_patch.patching.architecture.probe import call_rotary, make_probe
from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.defaults import torch_defaults
from rope_patch.patching.kernels.liger import is_liger_function
from rope_patch.rope_config import by_layer_type
from rope_patch.utils.errors import Refused

_NOT_YET = "cannot be followed in a cache yet: use a method whose frequencies stay, such as yarn"

# Layers that share another layer's keys cache none themselves.
_IGNORED_CONDITIONS = {"self.is_kv_shared_layer"}

# Architectures that test `position_embeddings is not None`, which always holds.
_ALWAYS_ROTATE = ("falcon", "granitemoehybrid", "olmo_hybrid")


@torch_defaults()
def is_interleaved(rotary: RotaryModule, config: Any) -> bool:
    """Return whether the rotated pairs are neighbours, rather than half a head apart.

    Rotates a random key by the `apply_rotary_pos_emb` of the model's modeling file, and compares
    the result with both layouts.

    Args:
        rotary: The model's rotary module.
        config: Its text config.

    Raises:
        ValueError: The model rotates in neither layout.
    """
    apply: Any = getattr(sys.modules[type(rotary.module).__module__], "apply_rotary_pos_emb", None)
    if is_liger_function(apply):
        return False  # Liger rotates halves only, and cannot be probed: it runs on GPUs only
    layer_type, prefix = next(iter(rotary.prefixes.items()))
    module = make_probe(rotary, config)
    with torch.device("cpu"):
        inv_freq = getattr(module, f"{prefix}inv_freq").float()
        positions = torch.tensor([[0, 1, 7, 30]])
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(1, 2, 4, 2 * len(inv_freq), generator=generator)
    angle = positions[..., None] * inv_freq
    scale = float(getattr(module, f"{prefix}attention_scaling"))
    cos, sin = (f(angle)[:, None] * scale for f in (torch.cos, torch.sin))
    if apply is not None:
        try:
            cos_sin = call_rotary(module, keys, positions, layer_type)
            got = (
                apply(keys, *cos_sin)
                if rotates_one_tensor(apply)
                else apply(keys, keys, *cos_sin)[1]
            )
        except (TypeError, ValueError, RuntimeError, AttributeError):
            got = None  # another signature: another kind of rotation
        for interleaved in (False, True):
            expected = rotate(keys, cos, sin, interleaved=interleaved)
            if isinstance(got, torch.Tensor) and torch.allclose(got, expected, atol=1e-5):
                return interleaved
    raise Refused(
        f"{type(rotary.module).__name__} turns keys neither as pairs of neighbours nor of halves, "
        f"and other ways {_NOT_YET}"
    )


def repeats_interleaved(rotary: RotaryModule, config: Any) -> bool:
    """Return whether cos and sin hold each number twice in a row (Cohere), not half by half.

    Args:
        rotary: The model's rotary module.
        config: Its text config.
    """
    module = make_probe(rotary, config)
    with torch.device("cpu"):
        x, positions = torch.zeros(1, 2, 4), torch.tensor([[1, 2]])
    layer_type = next(iter(rotary.prefixes))
    cos = call_rotary(module, x, positions, layer_type)[0]
    return torch.equal(cos[..., 0::2], cos[..., 1::2])


def has_half_tables(rotary: RotaryModule, config: Any) -> bool:
    """Return whether cos and sin hold each pair's number once, not twice (DeepSeek-V4).

    Args:
        rotary: The model's rotary module.
        config: Its text config.
    """
    module = make_probe(rotary, config)
    with torch.device("cpu"):
        x, positions = torch.zeros(1, 2, 4), torch.tensor([[1, 2]])
    layer_type, prefix = next(iter(rotary.prefixes.items()))
    cos = call_rotary(module, x, positions, layer_type)[0]
    return cos.shape[-1] < 2 * len(getattr(module, f"{prefix}inv_freq"))


def supports_per_row_frequencies(rotary: RotaryModule, config: Any) -> bool:
    """Return whether a rotary module's forward accepts frequencies per row, `[B, 1, R / 2]`.

    Not in transformers 5.0.

    Args:
        rotary: The model's rotary module.
        config: Its text config.
    """
    module = make_probe(rotary, config)
    with torch.device("cpu"):
        x, positions = torch.zeros(2, 3, 4), torch.arange(3)[None]
    layer_type, prefix = next(iter(rotary.prefixes.items()))
    own = getattr(module, f"{prefix}inv_freq")
    arguments = (x, positions) if layer_type is None else (x, positions, layer_type)
    row_outputs = []
    for inv_freq in (own, own / 2):
        setattr(module, f"{prefix}inv_freq", inv_freq)
        row_outputs.append(module(*arguments))
    setattr(module, f"{prefix}inv_freq", torch.stack([own, own / 2])[:, None])
    try:
        together = module(*arguments)
    except RuntimeError:
        return False
    expected = [torch.cat(parts) for parts in zip(*row_outputs, strict=True)]
    return all(torch.equal(a, b) for a, b in zip(together, expected, strict=True))


def is_mrope(module: Any, config: Any) -> bool:
    """Return whether a rotary module gives a token several positions (M-RoPE), each for some pairs.

    Args:
        module: A rotary module.
        config: The text config.
    """
    rope_parameters = by_layer_type(config.rope_parameters).values()
    return hasattr(module, "mrope_section") or any("mrope_section" in p for p in rope_parameters)


def rotated_layer_types(decoder: nn.Module, config: Any) -> list[str | None]:
    """Return the layer type of every layer that rotates its keys, "" for those that do not (NoPE).

    Args:
        decoder: The module that holds the layers.
        config: The model's text config.

    Raises:
        ValueError: The cached keys cannot be re-rotated, or only some layers rotate and it is
            unknown which.
    """
    if "qk_rope_head_dim" in vars(config):
        raise Refused(
            f"{type(config).__name__} caches compressed keys (multi-head latent attention), which "
            f"{_NOT_YET}"
        )
    rope_parameters = by_layer_type(config.rope_parameters)
    if any(is_mrope(module, config) for module in decoder.modules()):
        raise Refused(
            f"{type(config).__name__} gives a token several positions (M-RoPE), which {_NOT_YET}"
        )
    layer_types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    return [
        (None if None in rope_parameters else layer_types[index]) if rotates else ""
        for index, rotates in enumerate(_layers_that_rotate(decoder, config, layer_types))
    ]


def _layers_that_rotate(
    decoder: nn.Module, config: Any, layer_types: list[str | None]
) -> list[bool]:
    if getattr(config, "no_rope_layers", None):  # SmolLM3, Llama 4: 1 where a layer rotates
        return [bool(rotates) for rotates in config.no_rope_layers]
    if config.model_type in ("cohere2", "exaone4", "exaone_moe"):  # windows rotate, the rest not
        sliding = [layer_type == "sliding_attention" for layer_type in layer_types]
        whole = config.model_type != "cohere2" and getattr(config, "sliding_window", None) is None
        return [whole or window for window in sliding]
    rotates = [True] * len(layer_types)
    if config.model_type in _ALWAYS_ROTATE:
        return rotates
    for module in decoder.modules():
        module_class: Any = type(module)
        for condition, expected in _rotation_conditions(module_class):
            if condition in _IGNORED_CONDITIONS:
                continue
            value, layer = (
                _evaluate_condition(module, condition),
                getattr(module, "layer_idx", None),
            )
            if value is None or not isinstance(layer, int):
                raise Refused(
                    f"{type(module).__name__} rotates only if {condition}: layers that do not "
                    f"rotate {_NOT_YET}"
                )
            rotates[layer] &= value is expected
    return rotates


def _evaluate_condition(module: nn.Module, condition: str) -> bool | None:
    """Return a condition's value if it depends on the module alone, else None."""
    names = {n.id for n in ast.walk(ast.parse(condition)) if isinstance(n, ast.Name)}
    if names != {"self"}:
        return None
    try:
        return bool(eval(condition, {"__builtins__": {}}, {"self": module}))
    except (AttributeError, TypeError):
        return None


@functools.cache
def _rotation_conditions(module_class: Any) -> frozenset[tuple[str, bool]]:
    """Return the conditions on which a module class's forward rotates.

    Returns:
        Conditions, each with the value for which the forward rotates.
    """
    try:
        forward = ast.parse(textwrap.dedent(inspect.getsource(module_class.forward)))
    except (OSError, TypeError, AttributeError, SyntaxError):
        return frozenset()
    return frozenset(
        (ast.unparse(choice.test), expected)
        for choice in ast.walk(forward)
        if isinstance(choice, ast.If)
        for expected, branch in ((True, choice.body), (False, choice.orelse))
        for part in branch
        for call in ast.walk(part)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "apply_rotary_pos_emb"
    )
