"""List the scalings of published models: our methods, and transformers on their configs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hf_rotation
from comparison import Pair, ours
from published import DEEPSEEK3, GPT_OSS, LLAMA31, LLAMA32, PHI35, Published


@dataclass(frozen=True)
class PublishedScaling:
    """A model's published scaling, as a method of ours.

    Attributes:
        model: The model.
        method: Our method with this scaling.
        options: The fields of its config.json as our options.
        lengths: Lengths in tokens to compare; None if the length does not matter.
    """

    model: Published
    method: str
    options: dict[str, Any]
    lengths: tuple[int | None, ...] = (None,)

    def __str__(self) -> str:
        return self.model.name

    def describe(self) -> str:
        """Return the method with its options, without lists."""
        options = (f"{k}={v:g}" for k, v in self.options.items() if not isinstance(v, list))
        return f"`{self.method}`, " + ", ".join(options).replace("truncate=0", "truncate=False")

    def pairs(self) -> Iterator[Pair]:
        config = self.model.config()
        for tokens in self.lengths:
            theirs = hf_rotation.rotation_of(self.model, config, self.method, tokens)
            yield Pair(ours(self.method, self.model, seq_len=tokens, **self.options), theirs)

    def number(self) -> float:
        return max(pair.difference() for pair in self.pairs())


_PHI = {name: PHI35.scaling[name] for name in ("short_factor", "long_factor")}

PUBLISHED_SCALINGS = (
    PublishedScaling(
        LLAMA31, "llama3", {"factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
    ),
    PublishedScaling(
        LLAMA32, "llama3", {"factor": 32.0, "low_freq_factor": 1, "high_freq_factor": 4}
    ),
    PublishedScaling(GPT_OSS, "yarn", {"factor": 32.0, "truncate": False}),
    PublishedScaling(DEEPSEEK3, "yarn", {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
    PublishedScaling(PHI35, "longrope", {"factor": 131072 / 4096, **_PHI}, (1, 4096, 4097, 131072)),
)
