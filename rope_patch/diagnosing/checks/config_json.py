"""What config.json says, against what transformers made of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rope_patch.diagnosing.finding import Finding
from rope_patch.diagnosing.layer_facts import Facts
from rope_patch.rope_config import config_rope_type

# Names that transformers turns into others when it reads a config.
_ALIASES = {"su": "longrope", "mrope": "default"}


def config_json_findings(facts: Facts) -> Iterator[Finding]:
    """Compares the decoder's part of config.json with the config; nothing without one."""
    said = facts.subject.raw_config
    if not said:
        return
    spelled = {
        name: said[name]
        for name in ("rope_scaling", "rope_parameters")
        if _is_nonempty_dict(said, name)
    }
    if len(spelled) == 2 and _scalings(said["rope_scaling"]) != _scalings(said["rope_parameters"]):
        won = sorted({layer.scaling for layer in facts.layers.values()})
        yield Finding(
            "error",
            "two-dicts",
            "config.json has rope_scaling and rope_parameters, which say different things",
            f"rope_scaling asks for {', '.join(_scalings(said['rope_scaling']))}, rope_parameters "
            f"for {', '.join(_scalings(said['rope_parameters']))}; transformers took "
            f"{', '.join(won)}",
            "take one of them out of config.json; transformers 5 writes rope_parameters",
        )
    else:
        for name, found in spelled.items():
            yield from _lost_scaling(facts, name, found)
    yield from _theta_finding(facts, said, spelled)


def _lost_scaling(facts: Facts, name: str, found: dict[str, Any]) -> Iterator[Finding]:
    """A scaling that is asked for and arrives in no layer."""
    run = {layer.scaling for layer in facts.layers.values()}
    flat = facts.subject.config.rope_parameters
    for asked in _scalings(found):
        if asked == "default" or asked in run:
            continue
        if config_rope_type({k: v for k, v in flat.items() if not isinstance(v, dict)}) == asked:
            continue  # left beside the layer types: told elsewhere
        yield Finding(
            "error",
            "scaling-dropped",
            f"config.json asks for {asked!r} in {name}, and nothing of it reaches the model",
            f"every layer runs with {', '.join(sorted(run))}",
            "spell it as rope_parameters, rope_type and rope_theta included",
        )


def _theta_finding(
    facts: Facts, said: dict[str, Any], spelled: dict[str, Any]
) -> Iterator[Finding]:
    thetas = {layer.geometry.theta for layer in facts.layers.values()}
    taken = ", ".join(f"{theta:g}" for theta in sorted(thetas))
    top = said.get("rope_theta")
    if isinstance(top, int | float) and not isinstance(top, bool) and float(top) not in thetas:
        yield Finding(
            "error",
            "theta-lost",
            f"config.json says rope_theta {top:g}, and the model rotates by {taken}",
            f"the slowest pair turns {max(top, min(thetas)) / min(top, min(thetas)):.3g} times "
            f"{'faster' if min(thetas) < top else 'slower'} or so than the file says",
            f"write rope_theta {top:g} into rope_parameters, and nowhere else",
            numbers={"written": float(top), "taken": min(thetas)},
        )
    elif top is None and spelled and not any(_contains_theta(found) for found in spelled.values()):
        yield Finding(
            "warning",
            "theta-unsaid",
            "config.json has a dict about the rotation without rope_theta, and none beside it",
            f"transformers takes its default for the architecture, {taken}",
            "write the rope_theta that the model was trained with into rope_parameters",
            numbers={"taken": min(thetas)},
        )


def _contains_theta(found: dict[str, Any]) -> bool:
    nested = [value for value in found.values() if isinstance(value, dict)]
    return any("rope_theta" in inner for inner in [found, *nested])


def _scalings(found: dict[str, Any]) -> list[str]:
    nested = [value for value in found.values() if isinstance(value, dict)]
    names = [config_rope_type(inner) for inner in nested or [found]]
    return sorted({_ALIASES.get(name, name) for name in names})


def _is_nonempty_dict(said: dict[str, Any], name: str) -> bool:
    return isinstance(said.get(name), dict) and bool(said[name])
