"""Devices that plans are made for, their layouts, and how sizes are written."""

from __future__ import annotations

from typing import Any

from rope_patch.utils.resources import resource_folder

GIB = 2**30
# Memory that torch reports of an RTX 4090, an H100 and an H200: a device "of 24 GB" has at most
# 24 GiB, less its driver's share.
DEVICES = {"24 GB": int(23.5 * GIB), "80 GB": int(79.1 * GIB), "141 GB": int(139.7 * GIB)}
DEVICE_LAYOUTS: dict[str, dict[str, Any]] = {
    "1 GPU": {},
    "8, FSDP2": {"shards": 8},
    "8, FSDP2, context parallel": {"shards": 8, "context_parallel": 8},
}
SHAPES = resource_folder("recipes/shapes")


def format_gib(size: int) -> str:
    """Return bytes in GiB, with two decimals."""
    return f"{size / GIB:,.2f} GiB"


def format_tokens(length: int) -> str:
    """Return a number of tokens, or a dash if nothing fits."""
    return f"{length:,}" if length else "–"
