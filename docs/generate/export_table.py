"""Write the table of checkpoints in docs/engines.md: `python docs/generate/export_table.py`.

Each checkpoint has the published rotation of its family, in a model without weights and with few
layers. Each of its rotations is exported to each engine. A cell says that engines were run with
the export (tests/engines/exports/verified.json, which those tests write), that the export was
written from the engine's code alone, or why it is refused. About a minute of CPU.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import rope_patch
from rope_patch.exporting import Export
from rope_patch.exporting.engine_fields import engine_version
from rope_patch.exporting.folder import merge_config
from rope_patch.exporting.target import Target
from rope_patch.pretrained import empty_model

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "engines.md"
VERIFIED = ROOT / "tests" / "engines" / "exports" / "verified.json"
FIRST, LAST = "<!-- written by docs/generate/export_table.py -->\n", "<!-- end -->\n"

ENGINES = {
    "transformers": "transformers",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp",
    "mlx": "mlx-lm",
    "mlx-vlm": "mlx-vlm",
}
ASKED: dict[str, dict[str, Any]] = {
    "own": {},
    "yarn": {"factor": 2.0},
    "linear": {"factor": 2.0},
    "ntk": {"factor": 2.0},
    "dynamic-yarn": {},
}

# Sizes that do not matter to a rotation.
_SIZES = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 128, "num_attention_heads": 4}
_FEW = {**_SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_TOWER = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
_TOWER["num_hidden_layers"] = 1
_QWEN_TOWER = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
_HYBRID = {
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
_INDEXER = {
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128},
    **{"indexer_budget": 64, "indexer_compress_ratio": 4, "hc_lowrank": 8},
}
_LATENT = {
    **_FEW,
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 16},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 64, "first_k_dense_replace": 1},
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, **_EXPERTS},
}
_MROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}
_YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
_LATENT_YARN = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
_STRETCHES = [1 + pair / 63 for pair in range(64)]


def _qwen(model_type: str, **fields: Any) -> Any:
    text = {"model_type": f"{model_type}_text", "num_hidden_layers": 4, "head_dim": 256}
    text |= {"max_position_embeddings": 262144, "rope_parameters": dict(_MROPE)}
    layers = {**_SIZES, "num_key_value_heads": 2, **_HYBRID, **text, **fields}
    if model_type == "qwen4_exp":
        del layers["intermediate_size"]
    return CONFIG_MAPPING[model_type](text_config=layers, vision_config=dict(_QWEN_TOWER))


def _families() -> dict[str, Any]:
    """Return functions that make the configs, with the model types that they need."""
    experts = {"num_experts": 4, "shared_expert_intermediate_size": 16, **_EXPERTS}
    make = CONFIG_MAPPING.__getitem__
    return {
        "Qwen3.5, Qwen3.8": lambda: _qwen("qwen3_5"),
        "Qwen3.5 and Qwen3.8 with experts": lambda: _qwen("qwen3_5_moe", **experts),
        "Qwen3.8-Flash-Next": lambda: _qwen("qwen4_exp", **experts, **_INDEXER),
        "DeepSeek-V4": lambda: make("deepseek_v4")(
            **{**_SIZES, "num_hidden_layers": 4, "q_lora_rank": 16, "n_routed_experts": 4},
            **{"o_groups": 2, "o_lora_rank": 16, "index_n_heads": 2, "index_topk": 16, **_EXPERTS},
            max_position_embeddings=1048576,
            rope_parameters={
                **_YARN,
                "factor": 16.0,
                "original_max_position_embeddings": 65536,
            },
        ),
        "gpt-oss": lambda: make("gpt_oss")(**_FEW, head_dim=64, num_local_experts=4),
        "GLM-5": lambda: make("glm_moe_dsa")(
            **{**_LATENT, "index_n_heads": 2, "index_head_dim": 64, "index_topk": 16},
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        "Kimi K2.5": lambda: make("kimi_k25")(
            text_config={
                **{"model_type": "deepseek_v3", **_LATENT, "max_position_embeddings": 262144},
                "rope_parameters": {
                    **{**_LATENT_YARN, "rope_theta": 5e4, "factor": 64.0},
                    "original_max_position_embeddings": 4096,
                },
            },
            vision_config=dict(_TOWER),
        ),
        "Gemma 4": lambda: make("gemma4")(
            text_config={
                **{**_FEW, "model_type": "gemma4_text", "num_hidden_layers": 6},
                "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
                **{"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16},
            },
            vision_config={**_TOWER, "num_key_value_heads": 2, "head_dim": 8},
            audio_config=None,
        ),
        "Ministral 3": lambda: make("mistral3")(
            text_config={
                **{**_FEW, "model_type": "ministral3", "head_dim": 128},
                "rope_parameters": {
                    **{**_LATENT_YARN, "rope_theta": 1e6, "factor": 16.0},
                    **{"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16384},
                },
            },
            vision_config={**_TOWER, "model_type": "pixtral"},
        ),
        "Phi-3.5-MoE": lambda: make("phimoe")(
            **{**_FEW, "hidden_size": 512, "num_local_experts": 4},
            rope_parameters={
                **{"rope_type": "longrope", "rope_theta": 1e4},
                **{"short_factor": _STRETCHES, "long_factor": [4 * s for s in _STRETCHES]},
                **{"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122},
                "original_max_position_embeddings": 4096,
            },
        ),
    }


FAMILIES = tuple(_families())


def missing_families() -> tuple[str, ...]:
    """Return the families that this transformers does not have."""
    return tuple(family for family in FAMILIES if not _is_known(family))


def _is_known(family: str) -> bool:
    try:
        make_config(family)
    except KeyError:
        return False
    return True


def make_config(family: str) -> Any:
    """Return the config of a family; KeyError if transformers does not have it."""
    return _families()[family]()


def make_model(family: str, asked: str) -> Any:
    """Return a family's model without weights, with what is asked; Refused where we do not."""
    config = make_config(family)
    model = empty_model(type(config).__name__, config)
    if asked != "own":
        rope_patch.patch(model, asked, kernels="hf", **ASKED[asked])
    return model


@functools.cache
def exports(family: str, asked: str) -> dict[str, Export | str]:
    """Return each engine's export, or the reason of a refusal."""
    try:
        model = make_model(family, asked)
    except rope_patch.Refused as refusal:
        return dict.fromkeys(ENGINES, str(refusal))
    found: dict[str, Export | str] = {}
    for engine in ENGINES:
        try:
            found[engine] = rope_patch.export(model, engine)
        except rope_patch.Refused as refusal:
            found[engine] = re.sub(r"^\S+ cannot run .*?: ", "", str(refusal))
        else:
            if engine == "transformers":
                _require_transformers_rotates(model, found[engine].config)
    return found


def cells(family: str, asked: str) -> dict[str, str]:
    """Return each engine's cell: "run", "read", "plugin" or the reason of a refusal."""
    words = {}
    for engine, export in exports(family, asked).items():
        is_run = f"{family}, {asked}" in verified()[engine]["cases"] or engine == "transformers"
        word = "run" if is_run else "read"
        words[engine] = export if isinstance(export, str) else word
        if isinstance(export, Export) and export.needs_plugin:
            words[engine] = "plugin"
    return words


def _require_transformers_rotates(model: Any, fields: dict[str, Any]) -> None:
    """Raise unless transformers' model of a config with an export's fields rotates as the model."""
    target = Target.from_model(model)
    whole = merge_config(json.loads(json.dumps(target.config.to_dict())), copy.deepcopy(fields))
    config = AutoConfig.for_model(**whole)
    read = Target.from_model(empty_model(type(config).__name__, config)).rotations
    for layer_type, rotation in target.rotations.items():
        mine, theirs = rotation.frequencies, read[layer_type].frequencies
        torch.testing.assert_close(mine.inv_freq, theirs.inv_freq, rtol=2e-6, atol=1e-17)
        assert abs(mine.attention_factor / theirs.attention_factor - 1) < 1e-6


@functools.cache
def verified() -> dict[str, Any]:
    """Return what tests of engines wrote: by engine, its version and the cases that were run."""
    record = json.loads(VERIFIED.read_text(encoding="utf-8"))
    nothing: dict[str, Any] = {"version": None, "cases": {}}
    return {engine: record.get(engine, nothing) for engine in ENGINES}


def table() -> str:
    """Return the table and the reasons, in Markdown."""
    heads = [name + _versions(engine) for engine, name in ENGINES.items()]
    lines = [
        f"| checkpoint | asked | {' | '.join(heads)} |",
        "|:--|:--" + "|:--" * len(heads) + "|",
    ]
    reasons: dict[str, int] = {}
    for family in FAMILIES:
        for asked in ASKED:
            row = cells(family, asked).values()
            words = [_word(cell, reasons) for cell in row]
            lines.append(f"| {family} | {_name(asked)} | {' | '.join(words)} |")
    listed = [f"- [{number}] {reason}" for reason, number in reasons.items()]
    return "\n".join([*lines, "", *listed, ""])


def _name(asked: str) -> str:
    return "its own rotation" if asked == "own" else f"`{asked}`" + " ×2" * bool(ASKED[asked])


def _versions(engine: str) -> str:
    if engine == "transformers":
        return " 5"
    read, run = engine_version(engine).partition(" ")[0], verified()[engine]["version"]
    return f" {read}" + (f" (run: {run})" if run not in (None, read) else "")


def _word(cell: str, reasons: dict[str, int]) -> str:
    if cell in ("run", "read", "plugin"):
        return cell
    return f"[{reasons.setdefault(cell, len(reasons) + 1)}]"


def main() -> None:
    """Write the table into the page."""
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(FIRST)
    _, tail = rest.split(LAST)
    PAGE.write_text(head + FIRST + table() + LAST + tail, encoding="utf-8")


if __name__ == "__main__":
    main()
