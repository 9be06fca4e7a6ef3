"""List what equals ours: engines' formulas on every geometry, and models' published scalings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import engines
import formulas
import hf_rotation
from comparison import Pair, ours, stretches
from formulas import Rotation
from published import ALL, DEEPSEEK3, GPT_OSS, LLAMA31, LLAMA32, PHI35, Published

FACTOR = 4.0


@dataclass(frozen=True)
class Agreement:
    """An engine's formula that equals ours.

    Attributes:
        engine: Name of the engine.
        description: Our method and its options.
        evidence: "run" if tests run the installed package, "read" if its formula is from its code.
        ours: Our rotation of a model.
        theirs: The engine's rotation, restated.
    """

    engine: str
    description: str
    evidence: str
    ours: Callable[[Published], Rotation]
    theirs: Callable[[Published], Rotation]

    def __str__(self) -> str:
        return f"{self.engine}: {self.description}"

    def number(self) -> float:
        """Return the largest relative difference over all geometries."""
        return max(Pair(self.ours(model), self.theirs(model)).difference() for model in ALL)


def _ours(method: str, **options: Any) -> Callable[[Published], Rotation]:
    return lambda model: ours(method, model, factor=FACTOR, **options)


def _longrope(model: Published) -> Rotation:
    return ours("longrope", model, factor=FACTOR, long_factor=stretches(model, FACTOR))


def _full(model: Published) -> int:
    return int(FACTOR * model.trained_length)


def _still(model: Published) -> list[float]:
    return [1.0] * (model.rotary_dim // 2)


AGREEMENTS = (
    Agreement("mlx-lm", "`yarn`", "run", _ours("yarn"), lambda m: engines.mlx_yarn(m, FACTOR)),
    Agreement(
        "mlx-lm",
        "`yarn` with `mscale` and `mscale_all_dim`",
        "run",
        _ours("yarn", mscale=0.707, mscale_all_dim=1.0),
        lambda m: engines.mlx_yarn(m, FACTOR, 0.707, 1.0),
    ),
    Agreement(
        "mlx-lm", "`llama3`", "run", _ours("llama3"), lambda m: engines.mlx_llama3(m, FACTOR)
    ),
    Agreement(
        "mlx-lm",
        "`longrope`, long texts",
        "run",
        _longrope,
        lambda m: engines.mlx_longrope(m, _full(m), _still(m), stretches(m, FACTOR)),
    ),
    Agreement(
        "vLLM 0.33, SGLang 0.5.23",
        "`longrope`, long texts",
        "read",
        _longrope,
        lambda m: engines.vllm_longrope(m, _full(m), _still(m), stretches(m, FACTOR)),
    ),
    Agreement(
        "SGLang 0.5.23",
        "`yarn` with `mscale` and `mscale_all_dim`",
        "read",
        _ours("yarn", mscale=0.707, mscale_all_dim=1.0),
        lambda m: (formulas.yarn(m, FACTOR)[0], engines.sglang_attention(FACTOR, 0.707, 1.0)),
    ),
    Agreement(
        "llama.cpp", "`yarn`", "read", _ours("yarn"), lambda m: engines.llama_cpp_yarn(m, FACTOR)
    ),
    Agreement(
        "llama.cpp",
        "`llama3`",
        "read",
        _ours("llama3"),
        lambda m: engines.llama_cpp_llama3(m, FACTOR),
    ),
    Agreement(
        "KerasHub, vLLM, SGLang, jquesnelle/yarn",
        "`yarn`",
        "run",
        _ours("yarn"),
        lambda m: formulas.yarn(m, FACTOR),
    ),
    Agreement(
        "gpt-oss",
        "`yarn` with `truncate=False`",
        "read",
        _ours("yarn", truncate=False),
        lambda m: formulas.yarn(m, FACTOR, truncate=False),
    ),
    Agreement(
        "DeepSeek-V3's own code, beyond 4,096 tokens",
        "`ntk-by-parts`",
        "read",
        _ours("ntk-by-parts"),
        lambda m: engines.deepseek_yarn(m, FACTOR, _full(m)),
    ),
    Agreement(
        "litgpt, torchtune, vLLM, SGLang, Meta",
        "`llama3`",
        "run",
        _ours("llama3"),
        lambda m: formulas.llama3(m, FACTOR),
    ),
    Agreement(
        "rotary-embedding-torch, x-transformers, jquesnelle/yarn",
        "`ntk`",
        "run",
        _ours("ntk"),
        lambda m: formulas.ntk(m, FACTOR),
    ),
    Agreement(
        "all of them", "`linear`", "run", _ours("linear"), lambda m: formulas.linear(m, FACTOR)
    ),
)

# -- published scalings ----------------------------------------------------------------------------


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
