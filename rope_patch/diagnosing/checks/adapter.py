"""Check that an adapter and its base model rotate alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rope_patch.diagnosing.finding import Finding
from rope_patch.diagnosing.layer_facts import Facts
from rope_patch.pretrained.adapters import require_same_rotation
from rope_patch.pretrained.sidecar import SIDECAR, sidecar_target
from rope_patch.utils.errors import Refused


def adapter_findings(facts: Facts) -> Iterator[Finding]:
    """Yield findings about an adapter's folder, a live model's adapters, or a saved folder."""
    subject = facts.subject
    if subject.adapter:
        yield from _adapter_folder_findings(facts)
    elif subject.sidecar is not None:
        yield from _saved_folder_findings(facts, subject.sidecar)
    for name, config in (getattr(subject.model, "peft_config", None) or {}).items():
        adapter_type = getattr(getattr(config, "peft_type", None), "value", "adapter")
        yield Finding(
            "note",
            "adapter-says-nothing",
            f"the adapter {name!r} ({adapter_type}) does not say under which rotation it was "
            "trained",
            "PEFT's config has no field about the rotation; the model below rotates "
            + (f"as it is patched, {subject.handle}" if subject.handle else "as its config says"),
            f"rope_patch.save(model, folder) writes {SIDECAR} beside an adapter that is trained "
            "on a patched model",
        )


def _adapter_folder_findings(facts: Facts) -> Iterator[Finding]:
    subject, sidecar = facts.subject, facts.subject.sidecar
    if sidecar is None:
        rotation_keys = sorted(key for key in subject.adapter if "rope" in key or "position" in key)
        scalings = ", ".join(sorted({layer.scaling for layer in facts.layers.values()}))
        yield Finding(
            "warning",
            "adapter-says-nothing",
            f"the adapter does not say under which rotation it was trained: no {SIDECAR} is beside "
            "it",
            f"adapter_config.json has {len(subject.adapter)} fields, {len(rotation_keys)} of "
            "them about "
            f"the rotation; its base, {subject.path}, rotates as {scalings!r} up to "
            f"{facts.promised_length:,} tokens",
            "if it was trained on an extended model, extend the base in the same way: "
            'rope_patch.patch(base, ...), then rope_patch.load_adapter(base, "...")',
            numbers={"fields": len(subject.adapter), "about_rotation": len(rotation_keys)},
        )
        return
    trained = f"{sidecar['method']!r} from {sidecar['trained_length']:,} tokens"
    try:
        is_unpatched = subject.model and require_same_rotation(subject.model, subject.adapter_path)
    except Refused as error:
        yield Finding(
            "error",
            "adapter-on-another-base",
            "the adapter was trained under another rotation than its base can be given",
            str(error),
            "give the base that it was trained on",
        )
        return
    if is_unpatched:
        yield Finding(
            "warning",
            "adapter-trained-patched",
            f"the adapter was trained under {trained}; PEFT alone puts it on a base that rotates "
            "as before",
            f"{SIDECAR} records {_sidecar_frequencies(sidecar)}",
            f"model = rope_patch.load({subject.adapter_path!r}), or rope_patch.load_adapter(base, "
            f"{subject.adapter_path!r})",
        )


def _saved_folder_findings(facts: Facts, sidecar: dict[str, Any]) -> Iterator[Finding]:
    """Yield a finding if a folder written by rope_patch.save needs rope_patch to load."""
    if sidecar.get("native", True):
        return
    yield Finding(
        "warning",
        "needs-rope-patch",
        f"the folder was saved with {sidecar['method']!r}, which no config of transformers can "
        "say: plain transformers loads the model without it",
        f"{SIDECAR} records {_sidecar_frequencies(sidecar)}, native: false",
        f"model = rope_patch.load({facts.subject.path!r})",
    )


def _sidecar_frequencies(sidecar: dict[str, Any]) -> str:
    length = sidecar_target(sidecar)
    reached = f"{length:,} tokens" if isinstance(length, int) else "any length"
    return f"{sidecar['method']}, {sidecar['trained_length']:,} → {reached}"
