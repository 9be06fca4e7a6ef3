"""The installed release of transformers, its registries, and parts of its models."""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

from rope_patch.utils.errors import Refused

NEWEST_TESTED = "5.24.0"

APPLY_ROTATION = "apply_rotary_pos_emb"  # the global by which most attentions rotate
ATTENTION_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"  # the global with their attention functions
ATTENTION_GETTER = "get_interface"  # its method; releases before 5.1 index it instead
EAGER_ATTENTION = "eager_attention_forward"  # the global that is taken for "eager"


@functools.cache  # reading a package's metadata takes a millisecond, and every patch asks
def transformers_version() -> str:
    """Return the installed release of transformers."""
    return version("transformers")


def installed_release() -> str:
    """Return "transformers 5.24.0", for messages."""
    return f"transformers {transformers_version()}"


def is_newer_than_tested() -> bool:
    """Return whether the installed transformers is newer than the newest tested one."""
    return Version(transformers_version()) > Version(NEWEST_TESTED)


def rope_functions() -> dict[str, Any]:
    """Return transformers' live registry: a function of each rope type but "default"."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS


def fetched_file(path: str, name: str, **options: Any) -> Path:
    """Return the local path of a file within a folder or a repository of the Hub.

    Args:
        path: The folder or the name on the Hub.
        name: The file.
        **options: As `from_pretrained` takes them, such as `revision`.

    Raises:
        OSError: There is no such file.
    """
    from transformers.utils import cached_file

    return Path(str(cached_file(path, name, **options)))  # None only if told not to raise


def rope_config_class() -> Any:
    """Return the base class of configs that validates `rope_parameters` by rope type."""
    from transformers.modeling_rope_utils import RotaryEmbeddingConfigMixin

    return RotaryEmbeddingConfigMixin


def attention_implementation(config: Any) -> str:
    """Return the attention implementation that a config's model runs with, such as "sdpa".

    Raises:
        ValueError: The config does not say.
    """
    if not hasattr(config, "_attn_implementation"):
        raise Refused(
            f"{type(config).__name__} does not say which attention implementation runs, in "
            f"{installed_release()}: expected a config of transformers"
        )
    return str(config._attn_implementation)


def set_attention_implementation(config: Any, name: str) -> None:
    """Have a model that is built from a config run with an attention implementation."""
    config._attn_implementation = name


def text_model_classes() -> Any:
    """Return the mapping from config classes to classes that generate text from a text alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING


def image_text_model_classes() -> Any:
    """Return the mapping from config classes to classes that read images beside text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def model_file(family: str) -> Any:
    """Return the module with the code of a family of models, such as "llama"."""
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def decoder_layer_class() -> Any:
    """Return the base class of decoder layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return GradientCheckpointingLayer


def decoder_output(hidden: Any) -> Any:
    """Return what a decoder returns for hidden states, `[B, S, D]`, without a cache."""
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)
