"""Check the config's scaling against freshly built rotary modules, without weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rope_patch.diagnosing.checks.length_dependent import dynamic_findings, longrope_findings
from rope_patch.diagnosing.finding import Finding
from rope_patch.diagnosing.layer_facts import (
    Facts,
    LayerFacts,
    frequency_difference,
    transformers_rope_types,
)
from rope_patch.methods.ntk_by_parts import yarn_mscale
from rope_patch.pretrained.transformers_registry import needs_registration
from rope_patch.rope_config import config_rope_type, misspelt_keys

# Keys that spell scalings in transformers and elsewhere, and those that each scaling reads.
_YARN_KEYS = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
_KEYS_READ = {
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings", *_YARN_KEYS},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor"}
    | {"short_factor", "long_factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor"}
    | {"high_freq_factor"},
    "proportional": {"factor"},
    "default": set(),
}
_ALL_KEYS = set().union(*_KEYS_READ.values()) | {
    "alpha",
    "attn_factor",
    "extrapolation_factor",
    "finetuned",
    "short_mscale",
    "long_mscale",
}


def scaling_findings(facts: Facts) -> Iterator[Finding]:
    """Yield all findings about the config's scaling."""
    yield from _flat_dict_finding(facts)
    if facts.subject.problem is not None:
        yield Finding(
            "note",
            "no-model",
            "no rotation of transformers' could be made of the config here, so the config alone "
            "was looked at",
            facts.subject.problem,
        )
    if facts.assumed_length is not None:
        yield Finding(
            "note",
            "original-length-unsaid",
            "the config scales its rotation and does not say how many tokens the model was "
            "trained on before",
            f"{facts.assumed_length:,} tokens, its max_position_embeddings, are taken for it here",
            "pass trained_length=... (--trained-length) if that is not so",
            numbers={"assumed": facts.assumed_length},
        )
    for layer in facts.layers.values():
        if layer.scaling not in transformers_rope_types():
            yield _unknown_rope_type(layer)
            continue
        yield from _misspelt_keys(layer)
        yield from _formula_mismatch(facts, layer)
        yield from _ignored_keys(facts, layer)
        if layer.scaling == "dynamic":
            yield from dynamic_findings(facts, layer)
        if layer.scaling == "longrope":
            yield from longrope_findings(facts, layer)
        if layer.scaling == "yarn":
            yield from _length_mismatch(facts, layer)


def _unknown_rope_type(layer: LayerFacts) -> Finding:
    fix = "correct rope_type in the config"
    if needs_registration(layer.scaling):
        fix = (
            "rope_patch.register_rope_types() before it is loaded, or rope_type 'default' in the "
            f"config and rope_patch.patch(model, {layer.scaling!r}, ...)"
        )
    return Finding(
        "error",
        "unknown-scaling",
        f"transformers knows no rope_type {layer.scaling!r}: a model of this config cannot be made",
        f"it knows {', '.join(sorted(transformers_rope_types()))}",
        fix,
        layer.layer_type,
    )


def _flat_dict_finding(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for a flat dict on a model with layer types: transformers ignores it."""
    parameters = facts.subject.config.rope_parameters
    if None in facts.layers:
        return
    flat = {key: value for key, value in parameters.items() if not isinstance(value, dict)}
    scaling = config_rope_type(flat)
    if scaling == "default" or any(scaling == layer.scaling for layer in facts.layers.values()):
        return
    layer_types = list(facts.layers)
    full_attention_types = [
        layer_type
        for layer_type in layer_types
        if layer_type and "sliding" not in layer_type and "chunked" not in layer_type
    ]
    layer_type = (full_attention_types or layer_types)[0]
    layer = facts.layers[layer_type]
    inner = {key: value for key, value in flat.items() if key != "type"} | {"rope_type": scaling}
    inner.setdefault("rope_theta", layer.parameters.get("rope_theta"))
    factor = flat.get("factor")
    pairs = layer.geometry.rotary_dim // 2
    yield Finding(
        "error",
        "flat-on-layer-types",
        f"rope_parameters asks for {scaling!r} beside its layer types, where transformers does not "
        "look: no layer is scaled",
        f"layer types {', '.join(map(str, layer_types))} run with "
        f"{', '.join(sorted({found.scaling for found in facts.layers.values()}))}: 0 of {pairs} "
        f"pairs stretched{f', instead of by up to {factor:g}' if _read_number(factor) else ''}",
        f'config.rope_parameters["{layer_type}"] = {inner!r} before the model is made',
        numbers={"pairs": pairs, "changed": 0},
    )


def _formula_mismatch(facts: Facts, layer: LayerFacts) -> Iterator[Finding]:
    """Yield a finding if a fresh module differs from the config's formula."""
    configured = layer.configured(1)
    if configured is None or layer.actual is None or configured.close_to(layer.actual):
        return
    count, farthest = frequency_difference(configured, layer.actual)
    nested = layer.layer_type is not None and layer.parameters.get("truncate") is False
    if layer.scaling == "yarn" and nested:
        where = facts.subject.config.rope_parameters.get("truncate")
        yield Finding(
            "error",
            "truncate-unread",
            "truncate stands in the layer type's dict, and transformers reads it one level above",
            f"there it is {where!r}, so the ramp's ends are rounded: {count} of "
            f"{len(configured.inv_freq)} pairs differ, by up to {100 * (farthest - 1):.3g}%",
            'config.rope_parameters["truncate"] = False before the model is made, if all layer '
            "types mean it",
            layer.layer_type,
            {"pairs": len(configured.inv_freq), "changed": count, "ratio": farthest},
        )
        return
    yield Finding(
        "error",
        "formula",
        f"transformers computes other frequencies than {layer.scaling!r} as the config has it",
        f"{count} of {len(configured.inv_freq)} pairs differ, by up to a factor of {farthest:.6g}; "
        f"attention factor {layer.actual.attention_factor:.6g} instead of "
        f"{configured.attention_factor:.6g}",
        "",
        layer.layer_type,
        {"pairs": len(configured.inv_freq), "changed": count, "ratio": farthest},
    )


def _ignored_keys(facts: Facts, layer: LayerFacts) -> Iterator[Finding]:
    """Yield a finding for keys of other scalings, which this scaling ignores."""
    unread = [
        key
        for key, value in layer.parameters.items()
        if key in _ALL_KEYS - _KEYS_READ.get(layer.scaling, _ALL_KEYS) and value is not None
    ]
    if layer.scaling == "dynamic" and "original_max_position_embeddings" in unread:
        unread.remove("original_max_position_embeddings")  # reported separately
    if layer.scaling == "yarn" and "attn_factor" in unread and _says_attention_factor(layer):
        unread.remove("attn_factor")  # what some engines read instead, as exports write it
    if not unread:
        return
    settings = ", ".join(f"{key} = {_format(layer.parameters[key])}" for key in unread)
    fix = f"take {'it' if len(unread) == 1 else 'them'} out of the config"
    if "attn_factor" in unread:
        fix = "attention_factor is transformers' name for attn_factor"
    if layer.scaling == "default":
        fix = "name the scaling that they belong to (rope_type), or " + fix
    yield Finding(
        "note" if layer.scaling == "default" and unread == ["factor"] else "warning",
        "unread-keys",
        f"{layer.scaling!r} does not read {', '.join(unread)}",
        f"the config has {settings}, which change{'s' if len(unread) == 1 else ''} no frequency in "
        "transformers",
        fix,
        layer.layer_type,
    )


def _misspelt_keys(layer: LayerFacts) -> Iterator[Finding]:
    """Yield a finding for keys that nothing reads, with the known ones that they nearly are."""
    misspelt = misspelt_keys(layer.parameters)
    if not misspelt:
        return
    settings = ", ".join(f"{key} = {_format(layer.parameters[key])}" for key in misspelt)
    yield Finding(
        "warning",
        "misspelt-keys",
        f"rope_parameters has {', '.join(map(repr, misspelt))}, which nothing reads",
        f"the config has {settings}, which changes no frequency",
        "write " + ", ".join(f"{right!r} for {wrong!r}" for wrong, right in misspelt.items()),
        layer.layer_type,
    )


def _says_attention_factor(layer: LayerFacts) -> bool:
    """Return whether YaRN's `attn_factor` says the same as its `attention_factor`."""
    parameters = layer.parameters
    if not parameters.get("attention_factor"):
        return False
    said = parameters["attn_factor"] * yarn_mscale(parameters["factor"])
    return math.isclose(parameters["attention_factor"], said, rel_tol=1e-6)


def _length_mismatch(facts: Facts, layer: LayerFacts) -> Iterator[Finding]:
    """Compare YaRN's factor times original length with max_position_embeddings."""
    max_positions = getattr(facts.subject.config, "max_position_embeddings", None)
    original, factor = layer.geometry.trained_length, layer.parameters["factor"]
    if not isinstance(max_positions, int):
        return
    reached = round(original * factor)
    raw_config = facts.subject.raw_config
    if max_positions == original and factor > 1:
        says_original = any(
            isinstance(found, dict)
            and (found.get(layer.layer_type) or found).get("original_max_position_embeddings")
            for found in (raw_config.get("rope_parameters"), raw_config.get("rope_scaling"))
        )
        is_silent = bool(raw_config) and not says_original
        yield Finding(
            "warning",
            "promises-too-little" if not is_silent else "original-length-unsaid",
            f"max_position_embeddings says {max_positions:,}, the scaling reaches {reached:,} "
            "tokens"
            + (
                ", and the config does not say original_max_position_embeddings, for which "
                "transformers takes max_position_embeddings"
                if is_silent
                else ""
            ),
            f"factor {factor:g} times {original:,}; what looks at max_position_embeddings "
            "(tokenizers, lm-eval, serving engines) stops there",
            f"max_position_embeddings {reached} and original_max_position_embeddings {original} "
            f"in the config; if the model was trained on {max_positions / factor:,.0f} tokens, "
            f"original_max_position_embeddings {max_positions / factor:.0f}",
            layer.layer_type,
            {"full": max_positions, "reached": reached},
        )
    elif abs(max_positions - reached) > 1:
        yield Finding(
            "warning",
            "factor-and-lengths",
            f"factor {factor:g} times {original:,} trained tokens is {reached:,}, and "
            f"max_position_embeddings says {max_positions:,}",
            "transformers goes by the factor; its own lengths would make it "
            f"{max_positions / original:g}",
            f"factor {max_positions / original:g} in the config for {max_positions:,} tokens, or "
            f"max_position_embeddings {reached}",
            layer.layer_type,
            {
                "full": max_positions,
                "reached": reached,
                "factor": factor,
                "implied": max_positions / original,
            },
        )


def _read_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _format(value: object) -> str:
    return f"[{len(value)} numbers]" if isinstance(value, list | tuple) else repr(value)
