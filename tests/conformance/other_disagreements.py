"""List disagreements between implementations of LongRoPE, Llama 3, p-RoPE and others."""

from __future__ import annotations

import math

import engines
import formulas
import hf_rotation
import stateful
from comparison import ours
from disagreement import (
    MLX,
    SGLANG,
    TRANSFORMERS,
    VLLM,
    YARN_REPO,
    Disagreement,
    link,
)
from formulas import Rotation
from published import LLAMA2, LLAMA31, LLAMA32, MISTRAL_1, PHI35, SMOLLM2

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
        theirs=lambda: stateful.rotation_beside(PHI35, 8192, 2048),
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
        theirs=lambda: stateful.part_of_the_head(SMOLLM2, 0.75),
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
        theirs=lambda: stateful.rotation_after_cast(LLAMA31),
        choice="computed in float64 from the config, kept in float32",
        links=(TRANSFORMERS,),
        followed=lambda: hf_rotation.rotation_of(LLAMA31, LLAMA31.config(), "llama3"),
    ),
)
