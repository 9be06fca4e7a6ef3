"""The run that computes missing answers to questions on long prompts, and stores each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from rope_patch.evaluation.answerer import Answerer
from rope_patch.evaluation.question import Question, group_questions
from rope_patch.inference.answers import AnswerStore
from rope_patch.inference.prefix_reader import PrefixReader, is_out_of_memory
from rope_patch.utils.errors import describe_error
from rope_patch.utils.processes import Processes

logger = logging.getLogger("rope_patch")


@dataclass(frozen=True)
class _Bundle:
    """Questions whose prompts begin alike.

    Attributes:
        written: Their answers are generated; they may be decoded in one batch.
        scored: Their targets are scored; a list for each prompt, with no other prompt than those of
            `written` if there are any.
    """

    written: list[Question]
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
        """Return the parts of a group that are computed together.

        A part depends on the questions alone. After a failure, though, only the failed ones are
        asked again, each on its own, as the others were when it failed.
        """
        if not group:
            return []
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
