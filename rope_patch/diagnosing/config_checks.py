"""Check a config: its raw JSON, and its scaling against freshly built rotary modules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rope_patch.diagnosing.facts import (
    Facts,
    Finding,
    LayerFacts,
    frequency_difference,
    transformers_rope_types,
)
from rope_patch.methods import Frequencies, build
from rope_patch.methods.ntk_by_parts import yarn_mscale
from rope_patch.pretrained.transformers_registry import needs_registration
from rope_patch.rope_config import config_rope_type, misspelt_keys

# Rope types that transformers renames when it reads a config.
_ALIASES = {"su": "longrope", "mrope": "default"}


def config_json_findings(facts: Facts) -> Iterator[Finding]:
    """Yield differences between config.json's decoder part and the config; none without a file."""
    raw_config = facts.subject.raw_config
    if not raw_config:
        return
    rope_dicts = {
        name: raw_config[name]
        for name in ("rope_scaling", "rope_parameters")
        if _is_nonempty_dict(raw_config, name)
    }
    if len(rope_dicts) == 2 and _scalings(raw_config["rope_scaling"]) != _scalings(
        raw_config["rope_parameters"]
    ):
        scalings = sorted({layer.scaling for layer in facts.layers.values()})
        yield Finding(
            "error",
            "two-dicts",
            "config.json has rope_scaling and rope_parameters, which say different things",
            f"rope_scaling asks for {', '.join(_scalings(raw_config['rope_scaling']))}, "
            "rope_parameters "
            f"for {', '.join(_scalings(raw_config['rope_parameters']))}; transformers took "
            f"{', '.join(scalings)}",
            "take one of them out of config.json; transformers 5 writes rope_parameters",
        )
    else:
        for name, rope_dict in rope_dicts.items():
            yield from _lost_scaling(facts, name, rope_dict)
    yield from _theta_finding(facts, raw_config, rope_dicts)


def _lost_scaling(facts: Facts, name: str, rope_dict: dict[str, Any]) -> Iterator[Finding]:
    """Yield a finding if a configured scaling reaches no layer."""
    actual_scalings = {layer.scaling for layer in facts.layers.values()}
    rope_parameters = facts.subject.config.rope_parameters
    for scaling in _scalings(rope_dict):
        if scaling == "default" or scaling in actual_scalings:
            continue
        if (
            config_rope_type({k: v for k, v in rope_parameters.items() if not isinstance(v, dict)})
            == scaling
        ):
            continue  # beside the layer types: another check reports it
        yield Finding(
            "error",
            "scaling-dropped",
            f"config.json asks for {scaling!r} in {name}, and nothing of it reaches the model",
            f"every layer runs with {', '.join(sorted(actual_scalings))}",
            "spell it as rope_parameters, rope_type and rope_theta included",
        )


def _theta_finding(
    facts: Facts, raw_config: dict[str, Any], rope_dicts: dict[str, Any]
) -> Iterator[Finding]:
    thetas = {layer.geometry.theta for layer in facts.layers.values()}
    actual_thetas = ", ".join(f"{theta:g}" for theta in sorted(thetas))
    top_level_theta = raw_config.get("rope_theta")
    if (
        isinstance(top_level_theta, int | float)
        and not isinstance(top_level_theta, bool)
        and float(top_level_theta) not in thetas
    ):
        yield Finding(
            "error",
            "theta-lost",
            f"config.json says rope_theta {top_level_theta:g}, and the model rotates by "
            f"{actual_thetas}",
            "the slowest pair turns "
            f"{max(top_level_theta, min(thetas)) / min(top_level_theta, min(thetas)):.3g} times "
            f"{'faster' if min(thetas) < top_level_theta else 'slower'} or so than the file says",
            f"write rope_theta {top_level_theta:g} into rope_parameters, and nowhere else",
            numbers={"written": float(top_level_theta), "taken": min(thetas)},
        )
    elif (
        top_level_theta is None
        and rope_dicts
        and not any(_contains_theta(found) for found in rope_dicts.values())
    ):
        yield Finding(
            "warning",
            "theta-unsaid",
            "config.json has a dict about the rotation without rope_theta, and none beside it",
            f"transformers takes its default for the architecture, {actual_thetas}",
            "write the rope_theta that the model was trained with into rope_parameters",
            numbers={"taken": min(thetas)},
        )


def _contains_theta(rope_dict: dict[str, Any]) -> bool:
    nested = [value for value in rope_dict.values() if isinstance(value, dict)]
    return any("rope_theta" in inner for inner in [rope_dict, *nested])


def _scalings(rope_dict: dict[str, Any]) -> list[str]:
    nested = [value for value in rope_dict.values() if isinstance(value, dict)]
    names = [config_rope_type(inner) for inner in nested or [rope_dict]]
    return sorted({_ALIASES.get(name, name) for name in names})


def _is_nonempty_dict(raw_config: dict[str, Any], name: str) -> bool:
    return isinstance(raw_config.get(name), dict) and bool(raw_config[name])


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
    if short is None or long is None or frequency_difference(short, long)[0] == 0:
        return
    if layer.actual_far is not None and not layer.actual_far.close_to(long):
        return  # `_formula_mismatch` reports it
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
        yield from _far_formula_mismatch(layer)
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
    yield _formula_finding(layer, configured, layer.actual)


def _far_formula_mismatch(layer: LayerFacts) -> Iterator[Finding]:
    """Yield a finding if LongRoPE is not the config's beyond the original length."""
    configured, short = layer.configured(math.inf), layer.configured(1)
    if configured is None or layer.actual_far is None or configured.close_to(layer.actual_far):
        return
    original = layer.geometry.trained_length
    found = _formula_finding(layer, configured, layer.actual_far, f" beyond {original:,} tokens")
    if short and frequency_difference(short, layer.actual_far)[0] == 0:
        found = replace(
            found,
            code="long-factors-unused",
            evidence=f"it keeps the short factors there: {found.evidence}",
            fix=f"stay within {original:,} tokens here, or run it where long_factor is read",
        )
    yield found


def _formula_finding(
    layer: LayerFacts, configured: Frequencies, actual: Frequencies, where: str = ""
) -> Finding:
    """Return the finding that the frequencies of a new module are not the config's."""
    count, farthest = frequency_difference(configured, actual)
    return Finding(
        "error",
        "formula",
        f"transformers computes other frequencies than {layer.scaling!r} as the config has it"
        + where,
        f"{count} of {len(configured.inv_freq)} pairs differ, by up to a factor of {farthest:.6g}; "
        f"attention factor {actual.attention_factor:.6g} instead of "
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
        if key in _ALL_KEYS - _KEYS_READ.get(layer.scaling, _ALL_KEYS)
        and value is not None
        # Architectures' own files read keys beside a scaling's formula (Phi-3.5-MoE, HunYuan).
        and (layer.scaling == "default" or key not in layer.own_keys)
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
