"""List disagreements between implementations of NTK-aware and dynamic scaling."""

from __future__ import annotations

import engines
import formulas
import hf_rotation
from comparison import ours
from disagreement import SGLANG, TRANSFORMERS, VLLM, YARN_REPO, Disagreement, link
from formulas import Rotation
from published import LLAMA2

from rope_patch.geometry import Geometry
from rope_patch.methods import build


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
