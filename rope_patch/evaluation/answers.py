"""Answers to questions on long prompts: their batches, and the run that stores each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any

from rope_patch.inference.answers import AnswerStore
from rope_patch.inference.decoding import CacheBatch, GreedyDecoder, token_bytes
from rope_patch.inference.prefix_reader import PrefixReader, input_device, is_out_of_memory
from rope_patch.inference.scorer import score_target, score_together
from rope_patch.tasks import settled
from rope_patch.transformers_api.models import attention_implementation
from rope_patch.utils.errors import describe_error
from rope_patch.utils.processes import Processes


@dataclass(frozen=True)
class Question:
    """One question: its key among the answers, its prompt, and what to compute for it."""

    key: str
    ids: list[int]
    target: list[int]
    max_new_tokens: int = 0
    until: tuple[str, ...] = ()
    is_settled: Callable[[str], bool] | None = None

    @property
    def tokens(self) -> int:
        return len(self.ids) + max(len(self.target), self.max_new_tokens)

    @property
    def pass_tokens(self) -> int:
        """Return the pass's tokens: the prompt's, and the target's unless text is generated."""
        return len(self.ids) + (0 if self.max_new_tokens else len(self.target) - 1)

    def is_settled_by(self, text: str) -> bool:
        """Return whether more text cannot change the score of a generated one."""
        if self.is_settled is None:
            return False
        return self.is_settled(settled.settled_part(text, self.until))


def group_questions(questions: list[Question], chunk: int | None) -> list[list[Question]]:
    """Return neighbours that are answered together.

    Args:
        questions: Ordered by prompts.
        chunk: Neighbours share at least so many tokens and differ in the prompt; None groups the
            questions on one prompt.
    """
    groups: list[list[Question]] = []
    for question in questions:
        last = groups[-1][-1] if groups else None
        if last is not None and (
            last.ids == question.ids
            if chunk is None
            else last.ids[:chunk] == question.ids[:chunk] and len(question.ids) > chunk
        ):
            groups[-1].append(question)
        else:
            groups.append([question])
    return groups


def make_batches(questions: list[Question], tokens: int) -> Iterator[list[Question]]:
    """Yield questions on one prompt together, and single ones in batches of `tokens` with padding.

    Args:
        questions: Ordered by prompts.
        tokens: Of a batch, if it is of more than one prompt.
    """
    single: list[Question] = []
    for _, group in groupby(questions, key=lambda q: q.ids):
        same = list(group)
        if len(same) > 1:
            yield same
            continue
        longest = max((q.tokens for q in [*single, *same]), default=0)
        if single and (len(single) + 1) * longest > tokens:
            yield single
            single = []
        single += same
    if single:
        yield single


_MAX_CACHE = {"cpu": 2**31}  # bytes of the caches of answers that are decoded together
_GPU_MAX_CACHE = 2**34
_MAX_PACKED_TOKENS = 512  # tokens of several targets after one prompt that one pass scores


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
        self._token_bytes = 0  # bytes of a token in the cache; 0 until measured

    def batch_size(self, group: list[Question]) -> int:
        """Return how many of a group are answered together, as in each run if memory suffices."""
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
            return question.tokens - 1  # the last new token is never read
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


logger = logging.getLogger("rope_patch")


@dataclass(frozen=True)
class _Bundle:
    """Questions whose prompts begin alike."""

    written: list[Question]  # their answers are generated, possibly in one batch
    # Their targets are scored; a list for each prompt, with no other prompt than those of `written`
    # if there are any.
    scored: list[list[Question]]

    def questions(self) -> list[Question]:
        """Return all questions."""
        return [*self.written, *chain.from_iterable(self.scored)]

    def prompt_tokens(self) -> int:
        """Return the tokens that the progress bar counts."""
        return sum(map(prompt_tokens, [self.written, *self.scored]))


class AnswerRun:
    """Computes the answers that are missing, divided between processes, and stores them.

    A prompt is read once for all its questions, whether their answers are generated or scored. What
    is computed together depends on the questions alone, so that neither sharing nor an earlier
    run's answers change a result.

    Args:
        reader: Reads the prompts.
        answers: Where answers are kept.
        processes: Those that share the work.
        to_text: Returns the text of tokens.
        end_token: Ends a text, besides those that the model's generation config names.

    Attributes:
        prompt_tokens: Tokens of the prompts that were asked for.
    """

    def __init__(
        self,
        reader: PrefixReader,
        answers: AnswerStore,
        processes: Processes,
        to_text: Callable[[list[int]], str],
        end_token: int | None,
    ) -> None:
        self.prompt_tokens = 0
        self._reader = reader
        self._answers = answers
        self._processes = processes
        self._writer = Answerer(reader, to_text, end_token, generate=True)
        self._scorer = Answerer(reader, to_text, end_token, generate=False)
        self._scoring_seconds = 0.0  # spent on other questions while texts were generated

    def answer(self, questions: list[Question], progress_bar: Callable[[int], Any]) -> None:
        """Answer the questions that have no answer; record failures.

        Args:
            questions: With and without texts to generate, on long prompts.
            progress_bar: Returns a progress bar of some tokens.
        """
        bundles = self._bundles(questions)
        # The main process decides what is missing, because others may already see new answers.
        missing = self._processes.broadcast(
            [i for i, bundle in enumerate(bundles) if self._answers.missing(bundle.questions())]
        )
        pending = [part for i in missing for part in self._parts(bundles[i])]
        mine = self._processes.own_share(
            pending, lambda part: sum(q.tokens for q in part.questions())
        )
        with progress_bar(sum(part.prompt_tokens() for part in mine)) as bar:
            for part in mine:
                self._answer_part(part, bar)

    def _bundles(self, questions: list[Question]) -> list[_Bundle]:
        by_key = {question.key: question for question in questions}
        # Sorted, so that questions with a common beginning follow one another.
        ordered = sorted(by_key.values(), key=lambda q: q.ids)
        scored = {
            tuple(group[0].ids): group
            for group in group_questions([q for q in ordered if not q.max_new_tokens], None)
        }
        bundles = []
        written = [q for q in ordered if q.max_new_tokens]
        for group in group_questions(written, self._reader.chunk):
            prompts = dict.fromkeys(tuple(q.ids) for q in group)
            bundles.append(_Bundle(group, [scored.pop(p) for p in prompts if p in scored]))
        bundles += [_Bundle([], [group]) for group in scored.values()]
        return sorted(bundles, key=lambda bundle: bundle.questions()[0].ids)

    def _parts(self, bundle: _Bundle) -> list[_Bundle]:
        """Return the parts of a bundle that are computed together, without those that are done."""
        scored = {tuple(group[0].ids): group for group in bundle.scored}
        parts = []
        for written in self._split(bundle.written, self._writer):
            prompts = dict.fromkeys(tuple(q.ids) for q in written)
            parts.append(_Bundle(written, [scored.pop(p) for p in prompts if p in scored]))
        parts += [_Bundle([], [group]) for group in scored.values()]
        return [part for part in parts if self._answers.missing(part.questions())]

    def _split(self, group: list[Question], answerer: Answerer) -> list[list[Question]]:
        """Return the parts of a group that are computed together."""
        if not group:
            return []
        # A part depends on the questions alone. After a failure, though, only the failed ones are
        # asked again, each on its own, as the others were when it failed.
        failed = any(self._answers.has_failed(q.key) for q in group)
        size = 1 if failed else answerer.batch_size(group)
        return [group[i : i + size] for i in range(0, len(group), size)]

    def _answer_part(self, part: _Bundle, bar: Any) -> None:
        """Answer questions that begin alike; targets are scored while their prompt is in memory."""
        waiting = {tuple(group[0].ids): group for group in part.scored}
        self._writer.after_prompt = partial(self._score_waiting, waiting, bar)
        if self._answers.missing(part.written):
            self._answer_group(part.written, self._writer, bar)
        for prompt in list(waiting):
            self._score_waiting(waiting, bar, list(prompt))

    def _score_waiting(
        self, waiting: dict[tuple[int, ...], list[Question]], bar: Any, ids: list[int]
    ) -> None:
        """Score the targets of one prompt, if some are waiting."""
        started = time.monotonic()
        for group in self._split(waiting.pop(tuple(ids), []), self._scorer):
            if self._answers.missing(group):
                self._answer_group(group, self._scorer, bar)
        self._scoring_seconds += time.monotonic() - started

    def _answer_group(self, group: list[Question], answerer: Answerer, bar: Any) -> None:
        """Answer questions together; in halves if memory runs out, one by one if that fails."""
        size = answerer.batch_size(group)
        if len(group) > size:
            for i in range(0, len(group), size):
                self._answer_group(group[i : i + size], answerer, bar)
            return
        started, before, answers = time.monotonic() - self._scoring_seconds, bar.n, None
        missing = self._answers.missing(group)
        if len(group) > 1:
            try:
                answers = answerer.answer_together(group, bar.update)
            except Exception as error:
                if is_out_of_memory(error):
                    answerer.most_rows = len(group) // 2
                else:
                    logger.warning(
                        "%d questions are answered one by one instead of together: %s",
                        len(group),
                        describe_error(error),
                    )
        if answers is None:  # the error, whose traceback held tensors, is gone by now
            if len(group) > 1:
                answerer.reader.clear()
                bar.update(before - bar.n)
            if answerer.batch_size(group) < len(group):
                self._answer_group(group, answerer, bar)
                return
            for question in missing:
                self._answer_alone(question, answerer, bar)
            self.prompt_tokens += prompt_tokens(missing)
            return
        self.prompt_tokens += prompt_tokens(group)
        # Each one's share of the group, also where a killed run has stored some of its answers.
        seconds = (time.monotonic() - self._scoring_seconds - started) / len(group)
        keys = {question.key for question in missing}
        for question, answer in zip(group, answers, strict=True):
            if question.key in keys:
                self._answers.put(question.key, answer, seconds)

    def _answer_alone(self, question: Question, answerer: Answerer, bar: Any) -> None:
        started, reader = time.monotonic(), answerer.reader
        while True:
            before = bar.n
            try:
                answer = answerer.answer(question, bar.update)
            except Exception as error:
                bar.update(before - bar.n)
                if is_out_of_memory(error) and reader.halve_chunk():
                    continue
                reader.clear()  # the cache may be incomplete
                bar.update(len(question.ids))
                answer = {"error": describe_error(error)}
            self._answers.put(question.key, answer, time.monotonic() - started)
            return


def prompt_tokens(questions: list[Question]) -> int:
    """Return the tokens of the different prompts."""
    return sum(map(len, {tuple(question.ids) for question in questions}))
