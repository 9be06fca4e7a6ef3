"""llama.cpp's server: the next token's distribution at one position a request."""

from __future__ import annotations

from typing import Any

from rope_patch.verifying.engine import CannotVerify, Engine, Observation
from rope_patch.verifying.http_json import CannotReach, JsonClient
from rope_patch.verifying.probe_prompts import ProbePrompt

_PATH = "/completion"


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
        self.vocab_size = _vocabulary(client)
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
        scored = tuple(range(len(ids), len(ids) + len(written)))
        prompt = ProbePrompt("written", ids + written, scored, decoded_from=len(ids))
        return Observation(prompt, tuple(float(token["logprob"]) for token in tokens))

    def _next_tokens(self, ids: tuple[int, ...]) -> dict[int, float]:
        """Return the log-probability of each next token; every one, since any may be scored."""
        count = 2**20 if self.vocab_size is None else self.vocab_size
        (token,) = self._complete(ids, n_predict=1, n_probs=count)
        return {int(each["id"]): float(each["logprob"]) for each in token["top_logprobs"]}

    def _complete(self, ids: tuple[int, ...], **fields: Any) -> list[dict[str, Any]]:
        body = {"prompt": list(ids), "temperature": 0.0, "cache_prompt": True, **fields}
        answer = self._client.post(_PATH, body)
        tokens = answer.get("completion_probabilities") if isinstance(answer, dict) else None
        if not tokens:
            raise CannotVerify(
                f"{self.name} answers without completion_probabilities, expected them for n_probs: "
                "use a release of 2025 or later"
            )
        return tokens


def _vocabulary(client: JsonClient) -> int | None:
    """Return the size of the vocabulary; None if the server does not say."""
    try:
        answer = client.get("/v1/models")
        return int(answer["data"][0]["meta"]["n_vocab"])
    except CannotReach:
        raise
    except (CannotVerify, LookupError, TypeError, ValueError):
        return None
