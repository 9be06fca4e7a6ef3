"""Find out which engine answers at an address, and return its client."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from rope_patch.verifying.engine import CannotVerify, Engine
from rope_patch.verifying.http_json import CannotReach, JsonClient
from rope_patch.verifying.llama_cpp_server import LlamaCppServer
from rope_patch.verifying.local_files import open_local_files
from rope_patch.verifying.local_model import LocalModel
from rope_patch.verifying.openai_completions import OpenAICompletions
from rope_patch.verifying.sglang import SGLang

ENGINES = ("auto", "openai", "llama.cpp", "sglang")

# Where an engine describes itself, and what its answer has.
_MARKS = {
    "llama.cpp": ("/props", "default_generation_settings"),
    "sglang": ("/get_model_info", "model_path"),
}


def open_engine(
    model_or_url: Any,
    kind: str = "auto",
    served_model: str | None = None,
    seconds: float = 600.0,
    **loading: Any,
) -> Engine:
    """Return the client of an engine.

    Args:
        model_or_url: An engine's address, a folder, a GGUF file, or a live model.
        kind: One of `ENGINES`.
        served_model: The served model's name, where a server has several.
        seconds: Longest wait for all answers together.
        **loading: Arguments of `rope_patch.load`, for a folder or a file.

    Raises:
        CannotVerify: No engine answers, or none with a known API.
        TypeError: Neither an address nor a path nor a model.
    """
    if isinstance(model_or_url, nn.Module):
        return LocalModel(model_or_url)
    if isinstance(model_or_url, str | os.PathLike) and Path(model_or_url).exists():
        return open_local_files(Path(model_or_url), **loading)
    if not isinstance(model_or_url, str):
        raise TypeError(
            "expected an engine's address such as http://localhost:8000, or a live model, got "
            f"{type(model_or_url).__name__}"
        )
    if kind not in ENGINES:
        raise CannotVerify(f"engine must be one of {', '.join(ENGINES)}, got {kind!r}")
    client = JsonClient(model_or_url, seconds)
    if kind in ("auto", "llama.cpp") and (properties := _describe(client, "llama.cpp")):
        return LlamaCppServer(client, properties)
    if kind in ("auto", "sglang") and (model_info := _describe(client, "sglang")):
        return SGLang(client, model_info)
    if kind in _MARKS:
        raise CannotVerify(
            f"{client.url}{_MARKS[kind][0]} does not answer as {kind} does, expected its own "
            "server: leave --engine out to find out which one it is"
        )
    return OpenAICompletions(client, served_model)


def _describe(client: JsonClient, kind: str) -> dict[str, Any] | None:
    """Return what an engine says about itself; None from another one."""
    path, mark = _MARKS[kind]
    try:
        answer = client.get(path)
    except CannotReach:
        raise
    except CannotVerify:
        return None
    return answer if isinstance(answer, dict) and mark in answer else None
