"""List disagreements between implementations of YaRN: frequencies and attention factor."""

from __future__ import annotations

from dataclasses import replace

import engines
import formulas
import hf_rotation
from comparison import ours
from disagreement import (
    DEEPSEEK_CODE,
    GPT_OSS_CODE,
    LITGPT,
    LLAMA_CPP,
    LONGROPE,
    MLX,
    PAPER,
    SGLANG,
    TRANSFORMERS,
    VLLM,
    YARN_REPO,
    Disagreement,
    link,
)
from published import (
    DEEPSEEK3,
    GEMMA3_FULL,
    GEMMA3_SLIDING,
    GPT_OSS,
    LLAMA2,
    LLAMA31,
    MISTRAL_1,
    QWEN3,
)

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
