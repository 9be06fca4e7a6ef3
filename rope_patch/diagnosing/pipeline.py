"""Diagnosis of a model, a config or a path."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rope_patch.diagnosing.advice import PairTable, advise, build_pair_table
from rope_patch.diagnosing.config_checks import config_json_findings, scaling_findings
from rope_patch.diagnosing.diagnosis import Diagnosis
from rope_patch.diagnosing.encoding_diagnosis import EncodingDiagnosis, diagnose_encoding
from rope_patch.diagnosing.extensibility import extensibility_findings
from rope_patch.diagnosing.facts import (
    SEVERITIES,
    Facts,
    Finding,
    LayerFacts,
    promised_length,
    read_layer_facts,
)
from rope_patch.diagnosing.live_checks import (
    adapter_findings,
    live_findings,
    outside_method_findings,
)
from rope_patch.diagnosing.subject import Subject, open_subject
from rope_patch.diagnosing.vision_positions import vision_findings
from rope_patch.extension import Extension, require_near
from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method, build
from rope_patch.methods.base import require_tokens
from rope_patch.methods.position_map import PositionMap
from rope_patch.methods.registry import get_method
from rope_patch.original_config import original_config
from rope_patch.patching.geometry_selection import (
    base_geometries,
    inherit_constants,
    require_no_shrink,
)
from rope_patch.patching.method_wrappers import ContinuedScaling, describe_yarn
from rope_patch.rope_config import by_layer_type
from rope_patch.transformers_api.remote_code import takes_remote_code


@takes_remote_code
def diagnose(
    model: Any,
    method: str | Extension = "default",
    *,
    factor: float | str | None = None,
    length: int | str | None = None,
    trained_length: int | str | None = None,
    layer_types: list[str] | None = None,
    start: str = "auto",
    anyway: bool = False,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Diagnosis | EncodingDiagnosis:
    """Check whether transformers runs what a model's config says, and recommend for a length.

    Compares the configured rotation with the actual one, shows each rotated pair's angles in
    training and under a method, and recommends. Reads no weights.

    Args:
        model: A transformers model, a config, a folder, a model's name on the Hub, or an adapter's
            folder.
        method: A name from `rope_patch.list_methods()`, or a whole request, an `Extension`;
            "default" shows the model as it is.
        factor: Target length / trained length; at most one of `factor` and `length`. If neither is
            given, the target is the length that the config promises.
        length: Target length in tokens.
        trained_length: Length of pretraining in tokens, if the config is wrong about it.
        layer_types: As in `patch`.
        start: As in `patch`.
        anyway: As in `patch`.
        gguf_file: The GGUF file within a folder.
        trust_remote_code: Whether to execute Python code that the checkpoint brings.
        **options: The method's options.

    Returns:
        Findings, a recommendation and a table, to print, plot, or convert to data. For a model that
        does not rotate: how it tells positions, and what extends it.

    Raises:
        ValueError: The model tells positions in no known way, the config is invalid, or the request
            cannot be met.
    """
    extension = Extension.of(
        method,
        factor=factor,
        length=length,
        trained_length=trained_length,
        layer_types=layer_types,
        start=start,
        anyway=anyway,
        **options,
    )
    return diagnose_subject(open_subject(model, gguf_file=gguf_file), extension)


def diagnose_subject(subject: Subject, extension: Extension) -> Diagnosis | EncodingDiagnosis:
    """Diagnose an opened subject; see `diagnose`."""
    if encoding := diagnose_encoding(subject, extension):
        return encoding
    trained_length = extension.trained_length
    if trained_length is not None:
        require_tokens("trained_length", trained_length)
    layers, assumed = read_layer_facts(subject, trained_length)
    request = extension
    if assumed is not None and extension.start == "auto":
        # `patch` raises here and asks for `start`: a linear scaling may be trained in (Gemma 3),
        # and transformers' dynamic scaling begins where the config's length ends.
        linear = any(layer.scaling == "linear" for layer in layers.values())
        request = (
            replace(request, start="running")
            if linear
            else replace(request, trained_length=assumed)
        )
    config_length = promised_length(subject.config, layers)
    original = original_config(subject.config, request.start, request.trained_length)
    geometries = base_geometries(
        original,
        subject.rotaries,
        request.trained_length,
        request.layer_types,
        request.start,
    )
    trained_in_config = next(iter(geometries.values())).trained_length
    if extension.method != "default":
        require_no_shrink(extension, original, geometries, subject.config)
        own_parameters = by_layer_type(original.rope_parameters)
        extension = inherit_constants(extension, geometries, own_parameters)
    built_method, reached_length = _resolve_method(extension, trained_in_config)
    target = reached_length or max(
        trained_in_config, config_length if trained_length is None else trained_in_config
    )
    facts = Facts(subject, layers, config_length, target, assumed)
    rotations = {
        layer_type: _pair_table(
            geometry, layers[layer_type], built_method, target, config_length, original, subject
        )
        for layer_type, geometry in geometries.items()
    }
    findings = [
        *live_findings(facts),
        *config_json_findings(facts),
        *scaling_findings(facts),
        *_overpromised_length(facts, trained_length),
        *adapter_findings(facts),
        *outside_method_findings(facts, built_method),
        *extensibility_findings(facts),
        *vision_findings(facts, trained_in_config),
    ]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Diagnosis(
        model_type=subject.config.model_type,
        method="as it is" if built_method is None else str(built_method),
        length=target,
        rotations=rotations,
        findings=tuple(findings),
        advice=advise(facts, rotations, findings, request),
        patched=str(subject.handle) if subject.handle else None,
    )


def _resolve_method(extension: Extension, trained: int) -> tuple[Method | None, int | None]:
    """Return the method (None for the model as it is) and the target length."""
    is_default = extension.method == "default"
    if extension.factor is None and is_default and extension.length is not None:
        build(extension.method, **extension.options)
        require_tokens("length", extension.length)
        require_near(extension.length, trained, extension.anyway)
        # It may be within the trained length: then nothing is to be done.
        return None, int(extension.length)
    if (
        extension.factor is None
        and extension.length is None
        and not get_method(extension.method).is_dynamic
    ):
        if is_default:
            build(extension.method, **extension.options)
            return None, None
        extension = replace(extension, factor=1.0)
    method, reached_length = extension.resolve(trained)
    return (None if is_default else method), reached_length


def _pair_table(
    geometry: Geometry,
    layer: LayerFacts,
    method: Method | None,
    length: int,
    promised_length: int,
    original: Any,
    subject: Subject,
) -> PairTable:
    layer_type = geometry.layer_type
    own_yarn = describe_yarn(subject.config, layer_type)
    if method is not None:
        reach = method.reach(geometry.trained_length) if isinstance(method, PositionMap) else length
        own_parameters = by_layer_type(original.rope_parameters)[layer_type]
        method = ContinuedScaling.wrap_if_needed(
            method, {layer_type: geometry}, {layer_type: own_parameters}
        )
        after = method.frequencies_at(geometry, length)
        distance = min(length, reach)
        return build_pair_table(
            geometry, after, length, layer.scaling, own_yarn, largest_distance=distance
        )
    if original is not subject.config and layer.scaling != "dynamic":
        saved = layer.configured(length) if layer.scaling == "longrope" else layer.actual
        saved = saved or Frequencies(geometry.inv_freq(), geometry.attention_factor)
        return build_pair_table(geometry, saved, length, layer.scaling, own_yarn)
    now: Frequencies | None = Frequencies(geometry.inv_freq(), geometry.attention_factor)
    if not geometry.base and layer.scaling == "dynamic" and layer.configured_method is not None:
        now = layer.configured_method.frequencies_at(
            replace(geometry, trained_length=promised_length), length
        )
    elif not geometry.base and layer.scaling == "longrope":
        now = layer.configured(length) or now
    elif not geometry.base and layer.scaling != "default":
        configured, actual = layer.configured(length), layer.actual
        is_exact = configured is not None and (actual is None or configured.close_to(actual))
        now = (configured if is_exact else actual) or now
    assert now is not None
    return build_pair_table(geometry, now, length, layer.scaling, own_yarn)


def _overpromised_length(facts: Facts, trained_length: int | None) -> Iterator[Finding]:
    """Yield a finding if the config promises more than the trained length without scaling."""
    max_positions = getattr(facts.subject.config, "max_position_embeddings", None)
    if (
        trained_length is None
        or not isinstance(max_positions, int)
        or max_positions <= trained_length
    ):
        return
    if any(layer.scaling != "default" for layer in facts.layers.values()):
        return
    layer = next(iter(facts.layers.values()))
    extrapolating = int((trained_length * layer.geometry.inv_freq() < 2 * math.pi).sum())
    yield Finding(
        "error",
        "length-without-scaling",
        f"max_position_embeddings says {max_positions:,}, the model was trained on "
        f"{trained_length:,} "
        "tokens, and nothing scales the rotation",
        f"0 of {layer.geometry.rotary_dim // 2} pairs stretched; {extrapolating} of them meet "
        "new angles "
        f"beyond {trained_length:,} tokens",
        facts.subject.patch_call(
            "yarn", f"length={max_positions}, trained_length={trained_length}"
        ),
        numbers={"full": max_positions, "trained": trained_length, "pairs": extrapolating},
    )
