"""Export of models that do not rotate: what other engines read of their positions."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from rope_patch.encodings.sites.handle import EncodingPatch, current_encoding
from rope_patch.encodings.sites.plan import EncodingFacts, encoding_facts
from rope_patch.exporting.target import Export
from rope_patch.pretrained.loading import empty_model
from rope_patch.utils.errors import Refused

_TRANSFORMERS = ("transformers", "transformers4")


def export_encoding(model_or_config: Any, engine: str) -> Export | None:
    """Return what an engine needs for a model that does not rotate; None for one that does.

    Raises:
        ValueError: The engine has no form for the extension; says why and what to do instead.
    """
    model = model_or_config
    if isinstance(model, PreTrainedConfig):
        if getattr(model.get_text_config(decoder=True), "rope_parameters", None):
            return None
        model = empty_model(type(model).__name__, model, any_kind=True)
    if not isinstance(model, nn.Module):
        return None
    facts = encoding_facts(model)
    if facts.replacement is not None:
        raise Refused(
            f"{engine} has no form for the encoding {facts.replacement!r}, which rope_patch.encode "
            "gave the model: expected a model with its class's own encoding; serve this one with "
            "transformers and rope_patch.load"
        )
    if not facts.sites:
        return None
    handle = current_encoding(model)
    if handle is not None:
        return _export_patched(handle, engine)
    return _export_checkpoint(facts, engine)


def _export_patched(handle: EncodingPatch, engine: str) -> Export:
    facts = handle.facts
    if facts.stated and engine in _TRANSFORMERS:
        return Export(engine=engine, config={name: number for name, _, number in facts.stated})
    if facts.kinds == "learned":
        raise Refused(
            f"{engine} cannot be told of {handle}: the stretched table is among the weights, and "
            "no field or argument says it; write it with rope_patch.save, or `rope-patch patch "
            "MODEL --to FOLDER`, and export that folder"
        )
    raise Refused(
        f"{engine} cannot run {handle}: no config says other {facts.kinds} positions; serve the "
        "model with transformers and rope_patch.load"
    )


def _export_checkpoint(facts: EncodingFacts, engine: str) -> Export:
    """Return what a checkpoint needs whose positions are all in its config and weights."""
    note = "its positions are in config.json and the weights: the folder is all that is needed"
    if engine in _TRANSFORMERS:
        return Export(engine=engine, notes=[note])
    length = facts.sites[-1].trained_length
    if engine == "vllm" and length is not None and facts.kinds == "learned":
        return Export(engine=engine, arguments=["--max-model-len", str(length)], notes=[note])
    raise Refused(
        f"what {engine} makes of {facts.kinds} positions is not known here: exports of models that "
        "do not rotate are for transformers, and of learned tables for vllm, too"
    )
