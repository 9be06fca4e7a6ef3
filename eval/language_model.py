"""The model as lm-eval sees it: nothing cut silently, nothing as large as length x vocabulary."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import DynamicCache

from rope_patch.patching import current


class Response(str):
    """A generated text that also says how likely the right answer was from the same prompt."""

    answer_log_likelihood: float


class LongContextLM(HFLM):
    """A live model for lm-eval, one sample at a time.

    lm-eval's own class cuts prompts on the left when they are too long, and makes logits for every
    position. This one refuses such prompts, asks the model only for the logits that are read, and
    scores the right answer from the same pass over the prompt that generation starts from.

    Args:
        model: A transformers model, patched or not.
        tokenizer: Its tokenizer.
        max_length: Tokens of the longest sample, whatever the model's config says.
        model_info: What to record of the model in lm-eval's results.
    """

    def __init__(
        self, model: Any, tokenizer: Any, max_length: int, model_info: dict[str, Any]
    ) -> None:
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=1,
            max_length=max_length,
            softmax_dtype="float32",
        )
        self._model_info = model_info
        self._keep = 1

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes under `config`; its own looks the model up on the Hub."""
        handle = current(self.model)
        text = self.model.config.get_text_config(decoder=True)
        return self._model_info | {
            "rope_patch": str(handle) if handle else None,
            "rope_parameters": text.rope_parameters,
            "max_position_embeddings": text.max_position_embeddings,
        }

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generates greedily, one prompt after another.

        Raises:
            ValueError: A prompt and its answer room do not fit; nothing is cut silently.
        """
        responses = []
        for request in tqdm(requests, desc="generating", unit="prompt", disable=disable_tqdm):
            context, settings = request.args
            response = self._respond(context, dict(settings), request.doc)
            self.cache_hook.add_partial("generate_until", request.args, response)
            responses.append(response)
        return responses

    def _respond(self, context: str, settings: dict[str, Any], doc: dict[str, Any]) -> str:
        ids = torch.tensor([self.tok_encode(context)], device=self.device)
        room = settings.pop("max_gen_toks")
        self._require_fit(ids.shape[1] + room)
        until = settings.pop("until")
        with torch.no_grad():
            # All but the last token: generation feeds that one itself.
            cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
            self.model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
            likelihood = self._answer_log_likelihood(context, doc["answer"], ids, cache)
            written = self._model_generate(
                context=ids,
                attention_mask=torch.ones_like(ids),
                max_length=ids.shape[1] + room,
                stop=until,
                past_key_values=cache,
                **settings,
            )
        text = self.tok_decode(written[0, ids.shape[1] :].tolist())
        for stop in until:
            text = text.split(stop)[0]
        response = Response(text)
        response.answer_log_likelihood = likelihood
        return response

    def _answer_log_likelihood(
        self, context: str, answer: str, ids: torch.Tensor, cache: DynamicCache
    ) -> float:
        """Of the answer after the prompt `ids` `[1, S]`; leaves the cache as it was."""
        _, target = self._encode_pair(context, f" {answer}")
        targets = torch.tensor(target, device=self.device)
        # What left a sliding window cannot be brought back by cropping.
        scratch = copy.deepcopy(cache) if any(cache.is_sliding) else cache
        fed = torch.cat([ids[0, -1:], targets[:-1]])[None]
        logits = self.model(fed, past_key_values=scratch).logits[0].float()
        if scratch is cache:
            cache.crop(-fed.shape[1])
        return logits.log_softmax(-1).gather(-1, targets[:, None]).sum().item()

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[Any]:
        for _, context, continuation in requests:
            self._require_fit(len(context) + len(continuation))
        self._keep = max(len(continuation) for _, _, continuation in requests)
        return super()._loglikelihood_tokens(requests, **kwargs)

    def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> Any:
        with torch.no_grad():
            keep = min(self._keep, inps.shape[1])
            return self.model(inps, logits_to_keep=keep, use_cache=False).logits

    def _require_fit(self, length: int) -> None:
        if length > self.max_length:
            raise ValueError(
                f"a prompt and its answer take {length:,} tokens, {self.max_length:,} were set as "
                "the longest: build the samples with this model's tokenizer, or set a longer length"
            )
