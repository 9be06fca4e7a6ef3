"""Entry point of vLLM's general plugins: what rope_patch adds to vLLM, in each of its processes.

Every addition looks at the engine's `rope_type` first and leaves vLLM's own ones alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rope_patch.serving.vllm import rotary_factory
from rope_patch.serving.vllm.admission import admitted_length, engine_lengths
from rope_patch.serving.vllm.cache_salt import profile_salt
from rope_patch.serving.vllm.metrics import count_request
from rope_patch.serving.vllm.profiles import ProfileLengths
from rope_patch.serving.vllm.requirements import (
    FEATURE,
    require_readable,
    require_servable,
    uses_plugin,
)
from rope_patch.utils.errors import Refused

_LENGTHS = "rope_patch_lengths"


def register() -> None:
    """Add rope_patch's methods to this process's vLLM; calling it again adds nothing."""
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    rotary_factory.install()
    for owner, name, wrapper in (
        (ModelConfig, "get_and_verify_max_len", _get_and_verify_max_len),
        (VllmConfig, "__post_init__", _post_init),
        (VllmConfig, "_get_v2_model_runner_unsupported_features", _unsupported_features),
        (InputProcessor, "process_inputs", _process_inputs),
        (EngineCore, "preprocess_add_request", _preprocess_add_request),
        (WorkerWrapperBase, "init_device", _init_device),
    ):
        original = getattr(owner, name)
        if not hasattr(original, "rope_patch_original"):
            setattr(owner, name, _as_method(original, functools.partial(wrapper, original)))


def _as_method(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that binds to instances, as a partial does not."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **keywords: Any) -> Any:
        return function(self, *args, **keywords)

    vars(method)["rope_patch_original"] = original
    return method


def _get_and_verify_max_len(
    original: Callable[..., int], config: Any, *args: Any, **kw: Any
) -> int:
    """Refuse what cannot be read, before vLLM multiplies lengths by it."""
    require_readable(config)
    return original(config, *args, **kw)


def _post_init(original: Callable[..., None], config: Any, *args: Any, **keywords: Any) -> None:
    """Refuse, after vLLM has completed its config, what the plugin cannot serve."""
    original(config, *args, **keywords)
    require_servable(config)


def _unsupported_features(original: Callable[..., list[str]], config: Any) -> list[str]:
    """Name what only vLLM's first model runner can do, so that vLLM takes that one."""
    return [*original(config), *([FEATURE] if uses_plugin(config) else [])]


def _process_inputs(original: Callable[..., Any], processor: Any, *args: Any, **kw: Any) -> Any:
    """Count a request under its profile; refuse sessions that grow after their admission."""
    request = original(processor, *args, **kw)
    lengths = _lengths(processor)
    if lengths is None:
        return request
    if request.resumable:
        raise Refused(
            "rope_patch fixes a request's rotation from its prompt and max_tokens, and a resumable "
            "session has neither at its admission: send whole requests"
        )
    profile = _profile(request, lengths)
    count_request(processor.model_config.served_model_name, lengths, profile)
    return request


def _preprocess_add_request(original: Callable[..., Any], core: Any, request: Any) -> Any:
    """Keep the prefix cache of each profile apart."""
    lengths = _lengths(core)
    if lengths is not None and len(lengths) > 1:
        request.cache_salt = profile_salt(_profile(request, lengths), request.cache_salt)
    return original(core, request)


def _init_device(original: Callable[..., None], wrapper: Any) -> None:
    """Make the worker's model runner write the rows of each batch."""
    original(wrapper)
    if uses_plugin(wrapper.vllm_config):
        from rope_patch.serving.vllm.model_runner import watch_runner

        watch_runner(wrapper.worker.model_runner)


def _lengths(owner: Any) -> ProfileLengths | None:
    """Return the profile lengths of an engine's part, computed on its first request."""
    if _LENGTHS not in vars(owner):
        vars(owner)[_LENGTHS] = engine_lengths(owner.vllm_config)
    return vars(owner)[_LENGTHS]


def _profile(request: Any, lengths: ProfileLengths) -> int:
    """Return the profile of an `EngineCoreRequest`."""
    prompt = request.prompt_token_ids
    prompt = request.prompt_embeds if prompt is None else prompt
    parameters = request.sampling_params
    max_tokens = None if parameters is None else parameters.max_tokens
    return lengths.index(admitted_length(len(prompt), max_tokens, lengths.longest[-1]))
