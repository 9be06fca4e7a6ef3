"""The answerer: answers to questions on long prompts, one by one or several together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rope_patch.evaluation.question import Question
from rope_patch.inference.cache_batch import CacheBatch, token_bytes
from rope_patch.inference.greedy_decoder import GreedyDecoder
from rope_patch.inference.prefix_reader import PrefixReader, input_device
from rope_patch.inference.target_scores import score_target, score_together
from rope_patch.transformers_api.models import attention_implementation

_MAX_CACHE = {"cpu": 2**31}  # bytes of the keys and values of answers that are decoded together
_GPU_MAX_CACHE = 2**34
_MAX_PACKED_TOKENS = 512  # of the targets after one prompt that are scored in one pass


class Answerer:
    """Computes answers; knows which can be computed together.

    Questions on one text are read one after another, from the prefix they share, and their answers
    decoded in one batch. Targets of one prompt are scored in one pass. Where the rotation depends
    on the length, or the cache drops keys or holds a state, questions are answered one by one.

    Args:
        reader: Reads the prompts.
        to_text: Returns the text of tokens.
        end_token: Ends a text, besides those that the model's generation config names.
        generate: Whether to generate texts; else only targets are scored.

    Attributes:
        most_rows: The most questions together; fewer once memory ran out, None before.
        after_prompt: Called with each prompt's tokens as long as the reader's cache still holds
            it, when answers are generated together.
    """

    most_rows: int | None = None
    after_prompt: Callable[[list[int]], Any] | None = None

    def __init__(
        self,
        reader: PrefixReader,
        to_text: Callable[[list[int]], str],
        end_token: int | None,
        *,
        generate: bool,
    ) -> None:
        self.reader = reader
        self._to_text = to_text
        self._generate = generate
        config = getattr(reader.model, "generation_config", None)
        ends = getattr(config, "eos_token_id", None)
        stops = {end_token, *(ends if isinstance(ends, list) else [ends])}
        self._decoder = GreedyDecoder(reader.model, stops)
        self._token_bytes = 0  # of the cache; 0 until it is measured

    def batch_size(self, group: list[Question]) -> int:
        """Return how many of a group are answered together; by the group alone, if memory lasts."""
        size = self._largest_batch(group)
        return size if self.most_rows is None else min(size, self.most_rows)

    def _largest_batch(self, group: list[Question]) -> int:
        model, end = self.reader.model, max(q.tokens for q in group)
        lengths = {q.pass_tokens for q in group}
        if len(group) == 1 or not self.reader.rotates_alike(lengths, end):
            return 1
        if self._generate:
            handle = self.reader.handle
            if handle and handle.method.is_length_dependent(handle.trained_length):
                return 1  # a cache that is put together from others has no lengths to follow
            if not self._token_bytes:
                self._token_bytes = token_bytes(model, input_device(model))
            limit = _MAX_CACHE.get(input_device(model).type, _GPU_MAX_CACHE)
            return max(limit // (self._token_bytes * end), 1)
        takes_any_mask = attention_implementation(model.config) in ("sdpa", "eager")
        if not (takes_any_mask and self.reader.all_see_all and self.reader.rotates):
            return 1
        return max(_MAX_PACKED_TOKENS // max(len(q.target) for q in group), 1)

    def answer(self, question: Question, on_progress: Callable[[int], Any]) -> dict[str, Any]:
        """Answer one question.

        Args:
            question: The question.
            on_progress: Called with the number of tokens that were read since the last call.

        Returns:
            What is stored: the text and `target_log_likelihood` if texts are generated, else
            `log_likelihood` in nats and whether the target is `greedy`.
        """
        cache = self.reader(question.ids, on_progress, self._rotated_length(question))
        last, score = question.ids[-1], {}
        if question.target:
            score = score_target(cache, last, question.target, self.reader)
        if not self._generate:
            return score
        is_done = partial(self._is_done, question)
        new_ids = self._decoder.decode(cache, last, question.max_new_tokens, is_done)
        return self._generated(question, score, new_ids)

    def answer_together(
        self, group: list[Question], on_progress: Callable[[int], Any]
    ) -> list[dict[str, Any]]:
        """Answer at most `batch_size` questions of a group; see `answer`."""
        if not self._generate:
            ids, length = group[0].ids, max(q.pass_tokens for q in group)
            cache = self.reader(ids, on_progress, length)
            with self.reader.fixed_length(length):
                return score_together(cache, ids[-1], [q.target for q in group], self.reader)
        room = max(question.max_new_tokens for question in group)
        batch = CacheBatch([len(q.ids) - 1 for q in group], room, self.reader.handle)
        scores: list[dict[str, Any]] = []
        for row, question in enumerate(group):
            cache, last = self.reader(question.ids, on_progress), question.ids[-1]
            target = question.target
            scores.append(score_target(cache, last, target, self.reader) if target else {})
            batch.fill_row(row, cache)
            if self.after_prompt is not None:
                self.after_prompt(question.ids)
        texts = self._decoder.decode_batch(
            batch,
            [q.ids[-1] for q in group],
            [q.max_new_tokens for q in group],
            [partial(self._is_done, q) for q in group],
        )
        results = zip(group, scores, texts, strict=True)
        return [self._generated(question, score, new_ids) for question, score, new_ids in results]

    def _rotated_length(self, question: Question) -> int:
        """Return the length whose rotation the prompt gets, in tokens."""
        handle = self.reader.handle
        if question.max_new_tokens and handle and handle.method.fixed_at_admission:
            return question.tokens
        return question.pass_tokens

    def _is_done(self, question: Question, new_ids: list[int]) -> bool:
        """Return whether a stop string is there, or the score cannot change any more."""
        text = self._to_text(new_ids)
        return any(stop in text for stop in question.until) or question.is_settled_by(text)

    def _generated(
        self, question: Question, score: dict[str, Any], new_ids: list[int]
    ) -> dict[str, Any]:
        text = self._to_text(new_ids) if new_ids else ""
        for stop in question.until:
            text = text.split(stop)[0]
        answer = {"target_log_likelihood": score["log_likelihood"]} if score else {}
        return answer | {"text": text}
