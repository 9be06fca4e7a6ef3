"""Mapped attention as one operator of compiled graphs, for forwards without a cache.

What a map computes depends on the values of positions, which a graph does not know. The operator
gets them at run time and does what eager mode does. Its gradients are those of the same code,
computed again. A map and a rotation travel as text, because an operator takes no Python objects.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch

from rope_patch.methods.position_map import PositionMap, Region
from rope_patch.methods.registry import build
from rope_patch.patching.position_maps.forward_view import ForwardView, Visibility
from rope_patch.patching.position_maps.parts import attend, attend_masked
from rope_patch.patching.position_maps.shift_tables import ShiftRotation
from rope_patch.transformers_api.attention_functions import AttentionCall
from rope_patch.transformers_api.models import attention_implementation
from rope_patch.utils.errors import Refused


def write_settings(position_map: PositionMap, reach: int, rotation: ShiftRotation) -> str:
    """Return a map and a rotation as text."""
    return json.dumps(
        {
            "map": position_map.name,
            "options": position_map.options(),
            "reach": reach,
            "inv_freq": rotation.inv_freq.tolist(),
            "interleaved": rotation.interleaved,
            "kernels": rotation.kernels,
        }
    )


@lru_cache(maxsize=64)
def _read_settings(text: str) -> tuple[PositionMap, int, ShiftRotation]:
    """Return what `write_settings` wrote."""
    settings = json.loads(text)
    position_map: Any = build(settings["map"], **settings["options"])
    inv_freq = torch.tensor(settings["inv_freq"], dtype=torch.float64)
    rotation = ShiftRotation(inv_freq, settings["interleaved"], settings["kernels"])
    return position_map, settings["reach"], rotation


def attend_in_graph(
    settings: str,
    call: AttentionCall,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return mapped attention, `[B, Q, H, E]`, and its weights where the function returns them.

    Args:
        settings: What `write_settings` returned.
        call: What the attention function does; its mask is a tensor or None.
        positions: Of queries and keys, -1 for padding, `[B, S]` or `[1, S]`.
        query: `[B, H, S, D]`.
        key: `[B, K, S, D]`.
        value: `[B, K, S, E]`.
    """
    output, weights = mapped_attention(
        query,
        key,
        value,
        positions,
        call.mask,
        call.sinks,
        call.documents,
        settings,
        call.scaling,
        call.softcap,
        call.dropout,
        call.adds_mask,
        call.hides_keys,
        call.first_ahead,
        call.returns_weights,
    )
    return output, weights if call.returns_weights else None


# The operator reads the device, which the capture of a CUDA graph forbids. Releases of torch with
# this tag leave such operators out of the graphs; under others, maps break compiled graphs.
_TAG = getattr(torch._C.Tag, "cudagraph_unsafe", None)
_OPTIONS: Any = {"mutates_args": (), **({} if _TAG is None else {"tags": (_TAG,)})}
# Flash attention reads documents from positions, and flex attention's masks are no tensors.
_KINDS = ("sdpa", "eager")


def can_attend_in_graph(config: Any) -> bool:
    """Return whether a decoder's attentions can be operators of a graph."""
    # With several processes, a row may be divided among them, which is refused in eager mode.
    is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    return _TAG is not None and is_alone and attention_implementation(config) in _KINDS


@torch.library.custom_op("rope_patch::mapped_attention", **_OPTIONS)
def mapped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    documents: torch.Tensor | None,
    settings: str,
    scaling: float,
    softcap: float | None,
    dropout: float,
    adds_mask: bool,
    hides_keys: bool,
    first_ahead: int | None,
    returns_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the weights, which are empty where the function returns none."""
    how = (scaling, softcap, dropout, adds_mask, hides_keys, first_ahead, returns_weights)
    view, rotation, visibility = _read(
        query, key, positions, mask, sinks, documents, settings, *how
    )
    with torch.no_grad():  # the operator has gradients of its own
        output, weights = attend(view, rotation, query, key, value, visibility)
    output = output.transpose(1, 2).contiguous()
    return output, query.new_empty(0) if weights is None else weights


def _read(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    documents: torch.Tensor | None,
    settings: str,
    *how: Any,
) -> tuple[ForwardView, ShiftRotation, Visibility]:
    """Return what an operator's arguments say about the forward, the rotation and the mask."""
    scaling, softcap, dropout, adds_mask, hides_keys, first_ahead, returns_weights = how
    call = AttentionCall(
        scaling, softcap, sinks, dropout, mask, adds_mask, hides_keys, first_ahead, documents,
        returns_weights,
    )  # fmt: skip
    position_map, reach, rotation = _read_settings(settings)
    view = ForwardView(position_map, reach, positions, positions, filled=positions.shape[1])
    if not view.is_mapped:  # every key at its own distance
        view.regions = [Region(torch.zeros_like(positions), positions + 1)]
    return view, rotation, Visibility(call, query, key)


@mapped_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Any:
    rows, heads, steps, _ = query.shape
    shape = (rows, heads, steps, key.shape[2]) if rest[-1] else (0,)
    return query.new_empty(rows, steps, heads, value.shape[-1]), query.new_empty(shape)


@torch.library.custom_op("rope_patch::mapped_attention_backward", **_OPTIONS)
def mapped_attention_backward(
    output_grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    documents: torch.Tensor | None,
    settings: str,
    scaling: float,
    softcap: float | None,
    adds_mask: bool,
    hides_keys: bool,
    first_ahead: int | None,
) -> list[torch.Tensor]:
    """Return the gradients of queries, keys, values, and sinks if there are any."""
    how = (scaling, softcap, 0.0, adds_mask, hides_keys, first_ahead, False)

    def attend_again(*inputs: torch.Tensor) -> torch.Tensor:
        q, k, v, *rest = inputs
        own_sinks = rest[0] if rest else None
        forward = _read(q, k, positions, mask, own_sinks, documents, settings, *how)
        view, rotation, visibility = forward
        return attend_masked(view, rotation, q, k, v, visibility)[0]

    # An operator runs below autograd, where `torch.autograd.grad` would record nothing.
    inputs = (query, key, value) if sinks is None else (query, key, value, sinks)
    pulled: Any = torch.func.vjp(attend_again, *inputs)  # the output, and its pull-back
    return [grad.contiguous() for grad in pulled[1](output_grad.transpose(1, 2))]


@mapped_attention_backward.register_fake
def _(
    output_grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *_: Any,
) -> list[torch.Tensor]:
    inputs = (query, key, value, sinks)
    return [each.new_empty(each.shape) for each in inputs if each is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, settings, scaling, softcap, dropout, adds_mask, hides_keys, first_ahead, _ = inputs
    if dropout:
        raise Refused(
            f"a compiled position map has no gradients with dropout, got {dropout:g} in attention: "
            "expected attention_dropout=0; or train without torch.compile"
        )
    ctx.save_for_backward(*tensors)
    ctx.settings = (settings, scaling, softcap, adds_mask, hides_keys, first_ahead)


def _backward(ctx: Any, output_grad: torch.Tensor, weights_grad: Any) -> tuple[Any, ...]:
    grads = mapped_attention_backward(output_grad, *ctx.saved_tensors, *ctx.settings)
    dq, dk, dv, *dsinks = grads
    return dq, dk, dv, None, None, dsinks[0] if dsinks else None, *[None] * 9


mapped_attention.register_autograd(_backward, setup_context=_setup_context)
