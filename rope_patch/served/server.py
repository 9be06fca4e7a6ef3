"""A server as it describes itself: model, limit, what it tells of prompts; and how it rotates."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.evaluation.request import EvalRequest
from rope_patch.evaluation.results_schema import RotationRecord
from rope_patch.pretrained.gguf import split_gguf
from rope_patch.served.request import ServedRequest
from rope_patch.utils import provenance
from rope_patch.utils.errors import one_line
from rope_patch.verifying import verify
from rope_patch.verifying.clients import (
    COMPLETIONS_PATH,
    CannotReach,
    CannotVerify,
    Engine,
    HttpError,
    JsonClient,
    LlamaCppServer,
    OpenAICompletions,
    SGLang,
)
from rope_patch.verifying.engine_detection import engine_at
from rope_patch.verifying.probe_prompts import ProbePrompt

logger = logging.getLogger("rope_patch")

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class Server:
    """A server that completes prompts of token ids.

    Attributes:
        url: Its address.
        model: The served model's name.
        kind: The engine: "vllm", "llama.cpp", "sglang" or "openai" for any other.
        version: The engine's version; None if it does not say.
        max_length: Tokens that a prompt and its answer may have; None if it does not say.
        engine: The client that asks for log-probabilities in the engine's own way.
        headers: The headers of each request.
        log_prob_fields: The fields that ask for the log-probabilities of a prompt; None if none do.
        no_log_probs: Why there are none, if there are none.
        least_tokens: The fewest tokens that it writes for a request.
    """

    url: str
    model: str
    kind: str
    version: str | None
    max_length: int | None
    engine: Engine
    headers: dict[str, str]
    log_prob_fields: dict[str, Any] | None
    no_log_probs: str
    least_tokens: int

    @property
    def longest(self) -> int | None:
        """Return the tokens of the longest text that can be scored; None if unknown."""
        return None if self.max_length is None else self.max_length - self.least_tokens


def open_server(url: str, model: str | None, ids: list[int], seconds: float) -> Server:
    """Ask a server what it is and can do, by a short prompt.

    Args:
        url: Its address.
        model: The served model's name; the server's first one if None.
        ids: Tokens of a short prompt.
        seconds: Longest wait for all answers together.

    Raises:
        CannotVerify: Nothing answers there, or not as a server of completions.
    """
    client = JsonClient(url, seconds, option="--timeout")
    engine = engine_at(client, served_model=model)
    completions = engine if isinstance(engine, OpenAICompletions) else None
    completions = completions or OpenAICompletions(client, model)
    _require_completions(client, completions.model, ids)
    fields, reason = None, ""
    try:
        completions.observe(ProbePrompt("probe", tuple(ids), tuple(range(1, len(ids)))))
        (fields,) = completions.log_prob_fields
    except (CannotReach, HttpError):  # the latter of a key that is wrong, or a busy server
        raise
    except CannotVerify as error:
        reason = str(error)
    kind = "vllm" if completions.owner == "vllm" else "openai"
    kind = "llama.cpp" if isinstance(engine, LlamaCppServer) else kind
    kind = "sglang" if isinstance(engine, SGLang) else kind
    return Server(
        url=client.url,
        model=completions.model,
        kind=kind,
        version=_version(client, kind),
        max_length=engine.max_length or completions.max_length,
        engine=engine,
        headers=client.headers,
        log_prob_fields=fields,
        no_log_probs=reason,
        least_tokens=completions.least_tokens,
    )


def _require_completions(client: JsonClient, model: str, ids: list[int]) -> None:
    """Raise unless the server completes a prompt of ids, and says how many tokens it read."""
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0}
    try:
        answer = client.post(COMPLETIONS_PATH, body)
    except HttpError as error:
        if error.status in (401, 403):
            raise
        raise CannotVerify(
            f"{error}: expected OpenAI's completions of a prompt of token ids; give the address of "
            "an engine's own server that has them (vLLM, SGLang, llama.cpp)"
        ) from error
    require_whole_prompt(answer, len(ids), client.url)


def require_whole_prompt(answer: Any, sent: int, url: str) -> None:
    """Raise unless a server says that it read as many tokens as were sent.

    Args:
        answer: The answer's JSON.
        sent: Tokens of the prompt.
        url: The server's address, for the error.

    Raises:
        CannotVerify: It read another number of tokens, or does not say.
    """
    usage = answer.get("usage") if isinstance(answer, dict) else None
    read = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if read is None:
        raise CannotVerify(
            f"{url} answers without usage.prompt_tokens, expected the number of tokens that it "
            "read: without it, a prompt that was cut would go unnoticed; use a server that says it"
        )
    if read != sent:
        what = "cut the prompt" if isinstance(read, int) and read < sent else "tokenized it again"
        raise CannotVerify(
            f"{url} read {one_line(read)} tokens of a prompt of {sent:,} token ids: it {what}, so "
            "its answers are to other questions; expected all tokens as they are, so turn "
            "truncation and added special tokens off in the server, or allow it longer prompts"
        )


def _version(client: JsonClient, kind: str) -> str | None:
    """Return what an engine says of its version; None if nothing."""
    path, field = {
        "vllm": ("/version", "version"),
        "llama.cpp": ("/props", "build_info"),
        "sglang": ("/get_server_info", "version"),
    }.get(kind, ("", ""))
    answer = client.find(path) if path else None
    version = None if answer is None else answer.get(field)
    return None if version is None else one_line(version, 60)


def rotation_of(
    server: Server, tokenizer: str, request: EvalRequest, served: ServedRequest
) -> RotationRecord:
    """Return how a server rotates, by `rope_patch.verify`, or why that is not known.

    Args:
        server: The server.
        tokenizer: The tokenizer's folder or name.
        request: What is evaluated; says how weights are loaded.
        served: Says whether to verify, and against what.

    Raises:
        CannotReach: The server does not answer any more.
    """
    against = tokenizer if served.against is None else served.against
    reason = "--no-verify" if not served.verify else _no_weights(against, request, served)
    verification = None
    if reason is None:
        try:
            verification = verify(
                server.url,
                against=against,
                served_model=server.model,
                dtype=request.dtype,
                device_map=request.device_map,
                gguf_file=request.gguf_file,
            )
        except CannotReach:
            raise
        except ValueError as error:  # of weights that cannot be read, too
            if served.against is not None and not isinstance(error, CannotVerify):
                raise  # they were asked for by name
            reason = str(error)
    if verification is None:
        text = f"not verified: {reason}"
        logger.warning("how the server rotates is %s", text)
        return {"rotation": text, "rotates_as_asked": None, "verification": None}
    text = str(verification).partition("\n")[0]
    log = logger.info if verification else logger.warning
    log("%s", text)
    return {
        "rotation": text,
        "rotates_as_asked": {"as-asked": True, "another": False}.get(verification.status),
        "verification": verification.to_dict(),
    }


def _no_weights(against: str, request: EvalRequest, served: ServedRequest) -> str | None:
    """Return why there are no weights to verify against; None if there are some."""
    if served.against is not None:
        return None
    source, gguf_file = split_gguf(against, request.gguf_file)
    folder = Path(source)
    names = _WEIGHTS if gguf_file is None else [gguf_file]
    files = [file for name in names for file in folder.glob(name)] if folder.is_dir() else []
    if not files:
        return f"no weights are at hand in {against}; name them by --against MODEL"
    size, memory = sum(file.stat().st_size for file in files), provenance.hardware()["memory"]
    if memory is not None and size > memory:
        return (
            f"the weights in {against} take {size / 1e9:.0f} GB, and this machine has "
            f"{memory / 1e9:.0f} GB"
        )
    return None
