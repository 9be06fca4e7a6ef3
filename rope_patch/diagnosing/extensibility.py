"""Count the architecture's choices that make a model harder to extend.

OlmPool (Bertsch et al. 2026, arXiv:2608.10296, https://openreview.net/forum?id=MRXATMdzeC) took 26
7B models of one recipe to 64k tokens: data, tokenizer and extension the same, and the attention
varied. Four choices cost long-context scores: each little alone, three or more together up to 47%.
Which way of each choice is the harmful one, and by how much: https://www.olmpool.com.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from rope_patch.diagnosing.facts import Facts, Finding
from rope_patch.patching.architecture.mla_scale import find_mla_attentions
from rope_patch.patching.architecture.rotary_modules import find_owner

SOURCE = "arXiv:2608.10296 (OlmPool)"
_HARMFUL_TOGETHER = 3  # number of choices from which on the paper reports losses of up to 47%
_CHOICES = 4
# Query heads a key head up to which OlmPool shows no cost: its best model has 16 key heads of 32.
_HARMLESS_SHARING = 2
_LONG_PRETRAINING = 8192  # tokens; the longer of the paper's two lengths (4,096 and 8,192)
# Names of the norms of queries that attentions of transformers have.
_QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm", "q_layer_norm", "qk_norm")


@dataclass(frozen=True)
class Choice:
    """One of OlmPool's four choices as a model has it.

    Attributes:
        text: The choice, with its numbers.
        numbers: The same for programs.
    """

    text: str
    numbers: dict[str, float]


def extensibility_findings(facts: Facts) -> Iterator[Finding]:
    """Yield a note if an architecture has three or more of OlmPool's four choices."""
    decoders = [find_owner(facts.subject.model, r) for r in facts.subject.rotaries]  # type: ignore[arg-type]
    config = facts.subject.config
    candidates = [
        *(query_norm(decoder) for decoder in decoders[:1]),
        grouped_heads(config, is_latent=any(find_mla_attentions(each) for each in decoders)),
        sliding_windows(config, facts.target_length),
        short_pretraining(facts),
    ]
    choices = [choice for choice in candidates if choice is not None]
    if len(choices) < _HARMFUL_TOGETHER:
        return
    unknown = "" if decoders else "; whether it normalises queries is unknown without a model"
    yield Finding(
        "note",
        "hard-to-extend",
        f"the architecture has {len(choices)} of the {_CHOICES} choices under which 7B models kept "
        f"less of a longer context after the same extension: {_HARMFUL_TOGETHER} or more together "
        f"cost up to 47% of a long-context score, {SOURCE}",
        "; ".join(choice.text for choice in choices) + unknown,
        "measure answers from long texts before and after the extension (rope-patch compare): loss "
        "and short tasks did not tell these models apart",
        numbers={
            "choices": len(choices),
            **{name: value for choice in choices for name, value in choice.numbers.items()},
        },
    )


def query_norm(decoder: nn.Module) -> Choice | None:
    """Return the choice to normalise queries and keys, if a decoder's attentions do."""
    for module in decoder.modules():
        for name in _QUERY_NORMS:
            norm = module._modules.get(name)
            if norm is not None and not isinstance(norm, nn.Identity):
                return Choice("queries and keys are normalised", {"query_norm": 1})
    return None


def grouped_heads(config: Any, *, is_latent: bool) -> Choice | None:
    """Return the choice of few key heads (GQA), if more than two query heads share each.

    Args:
        config: The text config.
        is_latent: Whether heads share a latent instead (MLA), which OlmPool has not.
    """
    queries, keys = _number(config, "num_attention_heads"), _number(config, "num_key_value_heads")
    if is_latent or not queries or not keys or queries <= _HARMLESS_SHARING * keys:
        return None
    text = f"{queries} query heads share {keys} key head{'s' if keys > 1 else ''}"
    return Choice(text, {"query_heads": queries, "key_heads": keys})


def sliding_windows(config: Any, length: int) -> Choice | None:
    """Return the choice of windows shorter than a length, if some layers have one.

    Args:
        config: The text config.
        length: Tokens that the model is to read.
    """
    window = _number(config, "sliding_window") or _number(config, "attention_chunk_size")
    layers = _number(config, "num_hidden_layers")
    if window is None or layers is None or window >= length:
        return None
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        windowed = sum("sliding" in name or "chunked" in name for name in layer_types)
    else:
        windowed = layers if getattr(config, "use_sliding_window", True) else 0
    if not windowed:
        return None
    return Choice(
        f"{windowed} of {layers} layers see {window:,} tokens back",
        {"window": window, "windowed_layers": windowed, "layers": layers},
    )


def short_pretraining(facts: Facts) -> Choice | None:
    """Return the choice of a short pretraining, if the stated length is below OlmPool's longer one.

    A longer stated length tells nothing: it may be that of a later stage.
    """
    trained = min(layer.geometry.trained_length for layer in facts.layers.values())
    if trained >= _LONG_PRETRAINING:
        return None
    return Choice(f"trained on {trained:,} tokens at once", {"trained": trained})


def _number(config: Any, name: str) -> int | None:
    """Return a whole number of a config; None if it has none, or another one in each layer."""
    try:
        value = getattr(config, name, None)
    except Exception:  # transformers' error for numbers that differ between layers
        return None
    return value if isinstance(value, int) else None
