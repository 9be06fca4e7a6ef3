"""What answers as an engine: a server at an address, a live model, a folder or a GGUF file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from rope_patch.exporting.engine_fields import engine_version, what_graph_reads
from rope_patch.inference.prefix_reader import input_device
from rope_patch.pretrained.gguf import GgufRotationError
from rope_patch.pretrained.loading import load, read_model
from rope_patch.pretrained.sidecar import patch_to_restore
from rope_patch.transformers_api.forwards import cache_arguments
from rope_patch.utils.errors import one_line
from rope_patch.verifying.clients import (
    CannotVerify,
    Engine,
    JsonClient,
    LlamaCppServer,
    Observation,
    OpenAICompletions,
    SGLang,
)
from rope_patch.verifying.probe_prompts import ProbePrompt

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
    return engine_at(JsonClient(model_or_url, seconds), kind, served_model)


def engine_at(client: JsonClient, kind: str = "auto", served_model: str | None = None) -> Engine:
    """Return the client of the engine that answers at an address.

    Args:
        client: The HTTP client.
        kind: One of `ENGINES`.
        served_model: The served model's name, where a server has several.

    Raises:
        CannotVerify: See `open_engine`.
    """
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
    answer = client.find(path)
    return answer if answer is not None and mark in answer else None


class LocalModel(Engine):
    """A causal language model of this process, as it is: patched, configured or changed by hand.

    Args:
        model: The model.
        name: What it is, for messages; its class unless given.
    """

    def __init__(self, model: Any, name: str | None = None) -> None:
        self._model = model
        self._device = input_device(model)
        self.name = one_line(f"a live {type(model).__name__}" if name is None else name)
        self.vocab_size = model.config.get_text_config(decoder=True).vocab_size

    @torch.no_grad()
    def _observe(self, prompt: ProbePrompt) -> Observation:
        ids = torch.tensor([prompt.ids], device=self._device)
        logits = self._model(ids, use_cache=False).logits[0].float().log_softmax(-1)
        return Observation(
            prompt, tuple(float(logits[p - 1, prompt.ids[p]]) for p in prompt.scored)
        )

    @torch.no_grad()
    def _write(self, ids: tuple[int, ...], count: int) -> Observation:
        cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        piece, written, values = list(ids), [], []
        for _ in range(count):
            inputs = torch.tensor([piece], device=self._device)
            logits = self._model(inputs, **cache_arguments(self._model, cache)).logits[0, -1]
            log_probs = logits.float().log_softmax(-1)
            piece = [int(log_probs.argmax())]
            written += piece
            values.append(float(log_probs[piece[0]]))
        scored = tuple(range(len(ids), len(ids) + count))
        prompt = ProbePrompt("written", ids + tuple(written), scored, decoded_from=len(ids))
        return Observation(prompt, tuple(values))


def open_local_files(path: Path, **loading: Any) -> LocalModel:
    """Return the model of a folder, or of a GGUF file, as the engine to verify.

    A folder rotates as transformers rotates it, or as its `rope_patch.json` says. A GGUF file
    rotates as llama.cpp does without flags.

    Args:
        path: The folder or file.
        **loading: Arguments of `rope_patch.load`.

    Raises:
        CannotVerify: transformers cannot read the weights, or the rotation of the file.
        ValueError: The model is damaged.
    """
    if path.is_file():
        return LocalModel(_read_gguf(path, loading), f"{path} (GGUF)")
    _require_readable(path)
    read = read_model if patch_to_restore(path) is None else load
    return LocalModel(read(path, **loading), str(path))


def _require_readable(path: Path) -> None:
    """Raise if mlx-lm quantised the weights of a folder."""
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return  # loading explains it
    packed = config.get("quantization") if isinstance(config, dict) else None
    if isinstance(packed, dict) and "bits" in packed:
        raise CannotVerify(
            f"{path} holds weights of {packed['bits']} bits by mlx-lm, expected weights that "
            "transformers reads: verify a copy that `mlx_lm.convert --dequantize` wrote"
        )


def _read_gguf(path: Path, loading: dict[str, Any]) -> Any:
    """Return the model of a GGUF file, with the rotation that its keys name."""
    if path.suffix != ".gguf":
        raise CannotVerify(
            f"{path} is a file, expected a .gguf file, a folder, or an engine's address such as "
            "http://localhost:8000"
        )
    try:
        model = read_model(path.parent, gguf_file=path.name, **loading)
    except GgufRotationError as error:
        raise CannotVerify(str(error)) from error
    if getattr(model.config.get_text_config(decoder=True), "rope_parameters", None):
        _require_known_graph(path)
    return model


def _require_known_graph(path: Path) -> None:
    """Raise unless llama.cpp rotates every query and key by what a GGUF file says."""
    from gguf import GGUFReader

    architecture = str(GGUFReader(str(path)).fields["general.architecture"].contents())
    if what_graph_reads(architecture) is None:
        raise CannotVerify(
            f"{path} is of the architecture {architecture!r}, which llama.cpp "
            f"{engine_version('llama.cpp')} is not known to rotate by what its files say, so this "
            "model in transformers would stand for another: verify the server that runs the file, "
            "by its address"
        )
