"""List disagreements between implementations of rotations, with each one's size and our choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import engines
import formulas
import hf_rotation
import torch
from comparison import Pair, ours
from formulas import Rotation
from published import (
    DEEPSEEK3,
    GEMMA3_FULL,
    GEMMA3_SLIDING,
    GPT_OSS,
    LLAMA2,
    LLAMA31,
    LLAMA32,
    MISTRAL_1,
    PHI35,
    QWEN3,
    SMOLLM2,
)
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.methods import Geometry, build


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


# -- YaRN: frequencies and attention factor --------------------------------------------------------

GEMMA3_4B_SLIDING = replace(
    GEMMA3_SLIDING, name="Gemma-3-4B, sliding window", trained_length=131072
)
MISTRAL_8K = replace(MISTRAL_1, trained_length=8192)  # the length that Yarn-Mistral extends
QWEN3_32K = replace(QWEN3, trained_length=32768)  # the length that its model card extends

FREQUENCIES = (
    Disagreement(
        about="ramp over turns, or over pairs",
        who="the paper's text; all code has it over pairs",
        where="Llama-2-7B, factor 4",
        of="frequency",
        ours=lambda: ours("yarn", LLAMA2, factor=4),
        theirs=lambda: formulas.yarn_by_rotations(LLAMA2, 4),
        choice="over pairs: what every checkpoint was trained with and every engine runs",
        links=(link("eq. 18", "arxiv:2309.00071"), link("code", YARN_REPO)),
        followed=lambda: hf_rotation.rotation(LLAMA2, "yarn", factor=4.0),
    ),
    Disagreement(
        about="blend of frequencies, or of wavelengths",
        who="the paper's eq. 23; the start of LongRoPE's search",
        where="Llama-2-7B, factor 32",
        of="frequency",
        ours=lambda: ours("yarn", LLAMA2, factor=32),
        theirs=lambda: engines.longrope_start(LLAMA2, 32),
        choice="of frequencies, eq. 25: as the authors' code",
        links=(
            link("yarn#24", "gh:jquesnelle/yarn/issues/24"),
            LONGROPE,
        ),
        followed=lambda: hf_rotation.rotation(LLAMA2, "yarn", factor=32.0),
    ),
    Disagreement(
        about="`truncate: false`",
        who="mlx-lm, llama.cpp, DeepSeek, jquesnelle/yarn: always truncate",
        where="gpt-oss-20b, its own factor 32",
        of="frequency",
        ours=lambda: ours("yarn", GPT_OSS, factor=32, truncate=False),
        theirs=lambda: engines.mlx_yarn(GPT_OSS, 32),
        choice="an option, true unless said, as in transformers; gpt-oss was trained with false",
        links=(
            MLX,
            GPT_OSS_CODE,
        ),
        followed=lambda: hf_rotation.rotation_of(GPT_OSS, GPT_OSS.config(), "yarn"),
    ),
    Disagreement(
        about="`truncate: false` where layer types differ",
        who="transformers: looks for it beside the layer types, not in them",
        where="Gemma-3-1B, full attention, factor 4",
        of="frequency",
        ours=lambda: ours("yarn", GEMMA3_FULL, factor=4, truncate=False),
        theirs=lambda: hf_rotation.rotation(GEMMA3_FULL, "yarn", factor=4.0, truncate=False),
        choice="obeyed; saved as `longrope` with explicit factors, which transformers reads right",
        links=(TRANSFORMERS,),
        followed=lambda: formulas.yarn(GEMMA3_FULL, 4, truncate=False),
    ),
    Disagreement(
        about="the ramp's upper end is clamped to R − 1, or to R / 2 − 1",
        who="litgpt; KerasHub before its pull request 2981",
        where="Gemma-3-4B, sliding window (256 / 1e4 / 131,072), factor 4",
        of="frequency",
        ours=lambda: ours("yarn", GEMMA3_4B_SLIDING, factor=4),
        theirs=lambda: (
            formulas.blend(
                GEMMA3_4B_SLIDING,
                4,
                formulas.ramp(
                    GEMMA3_4B_SLIDING, *formulas.ramp_ends(GEMMA3_4B_SLIDING, 32, 1, top=127)
                ),
            ),
            1.0,
        ),
        choice="R − 1: a slip in the authors' code, but checkpoints and engines share it",
        links=(link("KerasHub", "gh:keras-team/keras-hub/pull/2981"), link("code", YARN_REPO)),
        followed=lambda: hf_rotation.rotation(GEMMA3_4B_SLIDING, "yarn", factor=4.0),
    ),
    Disagreement(
        about="direction of the ramp",
        who="litgpt 0.5.13: interpolates the fast pairs and keeps the slow ones",
        where="Llama-2-7B, factor 4",
        of="frequency",
        ours=lambda: ours("yarn", LLAMA2, factor=4),
        theirs=lambda: engines.litgpt_yarn(LLAMA2, 4),
        choice="fast pairs are kept",
        links=(LITGPT, link("eq. 17", "arxiv:2309.00071")),
        followed=lambda: hf_rotation.rotation(LLAMA2, "yarn", factor=4.0),
    ),
    Disagreement(
        about="betas of Mistral: 128 and 2, or 32 and 1",
        who="jquesnelle/yarn and LongRoPE's search, for Mistral alone",
        where="Mistral-7B-v0.1 from 8,192 tokens, factor 16 (Yarn-Mistral-7b-128k)",
        of="frequency",
        ours=lambda: ours("yarn", MISTRAL_8K, factor=16),
        theirs=lambda: engines.yarn_repo_mistral(MISTRAL_8K, 16),
        choice="32 and 1 for all, as in transformers; pass `beta_fast=128, beta_slow=2` for these",
        links=(
            link("code", YARN_REPO + "modeling_mistral_yarn.py"),
            link("yarn#19", "gh:jquesnelle/yarn/issues/19"),
        ),
        followed=lambda: hf_rotation.rotation(MISTRAL_8K, "yarn", factor=16.0),
    ),
    Disagreement(
        about="theta of the config, or always 10,000",
        who="jquesnelle/yarn's Llama model",
        where="Llama-3.1-8B from 8,192 tokens, factor 4",
        of="frequency",
        ours=lambda: ours("yarn", LLAMA31, factor=4),
        theirs=lambda: engines.yarn_repo_llama(LLAMA31, 4),
        choice="the config's",
        links=(link("code", YARN_REPO + "modeling_llama_yarn.py"),),
        followed=lambda: hf_rotation.rotation(LLAMA31, "yarn", factor=4.0),
    ),
    Disagreement(
        about="`factor`, or max_position_embeddings / original",
        who="transformers before pull request 40320",
        where="Qwen3-8B, its model card's factor 4 from 32,768 tokens (config: 40,960)",
        of="frequency",
        ours=lambda: ours("yarn", QWEN3_32K, factor=4),
        theirs=lambda: formulas.yarn(
            QWEN3_32K, engines.transformers_4_factor(full=40960, original=32768)
        ),
        choice="the factor that was asked for",
        links=(
            link("transformers#38224", "gh:huggingface/transformers/issues/38224"),
            link("#40320", "gh:huggingface/transformers/pull/40320"),
        ),
        followed=lambda: hf_rotation.rotation(QWEN3_32K, "yarn", full=40960, factor=4.0),
    ),
    Disagreement(
        about="short sequences",
        who="DeepSeek-V3's own code: unscaled while no more than 4,096 tokens are allocated",
        where="DeepSeek-V3, its own factor 40",
        of="frequency",
        ours=lambda: ours("yarn", DEEPSEEK3, factor=40),
        theirs=lambda: engines.deepseek_yarn(DEEPSEEK3, 40, full=4096),
        choice="`yarn` scales always, as in transformers; `mixed-yarn` and `dynamic-yarn` do not",
        links=(DEEPSEEK_CODE,),
        followed=lambda: hf_rotation.rotation_of(DEEPSEEK3, DEEPSEEK3.config(), "yarn"),
    ),
)

ATTENTION = (
    Disagreement(
        about="`attention_factor` in the config",
        who="mlx-lm, SGLang 0.5.23, llama.cpp and vLLM up to 0.29 ignore it (SGLang and that vLLM "
        "multiply by `attn_factor`)",
        where="Llama-2-7B, factor 4, `attention_factor: 1`",
        of="attention factor",
        ours=lambda: ours("yarn", LLAMA2, factor=4, attention_factor=1.0),
        theirs=lambda: ([], engines.sglang_attention(4, None, None)),
        choice="replaces the law, as in transformers and vLLM 0.33",
        links=(link("mlx-lm#1507", "gh:ml-explore/mlx-lm/pull/1507"), SGLANG, LLAMA_CPP, VLLM),
        followed=lambda: hf_rotation.rotation(LLAMA2, "yarn", factor=4.0, attention_factor=1.0),
    ),
    Disagreement(
        about="`mscale` without `mscale_all_dim`, or with 0",
        who="mlx-lm uses it alone; SGLang where both are there, be they 0",
        where="Llama-2-7B, factor 40, `mscale: 0.707`",
        of="attention factor",
        ours=lambda: ours("yarn", LLAMA2, factor=40, mscale=0.707),
        theirs=lambda: engines.mlx_yarn(LLAMA2, 40, mscale=0.707),
        choice="counts only where both are there and neither is 0, as in transformers and vLLM",
        links=(MLX, SGLANG, TRANSFORMERS),
        followed=lambda: hf_rotation.rotation(LLAMA2, "yarn", factor=40.0, mscale=0.707),
    ),
    Disagreement(
        about="`mscale` with `mscale_all_dim`",
        who="vLLM up to 0.29 ignored both in `yarn`",
        where="DeepSeek-V3, its own factor 40, both 1",
        of="attention factor",
        ours=lambda: ours("yarn", DEEPSEEK3, factor=40, mscale=1.0, mscale_all_dim=1.0),
        theirs=lambda: ([], formulas.yarn_attention_factor(40)),
        choice="their ratio; what `mscale_all_dim` sharpens goes into the softmax scale, once",
        links=(link("vllm#48621", "gh:vllm-project/vllm/issues/48621"), TRANSFORMERS),
        followed=lambda: hf_rotation.rotation_of(DEEPSEEK3, DEEPSEEK3.config(), "yarn"),
    ),
    Disagreement(
        about="`mscale` other than 1",
        who="llama.cpp: taken for 1 (in DeepSeek-V2 for `mscale_all_dim`)",
        where="DeepSeek-V3, factor 40, `mscale: 0.707`, `mscale_all_dim: 1`",
        of="attention factor",
        ours=lambda: ours("yarn", DEEPSEEK3, factor=40, mscale=0.707, mscale_all_dim=1.0),
        theirs=lambda: engines.llama_cpp_yarn(DEEPSEEK3, 40, all_dim=1.0),
        choice="obeyed, as in transformers",
        links=(LLAMA_CPP, TRANSFORMERS),
        followed=lambda: hf_rotation.rotation(
            DEEPSEEK3, "yarn", factor=40.0, mscale=0.707, mscale_all_dim=1.0
        ),
    ),
    Disagreement(
        about="the law without `mscale`",
        who="litgpt 0.5.13: no attention factor at all",
        where="Llama-2-7B, factor 4",
        of="attention factor",
        ours=lambda: ours("yarn", LLAMA2, factor=4),
        theirs=lambda: engines.litgpt_yarn(LLAMA2, 4),
        choice="0.1 ln(factor) + 1",
        links=(LITGPT, PAPER),
        followed=lambda: hf_rotation.rotation(LLAMA2, "yarn", factor=4.0),
    ),
    Disagreement(
        about="the law's slope for Mistral: 0.07, or 0.1",
        who="jquesnelle/yarn, for Mistral alone",
        where="Mistral-7B-v0.1 from 8,192 tokens, factor 16 (Yarn-Mistral-7b-128k)",
        of="attention factor",
        ours=lambda: ours("yarn", MISTRAL_8K, factor=16),
        theirs=lambda: engines.yarn_repo_mistral(MISTRAL_8K, 16),
        choice="0.1 for all, as in transformers; pass "
        f"`attention_factor={formulas.yarn_attention_factor(16, slope=0.07):.4g}` for these",
        links=(link("code", YARN_REPO + "modeling_mistral_yarn.py"),),
        followed=lambda: hf_rotation.rotation(MISTRAL_8K, "yarn", factor=16.0),
    ),
)


# -- NTK-aware and dynamic scaling -----------------------------------------------------------------


def _stepped(ratio: float) -> Rotation:
    """Return a patched model's rotation, which grows in steps by default."""
    method = build("dynamic")
    frequencies = method.frequencies_at(Geometry(**LLAMA2.numbers()), ratio * LLAMA2.trained_length)
    return frequencies.inv_freq.tolist(), frequencies.attention_factor


NTK = (
    Disagreement(
        about="static NTK: theta · s^(R / (R − 2)), or theta · s and all pairs by s^(2 / R)",
        who="vLLM's `ntk`",
        where="Llama-2-7B, factor 4",
        of="frequency",
        ours=lambda: ours("ntk", LLAMA2, factor=4),
        theirs=lambda: engines.vllm_ntk(LLAMA2, 4),
        choice="the paper's definition 1: the fastest pair is left alone",
        links=(VLLM, link("YaRN", "arxiv:2309.00071")),
        followed=lambda: formulas.ntk(LLAMA2, 4),
    ),
    Disagreement(
        about="theta 20,000 called NTK, factor 2",
        who="jquesnelle/yarn's own baseline",
        where="Llama-2-7B, factor 2",
        of="frequency",
        ours=lambda: ours("ntk", LLAMA2, factor=2),
        theirs=lambda: formulas.default(LLAMA2, theta=20000),
        choice=f"{1e4 * 2 ** (128 / 126):,.0f}, by definition 1; `abf` takes `new_theta=20000`",
        links=(link("train.sh", YARN_REPO.replace("scaled_rope/", "train.sh")),),
        followed=lambda: formulas.ntk(LLAMA2, 2),
    ),
    Disagreement(
        about="NTK-by-parts: the paper's one ramp, or the two ramps of June 2023",
        who="jquesnelle/yarn's PartNTK classes",
        where="Llama-2-7B, factor 4",
        of="frequency",
        ours=lambda: ours("ntk-by-parts", LLAMA2, factor=4),
        theirs=lambda: formulas.by_parts_2023_06(LLAMA2, 4),
        choice="the paper's; the older one is `ntk-by-parts-2023-06`",
        links=(link("code", YARN_REPO + "LlamaPartNTKScaledRotaryEmbedding.py"),),
        followed=lambda: hf_rotation.rotation(LLAMA2, "yarn", factor=4.0, attention_factor=1.0),
    ),
    Disagreement(
        about="`dynamic` on short texts",
        who="SGLang 0.5.23 and vLLM before pull request 41277: one base for all lengths",
        where="Llama-2-7B, factor 4, 4,096 tokens",
        of="frequency",
        ours=lambda: ours("dynamic", LLAMA2, factor=4, seq_len=4096),
        theirs=lambda: engines.vllm_dynamic(LLAMA2, 4),
        choice="unscaled up to the trained length",
        links=(link("vllm#5093", "gh:vllm-project/vllm/issues/5093"), SGLANG),
        followed=lambda: hf_rotation.rotation(LLAMA2, "dynamic", 4096, factor=4.0),
    ),
    Disagreement(
        about="`dynamic` on long texts",
        who="vLLM 0.33: not scaled at all unless the config has `max_trained_positions`",
        where="Llama-2-7B, factor 4, 16,384 tokens",
        of="frequency",
        ours=lambda: ours("dynamic", LLAMA2, factor=4, seq_len=16384),
        theirs=lambda: engines.vllm_dynamic_since(LLAMA2, 4),
        choice="follows the length",
        links=(link("vllm#41277", "gh:vllm-project/vllm/pull/41277"), VLLM),
        followed=lambda: hf_rotation.rotation(LLAMA2, "dynamic", 16384, factor=4.0),
    ),
    Disagreement(
        about="`dynamic` as division of every pair",
        who="KerasHub 0.32",
        where="Llama-2-7B, factor 4",
        of="frequency",
        ours=lambda: ours("ntk", LLAMA2, factor=4),
        theirs=lambda: engines.keras_dynamic(LLAMA2, 4),
        choice="theta grows by that, not the pairs",
        links=(
            link(
                "KerasHub",
                "gh:keras-team/keras-hub/blob/v0.32.0/keras_hub/src/layers/modeling/"
                "rotary_embedding.py",
            ),
        ),
        followed=lambda: hf_rotation.rotation(LLAMA2, "dynamic", 16384, factor=1.0),
    ),
    Disagreement(
        about="`dynamic` growth",
        who="LMDeploy's TurboMind of 2023: powers of two, ahead of the length",
        where="Llama-2-7B, 6,144 tokens",
        of="frequency",
        ours=lambda: ours("dynamic", LLAMA2, seq_len=6144),
        theirs=lambda: engines.lmdeploy_ntk(LLAMA2, 6144),
        choice="as much as the length asks for",
        links=(link("lmdeploy#536", "gh:InternLM/lmdeploy/issues/536"),),
        followed=lambda: hf_rotation.rotation(LLAMA2, "dynamic", 6144, factor=1.0),
    ),
    Disagreement(
        about="growth in steps",
        who='every other implementation follows each token; we do with `growth="exact"`',
        where="Llama-2-7B, a patched model at 4,300 tokens",
        of="frequency",
        ours=lambda: _stepped(4300 / 4096),
        theirs=lambda: hf_rotation.rotation(LLAMA2, "dynamic", 4300, factor=1.0),
        choice="the factor rises on the grid 2^(k / 4), so that cached keys are seldom turned",
        links=(),
        followed=lambda: formulas.ntk(LLAMA2, 2**0.25),
    ),
    Disagreement(
        about="`dynamic` where max_position_embeddings was raised",
        who="transformers: takes it for the trained length, whatever the original is",
        where="Llama-2-7B, max_position_embeddings and text of 16,384 tokens",
        of="frequency",
        ours=lambda: ours("dynamic", LLAMA2, seq_len=16384),
        theirs=lambda: hf_rotation.rotation(
            LLAMA2,
            "dynamic",
            16384,
            full=16384,
            factor=1.0,
            original_max_position_embeddings=4096,
        ),
        choice="the original length counts; saved configs keep max_position_embeddings at it",
        links=(TRANSFORMERS,),
        followed=lambda: hf_rotation.rotation(LLAMA2, "dynamic", 16384, factor=1.0),
    ),
    Disagreement(
        about="`dynamic-yarn`: factor n / original, or n / max_position_embeddings",
        who="jquesnelle/yarn's modeling_llama_yarn.py; its other file does as the paper",
        where="Llama-2-7B with max_position_embeddings 16,384, 32,768 tokens",
        of="frequency",
        ours=lambda: ours("dynamic-yarn", LLAMA2, seq_len=32768),
        theirs=lambda: formulas.yarn(LLAMA2, 32768 / 16384),
        choice="n / original",
        links=(
            link("code", YARN_REPO + "modeling_llama_yarn.py"),
            link("section 3.3", "arxiv:2309.00071"),
        ),
        followed=lambda: hf_rotation.rotation(LLAMA2, "yarn", factor=8.0),
    ),
)


# -- LongRoPE, Llama 3, p-RoPE and others ----------------------------------------------------------

SHORT = [float(number) for number in PHI35.scaling["short_factor"]]
LONG = [float(number) for number in PHI35.scaling["long_factor"]]
_BOTH = {"short_factor": SHORT, "long_factor": LONG, "factor": 32.0}


def _phi(tokens: int) -> Rotation:
    return ours("longrope", PHI35, seq_len=tokens, **_BOTH)


LONG_ROPE = (
    Disagreement(
        about="`attention_factor` and `factor`",
        who="vLLM, SGLang, mlx-lm: from max_position_embeddings / original alone",
        where="Llama-2-7B, factor 4, NTK written as `longrope` with `attention_factor: 1`",
        of="attention factor",
        ours=lambda: ours(
            "longrope", LLAMA2, factor=4, long_factor=[1.0] * 64, attention_factor=1.0
        ),
        theirs=lambda: engines.vllm_longrope(LLAMA2, 16384, [1.0] * 64, [1.0] * 64),
        choice="both obeyed, as in transformers",
        links=(VLLM, SGLANG, MLX),
        followed=lambda: hf_rotation.rotation(
            LLAMA2,
            "longrope",
            factor=4.0,
            attention_factor=1.0,
            long_factor=[1.0] * 64,
            short_factor=[1.0] * 64,
        ),
    ),
    Disagreement(
        about="`short_mscale` and `long_mscale`",
        who="vLLM, SGLang and transformers' PhiMoE obey them; all else of transformers does not",
        where="Phi-3.5-mini's geometry, factor 32, the 1.2432 of Phi-3.5-MoE",
        of="attention factor",
        ours=lambda: _phi(8192),
        theirs=lambda: ([], 1.243163121016122),
        choice="`attention_factor` says it, for short and long alike",
        links=(
            link("config", "https://huggingface.co/microsoft/Phi-3.5-MoE-instruct"),
            VLLM,
            TRANSFORMERS,
        ),
        followed=lambda: hf_rotation.rotation_of(PHI35, PHI35.config(), "longrope", 8192),
    ),
    Disagreement(
        about="which set short texts get",
        who="mlx-lm: long always; vLLM, llama.cpp: long where more than the original is served",
        where="Phi-3.5-mini, 2,048 tokens",
        of="frequency",
        ours=lambda: _phi(2048),
        theirs=lambda: engines.mlx_longrope(PHI35, 131072, SHORT, LONG),
        choice="short",
        links=(MLX, VLLM, link("llama.cpp#24823", "gh:ggml-org/llama.cpp/issues/24823")),
        followed=lambda: hf_rotation.rotation_of(PHI35, PHI35.config(), "longrope", 2048),
    ),
    Disagreement(
        about="a short text in a batch with a long one",
        who="transformers: the longest row decides for all",
        where="Phi-3.5-mini, 2,048 tokens beside 8,192",
        of="frequency",
        ours=lambda: _phi(2048),
        theirs=lambda: hf_rotation.rotation_beside(PHI35, 8192, 2048),
        choice="each row by its own length",
        links=(TRANSFORMERS,),
        followed=lambda: hf_rotation.rotation_of(PHI35, PHI35.config(), "longrope", 2048),
    ),
    Disagreement(
        about="a text of exactly the trained length",
        who="unsloth: long already",
        where="Phi-3.5-mini, 4,096 tokens",
        of="frequency",
        ours=lambda: _phi(4096),
        theirs=lambda: engines.unsloth_longrope(PHI35, 131072, SHORT, LONG, 4096),
        choice="still short, as in transformers",
        links=(
            link(
                "unsloth",
                "gh:unslothai/unsloth/blob/015bdef0d94a241bcd94eec7a405b1700632180d/"
                "unsloth/models/llama.py",
            ),
        ),
        followed=lambda: hf_rotation.rotation_of(PHI35, PHI35.config(), "longrope", 4096),
    ),
    Disagreement(
        about="a text of one token more",
        who="SGLang: still short",
        where="Phi-3.5-mini, 4,097 tokens",
        of="frequency",
        ours=lambda: _phi(4097),
        theirs=lambda: engines.sglang_longrope(PHI35, 131072, SHORT, LONG, 4097),
        choice="long, as in transformers",
        links=(SGLANG, TRANSFORMERS),
        followed=lambda: hf_rotation.rotation_of(PHI35, PHI35.config(), "longrope", 4097),
    ),
)


def _cos_for_sin() -> Rotation:
    """Return lengths of (cos, sin) at the first positions, where sin equals cos."""
    angles = (t * formulas.linear(MISTRAL_1, 2)[0][0] for t in range(100))
    return [math.hypot(math.cos(angle), math.cos(angle)) for angle in angles], 1.0


REST = (
    Disagreement(
        about="factor of Llama 3.2: 32, or 8",
        who="Meta's reference code: 8 for all models",
        where="Llama-3.2-1B",
        of="frequency",
        ours=lambda: ours("llama3", LLAMA32, factor=32),
        theirs=lambda: formulas.llama3(LLAMA32, 8),
        choice="32: the published config's; Meta's own fix of it",
        links=(
            link("llama-models#241", "gh:meta-llama/llama-models/issues/241"),
            link("#166", "gh:meta-llama/llama-models/issues/166"),
        ),
        followed=lambda: hf_rotation.rotation_of(LLAMA32, LLAMA32.config(), "llama3"),
    ),
    Disagreement(
        about="`partial_rotary_factor`: how many pairs turn, or how large the rotated part is",
        who="the same key in every `rope_type` but `proportional`",
        where="SmolLM2-135M, 0.75",
        of="frequency",
        ours=lambda: ours("proportional", SMOLLM2, partial_rotary_factor=0.75),
        theirs=lambda: hf_rotation.part_of_the_head(SMOLLM2, 0.75),
        choice="for `proportional`, how many: exponents go over the whole head",
        links=(link("p-RoPE", "arxiv:2410.06205"), TRANSFORMERS),
        followed=lambda: formulas.proportional(SMOLLM2, 0.75),
    ),
    Disagreement(
        about="`factor` of `proportional`",
        who="transformers and mlx-lm divide by it; vLLM and SGLang do not read it",
        where="SmolLM2-135M, 0.75, factor 4",
        of="frequency",
        ours=lambda: ours("proportional", SMOLLM2, factor=4, partial_rotary_factor=0.75),
        theirs=lambda: ([f / 4 for f in formulas.proportional(SMOLLM2, 0.75)[0]], 1.0),
        choice="not divided, as in the paper; saved with factor 1, which all read alike",
        links=(TRANSFORMERS, MLX, VLLM),
        followed=lambda: formulas.proportional(SMOLLM2, 0.75),
    ),
    Disagreement(
        about="a share that makes an odd number of dimensions",
        who="mlx-lm: one more pair turns",
        where="SmolLM2-135M, 0.3",
        of="frequency",
        ours=lambda: ours("proportional", SMOLLM2, partial_rotary_factor=0.3),
        theirs=lambda: engines.mlx_proportional(SMOLLM2, 0.3),
        choice="rounded down to pairs, as in transformers, vLLM and SGLang",
        links=(MLX, TRANSFORMERS),
        followed=lambda: formulas.proportional(SMOLLM2, 0.3),
    ),
    Disagreement(
        about="sin of linear scaling",
        who="jquesnelle/yarn's Mistral model: holds cos; the number is of the length of (cos, sin)",
        where="Mistral-7B-v0.1, factor 2",
        of="frequency",
        ours=lambda: ([1.0] * 100, 1.0),
        theirs=_cos_for_sin,
        choice="sin",
        links=(link("code", YARN_REPO + "modeling_mistral_yarn.py"),),
    ),
    Disagreement(
        about="frequencies after `model.bfloat16()`",
        who="transformers: rounds them with the weights",
        where="Llama-3.1-8B, its own scaling",
        of="frequency",
        ours=lambda: ours("llama3", LLAMA31, factor=8),
        theirs=lambda: hf_rotation.rotation_after_cast(LLAMA31),
        choice="computed in float64 from the config, kept in float32",
        links=(TRANSFORMERS,),
        followed=lambda: hf_rotation.rotation_of(LLAMA31, LLAMA31.config(), "llama3"),
    ),
)


# -- transformers 5.0 and 5.23 with each other and with us -----------------------------------------


def _softmax_multiplier(**options: float) -> float:
    """Return a patch's multiplier of the softmax scale in multi-head latent attention."""
    config = DEEPSEEK3.config()
    config.num_hidden_layers = config.first_k_dense_replace = 1
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return rope_patch.patch(model, "yarn", start="unscaled", **options).softmax_mscale ** 2


# Tests check the live modules of the installed version.
VERSIONS = (
    Disagreement(
        about="`dynamic` above the trained length, after a longer text",
        who="5.23: the longest text's frequencies; 5.0 computes them for each text",
        where="Llama-2-7B, 4,200 tokens after 16,384",
        of="frequency",
        ours=lambda: ours("dynamic", LLAMA2, seq_len=4200),
        theirs=lambda: formulas.ntk(LLAMA2, 16384 / 4096),
        choice="each row by its own length, whatever came before",
        links=(TRANSFORMERS, link("#25104", "gh:huggingface/transformers/issues/25104")),
        followed=lambda: formulas.ntk(LLAMA2, 4200 / 4096),
    ),
    Disagreement(
        about="`dynamic` below the trained length, after a longer text",
        who="5.0: the last longer text's frequencies; 5.23 resets them, though not at that length",
        where="Llama-2-7B, 2,048 tokens after 16,384",
        of="frequency",
        ours=lambda: ours("dynamic", LLAMA2, seq_len=2048),
        theirs=lambda: formulas.ntk(LLAMA2, 16384 / 4096),
        choice="unscaled, bit for bit",
        links=(TRANSFORMERS,),
        followed=lambda: formulas.default(LLAMA2),
    ),
    Disagreement(
        about="softmax scale of DeepSeek-V2 under its own YaRN",
        who="5.0: not sharpened; 5.23: by the square of the law at `mscale_all_dim`",
        where="DeepSeek-V2, its own factor 40, both mscales 0.707",
        of="softmax scale",
        ours=lambda: ([], _softmax_multiplier(factor=40, mscale=0.707, mscale_all_dim=0.707)),
        theirs=lambda: ([], 1.0),
        choice="as 5.23 and DeepSeek's own code, in every version",
        links=(link("#47435", "gh:huggingface/transformers/pull/47435"), DEEPSEEK_CODE),
        followed=lambda: ([], formulas.yarn_attention_factor(40, 0.707) ** 2),
    ),
    Disagreement(
        about="a flat `rope_parameters` where layer types differ",
        who="5.23: ignored (a flat `rope_scaling` goes to full attention); 5.0: KeyError",
        where="Gemma-3-1B, full attention, `yarn`, factor 4",
        of="frequency",
        ours=lambda: ours("yarn", GEMMA3_FULL, factor=4),
        theirs=lambda: formulas.default(GEMMA3_FULL),
        choice="the live model is patched, so it acts; saved nested",
        links=(link("#41934", "gh:huggingface/transformers/pull/41934"), TRANSFORMERS),
        followed=lambda: formulas.yarn(GEMMA3_FULL, 4),
    ),
)

ONLY_5_0 = (
    "has no `proportional`: a config that names it raises `KeyError`;",
    "raises `KeyError` for a `yarn` in one of several layer types (Gemma 3), though its function "
    "computes it;",
    "raises `UnboundLocalError` at the second long text under a `longrope` in one of several layer "
    "types.",
)
