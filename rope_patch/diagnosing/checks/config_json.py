"""Check the raw config.json against the config that transformers made of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rope_patch.diagnosing.finding import Finding
from rope_patch.diagnosing.layer_facts import Facts
from rope_patch.rope_config import config_rope_type

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
