"""Tell the length of a request, which decides its profile, and its salt; count it in the metrics.

The salt is the prefix cache's, by profile: keys of one text under two rotations differ.
"""

from __future__ import annotations

import functools
from typing import Any

from rope_patch.serving.vllm.profiles import ProfileLengths
from rope_patch.serving.vllm.rope_type import our_parameters, read_request


def admitted_length(prompt_length: int, max_tokens: int | None, max_length: int) -> int:
    """Return the most tokens of a request that the model may read, which decide its profile.

    The last token that is written is never read: a prompt that is scored and writes one token, the
    fewest that vLLM writes, counts for its own tokens. vLLM itself sets `max_tokens` to the rest of
    max_model_len for requests that name none.

    Args:
        prompt_length: Tokens of the prompt.
        max_tokens: Tokens that may be generated; None for requests that generate none.
        max_length: The engine's max_model_len.
    """
    return min(prompt_length + max((max_tokens or 0) - 1, 0), max_length)


def engine_lengths(vllm_config: Any) -> ProfileLengths | None:
    """Return the profile lengths of an engine; None if its rotation is vLLM's own.

    Args:
        vllm_config: vLLM's `VllmConfig`.
    """
    model_config = vllm_config.model_config
    if model_config is None:
        return None
    parameters = our_parameters(getattr(model_config.hf_text_config, "rope_parameters", None))
    if not parameters:
        return None
    requests = [read_request(one) for one in parameters]
    return ProfileLengths.merge(
        ProfileLengths.of_method(r.method, r.trained_length, model_config.max_model_len)
        for r in requests
    )


def profile_salt(profile: int, user_salt: str | None) -> str:
    """Return the salt of a request's first block, from its profile and the user's own salt.

    Different pairs have different salts: the text up to the first colon is the profile, so no
    user's salt can name another profile's blocks.

    Args:
        profile: Index of the request's profile.
        user_salt: `cache_salt` of the request; vLLM takes None and "" alike.
    """
    return f"{profile}:{user_salt or ''}"


@functools.cache
def _counter() -> Any:
    from prometheus_client import Counter

    return Counter(
        "rope_patch:requests",
        "Requests by the profile that rotates them; longest is the profile's length in tokens.",
        ("model_name", "profile", "longest"),
    )


def count_request(model_name: str, lengths: ProfileLengths, profile: int) -> None:
    """Count a request under its profile."""
    longest = str(lengths.longest[profile])
    _counter().labels(model_name=model_name, profile=str(profile), longest=longest).inc()
