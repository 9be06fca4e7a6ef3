"""What transformers' attention functions do with their arguments, so that others can do the same.

Four functions are known: eager attention of a model's own file, SDPA, flash and flex attention.
What stands in for one of them must do with each argument what the function does, or refuse the
argument by name. The names that a function reads are taken from its code, so one that a later
release reads is refused, too, until it is known here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.transformers_api.forwards import POSITIONS
from rope_patch.transformers_api.models import EAGER_ATTENTION, installed_release
from rope_patch.utils.errors import Refused

# Flash attention packs where all are given.
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_HONOURED = {
    "eager": {"scaling", "dropout", "softcap", "sliding_window"},
    "sdpa": {"scaling", "dropout", "is_causal", "output_attentions"},
    "flash": {
        *("scaling", "dropout", "is_causal", "softcap", "s_aux", "sliding_window"),
        *("output_attentions", "deterministic", POSITIONS, *_PACKING),
    },
    "flex": {"scaling", "dropout", "softcap", "s_aux", "kernel_options"},
}


@dataclass(frozen=True)
class AttentionCall:
    """What an attention function does in one call.

    Attributes:
        scaling: Factor of the logits.
        softcap: Logits become softcap * tanh(logits / softcap); None without.
        sinks: A logit for each head that no value goes with, `[H]`; None without.
        dropout: Probability that a weight becomes 0.
        mask: As the function is given it.
        adds_mask: Whether a tensor as mask is added to the logits, even one of booleans.
        hides_keys: Whether the mask is flash attention's, `[B, S]`, which says which keys are
            tokens.
        first_ahead: Query n sees n + `first_ahead` keys, counted from the first; None if the mask
            alone hides keys.
        documents: Number of each token's document, `[1, S]`; None where rows are whole.
        returns_weights: Whether it returns attention weights beside its output.
    """

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    dropout: float = 0.0
    mask: Any = None
    adds_mask: bool = False
    hides_keys: bool = False
    first_ahead: int | None = None
    documents: torch.Tensor | None = None
    returns_weights: bool = False


def attention_kind(function: Any) -> str | None:
    """Return which of transformers' attention functions one is; None for all others."""
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    known = {
        sdpa_attention_forward: "sdpa",
        flash_attention_forward: "flash",
        flex_attention_forward: "flex",
    }
    if getattr(function, "__name__", None) == EAGER_ATTENTION and str(
        getattr(function, "__module__", None)
    ).startswith("transformers.models."):
        return "eager"
    return next((kind for each, kind in known.items() if function is each), None)


@dataclass(frozen=True)
class StandIn:
    """What takes the place of an attention function, for messages.

    Attributes:
        name: Such as "a position map".
        instead: What to do where the function is unknown.
    """

    name: str
    instead: str


def require_known_attention(function: Any, stand_in: StandIn) -> str:
    """Return the kind of an attention function.

    Args:
        function: The function.
        stand_in: What takes its place.

    Raises:
        ValueError: It is none of transformers' own.
    """
    kind = attention_kind(function)
    if kind is None:
        while isinstance(function, functools.partial):
            function = function.func
        if (owner := getattr(function, "__self__", None)) is not None:
            raise Refused(
                f"{stand_in.name} stands in for the attention function, and "
                f"{type(owner).__name__} of {type(owner).__module__} changes what that function is "
                f"given: undo that first, or {stand_in.instead}"
            )
        name = getattr(function, "__qualname__", type(function).__name__)
        raise Refused(
            f"{stand_in.name} stands in for the attention function, and {name} of "
            f"{getattr(function, '__module__', 'an unknown module')} is none that it knows: "
            "expected transformers' own eager, SDPA, flash or flex attention "
            f"(model.set_attn_implementation('sdpa')); or {stand_in.instead}"
        )
    return kind


def read_call(
    function: Any,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: Any,
    arguments: dict[str, Any],
    *,
    filled: int,
    stand_in: StandIn,
) -> AttentionCall:
    """Return what an attention function does with its arguments.

    Args:
        function: The function.
        module: The attention.
        query: `[B, H, Q, D]`.
        key: `[B, K, S, D]`.
        mask: The function's `attention_mask`.
        arguments: Its keyword arguments.
        filled: Slots of the keys that hold tokens.
        stand_in: What takes the function's place.

    Raises:
        ValueError: The function is unknown, or it reads an argument that is.
    """
    kind = require_known_attention(function, stand_in)
    read = _names_read(function, kind)
    given = {name: value for name, value in arguments.items() if name in read}
    unknown = [
        name
        for name, value in given.items()
        if name not in _HONOURED[kind] and value is not None and value is not False
    ]
    if unknown:
        raise Refused(
            f"{type(module).__name__} passes {', '.join(unknown)} to {kind} attention in "
            f"{installed_release()}, which {stand_in.name} does not know: {stand_in.instead}"
        )
    steps, slots = query.shape[2], key.shape[2]
    scaling, is_causal = given.get("scaling"), has_causality(module, given)
    is_dropped = module.training or kind != "eager"  # eager attention asks the module
    first_ahead, documents = None, None
    if kind == "sdpa" and mask is None and is_causal and steps > 1:
        first_ahead = 1  # the first query is the first token, even of a static cache
    if kind == "flash":
        first_ahead = 1 + filled - steps if is_causal else None
        if mask is None and steps == slots:
            documents = _documents(given, query)
    sinks = given.get("s_aux")
    if kind == "eager" and "sinks" in function.__code__.co_names:
        sinks = getattr(module, "sinks", None)
    return AttentionCall(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=given.get("softcap"),
        sinks=sinks,
        dropout=float(given.get("dropout") or 0) if is_dropped else 0.0,
        mask=mask,
        adds_mask=kind in ("eager", "flex"),
        hides_keys=kind == "flash",
        first_ahead=first_ahead,
        documents=documents,
        returns_weights=kind == "eager",
    )


def has_causality(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """Return whether SDPA and flash attention hide later keys where no mask does.

    Args:
        module: The attention.
        arguments: The function's, or those of the attention's forward, which hands them on.
    """
    is_causal = arguments.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _names_read(function: Any, kind: str) -> frozenset[str]:
    names = _code_names(function)
    if kind == "flash":  # it hands on what it does not take
        from transformers import modeling_flash_attention_utils as utils

        for each in ("_flash_attention_forward", "_process_flash_attention_kwargs"):
            names |= _code_names(getattr(utils, each))
    return names


def _code_names(function: Any) -> frozenset[str]:
    """Return a function's parameters, and the names that it reads from its other arguments."""
    # Dynamo warns of caches, and does not need them.
    return (_read_code if torch.compiler.is_compiling() else _read_code_once)(function)


def _read_code(function: Any) -> frozenset[str]:
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    strings = {each for each in code.co_consts if isinstance(each, str)}
    return frozenset({*code.co_varnames[:count], *strings})


_read_code_once = functools.cache(_read_code)


def _documents(arguments: dict[str, Any], query: torch.Tensor) -> torch.Tensor | None:
    """Return the documents that flash attention reads from borders, or else from positions."""
    borders, positions = arguments.get("cu_seq_lens_q"), arguments.get(POSITIONS)
    if borders is not None and all(arguments.get(name) is not None for name in _PACKING):
        places = torch.arange(query.shape[2], device=borders.device)
        number = torch.bucketize(places, borders[1:], right=True)[None]
    elif positions is not None and len(query) == 1 and positions.ndim == 2:
        number = (positions == positions.amin()).cumsum(1)
    else:
        return None
    # Models hand on the positions of whole rows, too.
    return None if bool((number == number[:, :1]).all()) else number
