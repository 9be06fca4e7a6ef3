"""Evidence that a config's YaRN was trained in, rather than added after training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rope_patch.original_config import trained_config_length

# Model types whose published checkpoints were trained under the YaRN of their config.
TRAINED_WITH_YARN = {
    "deepseek_v2": "arXiv:2405.04434, section 3.1.4",
    "deepseek_v3": "arXiv:2412.19437, section 4.3",
    "gpt_oss": "arXiv:2508.10925",
    "kimi_k2": "arXiv:2507.20534",
    "laguna": "the configs of poolside's checkpoints",
    "ministral3": "the configs of Mistral's checkpoints",
    "olmo3": "arXiv:2512.13961, section 3.6",
}

# Constants of the formula. Recipes that put YaRN on a finished model name a factor and a length.
_CONSTANTS = (
    "beta_fast",
    "beta_slow",
    "truncate",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
)


def trained_yarn_evidence(config: Any, parameters: Mapping[str, Any]) -> str | None:
    """Return why a config's YaRN counts as trained in; None if nothing says so.

    A record that rope_patch trained the model under it decides. Else the config must claim the
    whole length that its YaRN reaches, and one of these decides: the model type is in
    `TRAINED_WITH_YARN`; the YaRN authors' `finetuned` is true; or the config states constants of
    the formula, which recipes for untrained use leave out.

    Args:
        config: The text config.
        parameters: Its `rope_parameters` for one layer type, with `rope_type` "yarn".
    """
    if trained_config_length(config):
        return "rope_patch recorded that the model was trained under it"
    factor, original = parameters.get("factor"), parameters.get("original_max_position_embeddings")
    claimed = getattr(config, "max_position_embeddings", None)
    if not factor or not original or not isinstance(claimed, int):
        return None
    if factor <= 1 or claimed < round(factor * original) - 1:
        return None
    model_type = str(getattr(config, "model_type", ""))
    if model_type in TRAINED_WITH_YARN:
        return f"{model_type} was trained under it: {TRAINED_WITH_YARN[model_type]}"
    if parameters.get("finetuned") is True:
        return "the config says finetuned"
    stated = [name for name in _CONSTANTS if parameters.get(name) is not None]
    return f"the config states its {', '.join(stated)}" if stated else None
