"""vLLM's `get_rope`, extended by the methods of rope_patch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from rope_patch.serving.vllm.rope_type import method_name, read_request
from rope_patch.utils.errors import Refused

if TYPE_CHECKING:
    from rope_patch.serving.vllm.stacked_tables import StackedRotary

_NAME = "get_rope"

# Layers that rotate alike share one module, as in vLLM.
_built: WeakValueDictionary[tuple[Any, ...], StackedRotary] = WeakValueDictionary()


def install() -> None:
    """Replace `get_rope` where vLLM defines it, and in every module that has imported it."""
    from vllm.model_executor.layers import rotary_embedding

    original = rotary_embedding.get_rope
    if hasattr(original, "rope_patch_original"):
        return
    extended = _extend(original)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_NAME) is original:
            setattr(module, _NAME, extended)


def _extend(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_rope(
        head_size: int,
        max_position: int,
        is_neox_style: bool = True,
        rope_parameters: dict[str, Any] | None = None,
        dtype: Any = None,
        dual_chunk_attention_config: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> Any:
        if method_name((rope_parameters or {}).get("rope_type")) is None:
            return original(
                head_size,
                max_position,
                is_neox_style,
                rope_parameters,
                dtype,
                dual_chunk_attention_config,
                **keywords,
            )
        assert rope_parameters is not None
        if dual_chunk_attention_config is not None:
            raise Refused(
                "dual chunk attention rotates by chunks, and the plugin by requests: take "
                "dual_chunk_attention_config out of the config"
            )
        # vLLM's default; it counts for several positions a token only.
        rows_per_token = keywords.get("mrope_positions_factor", 4)
        return _stacked_rotary(head_size, is_neox_style, rope_parameters, dtype, rows_per_token)

    vars(get_rope)["rope_patch_original"] = original
    return get_rope


def _stacked_rotary(
    head_size: int,
    is_neox_style: bool,
    parameters: dict[str, Any],
    dtype: Any,
    rows_per_token: int,
) -> StackedRotary:
    """Return the module with the tables of all profiles, one for equal requests of an engine."""
    import torch
    from vllm.config import get_current_vllm_config

    from rope_patch.serving.vllm.stacked_tables import StackedRotary

    config = get_current_vllm_config()
    dtype = dtype or torch.get_default_dtype()
    share = parameters.get("partial_rotary_factor", 1.0)
    rotary_dim = parameters.get("rope_dim") or int(head_size * share)
    request = read_request(parameters)
    rows_per_token = rows_per_token if request.sections else 1
    heads = (head_size, rotary_dim, is_neox_style)
    key = (id(config), *heads, repr(parameters), dtype, rows_per_token)
    rotary = _built.get(key)
    if rotary is None:
        rotary = StackedRotary(
            request,
            head_size=head_size,
            rotary_dim=rotary_dim,
            is_neox_style=is_neox_style,
            dtype=dtype,
            max_length=config.model_config.max_model_len,
            max_tokens=config.scheduler_config.max_num_batched_tokens,
            rows_per_token=rows_per_token,
        )
        _built[key] = rotary
    return rotary
