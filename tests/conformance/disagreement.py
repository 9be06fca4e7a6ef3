"""Define a disagreement between implementations, and its size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from comparison import Pair
from formulas import Rotation


@dataclass(frozen=True)
class Disagreement:
    """Two implementations that rotate differently where users expect the same.

    Attributes:
        about: The subject.
        who: The implementations that compute `theirs`.
        where: The geometry and the setting of the number.
        of: The compared number: a "frequency", the "attention factor" or the "softmax scale";
            the last two are a rotation's second part.
        ours: The rotation by rope_patch.
        theirs: The rotation by `who`.
        choice: What rope_patch does, and why.
        links: Sources, as Markdown.
        followed: The reference that our rotation must equal.
    """

    about: str
    who: str
    where: str
    of: str
    ours: Callable[[], Rotation]
    theirs: Callable[[], Rotation]
    choice: str
    links: tuple[str, ...]
    followed: Callable[[], Rotation] | None = None

    def __str__(self) -> str:
        return self.about

    def number(self) -> float:
        """Return the largest difference, relative to ours."""
        pair = Pair(self.ours(), self.theirs())
        return pair.of_frequency() if self.of == "frequency" else pair.of_attention()


def link(name: str, place: str) -> str:
    """Return a Markdown link, with a short text for well-known hosts."""
    for short, long in (("gh:", "https://github.com/"), ("arxiv:", "https://arxiv.org/abs/")):
        if place.startswith(short):
            place = long + place.removeprefix(short)
    return f"[{name}]({place})"


PAPER = link("YaRN", "arxiv:2309.00071")
YARN_REPO = "gh:jquesnelle/yarn/blob/995db5b575e75230b3384d658f8b944c9662f775/scaled_rope/"
MLX = link(
    "mlx-lm",
    "gh:ml-explore/mlx-lm/blob/d78bf58e217c904ec282ed8da9b947491f78c022/mlx_lm/models/rope_utils.py",
)
VLLM = link(
    "vLLM",
    "gh:vllm-project/vllm/blob/v0.33.0/vllm/model_executor/layers/rotary_embedding/",
)
SGLANG = link(
    "SGLang",
    "gh:sgl-project/sglang/blob/v0.5.23/python/sglang/srt/layers/rotary_embedding/",
)
TRANSFORMERS = link(
    "transformers",
    "gh:huggingface/transformers/blob/v5.23.0/src/transformers/modeling_rope_utils.py",
)
LONGROPE = link(
    "LongRoPE",
    "gh:microsoft/LongRoPE/blob/c9e56aa54007c328399677232a489feec446e4b8/evolution/search.py",
)
GPT_OSS_CODE = link(
    "gpt-oss",
    "gh:openai/gpt-oss/blob/7b583341fe16729127f6d5b94a7b09ccae97e1a1/gpt_oss/torch/model.py",
)
DEEPSEEK_CODE = link(
    "DeepSeek-V3",
    "gh:deepseek-ai/DeepSeek-V3/blob/9b4e9788e4a3a731f7567338ed15d3ec549ce03b/inference/model.py",
)
LLAMA_CPP = link("llama.cpp", "gh:ggml-org/llama.cpp/pull/17945")
LITGPT = link("litgpt", "gh:Lightning-AI/litgpt/pull/2202")
