"""Diagnosis of a model that does not rotate: how it tells positions, and what extends it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NoReturn

from rope_patch.diagnosing.subject import Subject
from rope_patch.encodings.replacement.encoding import rotation_refusal
from rope_patch.encodings.sites.handle import current_encoding
from rope_patch.encodings.sites.plan import encoding_facts
from rope_patch.encodings.sites.site import SiteFacts
from rope_patch.encodings.sites.table import TABLE_KINDS
from rope_patch.entry_points import check_encoding
from rope_patch.extension import Extension
from rope_patch.pretrained.encoding_checkpoint import is_encoding_sidecar
from rope_patch.utils.errors import Refused, text_html

# Each kind in words, and the method that keeps near positions and interpolates far ones, if any.
_KINDS = {
    "learned": ("a learned table", "linear"),
    "counted": ("a formula's table, read at any position", "linear"),
    "sinusoidal": ("a sinusoidal table", "linear"),
    "alibi": ("ALiBi, a bias that falls with distance by another slope in each head", "ntk"),
    "t5": ("T5's buckets of distances, each with a learned bias", "log-tail"),
}


@dataclass(frozen=True)
class EncodingDiagnosis:
    """The result of `diagnose` for a model that does not rotate; print it to read it.

    Attributes:
        model_type: The architecture.
        sites: Where positions enter.
        method: What was asked for, else what is recommended.
        effect: What the method does at each site; empty unless a factor or length is given.
        python: The line of Python that extends the model.
        patched: The extension in effect or recorded beside the checkpoint, or None.
    """

    model_type: str
    sites: tuple[SiteFacts, ...]
    method: str
    effect: tuple[str, ...]
    python: str
    patched: str | None = None

    @property
    def healthy(self) -> bool:
        """Return True: there is no rotation that could differ from the config."""
        return True

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        shown = [field.name for field in fields(SiteFacts) if field.repr]
        sites = tuple({name: getattr(site, name) for name in shown} for site in self.sites)
        return asdict(self) | {"sites": sites, "healthy": self.healthy}

    def plot(self, path: str | os.PathLike[str]) -> NoReturn:
        """Refuse, as there are no pairs to draw.

        Raises:
            ValueError: Always; names the pictures that there are.
        """
        raise Refused(
            f"{self.model_type} has no rotated pairs to draw: `rope-patch picture` draws tables "
            "and biases (docs/pictures.md)"
        )

    def __str__(self) -> str:
        lines = [f"{self.model_type} does not rotate: it tells positions by"]
        for site in self.sites:
            length = site.trained_length
            known = (
                f"{length:,} positions"
                if site.kind in TABLE_KINDS
                else (
                    "trained length unknown" if length is None else f"trained on {length:,} tokens"
                )
            )
            lines.append(f"  {_KINDS[site.kind][0]}: {site.name}, {known}")
            lines.append(f"    extended by {', '.join(site.methods)}")
        if self.patched:
            lines.append(f"patched by rope_patch: {self.patched}; told as it was before")
        if self.effect:
            lines += [f"{self.method}:", *(f"  {line}" for line in self.effect)]
        lines.append(f"to extend it ({self.method}; docs/other-encodings.md says which to choose):")
        return "\n".join([*lines, f"  {self.python}"])

    def _repr_html_(self) -> str:
        return text_html(str(self))


def diagnose_encoding(subject: Subject, extension: Extension) -> EncodingDiagnosis | None:
    """Return the diagnosis of a model that does not rotate; None if it shows no encoding.

    Raises:
        ValueError: The request cannot be met, or `rope_patch.encode` gave the model an encoding
            that nothing extends.
    """
    if subject.model is None:
        return None
    facts = encoding_facts(subject.model)
    if facts.replacement == "none":
        raise Refused(
            "the model has no positions (rope_patch.encode): expected one that has; its attention "
            "can be sharpened, as by rope_patch.patch(model, 'nope', temperature='log-n')"
        )
    if not facts.sites:
        refusal = rotation_refusal(subject.model)
        if facts.replacement is None or refusal is None:
            return None
        raise refusal
    default = _KINDS[facts.sites[0].kind][1]
    method = extension.method if extension.method != "default" else default
    wanted = replace(extension, method=method)
    effect: tuple[str, ...] = ()
    patched, trained = _patched(subject)
    trained = trained if extension.trained_length is None else extension.trained_length
    if (extension.factor, extension.length) != (None, None) or method.startswith("dynamic-"):
        plan = check_encoding(subject.model, replace(wanted, trained_length=trained))
        assert plan is not None
        effect = tuple(site.describe(plan.stretch) for site in plan.sites)
    sites = facts.sites
    if trained is not None:
        sites = tuple(replace(site, trained_length=trained) for site in sites)
    return EncodingDiagnosis(
        model_type=subject.config.model_type,
        sites=sites,
        method=method,
        effect=effect,
        python=subject.patch_call(method, _arguments(wanted, facts.sites)),
        patched=patched,
    )


def _arguments(extension: Extension, sites: tuple[SiteFacts, ...]) -> str:
    """Return the arguments of the line that extends the model, with those that it needs."""
    arguments = {k: v for k, v in extension.arguments().items() if k != "start"}
    is_dynamic = extension.method.startswith("dynamic-")
    if not is_dynamic and not arguments.keys() & {"factor", "length"}:
        arguments["factor"] = 4
    lengths = {site.trained_length for site in sites}
    if lengths == {None} and extension.trained_length is None:
        arguments["trained_length"] = "..."
    elif len(lengths) > 1 and extension.layer_types is None:
        arguments["layer_types"] = [sites[-1].part]
    return ", ".join(f"{k}={v if v == '...' else repr(v)}" for k, v in arguments.items())


def _patched(subject: Subject) -> tuple[str | None, int | None]:
    """Return the extension in effect or recorded, and the length before it."""
    if subject.live and subject.model is not None:
        handle = current_encoding(subject.model)
        return (None, None) if handle is None else (str(handle), handle.trained_length)
    sidecar = subject.sidecar
    if sidecar is None or not is_encoding_sidecar(sidecar):
        return None, None
    target, trained = sidecar["target_length"], sidecar["trained_length"]
    length = "any length" if target is None else f"{target:,} tokens"
    return f"{sidecar['method']}, {trained:,} → {length}", trained
