"""Diagnosis of a model that does not rotate: how it tells positions, and what extends it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from rope_patch.diagnosing.subject import Subject
from rope_patch.encodings.replacement.encoding import find_encoding, rotation_refusal
from rope_patch.encodings.sites.handle import current_encoding
from rope_patch.encodings.sites.plan import find_sites
from rope_patch.encodings.sites.probe import UnknownEncoding, transformers_model
from rope_patch.entry_points import check_encoding
from rope_patch.extension import Extension
from rope_patch.pretrained.encoding_checkpoint import is_encoding_sidecar
from rope_patch.utils.errors import Refused, text_html

if TYPE_CHECKING:
    from rope_patch.encodings.sites.site import Site

_KINDS = {
    "learned": "a learned table",
    "counted": "a formula's table, read at any position",
    "sinusoidal": "a sinusoidal table",
    "alibi": "ALiBi, a bias that falls with distance by another slope in each head",
    "t5": "T5's buckets of distances, each with a learned bias",
}
# Method that keeps near positions and interpolates far ones, if the encoding has one.
_DEFAULTS = {
    "learned": "linear",
    "counted": "linear",
    "sinusoidal": "linear",
    "alibi": "ntk",
    "t5": "log-tail",
}


@dataclass(frozen=True)
class SiteFacts:
    """A place where positions enter a model.

    Attributes:
        name: Its module.
        part: "encoder" or "decoder".
        kind: "learned", "counted", "sinusoidal", "alibi" or "t5".
        trained_length: Tokens of pretraining; None if neither a table nor the config says them.
        methods: What extends it.
    """

    name: str
    part: str
    kind: str
    trained_length: int | None
    methods: tuple[str, ...]


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
        return asdict(self) | {"healthy": self.healthy}

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
                if site.kind in ("learned", "sinusoidal")
                else (
                    "trained length unknown" if length is None else f"trained on {length:,} tokens"
                )
            )
            lines.append(f"  {_KINDS[site.kind]}: {site.name}, {known}")
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
    encoding = find_encoding(subject.model)
    if encoding is not None and encoding.name == "none":
        raise Refused(
            "the model has no positions (rope_patch.encode): expected one that has; its attention "
            "can be sharpened, as by rope_patch.patch(model, 'nope', temperature='log-n')"
        )
    refusal = rotation_refusal(subject.model)
    if refusal is None:
        return None
    try:
        _, model = transformers_model(subject.model)
        sites = find_sites(model)
    except UnknownEncoding:
        if encoding is not None:
            raise refusal from None
        return None
    if not sites:
        return None
    method = extension.method if extension.method != "default" else _DEFAULTS[sites[0].kind]
    wanted = replace(extension, method=method)
    effect: tuple[str, ...] = ()
    patched, trained = _patched(subject)
    trained = trained if extension.trained_length is None else extension.trained_length
    if (extension.factor, extension.length) != (None, None) or method.startswith("dynamic-"):
        plan = check_encoding(model, replace(wanted, trained_length=trained))
        assert plan is not None
        effect = tuple(site.describe(plan.stretch) for site in plan.sites)
    return EncodingDiagnosis(
        model_type=subject.config.model_type,
        sites=tuple(_facts(site, model.config, trained) for site in sites),
        method=method,
        effect=effect,
        python=subject.patch_call(method, _arguments(wanted, sites, model.config)),
        patched=patched,
    )


def _facts(site: Site, config: Any, trained: int | None) -> SiteFacts:
    length = site.trained_length(config) if trained is None else trained
    return SiteFacts(site.name, site.part, site.kind, length, site.methods)


def _arguments(extension: Extension, sites: list[Site], config: Any) -> str:
    """Return the arguments of the line that extends the model, with those that it needs."""
    arguments = {k: v for k, v in extension.arguments().items() if k != "start"}
    is_dynamic = extension.method.startswith("dynamic-")
    if not is_dynamic and not arguments.keys() & {"factor", "length"}:
        arguments["factor"] = 4
    lengths = {site.trained_length(config) for site in sites}
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
