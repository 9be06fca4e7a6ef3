"""Clients of running engines, which are asked over HTTP how likely tokens are.

`Engine` is what the comparison sees: `observe` a prompt's tokens, `write` what comes after it.
`OpenAICompletions`, `SGLang` and `LlamaCppServer` speak the APIs of three kinds of server through
`JsonClient`, which bounds what a server may do: its time, its answers' size, its redirects.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from email.message import Message
from typing import IO, Any

from rope_patch.utils.errors import Refused, describe_error, one_line, parse_json
from rope_patch.verifying.probe_prompts import ProbePrompt


class CannotVerify(Refused):
    """The engine cannot be compared with the model, for the reason in the message."""


@dataclass(frozen=True)
class Observation:
    """What an engine says about a prompt.

    Attributes:
        prompt: The prompt, with the scored tokens that the engine answered for.
        log_probs: A log-probability for each scored token, in nats.
    """

    prompt: ProbePrompt
    log_probs: tuple[float, ...]

    def __post_init__(self) -> None:
        if broken := sum(map(math.isnan, self.log_probs)):
            raise CannotVerify(
                f"the engine answers NaN for {broken} of {len(self.log_probs)} tokens, expected "
                "log-probabilities: its numbers overflow; serve in another dtype"
            )

    @classmethod
    def of(cls, prompt: ProbePrompt, log_probs: dict[int, float]) -> Observation:
        """Return the observation of those scored tokens that have a log-probability."""
        scored = tuple(p for p in prompt.scored if log_probs.get(p) is not None)
        return cls(replace(prompt, scored=scored), tuple(log_probs[p] for p in scored))

    @classmethod
    def of_written(
        cls, ids: tuple[int, ...], written: tuple[int, ...], log_probs: Iterable[float]
    ) -> Observation:
        """Return the observation of tokens that an engine wrote after a prompt."""
        scored = tuple(range(len(ids), len(ids) + len(written)))
        prompt = ProbePrompt("written", ids + written, scored, decoded_from=len(ids))
        return cls(prompt, tuple(map(float, log_probs)))


class Engine(ABC):
    """A running engine, asked for log-probabilities of tokens.

    Attributes:
        name: Its model and address, for messages.
        max_length: Tokens that it accepts; None if it does not say.
        vocab_size: Size of its vocabulary; None if it does not say.
        is_slow: Whether each scored token is a request of its own, so that few should be scored.
    """

    name: str = "engine"
    max_length: int | None = None
    vocab_size: int | None = None
    is_slow: bool = False

    def observe(self, prompt: ProbePrompt) -> Observation:
        """Return the log-probabilities of a prompt's scored tokens.

        Raises:
            CannotVerify: The engine does not answer, or not with log-probabilities.
        """
        with self._naming_the_engine():
            return self._observe(prompt)

    def write(self, ids: tuple[int, ...], count: int) -> Observation | None:
        """Return what the engine writes after a prompt, token by token, greedily.

        Args:
            ids: The prompt.
            count: Tokens to write.

        Returns:
            Prompt and written tokens; None if the engine does not say which ids it wrote.

        Raises:
            CannotVerify: The engine does not answer, or in an unknown form.
        """
        with self._naming_the_engine():
            return self._write(ids, count)

    @abstractmethod
    def _observe(self, prompt: ProbePrompt) -> Observation: ...

    @abstractmethod
    def _write(self, ids: tuple[int, ...], count: int) -> Observation | None: ...

    @contextmanager
    def _naming_the_engine(self) -> Iterator[None]:
        """Name the engine in an error of reading its answer."""
        try:
            yield
        except Refused:
            raise
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise CannotVerify(
                f"{self.name} answers in an unknown form ({describe_error(error)}), expected "
                "log-probabilities as its API documents them: choose the API by --engine"
            ) from error


MAX_ANSWER_BYTES = 2**30  # bytes of an answer that are read at most


BUSY = (408, 429, 502, 503, 504)  # statuses of a server that cannot answer now, or of its proxy


class CannotReach(CannotVerify):
    """No server answers at an address."""


class HttpError(CannotVerify):
    """A server answered with an error.

    Attributes:
        status: HTTP's number.
        detail: The server's message.
    """

    def __init__(self, url: str, status: int, detail: str) -> None:
        self.status, self.detail = status, detail
        message = f"{url} answered {status}: {detail}"
        if status in (401, 403):
            message += ": expected to be let in; put the server's key into OPENAI_API_KEY"
        super().__init__(message)


class _OwnOriginOnly(urllib.request.HTTPRedirectHandler):
    """Follow redirects within one server: others would get the key, or be taken for it."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message[str, str],
        newurl: str,
    ) -> urllib.request.Request | None:
        """Return the request to the new address; raise if that is another scheme, host or port."""
        if _origin(newurl) != _origin(req.full_url):
            raise CannotVerify(
                f"{one_line(req.full_url)} redirects to {one_line(newurl)}, another server: "
                "expected its own answer; give the address of the engine itself"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


class JsonClient:
    """A client of one server.

    Args:
        url: Address of the server; paths of the API are added to it.
        seconds: Longest wait for all answers together.
        api_key: Sent as a bearer token; the variable OPENAI_API_KEY unless given.
        option: The option that sets `seconds`, for errors.

    Attributes:
        headers: The headers of each request, the key among them.

    Raises:
        CannotVerify: Not an http(s) address, or a key that no header can hold.
    """

    def __init__(
        self,
        url: str,
        seconds: float = 120.0,
        api_key: str | None = None,
        option: str = "--seconds",
    ) -> None:
        try:
            origin = _origin(url)
        except ValueError:
            origin = None
        if origin is None or origin[0] not in ("http", "https") or not origin[1]:
            raise CannotVerify(
                "expected the address of a server such as http://localhost:8000, or a folder or "
                f"GGUF file that exists, got {url!r}"
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self.seconds = seconds
        self._option = option
        self._waited = 0.0
        key = os.environ.get("OPENAI_API_KEY", "") if api_key is None else api_key
        key = key.strip()
        if not key.isascii() or not key.isprintable():
            raise CannotVerify(
                "OPENAI_API_KEY has characters that no HTTP header can hold, expected printable "
                "ASCII: set it again"
            )
        self.headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"
        self._opener = urllib.request.build_opener(_OwnOriginOnly)

    def find(self, path: str) -> dict[str, Any] | None:
        """Return the JSON object at a path that some engines have; None without one.

        Raises:
            CannotReach: The server does not answer at all.
        """
        try:
            answer = self.get(path)
        except CannotReach:
            raise
        except CannotVerify:
            return None
        return answer if isinstance(answer, dict) else None

    def get(self, path: str) -> Any:
        """Return a path's JSON.

        Raises:
            CannotVerify: The server is not reachable, or answers with an error or no JSON.
        """
        return self._request(path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to a JSON body.

        Raises:
            CannotVerify: See `get`.
        """
        return self._request(path, json.dumps(body).encode())

    def _request(self, path: str, body: bytes | None) -> Any:
        url = f"{self.url}{path}"
        request = urllib.request.Request(url, data=body, headers=self.headers)
        try:
            text = self._read(request)
        except OSError as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):
                raise CannotReach(
                    f"{url} did not answer within {self.seconds:g} s: wait until the server is "
                    f"idle, or allow more time by {self._option}"
                ) from error
            raise CannotReach(
                f"no server answers at {url} ({describe_error(error)}): expected one that runs; "
                "start it, and give its address as http://HOST:PORT"
            ) from error
        except http.client.HTTPException as error:
            raise CannotReach(
                f"what answers at {url} does not speak HTTP ({describe_error(error)}): expected an "
                "engine's server; give its address as http://HOST:PORT"
            ) from error
        try:
            return parse_json(text)
        except ValueError as error:
            raise CannotVerify(
                f"{url} answered no JSON ({one_line(text[:80].decode(errors='replace'))!r}): "
                "expected an engine's API; give the address of the server itself"
            ) from error

    def _read(self, request: urllib.request.Request) -> bytes:
        """Return an answer's body, and end at the deadline whatever the server does."""
        # A socket's timeout bounds a single read, so a server that sends a byte a second would
        # never meet it. The request runs in a thread of its own, which is left behind at the
        # deadline.
        left = self.seconds - self._waited
        outcome: list[bytes | BaseException] = []
        is_late = threading.Event()

        def read_answer() -> None:
            try:
                with self._opener.open(request, timeout=max(left, 1e-3)) as answer:
                    outcome.append(_read_body(answer, is_late))
            except urllib.error.HTTPError as error:
                try:
                    detail = error_message(_read_body(error, is_late))
                    outcome.append(HttpError(request.full_url, error.code, detail))
                except Exception as second:
                    outcome.append(second)
            except BaseException as error:
                outcome.append(error)

        started = time.monotonic()
        thread = threading.Thread(target=read_answer, daemon=True)
        thread.start()
        thread.join(max(left, 0.0))
        self._waited += time.monotonic() - started
        is_late.set()
        if not outcome:
            raise TimeoutError
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port of an address; raise if it is none."""
    parts = urllib.parse.urlsplit(url)
    standard = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, standard if parts.port is None else parts.port


def _read_body(answer: Any, is_late: threading.Event) -> bytes:
    """Return a body: what came in time, up to `MAX_ANSWER_BYTES` bytes."""
    parts: list[bytes] = []
    size = 0
    while not is_late.is_set() and size < MAX_ANSWER_BYTES and (part := answer.read1(1 << 20)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def error_message(body: bytes) -> str:
    """Return the message in an error's body."""
    text = body.decode(errors="replace")
    try:
        answer = parse_json(text)
    except ValueError:
        return one_line(text)
    for name in ("error", "message", "detail"):
        if isinstance(answer, dict) and name in answer:
            answer = answer[name]
    return one_line(answer)


COMPLETIONS_PATH = "/v1/completions"
# Fields that ask for a prompt's log-probabilities: OpenAI's, and vLLM's own.
_LOG_PROB_FIELDS: tuple[dict[str, Any], ...] = (
    {"echo": True, "logprobs": 1},
    {"prompt_logprobs": 0},
)
_TOKEN_ID = "token_id:"  # begins a token that vLLM gives as its id, not its text


class OpenAICompletions(Engine):
    """A server that echoes a prompt of token ids with the log-probability of each.

    Args:
        client: The HTTP client.
        model: The served model's name; the server's first one unless given.

    Attributes:
        model: The served model's name.
        owner: What the server calls itself in its list of models, such as "vllm"; may be empty.
        log_prob_fields: Fields that may ask for a prompt's log-probabilities; those alone that do,
            once `observe` succeeded.
        least_tokens: The fewest tokens that the server writes for a request.

    Raises:
        CannotVerify: The server is not reachable or has no models.
    """

    def __init__(self, client: JsonClient, model: str | None = None) -> None:
        self._client = client
        try:
            answer = client.get("/v1/models")
        except HttpError as error:
            raise _with_advice(error, 0) from error
        cards = answer.get("data") if isinstance(answer, dict) else None
        names = [card["id"] for card in cards or [] if isinstance(card, dict) and "id" in card]
        if not names or (model is not None and model not in names):
            raise CannotVerify(
                f"{client.url} serves {', '.join(map(repr, names)) or 'no model'}, expected "
                f"{'at least one' if model is None else repr(model)}: name one with --served-model"
            )
        self.model = names[0] if model is None else model
        card = cards[names.index(self.model)]  # type: ignore[index]
        self.max_length = card.get("max_model_len")
        self.owner = one_line(card.get("owned_by") or "")
        self.name = f"{one_line(self.model)} at {client.url}"
        self.log_prob_fields = _LOG_PROB_FIELDS
        self.least_tokens = 0

    def _observe(self, prompt: ProbePrompt) -> Observation:
        refusal = None
        for fields in self.log_prob_fields:
            body = {"prompt": list(prompt.ids), **fields}
            try:
                answer = self._complete(body, self.least_tokens)
            except HttpError as error:  # vLLM without a tokenizer refuses to echo
                refusal = refusal or _with_advice(error, len(prompt.ids))
                if error.status in BUSY:
                    break
                continue
            log_probs = prompt_log_probs(answer, prompt.ids)
            if log_probs is not None:
                self.log_prob_fields = (fields,)
                return Observation.of(prompt, log_probs)
        raise refusal or CannotVerify(
            f"{self.name} answers without log-probabilities of the prompt's tokens, expected "
            f"{len(prompt.ids)} of them for echo=true, logprobs=1: serve with vLLM, SGLang or "
            "llama.cpp's server, or turn log-probabilities on"
        )

    def _write(self, ids: tuple[int, ...], count: int) -> Observation | None:
        body = {"prompt": list(ids), "logprobs": 1, "return_tokens_as_token_ids": True}
        try:
            answer = self._complete({**body, "ignore_eos": True}, count)
        except HttpError as error:
            raise _with_advice(error, len(ids) + count) from error
        log_probs = answer.get("logprobs") or {}
        tokens, values = log_probs.get("tokens"), log_probs.get("token_logprobs")
        if not tokens or not values or not all(str(t).startswith(_TOKEN_ID) for t in tokens):
            return None
        written = tuple(int(str(token).removeprefix(_TOKEN_ID)) for token in tokens)
        return Observation.of_written(ids, written, values)

    def _complete(self, body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        """Return the first choice; ask for one token where a server writes no fewer."""
        body = {"model": self.model, "temperature": 0.0, **body}
        try:
            answer = self._client.post(COMPLETIONS_PATH, {**body, "max_tokens": max_tokens})
        except HttpError as error:
            if max_tokens > 0 or "max_tokens" not in error.detail:
                raise
            self.least_tokens = 1
            answer = self._client.post(COMPLETIONS_PATH, {**body, "max_tokens": 1})
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not choices or not isinstance(choices[0], dict):
            raise CannotVerify(
                f"{self._client.url}{COMPLETIONS_PATH} answered without choices, expected "
                "OpenAI's completions: give the address of an engine's own server"
            )
        return choices[0]


def _with_advice(error: HttpError, tokens: int) -> CannotVerify:
    """Return an error that says what to do about a server's refusal."""
    if error.status in (401, 403, *BUSY):
        return error
    if error.status == 404:
        fix = "expected OpenAI's completions; give --engine llama.cpp or sglang for their servers"
    elif "vocab" in error.detail:
        fix = "the engine has another vocabulary: give --against the model that it serves"
    elif not tokens:
        fix = "expected a list of models; give the address of an engine's own server"
    else:
        fix = f"expected log-probabilities of {tokens} tokens; make prompts shorter by --tokens"
    return CannotVerify(f"{error}: {fix}")


def prompt_log_probs(choice: dict[str, Any], ids: Sequence[int]) -> dict[int, float] | None:
    """Return the log-probabilities of a prompt's tokens, by index.

    Args:
        choice: A choice of an answer of completions.
        ids: The prompt's tokens.

    Returns:
        In nats, without the first token's; None if the choice has none in either form.
    """
    return _echo_log_probs(choice, ids) or _vllm_log_probs(choice, ids)


def _echo_log_probs(choice: dict[str, Any], ids: Sequence[int]) -> dict[int, float] | None:
    """Return the log-probabilities of an echoed prompt, by index; None without an echo."""
    values = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(values, list) or len(values) < len(ids) or values[0] is not None:
        return None
    return {i: float(v) for i, v in enumerate(values[: len(ids)]) if v is not None}


def _vllm_log_probs(choice: dict[str, Any], ids: Sequence[int]) -> dict[int, float] | None:
    """Return the log-probabilities in vLLM's own field, by index; None without the field."""
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(ids):
        return None
    log_probs = {}
    for i, (entry, token) in enumerate(zip(entries, ids, strict=True)):
        if entry and str(token) in entry:
            log_probs[i] = float(entry[str(token)]["logprob"])
    return log_probs


_GENERATE_PATH = "/generate"


class SGLang(Engine):
    """A server that returns `input_token_logprobs`.

    Args:
        client: The HTTP client.
        model_info: The server's answer at `/get_model_info`.
    """

    def __init__(self, client: JsonClient, model_info: dict[str, Any]) -> None:
        self._client = client
        self.name = f"{one_line(model_info.get('model_path', 'SGLang'))} at {client.url}"

    def _observe(self, prompt: ProbePrompt) -> Observation:
        entries = self._generate(prompt.ids, 1, "input_token_logprobs")
        if [int(entry[1]) for entry in entries] != list(prompt.ids):
            raise CannotVerify(
                f"{self.name} returns log-probabilities of {len(entries)} other tokens, expected "
                f"the prompt's {len(prompt.ids)}: it must not add any of its own"
            )
        log_probs = {i: float(entry[0]) for i, entry in enumerate(entries) if entry[0] is not None}
        return Observation.of(prompt, log_probs)

    def _write(self, ids: tuple[int, ...], count: int) -> Observation:
        entries = self._generate(ids, count, "output_token_logprobs")
        written = tuple(int(entry[1]) for entry in entries)
        return Observation.of_written(ids, written, (entry[0] for entry in entries))

    def _generate(self, ids: tuple[int, ...], count: int, field: str) -> list[Any]:
        sampling = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
        body = {
            "input_ids": list(ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = self._client.post(_GENERATE_PATH, body)
        entries = (answer.get("meta_info") or {}).get(field) if isinstance(answer, dict) else None
        if not entries:
            raise CannotVerify(
                f"{self.name} answers without {field}, expected them for return_logprob=true: use "
                "a release that has them at /generate"
            )
        return entries


_COMPLETION_PATH = "/completion"


class LlamaCppServer(Engine):
    """A server that says how likely each next token is, and nothing about a prompt's tokens.

    So each scored token is a request: the prompt up to it, whose beginning the server has cached.

    Args:
        client: The HTTP client.
        properties: The server's answer at `/props`.
    """

    is_slow = True

    def __init__(self, client: JsonClient, properties: dict[str, Any]) -> None:
        self._client = client
        settings = properties.get("default_generation_settings") or {}
        self.max_length = settings.get("n_ctx")
        self.vocab_size = _vocabulary_size(client)
        self.name = f"llama.cpp at {client.url}"

    def _observe(self, prompt: ProbePrompt) -> Observation:
        log_probs = {}
        for position in prompt.scored:
            likely = self._next_tokens(prompt.ids[:position])
            if (value := likely.get(prompt.ids[position])) is not None:
                log_probs[position] = value
        return Observation.of(prompt, log_probs)

    def _write(self, ids: tuple[int, ...], count: int) -> Observation:
        tokens = self._complete(ids, n_predict=count, n_probs=1, ignore_eos=True)
        written = tuple(int(token["id"]) for token in tokens)
        return Observation.of_written(ids, written, (token["logprob"] for token in tokens))

    def _next_tokens(self, ids: tuple[int, ...]) -> dict[int, float]:
        """Return the log-probability of each next token; every one, since any may be scored."""
        count = 2**20 if self.vocab_size is None else self.vocab_size
        tokens = self._complete(ids, n_predict=1, n_probs=count)
        likely = tokens[0]["top_logprobs"] if tokens else []
        return {int(each["id"]): float(each["logprob"]) for each in likely}

    def _complete(self, ids: tuple[int, ...], **fields: Any) -> list[dict[str, Any]]:
        body = {"prompt": list(ids), "temperature": 0.0, "cache_prompt": True, **fields}
        answer = self._client.post(_COMPLETION_PATH, body)
        tokens = answer.get("completion_probabilities") if isinstance(answer, dict) else None
        # Of a token that is a part of a character, the server says nothing until the rest is there.
        is_partial = isinstance(answer, dict) and str(answer.get("content")).endswith("\ufffd")
        if not tokens and not is_partial:
            raise CannotVerify(
                f"{self.name} answers without completion_probabilities, expected them for n_probs: "
                "use a release of 2025 or later"
            )
        return tokens or []


def _vocabulary_size(client: JsonClient) -> int | None:
    """Return the size of the vocabulary; None if the server does not say."""
    try:
        answer = client.get("/v1/models")
        return int(answer["data"][0]["meta"]["n_vocab"])
    except CannotReach:
        raise
    except (CannotVerify, LookupError, TypeError, ValueError):
        return None
