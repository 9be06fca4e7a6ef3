"""SGLang's server: `/generate` with the log-probabilities of input tokens."""

from __future__ import annotations

from typing import Any

from rope_patch.utils.errors import one_line
from rope_patch.verifying.engine import CannotVerify, Engine, Observation
from rope_patch.verifying.http_json import JsonClient
from rope_patch.verifying.probe_prompts import ProbePrompt

_PATH = "/generate"


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
        scored = tuple(range(len(ids), len(ids) + len(written)))
        prompt = ProbePrompt("written", ids + written, scored, decoded_from=len(ids))
        return Observation(prompt, tuple(float(entry[0]) for entry in entries))

    def _generate(self, ids: tuple[int, ...], count: int, field: str) -> list[Any]:
        sampling = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
        body = {
            "input_ids": list(ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = self._client.post(_PATH, body)
        entries = (answer.get("meta_info") or {}).get(field) if isinstance(answer, dict) else None
        if not entries:
            raise CannotVerify(
                f"{self.name} answers without {field}, expected them for return_logprob=true: use "
                "a release that has them at /generate"
            )
        return entries
