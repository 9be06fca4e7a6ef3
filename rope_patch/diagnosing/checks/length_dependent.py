"""Check length-dependent scalings: where they begin, and their effect on cached keys."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rope_patch.diagnosing.finding import Finding
from rope_patch.diagnosing.layer_facts import Facts, LayerFacts, frequency_difference
from rope_patch.methods import Frequencies, build

# Architectures that recompute the prompt without cached keys beyond the original length.
_RECOMPUTING = ("phi3", "phimoe", "phi4_multimodal")


def dynamic_findings(facts: Facts, layer: LayerFacts) -> Iterator[Finding]:
    """Yield findings about transformers' own dynamic NTK."""
    start = (
        facts.subject.config.max_position_embeddings
    )  # transformers takes it for the trained length
    trained, factor = layer.geometry.trained_length, float(layer.parameters["factor"])
    unscaled = Frequencies(layer.geometry.inv_freq())
    if trained < start:
        intended = build("dynamic", factor=factor, growth="exact").frequencies(
            layer.geometry, start
        )
        count, farthest = frequency_difference(intended, unscaled)
        original_length = layer.parameters.get("original_max_position_embeddings")
        yield Finding(
            "error",
            "dynamic-starts-late",
            "transformers' dynamic scaling begins at max_position_embeddings"
            + (
                ", and ignores original_max_position_embeddings"
                if original_length is not None
                else ""
            ),
            f"nothing is scaled up to {start:,} tokens, {start / trained:g} times the trained "
            f"{trained:,}: there {count} of {len(unscaled.inv_freq)} pairs should be stretched, by "
            f"up to {farthest:.4g}",
            facts.subject.patch_call("dynamic", f"factor={factor:g}, trained_length={trained}")
            + f", or max_position_embeddings {trained} in the config",
            layer.layer_type,
            {"starts": start, "trained": trained, "ratio": farthest, "changed": count},
        )
    length = max(facts.target_length, 2 * start)
    grown = build("dynamic", factor=factor, growth="exact").frequencies(
        layer.geometry, length * trained / start
    )
    pair, angle = _worst_stale_pair(unscaled, grown, start)
    yield Finding(
        "warning",
        "cached-keys-left-behind",
        "with a key-value cache, transformers' dynamic scaling leaves cached keys under the "
        "frequencies of their time",
        f"a text that grows from {start:,} to {length:,} tokens: the key at {start - 1:,} is "
        f"{angle:.3g} radians off in pair {pair}",
        facts.subject.patch_call("dynamic", f"factor={factor:g}, trained_length={trained}"),
        layer.layer_type,
        {"length": length, "pair": pair, "radians": angle},
    )


def longrope_findings(facts: Facts, layer: LayerFacts) -> Iterator[Finding]:
    """Yield findings about LongRoPE, whose two sets switch with a batch's longest row."""
    short, long = layer.configured(1), layer.configured(math.inf)
    if short is None or long is None or short.same_as(long):
        return
    original = layer.geometry.trained_length
    pair, angle = _worst_stale_pair(short, long, original)
    evidence = (
        f"a text that passes {original:,} tokens: the key at {original - 1:,} is {angle:.3g} "
        f"radians off in pair {pair}"
    )
    numbers = {"length": original + 1, "pair": pair, "radians": angle}
    if facts.subject.config.model_type in _RECOMPUTING:
        yield Finding(
            "note",
            "prompt-read-again",
            "where a text passes the original length, generate drops the cached keys of this "
            "architecture and reads the text again",
            evidence + ", were they kept",
            "",
            layer.layer_type,
            numbers,
        )
        return
    factor = layer.configured_method.factor if layer.configured_method else 1.0
    parameters_path = "model.config.rope_parameters" + (
        "" if layer.layer_type is None else f'["{layer.layer_type}"]'
    )
    factor_keys = ("long_factor", "short_factor", "attention_factor")
    options = ", ".join(
        f'{name}=p["{name}"]' for name in factor_keys if layer.parameters.get(name) is not None
    )
    yield Finding(
        "warning",
        "cached-keys-left-behind",
        "with a key-value cache, transformers leaves the keys of a text that passes the original "
        "length under the short factors",
        evidence,
        f'p = {parameters_path}; rope_patch.patch(model, "longrope", factor={factor:g}, '
        'start="unscaled", '
        f"{options})",
        layer.layer_type,
        numbers,
    )


def _worst_stale_pair(before: Frequencies, after: Frequencies, length: int) -> tuple[int, float]:
    """Return the pair whose key at the last of `length` positions is most stale, in radians."""
    angles = ((before.inv_freq - after.inv_freq).abs() * (length - 1)).tolist()
    pair = max(range(len(angles)), key=angles.__getitem__)
    return pair, angles[pair]
