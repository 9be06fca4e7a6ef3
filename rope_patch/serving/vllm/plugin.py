"""Entry point of vLLM's general plugins: what rope_patch adds to vLLM, in each of its processes.

Every addition looks at the engine's `rope_type` first and leaves vLLM's own ones alone.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rope_patch.serving.vllm import rotary_factory
from rope_patch.serving.vllm.profiles import ProfileLengths
from rope_patch.serving.vllm.requests import (
    admitted_length,
    count_request,
    engine_lengths,
    profile_salt,
)
from rope_patch.serving.vllm.requirements import (
    FEATURE,
    require_readable,
    require_servable,
    uses_plugin,
)
from rope_patch.utils.errors import Refused
from rope_patch.utils.installation import install_hint

_LENGTHS = "rope_patch_lengths"


@dataclass(frozen=True)
class Hook:
    """A method of vLLM that the plugin wraps.

    Attributes:
        module: The module that its class is imported from.
        owner: The class.
        name: The method.
        wrapper: What is called in its place, with the method first.
    """

    module: str
    owner: str
    name: str
    wrapper: Callable[..., Any]

    @property
    def path(self) -> str:
        """Return the method's full name, for messages."""
        return f"{self.module}.{self.owner}.{self.name}"


def register() -> None:
    """Add rope_patch's methods to this process's vLLM; calling it again adds nothing.

    On a release without one of the hooks, engines that ask for a method of rope_patch are refused,
    and others run as without the plugin.
    """
    found = {hook: _find(hook) for hook in HOOKS}
    missing = [hook.path for hook, owner in found.items() if owner is None]
    if missing:
        _refuse_engines(found, missing)
        return
    rotary_factory.install()
    for hook, owner in found.items():
        _wrap(owner, hook.name, hook.wrapper)


def _find(hook: Hook) -> Any:
    """Return the class of vLLM that a hook is in; None if this release has no such method."""
    try:
        owner = getattr(importlib.import_module(hook.module), hook.owner, None)
    except ModuleNotFoundError:
        return None
    return owner if hasattr(owner, hook.name) else None


def _refuse_engines(found: dict[Hook, Any], missing: list[str]) -> None:
    """Refuse every engine that asks for a method of rope_patch, naming what vLLM lacks."""
    message = (
        f"rope_patch cannot rotate by request in this release of vLLM, which has no "
        f"{', '.join(missing)}: install a release that it knows ({install_hint('vllm')}), "
        "or serve a static method that `rope-patch export MODEL --engine vllm` writes in vLLM's "
        "own form"
    )

    def refuse(original: Callable[..., None], config: Any, *args: Any, **keywords: Any) -> None:
        original(config, *args, **keywords)
        if uses_plugin(config):
            raise Refused(message)

    (last,) = (hook for hook in HOOKS if hook.wrapper is _post_init)
    if found[last] is None:
        raise Refused(message)  # no place is left that could refuse an engine
    _wrap(found[last], last.name, refuse)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
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


HOOKS = (
    Hook("vllm.config", "ModelConfig", "get_and_verify_max_len", _get_and_verify_max_len),
    Hook("vllm.config", "VllmConfig", "__post_init__", _post_init),
    Hook(
        "vllm.config",
        "VllmConfig",
        "_get_v2_model_runner_unsupported_features",
        _unsupported_features,
    ),
    Hook("vllm.v1.engine.input_processor", "InputProcessor", "process_inputs", _process_inputs),
    Hook("vllm.v1.engine.core", "EngineCore", "preprocess_add_request", _preprocess_add_request),
    Hook("vllm.v1.worker.worker_base", "WorkerWrapperBase", "init_device", _init_device),
)
