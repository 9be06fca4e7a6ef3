"""List disagreements of transformers 5.0 and 5.23 with each other and with us."""

from __future__ import annotations

import formulas
from comparison import ours
from disagreement import DEEPSEEK_CODE, TRANSFORMERS, Disagreement, link
from published import DEEPSEEK3, GEMMA3_FULL, LLAMA2

from rope_patch.geometry import Geometry
from rope_patch.methods import build
from rope_patch.patching.mla_scale import SoftmaxScaled


def _softmax_multiplier(**options: float) -> float:
    """Return a patch's multiplier of the softmax scale in multi-head latent attention."""
    method = SoftmaxScaled(inner=build("yarn", **options))
    return method.softmax_mscale(Geometry(**DEEPSEEK3.numbers())) ** 2


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
