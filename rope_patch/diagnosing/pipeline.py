"""From a model, a config or a path to a diagnosis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rope_patch.diagnosing.advice import advise
from rope_patch.diagnosing.checks.adapter import adapter_findings
from rope_patch.diagnosing.checks.config_json import config_json_findings
from rope_patch.diagnosing.checks.config_scaling import scaling_findings
from rope_patch.diagnosing.checks.live_model import live_findings
from rope_patch.diagnosing.diagnosis import Diagnosis
from rope_patch.diagnosing.finding import SEVERITIES, Finding
from rope_patch.diagnosing.layer_facts import Facts, LayerFacts, promised_length, read_layer_facts
from rope_patch.diagnosing.pairs import PairTable, build_pair_table
from rope_patch.diagnosing.subject import Subject, open_subject
from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method, build
from rope_patch.methods.base import require_tokens
from rope_patch.methods.registry import get_method
from rope_patch.patching.architecture.probe import reference_frequencies
from rope_patch.patching.method_wrappers import ContinuedScaling
from rope_patch.patching.plan import resolve_base, resolve_options, select_layer_types
from rope_patch.rope_config import read_geometries


def diagnose(
    model: Any,
    method: str = "default",
    *,
    factor: float | None = None,
    length: int | None = None,
    trained_length: int | None = None,
    layer_types: list[str] | None = None,
    start: str = "auto",
    gguf_file: str | None = None,
    **options: Any,
) -> Diagnosis:
    """Says whether transformers does what a model's config says, and what to do for a length.

    Looks at what the config asks for and what comes of it, at what every rotated pair has seen in
    training and where a method takes it, and recommends. No weights are read.

    Args:
        model: A transformers model, a config, a folder, a model's name on the Hub, or an adapter's
            folder.
        method: A name from `rope_patch.list_methods()`; "default" shows the model as it is.
        factor: Target length / trained length; at most one of `factor` and `length`. What the
            config promises is looked at if neither is given.
        length: Target length in tokens.
        trained_length: Tokens of pretraining, if the config does not tell the truth about them.
        layer_types: As in `patch`.
        start: As in `patch`.
        gguf_file: The GGUF file within a folder.
        **options: The method's options.

    Returns:
        Findings, a recommendation and a table: to print, to plot, or as data.

    Raises:
        ValueError: No RoPE, a config that says what cannot be, or a request that cannot be met.
    """
    subject = open_subject(model, gguf_file=gguf_file)
    return diagnose_subject(
        subject,
        method,
        factor=factor,
        length=length,
        trained_length=trained_length,
        layer_types=layer_types,
        start=start,
        options=options,
    )


def diagnose_subject(
    subject: Subject,
    method: str = "default",
    *,
    factor: float | None = None,
    length: int | None = None,
    trained_length: int | None = None,
    layer_types: list[str] | None = None,
    start: str = "auto",
    options: dict[str, Any] | None = None,
) -> Diagnosis:
    """Diagnoses what was opened; see `diagnose`."""
    if trained_length is not None:
        require_tokens("trained_length", trained_length)
    layers, assumed = read_layer_facts(subject, trained_length)
    request = {"trained_length": trained_length, "layer_types": layer_types, "start": start}
    if assumed is not None and start == "auto":
        # `patch` asks which is meant: a linear scaling may have been trained in (Gemma 3), and
        # transformers' dynamic one begins where the config's length ends.
        linear = any(layer.scaling == "linear" for layer in layers.values())
        request |= {"start": "running"} if linear else {"trained_length": assumed}
    full = promised_length(subject.config, layers)
    geometries = _base_geometries(subject, request)
    trained = next(iter(geometries.values())).trained_length
    chosen, reached = _resolve_method(method, factor, length, trained, dict(options or {}))
    target = reached or max(trained, full if trained_length is None else trained)
    facts = Facts(subject, layers, full, target, assumed)
    rotations = {
        kind: _pair_table(geometry, layers[kind], chosen, target, full)
        for kind, geometry in geometries.items()
    }
    findings = [
        *live_findings(facts),
        *config_json_findings(facts),
        *scaling_findings(facts),
        *_overpromised_length(facts, trained_length),
        *adapter_findings(facts),
    ]
    findings.sort(key=lambda found: SEVERITIES.index(found.severity))
    return Diagnosis(
        model_type=subject.config.model_type,
        method="as it is" if chosen is None else str(chosen),
        length=target,
        rotations=rotations,
        findings=tuple(findings),
        advice=advise(facts, rotations, findings, request),
        patched=str(subject.handle) if subject.handle else None,
    )


def _base_geometries(subject: Subject, request: dict[str, Any]) -> dict[str | None, Geometry]:
    """Where an extension would start, for the layer types that it would change."""
    config, start = subject.config, request["start"]
    every = read_geometries(config, request["trained_length"], start)
    chosen = select_layer_types(every, request["layer_types"], config)
    before = [(rotary, reference_frequencies(rotary, config)) for rotary in subject.rotaries]
    known = {kind for _, found in before for kind in found}
    return {
        kind: resolve_base(geometry, before, config, start) if kind in known else geometry
        for kind, geometry in chosen.items()
    }


def _resolve_method(
    name: str,
    factor: float | None,
    length: int | None,
    trained: int,
    options: dict[str, Any],
) -> tuple[Method | None, int | None]:
    """The method that is asked about, None for the model as it is, and the length."""
    kind = get_method(name)
    if name == "default" and factor is None and length is not None:
        build(name, **options)
        require_tokens("length", length)
        return None, int(length)  # also one within training: then there is nothing to do
    if factor is None and length is None and not kind.is_dynamic:
        if name == "default":
            build(name, **options)
            return None, None
        factor = 1.0
    options, reached = resolve_options(name, factor, length, trained, options)
    built = build(name, **options)
    return (None if name == "default" else built), reached


def _pair_table(
    geometry: Geometry, layer: LayerFacts, chosen: Method | None, length: int, promised: int
) -> PairTable:
    if chosen is not None:
        kind = geometry.layer_type
        chosen = ContinuedScaling.wrap_if_needed(chosen, {kind: geometry}, {kind: layer.parameters})
        return build_pair_table(
            geometry, chosen.frequencies_at(geometry, length), length, layer.scaling
        )
    after: Frequencies | None = Frequencies(geometry.inv_freq(), geometry.attention_factor)
    if not geometry.base and layer.scaling == "dynamic" and layer.configured_method is not None:
        after = layer.configured_method.frequencies_at(
            replace(geometry, trained_length=promised), length
        )
    elif not geometry.base and layer.scaling == "longrope":
        after = layer.configured(length) or after
    elif not geometry.base and layer.scaling != "default":
        asks, runs = layer.configured(length), layer.actual
        exact = asks is not None and (runs is None or asks.close_to(runs))
        after = (asks if exact else runs) or after
    assert after is not None
    return build_pair_table(geometry, after, length, layer.scaling)


def _overpromised_length(facts: Facts, trained_length: int | None) -> Iterator[Finding]:
    """A length that nobody trained on and no scaling makes up for."""
    full = getattr(facts.subject.config, "max_position_embeddings", None)
    if trained_length is None or not isinstance(full, int) or full <= trained_length:
        return
    if any(layer.scaling != "default" for layer in facts.layers.values()):
        return
    layer = next(iter(facts.layers.values()))
    new = int((trained_length * layer.geometry.inv_freq() < 2 * math.pi).sum())
    yield Finding(
        "error",
        "length-without-scaling",
        f"max_position_embeddings says {full:,}, the model was trained on {trained_length:,} "
        "tokens, and nothing scales the rotation",
        f"0 of {layer.geometry.rotary_dim // 2} pairs stretched; {new} of them meet new angles "
        f"beyond {trained_length:,} tokens",
        facts.subject.patch_call("yarn", f"length={full}, trained_length={trained_length}"),
        numbers={"full": full, "trained": trained_length, "pairs": new},
    )
