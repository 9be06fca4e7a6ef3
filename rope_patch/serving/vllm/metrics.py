"""Counter of requests by profile, among the metrics of vLLM."""

from __future__ import annotations

import functools
from typing import Any

from rope_patch.serving.vllm.profiles import ProfileLengths


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
