"""Say that positions grow slower than tokens in images and video (M-RoPE), and what factor follows.

A token of a grid has its time, row and column (arXiv:2409.12191), so that a grid of t × h × w
tokens ends max(t, h, w) positions further, where text of as many tokens ends t · h · w further.
The arithmetic is that of `get_rope_index` of each architecture in transformers:

- Qwen2-VL and Qwen2.5-VL: a video is one grid, in which time advances by an interval: 1, or with
  Qwen2.5-VL `tokens_per_second` times the seconds between two rows of frames.
- Qwen3-VL and Qwen3.5: each row of frames is a grid of its own, between the text of a timestamp and
  two tokens that begin and end it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rope_patch.diagnosing.facts import Facts, Finding

_IN_ONE_GRID = ("qwen2_vl", "qwen2_5_vl")
_GRID_BY_GRID = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
# The example: pixels of a small video, and a row of frames each second.
_WIDTH, _HEIGHT = 640, 360
_SECONDS = 1
_TIMESTAMP = 9  # tokens of "<1234.5 seconds>", digits one by one
_MARKS = 2  # tokens that begin and end a grid
_EXAMPLE_FACTOR = 4  # where no longer target is named
_SMALLER = 0.75  # the share of that factor which is compared: 3 instead of 4


@dataclass(frozen=True)
class VideoExample:
    """A video that fills a number of tokens.

    Attributes:
        grids: Rows of frames (t).
        height: Tokens of a grid's column (h).
        width: Tokens of a grid's row (w).
        tokens: All tokens, with those between the grids.
        positions: The largest position + 1.
    """

    grids: int
    height: int
    width: int
    tokens: int
    positions: int


def vision_findings(facts: Facts, trained: int) -> Iterator[Finding]:
    """Yield a note with the factor by positions of a video, for models whose rule is known.

    Args:
        facts: Facts about the model.
        trained: The length that a factor multiplies, in tokens.
    """
    config: Any = getattr(facts.subject.model, "config", None)
    model_type = getattr(config, "model_type", "")
    if model_type not in (*_IN_ONE_GRID, *_GRID_BY_GRID):
        return
    if not isinstance(config.vision_config.patch_size, int):
        return  # patches that are no squares
    target = facts.target_length if facts.target_length > trained else _EXAMPLE_FACTOR * trained
    video = video_example(model_type, config.vision_config, target)
    by_tokens = target / trained
    by_positions = max(1.0, video.positions / trained)
    smaller = max(1.0, _SMALLER * by_tokens)
    # Text and video together take (1 - share) tokens + share * positions of the video.
    share = (1 - smaller / by_tokens) / (1 - video.positions / video.tokens)
    if video.tokens > target or by_positions > smaller:
        return  # no such video fits, or it saves too little
    suffices = f"factor {smaller:.3g} suffices" if smaller > 1 else "no extension is needed"
    between = (
        f"{_TIMESTAMP} tokens of a timestamp before each"
        if model_type in _GRID_BY_GRID
        else f"one each {_SECONDS} s, {_interval(config.vision_config):g} positions later"
    )
    yield Finding(
        "note",
        "positions-of-images",
        "positions grow slower than tokens in images and video (M-RoPE): a grid of t × h × w "
        f"tokens advances them by max(t, h, w). For {target:,} tokens {suffices} instead of "
        f"{by_tokens:.3g} if at least {math.ceil(100 * share)}% of them are such a video",
        f"a video of {_WIDTH} × {_HEIGHT} pixels alone, {video.grids:,} grids of {video.width} × "
        f"{video.height} tokens ({between}), has {video.tokens:,} tokens and ends at position "
        f"{video.positions:,}: factor {by_positions:.3g}. Text needs the factor of its tokens",
        facts.subject.patch_call("yarn", f"factor={smaller:g}") if smaller > 1 else "",
        numbers={
            "trained": trained,
            "tokens": video.tokens,
            "positions": video.positions,
            "grids": video.grids,
            "height": video.height,
            "width": video.width,
            "factor_by_tokens": by_tokens,
            "factor_by_positions": by_positions,
            "smaller_factor": smaller,
            "share_of_video": share,
        },
    )


def video_example(model_type: str, vision: Any, tokens: int) -> VideoExample:
    """Return the video of the example that has at most a number of tokens; one grid at least."""
    side = vision.patch_size * vision.spatial_merge_size  # pixels of a token
    height, width = (max(1, round(pixels / side)) for pixels in (_HEIGHT, _WIDTH))
    if model_type in _GRID_BY_GRID:
        text = _TIMESTAMP + _MARKS
        grids = max(1, tokens // (text + height * width))
        positions = grids * (text + max(height, width))
        return VideoExample(grids, height, width, grids * (text + height * width), positions)
    grids = max(1, tokens // (height * width))
    positions = max(int((grids - 1) * _interval(vision)) + 1, height, width)
    return VideoExample(grids, height, width, grids * height * width, positions)


def _interval(vision: Any) -> float:
    """Return how many positions a row of frames is behind the one before it, within one grid."""
    return float(getattr(vision, "tokens_per_second", 1) * _SECONDS)
