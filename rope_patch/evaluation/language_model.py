"""Language models for lm-eval whose answers are stored: a live model, and what others build on.

`QuestionLM` turns lm-eval's requests into questions and gives stored answers back. `LongContextLM`
answers them with a live model, and shares what prompts begin with.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows
from tqdm import tqdm

from rope_patch import tasks
from rope_patch.encodings.active import current
from rope_patch.evaluation.answers import AnswerRun, Question, make_batches
from rope_patch.evaluation.measures.perplexity import token_losses
from rope_patch.inference import scorer
from rope_patch.inference.answers import AnswerStore, answer_key
from rope_patch.inference.prefix_reader import PrefixReader, input_device, is_out_of_memory
from rope_patch.tasks import chat_template, settled
from rope_patch.utils.errors import describe_error
from rope_patch.utils.processes import Processes
from rope_patch.utils.terminal import progress_bar


@dataclass(frozen=True)
class Window:
    """A part of a document that the model reads in one pass.

    Attributes:
        key: The key among the answers.
        ids: The tokens, those before the scored ones included.
        scored: How many of them are scored, from the end.
    """

    key: str
    ids: list[int]
    scored: int

    @property
    def tokens(self) -> int:
        """Return the tokens that the model reads: the last one predicts nothing."""
        return len(self.ids) - 1


class Response(str):
    """A generated text with the log-likelihood of the right answer after the same prompt.

    Attributes:
        target_log_likelihood: Of the target, in nats; None where the sample has no target.
        error: Why there is no text, if there is none.
    """

    target_log_likelihood: float | None = None
    error: str | None = None


class QuestionLM(TemplateLM):
    """The part of a language model for lm-eval that asks questions and stores their answers.

    A subclass answers them: it scores targets, writes texts, and scores windows of documents. It
    calls `_set_up` first.

    Documents are split as lm-eval splits them: disjoint targets, each window with as many tokens
    before its targets as fit; the first begins with the tokenizer's prefix token. A window is one
    pass, and the logits of a few hundred positions exist at once.

    Attributes:
        failures: Why a sample has no answer, by its task and its number in it (lm-eval's doc_id).
        prompt_tokens: Tokens of the long prompts that were asked for. A prompt counts once, however
            many choices follow it.
        computed_tokens: Tokens that went through the model for them.
        earlier_seconds: Time that an earlier run took for its answers that were used.
        stored_seconds: Time of all answers that were used, as it is stored with them.
        rolling_window: Tokens of a document's window; `max_length` if None.
        tasks: lm-eval's task objects, if known: questions of theirs that ask for texts are answered
            together with those that score targets, so that prompts they share are read once.
    """

    rolling_window: int | None = None
    max_length: int
    max_gen_toks: int

    def _set_up(
        self,
        model_info: dict[str, Any],
        answers: AnswerStore | None,
        identity: Callable[[int, int], Any],
        label: str,
        processes: Processes | None = None,
    ) -> None:
        """Begin without answers but the stored ones; see `LongContextLM` for the arguments."""
        self.failures: dict[tuple[str, int], str] = {}
        self.prompt_tokens = 0
        self.computed_tokens = 0
        self.earlier_seconds = 0.0
        self.stored_seconds = 0.0
        self._model_info = model_info
        self._answers = AnswerStore() if answers is None else answers
        self._identity = identity
        self._label = label
        self._processes = processes or Processes(alone=True)
        self.tasks: Sequence[Any] = ()
        self._quiet = False
        self._last_answers: list[dict[str, Any]] = []

    @abstractmethod
    def _score(self, questions: list[Question]) -> None:
        """Store how likely the questions' targets are, where no answer is stored."""

    @abstractmethod
    def _write(self, questions: list[Question]) -> None:
        """Store texts, where none is stored, and how likely the questions' targets are."""

    @abstractmethod
    def _answer_windows(self, windows: list[Window]) -> None:
        """Score the windows of documents that have no stored answer."""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation in the tokenizer's template, as our samples were fitted in it."""
        return chat_template.apply(self.tokenizer, chat_history, add_generation_prompt)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate greedily.

        Raises:
            ValueError: A prompt and its answer room do not fit, or a task that wants to sample;
                nothing is cut silently.
        """
        questions = [self._generation_question(request) for request in requests]
        self._quiet = disable_tqdm
        self._write(questions)
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

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of documents, in nats; NaN where a window failed."""
        self._quiet = disable_tqdm
        windows = [self._windows(request.args[0]) for request in requests]
        self._answer_windows([window for document in windows for window in document])
        likelihoods = []
        for document, request in zip(windows, requests, strict=True):
            answers = [self._answers[window.key] for window in document]
            failed = [answer for answer in answers if "error" in answer]
            if failed:
                self._record_failure(failed[0], request)
            nats = (answer.get("log_likelihood", math.nan) for answer in answers)
            likelihoods.append(float(sum(nats)))
        return likelihoods

    def _loglikelihood_tokens(self, requests: list[Any], *_: Any, **__: Any) -> list[Any]:
        questions = []
        for _, context, continuation in requests:
            identity = self._identity(len(context) - 1, len(context) + len(continuation))
            key = answer_key(identity, "loglikelihood", context, continuation)
            questions.append(Question(key, list(context), list(continuation)))
            self._require_fit(questions[-1])
        self._score(questions)
        self._claim_seconds(questions)
        self._last_answers = [self._answers[question.key] for question in questions]
        nothing = {"log_likelihood": float("nan"), "greedy": False}
        answers = [nothing | answer for answer in self._last_answers]
        return [(answer["log_likelihood"], answer["greedy"]) for answer in answers]

    def _windows(self, text: str) -> list[Window]:
        size = self.rolling_window or self.max_length
        pairs = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=size,
            context_len=1,
        )
        windows = []
        for read, targets in pairs:
            identity = self._identity(len(read), len(read))
            key = answer_key(identity, "rolling", read, targets)
            windows.append(Window(key, [*read, targets[-1]], len(targets)))
        return windows

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
        given = [int(settings[name]) for name in names if settings.get(name) is not None]
        room = next(iter(given), self.max_gen_toks)
        if room < 1:
            raise ValueError(
                f"{request.task_name}: expected room for at least 1 token of an answer "
                f"({', '.join(names)}), got {room}"
            )
        target = self._encode_pair(context, f" {doc['target']}")[1] if doc else []
        until = settings.get("until") or []
        until = (until,) if isinstance(until, str) else tuple(until)
        identity = self._identity(len(ids) - 1, len(ids) + max(room, len(target)))
        key = answer_key(identity, "generate", ids, target, room, until)
        is_settled = partial(settled.stop_rule(_scoring(request.task_name)), doc) if doc else None
        question = Question(key, ids, target, room, until, is_settled)
        self._require_fit(question, f"{request.task_name}: ")
        return question

    def _generation_questions(self) -> list[Question]:
        """Return the questions of `tasks` whose answers are to be generated."""
        requests = [request for task in self.tasks for request in task.instances]
        texts = [request for request in requests if request.request_type == "generate_until"]
        return [self._generation_question(request) for request in texts]

    def _claim_seconds(self, questions: list[Question]) -> None:
        keys = [question.key for question in questions]
        self.earlier_seconds += self._answers.claim_earlier_seconds(keys)
        self.stored_seconds += self._answers.claim_seconds(keys)

    def _progress_bar(self, tokens: int) -> tqdm[Any]:
        quiet = self._quiet or not tokens or not self._processes.is_main
        label = self._label or "reading"
        return progress_bar(total=tokens, disable=quiet, unit="tok", unit_scale=True, desc=label)

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


def _scoring(task_name: str) -> Any:
    """Return the scoring function of one of our tasks, else None."""
    name = task_name.split("@")[0]
    return tasks.config(name)["process_results"] if name in tasks.names() else None


BATCHABLE_TOKENS = 512  # tokens; questions up to this length are read in batches
_BATCH_TOKENS = {"cpu": 4096}
_GPU_BATCH_TOKENS = 32768
_MAX_BATCH_LOGITS = 2**28  # numbers in the logits of a batch: 1 GB in float32


class LongContextLM(QuestionLM, HFLM):
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
        )
        self._set_up(model_info, answers, identity, label, processes)
        self._share = share
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
            "rope_parameters": getattr(text, "rope_parameters", None),
            "max_position_embeddings": getattr(text, "max_position_embeddings", None),
        }

    def _score(self, questions: list[Question]) -> None:
        self._answer_in_batches([q for q in questions if q.tokens <= BATCHABLE_TOKENS])
        long = [q for q in questions if q.tokens > BATCHABLE_TOKENS]
        if long:
            self._write([*long, *self._generation_questions()])

    def _write(self, questions: list[Question]) -> None:
        """Answer questions on long prompts, each prompt read once for all of them."""
        reader = PrefixReader(self.model, self._share)
        run = AnswerRun(reader, self._answers, self._processes, self.tok_decode, self.eot_token_id)
        run.answer(questions, self._progress_bar)
        self.prompt_tokens += run.prompt_tokens
        self.computed_tokens += reader.tokens_read
        self._sync()

    def _answer_in_batches(self, questions: list[Question]) -> None:
        """Answer short questions in batches that do not depend on what is answered already."""
        by_key = {q.key: q for q in questions}
        ordered = sorted(by_key.values(), key=lambda q: (len(q.ids), q.ids))
        batches = list(make_batches(ordered, self._batch_tokens))
        missing = self._processes.broadcast(
            [i for i, batch in enumerate(batches) if self._answers.missing(batch)]
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
            answers = scorer.score_batch(
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
        # A killed run may have left a batch half written. What is stored is each one's share of
        # the batch, so that a half written one counts as a whole one does.
        missing = {question.key for question in self._answers.missing(questions)}
        seconds = (time.monotonic() - started) / len(questions)
        for question, answer in zip(questions, answers, strict=True):
            if question.key in missing:
                self._answers.put(question.key, answer, seconds)

    def _answer_windows(self, windows: list[Window]) -> None:
        """Score the windows that have no answer, divided between processes; record failures."""
        by_key = {window.key: window for window in windows}
        missing = self._processes.broadcast(
            [key for key in by_key if not self._answers.is_answered(key)]
        )
        pending = [by_key[key] for key in missing]
        mine = self._processes.own_share(pending, lambda window: window.tokens)
        with self._progress_bar(sum(window.tokens for window in mine)) as bar:
            for window in mine:
                try:
                    losses = token_losses(
                        self.model, window.ids, window.scored, "a window", read_last=False
                    )
                    answer: dict[str, Any] = {"log_likelihood": -losses.double().sum().item()}
                except Exception as error:
                    answer = {"error": describe_error(error)}
                self._answers.put(window.key, answer)
                bar.update(window.tokens)
                self.prompt_tokens += window.tokens
                self.computed_tokens += window.tokens
        self._sync()

    def _sync(self) -> None:
        """Wait for the other processes, and read their answers."""
        if self._processes.size > 1:
            self._processes.wait()
            self._answers.reload()
