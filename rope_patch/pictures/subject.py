"""Read from a model what a picture shows: its rotation, its tables, its biases."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from rope_patch.encodings.replacement.encoding import RotaryEncoding, find_encoding
from rope_patch.encodings.sites.buckets import BucketsSite
from rope_patch.encodings.sites.plan import find_sites
from rope_patch.encodings.sites.probe import transformers_model
from rope_patch.encodings.sites.site import Site
from rope_patch.encodings.sites.table import LearnedTableSite
from rope_patch.geometry import Geometry
from rope_patch.original_config import original_config
from rope_patch.patching import current
from rope_patch.patching.architecture.rotary_modules import find_rotaries
from rope_patch.patching.geometry_selection import base_geometries
from rope_patch.pretrained.demo import resolve_model_path
from rope_patch.pretrained.loading import empty_model, read_config
from rope_patch.transformers_api.remote_code import trust_argument
from rope_patch.utils.errors import Refused, describe_error

_NO_WEIGHTS = "the model has no weights (device 'meta'): expected a loaded one"


def read_rotation(model: Any, trained_length: int | None = None) -> tuple[str, Geometry]:
    """Return a model's name and the rotation of the layers that see far.

    Reads no weights.

    Args:
        model: A live model, a folder, a name on the Hub, or "demo".
        trained_length: Tokens of pretraining, if the config is wrong about it.

    Raises:
        ValueError: There is no such model, or it does not rotate.
    """
    if isinstance(model, nn.Module):
        encoding = find_encoding(model)
        if encoding is not None and not isinstance(encoding, RotaryEncoding):
            raise Refused(
                f"the model does not rotate, as rope_patch.encode gave it {encoding.name!r}: "
                "expected one that does, such as Llama"
            )
        name, (_, live) = type(model).__name__, transformers_model(model)
        handle = current(model)
        text = handle.model_config(live) if handle else live.config.get_text_config(decoder=True)
    else:
        path = _path(model)
        config = read_config(path)
        name, live = str(model), empty_model(path, config)
        text = config.get_text_config(decoder=True)
    config = original_config(text, trained_length=trained_length)
    geometries = base_geometries(config, find_rotaries(live), trained_length)
    layer_type, geometry = next(iter(geometries.items()))
    return name if layer_type is None else f"{name}, {layer_type.replace('_', ' ')}", geometry


def read_sites(model: Any) -> list[Site]:
    """Return where positions enter a model that does not rotate, with the model's weights.

    Args:
        model: A live model, a folder or a name on the Hub.

    Raises:
        ValueError: There is no such model, or it tells positions in an unknown way.
    """
    if isinstance(model, nn.Module):
        return find_sites(transformers_model(model)[1])
    path = _path(model)
    config = read_config(path)
    import transformers

    names = getattr(config, "architectures", None) or []
    kind: Any = getattr(transformers, str(next(iter(names), "")), transformers.AutoModel)
    try:
        own = kind is transformers.AutoModel  # alone takes code of the checkpoint's own
        live = kind.from_pretrained(path, **(trust_argument() if own else {}))
    except (OSError, ValueError, RuntimeError) as error:
        raise Refused(f"cannot load {path}: {describe_error(error)}") from error
    return find_sites(live)


def learned_tables(model: Any) -> dict[str, torch.Tensor]:
    """Return the trained rows of every learned table, `[L, D]` float64, by its module's name.

    Raises:
        ValueError: The model has none, or no weights.
    """
    sites = read_sites(model)
    learned = [site for site in sites if isinstance(site, LearnedTableSite)]
    if not learned:
        kinds = " and ".join(dict.fromkeys(site.kind for site in sites)) or "no known"
        raise Refused(f"the model has {kinds} positions: expected a learned table, as of GPT-2")
    if any(site.table.is_meta for site in learned):
        raise Refused(_NO_WEIGHTS)
    return {
        site.name: site.table[site.detected.first_row :].detach().double().cpu() for site in learned
    }


def bucket_table(site: BucketsSite) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return T5's trained biases, `[buckets, heads]` float64, and the arguments of `t5_bucket`.

    Raises:
        ValueError: The model has no weights.
    """
    children = site.module.children()
    table = next(child for child in children if isinstance(child, nn.Embedding)).weight
    if table.is_meta:
        raise Refused(_NO_WEIGHTS)
    return table.detach().double().cpu(), site.settings


def _path(model: Any) -> str:
    if not isinstance(model, str | os.PathLike):
        raise Refused(
            "model must be a transformers model, a folder or a name on the Hub, got "
            f"{type(model).__name__}"
        )
    return resolve_model_path(os.fspath(model))
