"""LongContextLM: a live model as lm-eval's, with prefix sharing and stored answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from rope_patch import tasks
from rope_patch.evaluation.answerer import Answerer
from rope_patch.evaluation.question import Question, group_questions, make_batches
from rope_patch.evaluation.rolling_windows import RollingLikelihood
from rope_patch.inference import target_scores
from rope_patch.inference.answers import AnswerStore, answer_key
from rope_patch.inference.prefix_reader import PrefixReader, input_device, is_out_of_memory
from rope_patch.patching import current
from rope_patch.tasks import settled
from rope_patch.tasks.chat_template import TEMPLATE_ARGUMENTS
from rope_patch.utils.errors import describe_error
from rope_patch.utils.processes import Processes
from rope_patch.utils.progress import progress_bar

BATCHABLE_TOKENS = 512  # tokens; questions up to this length are read in batches
_BATCH_TOKENS = {"cpu": 4096}
_GPU_BATCH_TOKENS = 32768
_MAX_BATCH_LOGITS = 2**28  # numbers in the logits of a batch: 1 GB in float32

logger = logging.getLogger("rope_patch")


class Response(str):
    """A generated text with the log-likelihood of the right answer after the same prompt.

    Attributes:
        target_log_likelihood: Of the target, in nats; None where the sample has no target.
        error: Why there is no text, if there is none.
    """

    target_log_likelihood: float | None = None
    error: str | None = None


class LongContextLM(RollingLikelihood, HFLM):
    """A live model for lm-eval.

    lm-eval's own class cuts prompts on the left when they are too long, and makes logits for every
    position. This one refuses such prompts, asks the model only for the logits that are read, reads
    what prompts begin with in common once, decodes the answers to questions on one text together,
    scores all targets of a prompt in one pass, keeps every answer, and goes on after a failure.

    Which questions are computed together depends on the questions alone, so that neither sharing
    nor an earlier run's answers change a result. Where the rotation depends on the length, or the
    cache drops keys, questions are answered one by one.

    Args:
        model: A transformers model, patched or not.
        tokenizer: Its tokenizer.
        max_length: Tokens of the longest sample, whatever the model's config says.
        model_info: What to record of the model in lm-eval's results.
        answers: Where answers are kept; in memory unless given.
        identity: What answers depend on besides the prompts (weights, patch, dtype, kernels), given
            how many tokens the prompt has, and with the answer.
        share: Whether to read common beginnings once.
        label: Says on the progress bar what runs.
        processes: Those that share the work; this one does all of it unless given.

    Attributes:
        failures: Why a sample has no answer, by its task and its number in it (lm-eval's doc_id).
        prompt_tokens: Tokens of the long prompts that were asked for. A prompt counts once, however
            many choices follow it.
        computed_tokens: Tokens that went through the model for them.
        earlier_seconds: Time that an earlier run took for its answers that were used.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_length: int,
        model_info: dict[str, Any],
        *,
        answers: AnswerStore | None = None,
        identity: Callable[[int, int], Any] = lambda length, end: None,
        share: bool = True,
        label: str = "",
        processes: Processes | None = None,
    ) -> None:
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=1,
            max_length=max_length,
            softmax_dtype="float32",
            chat_template_args=TEMPLATE_ARGUMENTS,
        )
        self.failures: dict[tuple[str, int], str] = {}
        self.prompt_tokens = 0
        self.computed_tokens = 0
        self.earlier_seconds = 0.0
        self._model_info = model_info
        self._answers = AnswerStore() if answers is None else answers
        self._identity = identity
        self._share = share
        self._label = label
        self._processes = processes or Processes(alone=True)
        self._quiet = False
        self._last_answers: list[dict[str, Any]] = []
        device_type = input_device(model).type
        self._batch_tokens = min(
            _BATCH_TOKENS.get(device_type, _GPU_BATCH_TOKENS),
            max(
                _MAX_BATCH_LOGITS // model.config.get_text_config(decoder=True).vocab_size,
                BATCHABLE_TOKENS,
            ),
        )

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes under `config`, without lm-eval's look-up on the Hub."""
        handle = current(self.model)
        text = self.model.config.get_text_config(decoder=True)
        return self._model_info | {
            "rope_patch": str(handle) if handle else None,
            "rope_parameters": text.rope_parameters,
            "max_position_embeddings": text.max_position_embeddings,
        }

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate greedily.

        Raises:
            ValueError: A prompt and its answer room do not fit, or a task that wants to sample;
                nothing is cut silently.
        """
        questions = [self._generation_question(request) for request in requests]
        self._quiet = disable_tqdm
        self._answer_missing(questions, generate=True)
        self._claim_seconds(questions)
        responses: list[str] = []
        for question, request in zip(questions, requests, strict=True):
            answer = self._answers[question.key]
            response = Response(answer.get("text", ""))
            response.target_log_likelihood = answer.get("target_log_likelihood")
            response.error = self._record_failure(answer, request)
            responses.append(response)
        return responses

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        """Return log-likelihoods of continuations, and whether greedy decoding would write them."""
        self._quiet = disable_tqdm
        likelihoods = super().loglikelihood(requests, disable_tqdm=True)  # its bar is of tokenizing
        for answer, request in zip(self._last_answers, requests, strict=True):
            self._record_failure(answer, request)
        return likelihoods

    def _loglikelihood_tokens(self, requests: list[Any], *_: Any, **__: Any) -> list[Any]:
        questions = []
        for _, context, continuation in requests:
            identity = self._identity(len(context) - 1, len(context) + len(continuation))
            key = answer_key(identity, "loglikelihood", context, continuation)
            questions.append(Question(key, list(context), list(continuation)))
            self._require_fit(questions[-1])
        self._answer_in_batches([q for q in questions if q.tokens <= BATCHABLE_TOKENS])
        self._answer_missing([q for q in questions if q.tokens > BATCHABLE_TOKENS], generate=False)
        self._claim_seconds(questions)
        self._last_answers = [self._answers[question.key] for question in questions]
        nothing = {"log_likelihood": float("nan"), "greedy": False}
        answers = [nothing | answer for answer in self._last_answers]
        return [(answer["log_likelihood"], answer["greedy"]) for answer in answers]

    def _generation_question(self, request: Any) -> Question:
        context, generation_kwargs = request.args
        settings = dict(generation_kwargs)
        if settings.get("do_sample", bool(settings.get("temperature"))):
            raise ValueError(
                f"{request.task_name} wants to sample (do_sample or temperature); answers here are "
                "greedy, so that the same command gives the same ones: set do_sample: false and "
                "temperature: 0 in the task"
            )
        # Of our samples alone the target and the scoring are known; others' may be scored by what
        # follows the answer.
        ours = isinstance(request.doc, dict) and "target_tokens" in request.doc
        doc = request.doc if ours else {}
        ids = self.tok_encode(context)
        names = ("max_gen_toks", "max_new_tokens", "max_tokens")
        room = next((int(settings[name]) for name in names if settings.get(name)), None)
        room = room or self.max_gen_toks
        target = self._encode_pair(context, f" {doc['target']}")[1] if doc else []
        until = settings.get("until") or []
        until = (until,) if isinstance(until, str) else tuple(until)
        identity = self._identity(len(ids) - 1, len(ids) + max(room, len(target)))
        key = answer_key(identity, "generate", ids, target, room, until)
        is_settled = partial(settled.rule_of(_scoring(request.task_name)), doc) if doc else None
        question = Question(key, ids, target, room, until, is_settled)
        self._require_fit(question, f"{request.task_name}: ")
        return question

    def _answer_missing(self, questions: list[Question], *, generate: bool) -> None:
        """Answer the questions that have no answer, divided between processes; record failures."""
        by_key = {question.key: question for question in questions}
        # Sorted, so that questions with a common beginning follow one another.
        ordered = sorted(by_key.values(), key=lambda q: q.ids)
        reader = PrefixReader(self.model, self._share)
        answerer = Answerer(reader, self.tok_decode, self.eot_token_id, generate=generate)
        groups = group_questions(ordered, reader.chunk if generate else None)
        # The main process decides what is missing, because others may already see new answers.
        missing = self._processes.broadcast(
            [i for i, group in enumerate(groups) if self._missing(group)]
        )
        pending = [part for i in missing for part in self._split(groups[i], answerer)]
        mine = self._processes.own_share(pending, lambda group: sum(q.tokens for q in group))
        with self._progress_bar(sum(map(_prompt_tokens, mine))) as bar:
            for group in mine:
                self._answer_group(group, answerer, bar)
        self.computed_tokens += reader.tokens_read
        self._sync()

    def _missing(self, questions: list[Question]) -> list[Question]:
        return [q for q in questions if not self._answers.is_answered(q.key)]

    def _split(self, group: list[Question], answerer: Answerer) -> list[list[Question]]:
        """Return the parts of a group that are computed together; those without gaps are left out.

        A part depends on the questions alone. After a failure, though, only the failed ones are
        asked again, each on its own, as the others were when it failed.
        """
        failed = any(self._answers.has_failed(q.key) for q in group)
        size = 1 if failed else answerer.batch_size(group)
        parts = [group[i : i + size] for i in range(0, len(group), size)]
        return [part for part in parts if self._missing(part)]

    def _answer_group(self, group: list[Question], answerer: Answerer, bar: Any) -> None:
        """Answer questions together; in halves if memory runs out, one by one if that fails."""
        size = answerer.batch_size(group)
        if len(group) > size:
            for i in range(0, len(group), size):
                self._answer_group(group[i : i + size], answerer, bar)
            return
        started, before, answers = time.monotonic(), bar.n, None
        missing = self._missing(group)
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
            self.prompt_tokens += _prompt_tokens(missing)
            return
        self.prompt_tokens += _prompt_tokens(group)
        seconds = (time.monotonic() - started) / len(missing)
        keys = {question.key for question in missing}
        for question, answer in zip(group, answers, strict=True):
            if question.key in keys:
                self._put(question, answer, seconds)

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
            self._put(question, answer, time.monotonic() - started)
            return

    def _put(self, question: Question, answer: dict[str, Any], seconds: float) -> None:
        """Store an answer with its share of the run's time; processes work at the same time."""
        self._answers.put(question.key, answer, seconds / self._processes.size)

    def _claim_seconds(self, questions: list[Question]) -> None:
        self.earlier_seconds += self._answers.claim_earlier_seconds(q.key for q in questions)

    def _answer_in_batches(self, questions: list[Question]) -> None:
        """Answer short questions in batches that do not depend on what is answered already."""
        by_key = {q.key: q for q in questions}
        ordered = sorted(by_key.values(), key=lambda q: (len(q.ids), q.ids))
        batches = list(make_batches(ordered, self._batch_tokens))
        missing = self._processes.broadcast(
            [
                i
                for i, b in enumerate(batches)
                if not all(self._answers.is_answered(j.key) for j in b)
            ]
        )
        pending = [batches[i] for i in missing]
        mine = self._processes.own_share(pending, lambda batch: len(batch) * batch[-1].tokens)
        with self._progress_bar(sum(q.tokens for batch in mine for q in batch)) as bar:
            for batch in mine:
                self._answer_batch(batch)
                bar.update(sum(q.tokens for q in batch))
        self._sync()

    def _answer_batch(self, questions: list[Question]) -> None:
        """Answer a batch; halve it where memory runs out."""
        started = time.monotonic()
        try:
            answers = target_scores.score_batch(
                self.model, [q.ids for q in questions], [q.target for q in questions]
            )
        except Exception as error:
            if len(questions) > 1:  # a single question or the size of the batch may be the cause
                if is_out_of_memory(error):
                    self._batch_tokens = max(self._batch_tokens // 2, 1)
                    torch.cuda.empty_cache()
                for half in (questions[: len(questions) // 2], questions[len(questions) // 2 :]):
                    self._answer_batch(half)
                return
            answers = [{"error": describe_error(error)}]
        # A killed run may have left a batch half written.
        missing = {question.key for question in self._missing(questions)}
        seconds = (time.monotonic() - started) / max(len(missing), 1)
        for question, answer in zip(questions, answers, strict=True):
            if question.key in missing:
                self._put(question, answer, seconds)

    def _progress_bar(self, tokens: int) -> tqdm[Any]:
        quiet = self._quiet or not tokens or not self._processes.is_main
        label = self._label or "reading"
        return progress_bar(total=tokens, disable=quiet, unit="tok", unit_scale=True, desc=label)

    def _sync(self) -> None:
        """Wait for the other processes, and read their answers."""
        if self._processes.size > 1:
            self._processes.wait()
            self._answers.reload()

    def _record_failure(self, answer: dict[str, Any], request: Any) -> str | None:
        error = answer.get("error")
        if error is not None:
            self.failures[request.task_name, request.doc_id] = error
        return error

    def _require_fit(self, question: Question, place: str = "") -> None:
        if question.tokens > self.max_length:
            raise ValueError(
                f"{place}a prompt and its answer take {question.tokens:,} tokens, "
                f"{self.max_length:,} were set as the longest: build the samples with this model's "
                "tokenizer, or set a longer length"
            )


def _prompt_tokens(questions: list[Question]) -> int:
    """Return the tokens of the different prompts."""
    return sum(map(len, {tuple(question.ids) for question in questions}))


def _scoring(task_name: str) -> Any:
    """Return the scoring function of one of our tasks, else None."""
    name = task_name.split("@")[0]
    return tasks.config(name)["process_results"] if name in tasks.names() else None
