"""Resolve a request to extend encodings that do not rotate. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from rope_patch.encodings.replacement.encoding import find_encoding, rotation_refusal
from rope_patch.encodings.sites.buckets import (
    FUNCTION,
    BlockBucketsSite,
    BucketsSite,
    InputBucketsSite,
)
from rope_patch.encodings.sites.probe import UnknownEncoding, probe, text_model, transformers_model
from rope_patch.encodings.sites.site import (
    DetectedPositions,
    Site,
    SiteFacts,
    Stretch,
    refusal_reason,
)
from rope_patch.encodings.sites.slopes import SlopesSite
from rope_patch.encodings.sites.table import LearnedTableSite, SinusoidalTableSite, TableSite
from rope_patch.extension import Extension, resolve_factor_and_length
from rope_patch.methods.base import require_tokens
from rope_patch.patching.architecture.rotary_modules import unreached_rotation
from rope_patch.utils.errors import Refused, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class EncodingFacts:
    """What a model that does not rotate, or a patch of one, tells code outside of this package.

    Attributes:
        sites: Where positions enter, of a patch those that it changes alone; none if the model
            rotates, or in no known way.
        replacement: Name of the encoding that `rope_patch.encode` gave the model; None if it has
            its class's own, or one that its config says.
    """

    sites: tuple[SiteFacts, ...]
    replacement: str | None = None

    @property
    def kinds(self) -> str:
        """Return the kinds of all sites, in words."""
        return " and ".join(dict.fromkeys(site.kind for site in self.sites))

    @property
    def tables(self) -> list[SiteFacts]:
        """Return the sites that have a table."""
        return [site for site in self.sites if site.table is not None]

    @property
    def stated(self) -> list[tuple[str, int, int]]:
        """Return the numbers of a patch that the config can state; none if it cannot state all."""
        numbers = [site.number for site in self.sites if site.number is not None]
        return numbers if len(numbers) == len(self.sites) else []


@dataclass(frozen=True, eq=False)
class EncodingPlan:
    """A request for a model that does not rotate, checked and ready to be applied.

    Attributes:
        extension: The request.
        model: The transformers model that reads the text, within what was given.
        outer: The outermost transformers model, whose config names the model's.
        sites: Where positions enter, those to change alone.
        stretch: The method and its lengths.
    """

    extension: Extension
    model: PreTrainedModel
    outer: PreTrainedModel
    sites: list[Site]
    stretch: Stretch

    @property
    def config_fields(self) -> dict[str, int]:
        """Return the fields of the config that change, with their new values."""
        fields: dict[str, int] = {}
        for site in self.sites:
            fields |= site.config_fields(self.model.config, self.stretch)
        return fields

    @property
    def facts(self) -> EncodingFacts:
        """Return facts of the sites as the model is now."""
        return EncodingFacts(tuple(site.facts(self.model, self.stretch) for site in self.sites))


def encoding_facts(model: nn.Module) -> EncodingFacts:
    """Return what a model tells of its positions, patched or not.

    Args:
        model: A transformers model, or something around one.

    Raises:
        ValueError: Positions enter in a way that cannot be extended.
    """
    encoding = find_encoding(model)
    replacement = None if encoding is None or encoding.is_in_config else encoding.name
    sites: list[SiteFacts] = []
    if rotation_refusal(model) is not None:
        with suppress(UnknownEncoding):
            _, outer = transformers_model(model)
            sites = [site.facts(outer) for site in find_sites(outer)]
    return EncodingFacts(tuple(sites), replacement)


def find_sites(model: PreTrainedModel) -> list[Site]:
    """Return where positions enter a model that does not rotate.

    Raises:
        ValueError: Nowhere that is known; or in a way that cannot be extended.
    """
    if (encoding := find_encoding(model)) is not None:
        name = next(name for name, module in model.named_modules() if module is encoding)
        if sites := list(encoding.sites(name)):
            return sites
        raise UnknownEncoding(
            f"the encoding {encoding.name!r} has no table, slopes or buckets to stretch: expected "
            "alibi, t5, learned, sinusoidal, integer or normalised"
        )
    if reason := refusal_reason(model):
        raise Refused(f"{type(model).__name__} is not extended: {reason}")
    detected = probe(model)
    if detected.unread:
        raise Refused(
            f"{type(model).__name__} is not extended: {' and '.join(detected.unread)} grows with "
            "its length, too, and a text alone does not show which rows it reads"
        )
    return [
        *_tables(model, detected),
        *_slopes(model, detected),
        *_buckets(model, detected),
    ]


def make_encoding_plan(model: nn.Module, extension: Extension) -> EncodingPlan:
    """Check a request against a model that does not rotate and return its plan.

    Args:
        model: The unpatched model, or something around it.
        extension: The request.

    Raises:
        ValueError: The request cannot be met, or would change nothing.
        TypeError: A value of the wrong type.
    """
    _, outer = transformers_model(model)
    inner = text_model(outer)
    sites = find_sites(inner)
    if not sites:
        text_config = type(inner.config.get_text_config(decoder=True))
        if (reason := unreached_rotation(inner, text_config)) is not None:
            raise Refused(reason)
        raise Refused(
            f"{type(inner).__name__} is not extended: a small copy of it showed no rotation, no "
            "table of positions, no slopes and no buckets. What tells order by recurrence or by "
            "its mask alone has no positions to extend, and reads any length"
        )
    sites = _selected(sites, extension)
    kinds = EncodingFacts(tuple(site.facts(inner) for site in sites)).kinds
    known = [m for m in sites[0].methods if all(m in site.methods for site in sites)]
    if extension.method not in known:
        choice = (
            f"expected one of {', '.join(known)}"
            if known
            else "no method extends them together: name a part (layer_types=...)"
        )
        raise Refused(
            f"{extension.method!r} does not extend {type(inner).__name__}'s positions ({kinds})"
            f"{did_you_mean(extension.method, known)}: {choice}"
        )
    options = [o for o in sites[0].options if all(o in site.options for site in sites)]
    if unknown := [name for name in extension.options if name not in options]:
        has = f"the option {', '.join(options)}" if options else "no options"
        raise Refused(
            f"{extension.method} has {has} for {kinds} positions of {type(inner).__name__}, got "
            f"{', '.join(unknown)}{did_you_mean(unknown[0], options)}"
        )
    exact = extension.options.get("exact")
    if exact is not None and not isinstance(exact, bool):
        raise TypeError(f"exact must be True or False, got {exact!r}")
    for name in ("kernels", "start"):
        if (value := getattr(extension, name)) != "auto":
            raise Refused(f"{name}={value!r} is for models that rotate; {kinds} positions do not")
    stretch = _stretch(inner, sites, extension)
    if not any(site.changes(stretch) for site in sites):
        raise Refused(
            f"{extension.method} with factor {stretch.factor:g} would change nothing: expected a "
            "factor above 1 that changes at least one position"
        )
    return EncodingPlan(extension, inner, outer, sites, stretch)


def _stretch(model: PreTrainedModel, sites: list[Site], extension: Extension) -> Stretch:
    trained = extension.trained_length
    if trained is not None:
        require_tokens("trained_length", trained)
    else:
        lengths = {site.name: site.trained_length(model.config) for site in sites}
        if None in lengths.values():
            raise Refused(
                f"{type(model.config).__name__} does not say how long the texts of pretraining "
                "were: name them, for example trained_length=2048"
            )
        trained, *others = dict.fromkeys(lengths.values())
        if others:
            got = ", ".join(f"{length:,} in {name}" for name, length in lengths.items())
            raise Refused(
                f"parts that are extended together must start at one length, got {got}: patch one "
                'of them, with layer_types=["encoder"] or ["decoder"]'
            )
    assert trained is not None
    for site in sites:
        if isinstance(site, TableSite) and trained > (rows := site.trained_length(model.config)):
            raise Refused(
                f"{site.name} has {rows:,} positions: expected at most as many of pretraining, got "
                f"trained_length={trained:,}; leave it out to use all"
            )
        if isinstance(site, BucketsSite) and trained < site.least_length:
            raise Refused(
                f"expected a trained length of at least {site.least_length} tokens, as nearer "
                f"distances have a bucket of their own in {site.name}, got {trained:,}"
            )
    if extension.method.startswith("dynamic-"):
        return Stretch(extension.method, trained, None, extension.options.get("exact"))
    factor, length = resolve_factor_and_length(
        extension.factor, extension.length, trained, anyway=extension.anyway
    )
    if factor < 1:
        raise Refused(
            f"factor must be at least 1 (target length / trained length), got {factor}: a method "
            "extends a context, it does not shorten one"
        )
    return Stretch(extension.method, trained, length, extension.options.get("exact"))


def _selected(sites: list[Site], extension: Extension) -> list[Site]:
    if extension.layer_types is None:
        return sites
    parts = list(dict.fromkeys(site.part for site in sites))
    for name in extension.layer_types:
        if name not in parts:
            raise Refused(f"layer_types: this model has {' and '.join(parts)}, got {name!r}")
    return [site for site in sites if site.part in extension.layer_types]


def _tables(model: PreTrainedModel, detected: DetectedPositions) -> Iterator[Site]:
    for table in detected.tables:
        module = model.get_submodule(table.module)
        sinusoidal = SinusoidalTableSite.of(table.module, module, table)
        yield sinusoidal or LearnedTableSite(table.module, module, table)


def _slopes(model: PreTrainedModel, detected: DetectedPositions) -> Iterator[Site]:
    names = {bias.module for bias in detected.slopes}
    for bias in detected.slopes:
        if any(bias.module.startswith(f"{other}.") for other in names):
            continue
        layers = bias.module.rpartition(".")[0]
        heads = model.config.num_attention_heads
        yield SlopesSite(
            layers,
            model.get_submodule(layers),
            bias.argument,
            heads,
            model.config.hidden_size // heads,
            bias.from_end,
        )


def _buckets(model: PreTrainedModel, detected: DetectedPositions) -> Iterator[Site]:
    for found in detected.buckets:
        owner, _, table = found.module.rpartition(".")
        first = model.get_submodule(owner)
        if found.shape[0] != found.shape[1]:
            # A window has no distances that a longer text would add (LongT5's encoder).
            if hasattr(first, "compute_side_bias"):
                yield BlockBucketsSite(owner, first)
            continue
        if hasattr(first, "prepare_input"):
            yield InputBucketsSite(owner, first)
            continue
        if not hasattr(first, FUNCTION):
            raise Refused(
                f"{type(model).__name__} computes the buckets of its distances with fixed numbers "
                f"in {owner or 'its own code'}, where nothing can be set: it is not supported"
            )
        part = owner.split(".")[0]
        for other, module in model.named_modules():
            same = type(module) is type(first) and other.split(".")[0] == part
            if same and isinstance(getattr(module, table, None), nn.Embedding):
                yield BucketsSite(other, module)
