"""Check in any architecture that a growing text re-rotates exactly what its cache holds rotated.

Knows nothing of the architecture: what a cache holds rotated, and how, shows when the same tokens
are read at positions a little further on. Attention only sees distances, so nothing else changes.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from helpers.releases import CACHE
from helpers.rotary_modules import find_rotaries
from helpers.tiny_models import BEFORE_5_17

import rope_patch

TRAINED, FIRST, SECOND, SHIFT = 16, 10, 12, 3
FACTOR = 2 ** (2 / 4)  # the first step 2^(k / 4) that serves 22 tokens

Cached = dict[tuple[int, str], torch.Tensor]


def assert_followed(model: Any, start: Any) -> None:
    """Patch a model with `dynamic-linear`, grow a cached text, check its cache and undo the patch.

    Args:
        model: The unpatched model.
        start: Function of a handle, a layer type and its frequencies that returns those which an
            extension starts from.

    Raises:
        AssertionError: A cached tensor is not what it was, rotated by the new frequencies.
    """
    frequencies = {
        kind: getattr(rotary.module, f"{prefix}inv_freq").clone()
        for rotary in find_rotaries(model)
        for kind, prefix in rotary.prefixes.items()
    }
    config = model.config.get_text_config(decoder=True)
    if BEFORE_5_17 and not hasattr(_read(model, FIRST), "layers"):
        return  # a cache class of the architecture's own
    plain, shifted = (_cached(_read(model, FIRST, first)) for first in (0, SHIFT))
    handle = rope_patch.patch(model, "dynamic-linear", trained_length=TRAINED)
    cache = _read(model, FIRST)
    before = _cached(cache)
    after = _cached(_read(model, SECOND, FIRST, cache))
    handle.undo()
    rerotated = 0
    for key, tensor in plain.items():
        own_type = dict(enumerate(getattr(config, "layer_types", None) or ())).get(key[0])
        kinds = sorted(frequencies, key=lambda kind: kind != own_type)  # several may rotate alike
        layout = _layout(tensor, shifted[key], {kind: frequencies[kind] for kind in kinds})
        expected = before[key]
        if layout is not None and layout[0] in handle.geometries:
            kind, *rest = layout
            old = start(handle, kind, frequencies[kind])
            expected = _rotate(expected, torch.arange(FIRST), old / FACTOR - old, *rest)
            assert (expected - before[key]).abs().max() > 1e-2
            rerotated += 1
        got = after[key][..., :FIRST, :]
        torch.testing.assert_close(
            got, expected, rtol=0, atol=2e-4, msg=lambda m, k=key: f"{k} {m}"
        )
    assert rerotated, "no cached tensor is rotated"


@torch.no_grad()
def _read(model: Any, count: int, first: int = 0, cache: Any = None) -> Any:
    """Read tokens at positions from `first` on and return the cache."""
    generator = torch.Generator().manual_seed(first if cache is not None else 1)
    ids = torch.randint(4, 100, (1, count), generator=generator)
    positions = torch.arange(first, first + count)[None]
    given = {"position_ids": positions, "use_cache": True}
    if cache is not None:
        given[CACHE] = cache
    return model(input_ids=ids, **given)[CACHE]


def _cached(cache: Any) -> Cached:
    """Return copies of what the layers of a cache hold a slot for each token of, `[B, H, S, D]`."""
    tensors = {}
    for index, layer in enumerate(cache.layers):
        for name in ("keys", "values", "indexer_keys"):
            tensor = getattr(layer, name, None)
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                tensor = tensor[:, None] if name == "indexer_keys" else tensor
                tensors[index, name] = tensor.clone()
    return tensors


def _layout(tensor: torch.Tensor, shifted: torch.Tensor, frequencies: dict[Any, Any]) -> Any:
    """Return layer type, neighbours, part and sign of a rotation; None for what is not rotated."""
    if torch.allclose(tensor, shifted, atol=1e-3):
        return None
    shift = torch.full((FIRST,), SHIFT)
    for kind, *rest in itertools.product(frequencies, (False, True), ("first", "last"), (1, -1)):
        if torch.allclose(_rotate(tensor, shift, frequencies[kind], *rest), shifted, atol=1e-3):
            return kind, *rest
    raise AssertionError("a cached tensor is rotated in no way that is known here")


def _rotate(
    tensor: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    neighbours: bool,
    part: str,
    sign: int,
) -> torch.Tensor:
    width = 2 * len(inv_freq)
    if tensor.shape[-1] < width:
        return tensor
    rest = tensor.shape[-1] - width
    sizes = [width, rest] if part == "first" else [rest, width]
    parts = list(tensor.split(sizes, -1))
    x = parts[0 if part == "first" else 1]
    pairs = torch.stack([x[..., 0::2], x[..., 1::2]] if neighbours else x.chunk(2, -1), -1)
    angle = sign * positions[:, None] * inv_freq.float()
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_real(turned)
    x = pairs.flatten(-2) if neighbours else torch.cat(pairs.unbind(-1), -1)
    parts[0 if part == "first" else 1] = x
    return torch.cat(parts, -1)
