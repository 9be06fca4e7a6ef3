"""Whether the input of `qk_norm_rope` can be recomputed from its output, by the norms' weights.

The rounding error of a pair scales with its length. Rotated back, it falls on both numbers of the
pair, and division by the smaller weight amplifies it by the ratio of the two weights.

The answer takes a read of the device, which stalls it, so it is remembered until a weight changes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

# Largest ratio of the two weights of a rotated pair at which the normed input may be recomputed
# from rounded outputs. The error grows with the ratio; at 64 it is that of one or two roundings.
_MAX_PAIR_RATIO = 64.0

# Smaller weights make outputs that float16 cannot represent.
_MIN_WEIGHT = 2.0**-14


class _Answer(NamedTuple):
    """An answer, with the version and the address of the weight that it is for."""

    version: int
    address: int
    is_even: bool


# Answers by tensor (a view's is its base), then by view and settings.
_answers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def can_recompute_from_output(
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    packed_freqs: torch.Tensor,
    *,
    offset: float = 0.0,
    interleaved: bool = False,
) -> bool:
    """Return whether the normed input can be recomputed accurately from the output.

    Reads the device once for each weight, and again after in-place changes that torch counts
    (`_version`; optimizers' steps are, changes through `.data` are not). A stream that captures a
    CUDA graph allows no read: a weight that was not read before counts as unsuitable then.
    """
    settings = (2 * (packed_freqs.shape[-1] - 1), interleaved, offset)
    return _has_even_pairs(q_weight, *settings) and _has_even_pairs(k_weight, *settings)


def _has_even_pairs(weight: torch.Tensor, *settings: Any) -> bool:
    if weight.is_inference():  # has no version
        return _read_even_pairs(weight, *settings)
    owner = weight if weight._base is None else weight._base
    answers: dict[Hashable, _Answer] | None = _answers.get(owner)
    if answers is None:
        answers = _answers[owner] = {}
    key = (weight.shape, weight.stride(), weight.storage_offset(), *settings)
    content = (weight._version, weight.data_ptr())
    answer = answers.get(key)
    if answer is None or answer[:2] != content:
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        answer = answers[key] = _Answer(*content, _read_even_pairs(weight, *settings))
    return answer.is_even


def _read_even_pairs(
    weight: torch.Tensor, rotary_dim: int, interleaved: bool, offset: float
) -> bool:
    """Return whether no weight is next to 0 and weights of a pair are of similar size."""
    size = (weight.detach() + offset).abs().float()
    is_even = (size >= _MIN_WEIGHT).all()
    if rotary_dim:
        pairs = size[..., :rotary_dim].unflatten(-1, (-1, 2) if interleaved else (2, -1))
        low, high = torch.aminmax(pairs, dim=-1 if interleaved else -2)
        is_even &= (high / low).max() <= _MAX_PAIR_RATIO
    return bool(is_even)
