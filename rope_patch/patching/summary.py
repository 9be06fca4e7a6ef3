"""Text that describes a patch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from rope_patch.methods.position_map import PositionMap
from rope_patch.patching.method_wrappers import describe_start, method_origin, unwrap

if TYPE_CHECKING:
    from rope_patch.patching.handle import Patch
    from rope_patch.patching.kernels.eligibility import KernelSummary


def summarize(
    handle: Patch, unchanged_layer_types: Iterable[str | None], kernel_summary: KernelSummary
) -> str:
    """Return the text of `Patch.summary`.

    Args:
        handle: The patch.
        unchanged_layer_types: The layer types that the patch does not change.
        kernel_summary: Which code rotates; see `summarize_kernels`.
    """
    method = handle.method
    lines = [f"{handle}" + ("" if handle.active else " (undone)")]
    shown, where = handle.frequencies, ""
    if method.is_dynamic and handle.is_length_dependent:
        length = handle.length or 2 * handle.trained_length
        shown, where = handle.frequencies_at(length), f" at {length:,} tokens"
    for layer_type, geometry in handle.geometries.items():
        changed = shown[layer_type]
        stretch = geometry.inv_freq() / changed.inv_freq
        stretch = stretch.nan_to_num(nan=1.0, posinf=torch.inf)  # pairs that never rotated
        pairs = int(((stretch - 1).abs() > 1e-6).sum())
        slowest = "no longer rotates" if stretch.isinf().any() else f"×{stretch.max():.4g}"
        lines.append(
            f"  {layer_type or 'all layers'}: theta {geometry.theta:g}, {pairs} of {len(stretch)} "
            f"pairs changed{where} (slowest: {slowest}), "
            f"attention factor {changed.attention_factor:.6g}"
        )
    lines += [f"  {layer_type}: unchanged" for layer_type in unchanged_layer_types]
    if tokens := method.start_token_count:
        lines.append(f"  positions below {tokens:,} keep the rotation from before, in all of these")
    lines += describe_start(handle.original_config, handle.geometries)
    if handle.softmax_mscale != 1:
        lines.append(
            f"  softmax scale ×{handle.softmax_mscale**2:.6g}: heads that rotate only in part have "
            "the attention factor there"
        )
    if origin := method_origin(method):
        lines.append(f"  a method from outside: {origin}")
    inner = unwrap(method)
    if isinstance(inner, PositionMap):
        lines.append(f"  {inner.describe(handle.trained_length)}")
    if (temperature := method.query_temperature) is not None:
        formula = temperature.describe(handle.trained_length)
        lines.append(f"  attention logits ×{formula}, by each query's position")
    options = {k: v for k, v in method.options().items() if k != "factor"}
    options = {k: v for k, v in options.items() if v is not None and v != ""}
    if options:
        lines.append("  options: " + ", ".join(f"{k}={_abbreviate(v)}" for k, v in options.items()))
    lines.append(f"  {kernel_summary}")
    return "\n".join(lines)


def _abbreviate(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"[{', '.join(value)}]"
    return f"[{len(value)} numbers]" if isinstance(value, tuple | list) else str(value)
