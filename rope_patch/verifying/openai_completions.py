"""Engines with OpenAI's `/v1/completions`: vLLM and whatever echoes log-probabilities."""

from __future__ import annotations

from typing import Any

from rope_patch.utils.errors import one_line
from rope_patch.verifying.engine import CannotVerify, Engine, Observation
from rope_patch.verifying.http_json import HttpError, JsonClient
from rope_patch.verifying.probe_prompts import ProbePrompt

_PATH = "/v1/completions"
# How a prompt's log-probabilities are asked for: OpenAI's form, and vLLM's.
_FORMS: tuple[dict[str, Any], ...] = ({"echo": True, "logprobs": 1}, {"prompt_logprobs": 0})
_TOKEN_ID = "token_id:"  # how vLLM writes ids in place of texts


class OpenAICompletions(Engine):
    """A server that echoes a prompt of token ids with the log-probability of each.

    Args:
        client: The HTTP client.
        model: The served model's name; the server's first one unless given.

    Raises:
        CannotVerify: The server is not reachable or has no models.
    """

    def __init__(self, client: JsonClient, model: str | None = None) -> None:
        self._client = client
        try:
            answer = client.get("/v1/models")
        except HttpError as error:
            raise _explain(error, 0) from error
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
        self.name = f"{one_line(self.model)} at {client.url}"
        self._forms = _FORMS
        self._least_tokens = 0  # that the server lets one ask for

    def _observe(self, prompt: ProbePrompt) -> Observation:
        refusal = None
        for form in self._forms:
            body = {"prompt": list(prompt.ids), **form}
            try:
                answer = self._complete(body, self._least_tokens)
            except HttpError as error:  # vLLM without a tokenizer refuses to echo
                refusal = refusal or _explain(error, len(prompt.ids))
                continue
            log_probs = _echoed(answer, prompt.ids) or _prompt_log_probs(answer, prompt.ids)
            if log_probs is not None:
                self._forms = (form,)
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
            raise _explain(error, len(ids) + count) from error
        log_probs = answer.get("logprobs") or {}
        tokens, values = log_probs.get("tokens"), log_probs.get("token_logprobs")
        if not tokens or not values or not all(str(t).startswith(_TOKEN_ID) for t in tokens):
            return None
        written = tuple(int(str(token).removeprefix(_TOKEN_ID)) for token in tokens)
        scored = tuple(range(len(ids), len(ids) + len(written)))
        prompt = ProbePrompt("written", ids + written, scored, decoded_from=len(ids))
        return Observation(prompt, tuple(map(float, values)))

    def _complete(self, body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        """Return the first choice; ask for one token where a server writes no fewer.

        Raises:
            HttpError: The server refuses the request.
        """
        body = {"model": self.model, "temperature": 0.0, **body}
        try:
            answer = self._client.post(_PATH, {**body, "max_tokens": max_tokens})
        except HttpError as error:
            if max_tokens > 0 or "max_tokens" not in error.detail:
                raise
            self._least_tokens = 1
            answer = self._client.post(_PATH, {**body, "max_tokens": 1})
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not choices or not isinstance(choices[0], dict):
            raise CannotVerify(
                f"{self._client.url}{_PATH} answered without choices, expected OpenAI's "
                "completions: give the address of an engine's own server"
            )
        return choices[0]


def _explain(error: HttpError, tokens: int) -> CannotVerify:
    """Return an error that says what to do about a server's refusal."""
    if error.status in (401, 403):
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


def _echoed(choice: dict[str, Any], ids: tuple[int, ...]) -> dict[int, float] | None:
    """Return the log-probabilities that an echo has, by index; None without."""
    values = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(values, list) or len(values) < len(ids) or values[0] is not None:
        return None
    return {i: float(v) for i, v in enumerate(values[: len(ids)]) if v is not None}


def _prompt_log_probs(choice: dict[str, Any], ids: tuple[int, ...]) -> dict[int, float] | None:
    """Return the log-probabilities in vLLM's own field, by index; None without."""
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(ids):
        return None
    log_probs = {}
    for i, (entry, token) in enumerate(zip(entries, ids, strict=True)):
        if entry and str(token) in entry:
            log_probs[i] = float(entry[str(token)]["logprob"])
    return log_probs
