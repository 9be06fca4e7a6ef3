"""Facts about models that do not rotate: their trained length, and a method's record."""

from __future__ import annotations

from typing import Any

from rope_patch.encodings.replacement.encoding import rotation_refusal
from rope_patch.encodings.sites.handle import EncodingPatch
from rope_patch.encodings.sites.plan import EncodingPlan, encoding_facts, find_sites
from rope_patch.encodings.sites.site import Site
from rope_patch.geometry import Geometry
from rope_patch.original_config import original_config
from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.stamp import innermost_decoders
from rope_patch.pretrained.loading import auto_class, empty_model
from rope_patch.rope_config import read_geometries
from rope_patch.transformers_api.forwards import ForwardCall
from rope_patch.utils.errors import Refused


def model_lengths(
    path: str, config: Any, trained_length: int | None, start: str
) -> tuple[dict[str | None, Geometry], int]:
    """Return a model's unscaled rotation by layer type, and the tokens of its pretraining.

    Args:
        path: The model's folder or name, for errors.
        config: Its config.
        trained_length: Tokens of pretraining, if they are named; else None.
        start: See `rope_patch.patch`.

    Returns:
        The geometries, none for a model that does not rotate; and the trained length.

    Raises:
        ValueError: It tells positions in no known way, or says no length.
    """
    text = config.get_text_config(decoder=True)
    if not _rotates(text) and (length := _site_length(path, config, trained_length)):
        return {}, length
    text = original_config(text, start, trained_length)
    geometries = read_geometries(text, trained_length, start)
    return geometries, next(iter(geometries.values())).trained_length


def require_measurable(config: Any, plan: EncodingPlan) -> None:
    """Raise unless a plan for a model that does not rotate can be evaluated.

    Raises:
        ValueError: The model reads other things than a text from left to right, or the method
            follows the text, whose prompts would be read in chunks of different factors.
    """
    if auto_class(config, any_kind=True) is not auto_class(config):
        raise Refused(
            f"the checkpoint holds a {config.architectures[0]}, and evaluations read texts from "
            "left to right: expected a decoder such as GPT-2 or BLOOM"
        )
    if plan.stretch.is_dynamic:
        raise Refused(
            f"{plan.stretch.method} scales each chunk of a prompt by the length so far, and a "
            "prompt read at once by all of it: evaluate "
            f"{plan.stretch.formula} with a factor for each length instead"
        )


class RowsGuard:
    """Pre-hook of a decoder that refuses texts for which it has no rows.

    Without it, the embedding's own error names no reason, and on a GPU it ends the process.

    Attributes:
        model: The model.
        sites: Its sites, and not their facts, because a patch may lengthen tables later.
    """

    def __init__(self, model: Any, sites: list[Site]) -> None:
        self.model, self.sites = model, sites

    @classmethod
    def install(cls, model: Any) -> None:
        """Guard a model that does not rotate; do nothing to others."""
        if rotation_refusal(model) is not None:
            guard = cls(model, find_sites(model))
            sites = [RotaryModule(site.module, {}) for site in guard.sites]
            for decoder in innermost_decoders(model, sites):
                decoder.register_forward_pre_hook(guard, with_kwargs=True)

    def __call__(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if a text is longer than a table, or than the bias that MPT builds.

        Raises:
            ValueError: It is; says how many tokens can be read.
        """
        call = ForwardCall(decoder, args, kwargs)
        if call.tokens is None:
            return
        tokens = call.tokens.shape[1] + int(call.cached_tokens())
        for site in self.sites:
            rows = site.longest_text(self.model.config)
            if rows is not None and tokens > rows:
                raise Refused(
                    f"{site.name} tells {rows:,} positions apart, and the text has {tokens:,}"
                )


def encoding_label(handle: EncodingPatch) -> str:
    """Return the label of a method's results."""
    return handle.method if handle.factor is None else f"{handle.method} ×{handle.factor:g}"


def encoding_identity(handle: EncodingPatch) -> list[Any]:
    """Return what a patch changes, for the keys of stored answers."""
    parts = sorted({site.part for site in handle.facts.sites})
    return ["positions", handle.method, handle.trained_length, handle.length, parts]


def _rotates(text: Any) -> bool:
    return bool(getattr(text, "rope_parameters", None)) and not getattr(text, "alibi", False)


def _site_length(path: str, config: Any, trained_length: int | None) -> int | None:
    """Return the trained length of a model that does not rotate; None if it has no known sites."""
    sites = encoding_facts(empty_model(path, config)).sites
    lengths = [trained_length, *(site.trained_length for site in sites)]
    length = next((length for length in lengths if length is not None), None)
    if sites and length is None:
        raise Refused(
            f"{type(config).__name__} does not say how long the texts of pretraining were: name "
            "them, for example trained_length=2048 (--trained-length 2048)"
        )
    return length if sites else None
