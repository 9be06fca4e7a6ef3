"""LongContextLM: a live model as lm-eval's, with prefix sharing and stored answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import DynamicCache

from rope_patch.evaluation.question import Question, make_batches
from rope_patch.evaluation.rolling_windows import RollingLikelihood
from rope_patch.inference.answers import AnswerStore, answer_key
from rope_patch.inference.prefix_reader import PrefixReader, input_device, is_out_of_memory
from rope_patch.patching import current
from rope_patch.tasks.chat_template import TEMPLATE_ARGUMENTS
from rope_patch.utils.errors import describe_error
from rope_patch.utils.processes import Processes
from rope_patch.utils.progress import progress_bar

BATCHABLE_TOKENS = 512  # tokens; questions up to this length are read in batches
_BATCH_TOKENS = {"cpu": 4096}
_GPU_BATCH_TOKENS = 32768
_MAX_BATCH_LOGITS = 2**28  # numbers in the logits of a batch: 1 GB in float32


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
    what prompts begin with in common once, scores the right answer from the same pass over the
    prompt that generation starts from, keeps every answer as it comes, and goes on after a failure.

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
        prompt_tokens: Tokens of the prompts that were read.
        computed_tokens: Tokens that went through the model for them.
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
        self._answer_missing(questions, self._generate)
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
        self._answer_missing(
            [q for q in questions if q.tokens > BATCHABLE_TOKENS], self._score_target
        )
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
        question = Question(key, ids, target, room, until, tuple(doc.get("answers", ())))
        self._require_fit(question, f"{request.task_name}: ")
        return question

    def _answer_missing(self, questions: list[Question], answer: Callable[..., Any]) -> None:
        """Answer the questions that have no answer, divided between processes; record failures."""
        by_key = {question.key: question for question in questions}
        # The main process decides what is missing, because others may already see new answers.
        missing = self._processes.broadcast(
            [key for key in by_key if not self._answers.is_answered(key)]
        )
        # Sorted, so that questions with a common beginning follow one another.
        ordered = sorted((by_key[key] for key in missing), key=lambda q: q.ids)
        mine = self._processes.own_share(ordered, lambda q: q.tokens)
        reader = PrefixReader(self.model, self._share)
        with self._progress_bar(sum(len(question.ids) for question in mine)) as bar:
            for question in mine:
                self._answer_with_retry(question, reader, answer, bar)
        self.prompt_tokens += reader.prompt_tokens
        self.computed_tokens += reader.tokens_read
        self._sync()

    def _answer_with_retry(
        self, question: Question, reader: PrefixReader, compute: Callable[..., Any], bar: Any
    ) -> None:
        while True:
            before = bar.n
            try:
                answer = compute(
                    question, reader(question.ids, bar.update, question.pass_tokens), reader
                )
            except Exception as error:
                bar.update(before - bar.n)
                if is_out_of_memory(error) and reader.halve_chunk():
                    continue
                reader.clear()  # the cache may be incomplete
                bar.update(len(question.ids))
                answer = {"error": describe_error(error)}
            self._answers.put(question.key, answer)
            return

    def _generate(self, question: Question, cache: Any, reader: PrefixReader) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        if question.target:
            answer["target_log_likelihood"] = self._score_target(question, cache, reader)[
                "log_likelihood"
            ]
        answer["text"] = self._generate_text(question, cache)
        return answer

    @torch.no_grad()
    def _generate_text(self, question: Question, cache: Any) -> str:
        """Generate greedily after a prompt; stop once the score cannot change any more."""
        config = getattr(self.model, "generation_config", None)
        ends = getattr(config, "eos_token_id", None)
        stops = {self.eot_token_id, *(ends if isinstance(ends, list) else [ends])}
        new_ids: list[int] = []
        text, token = "", question.ids[-1]
        while len(new_ids) < question.max_new_tokens:
            ids = torch.tensor([[token]], device=input_device(self.model))
            logits = self.model(ids, past_key_values=cache, use_cache=True).logits
            token = int(logits[0, -1].argmax())
            if token in stops:
                break
            new_ids.append(token)
            text = self.tok_decode(new_ids)
            if any(stop in text for stop in question.until) or question.is_settled_by(text):
                break
        for stop in question.until:
            text = text.split(stop)[0]
        return text

    @torch.no_grad()
    def _score_target(self, question: Question, cache: Any, reader: PrefixReader) -> dict[str, Any]:
        """Score the target after the prompt; leave the cache as it was."""
        fed = torch.tensor(
            [[question.ids[-1], *question.target[:-1]]], device=input_device(self.model)
        )
        scratch = reader.borrow(cache, fed.shape[1])
        logits = self.model(fed, past_key_values=scratch, use_cache=True).logits[0].float()
        reader.give_back(cache, scratch, fed.shape[1])
        return _target_likelihood(logits, question.target)

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
        try:
            answers = self._score_batch(questions)
        except Exception as error:
            if len(questions) > 1:  # a single question or the size of the batch may be the cause
                if is_out_of_memory(error):
                    self._batch_tokens = max(self._batch_tokens // 2, 1)
                    torch.cuda.empty_cache()
                for half in (questions[: len(questions) // 2], questions[len(questions) // 2 :]):
                    self._answer_batch(half)
                return
            answers = [{"error": describe_error(error)}]
        for question, answer in zip(questions, answers, strict=True):
            # A killed run may have left a batch half written.
            if not self._answers.is_answered(question.key):
                self._answers.put(question.key, answer)

    @torch.no_grad()
    def _score_batch(self, questions: list[Question]) -> list[dict[str, Any]]:
        """Score targets after their prompts, row by row; read a prompt that all share once.

        Rows are padded on the right, where a causal model does not look, and masked all the same:
        where the rotation follows a row's length, padding must not count.
        """
        at, cache, read = input_device(self.model), None, 0
        first, last = questions[0].ids, questions[-1].ids
        alike = len(questions) > 1 and first == last and len(first) > 1
        handle = current(self.model)
        if alike and not (handle and handle.method.is_length_dependent(handle.trained_length)):
            # All but the last token, which goes before every target.
            read = len(first) - 1
            cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
            prompt = torch.tensor([first[:-1]], device=at)
            self.model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.batch_repeat_interleave(len(questions))
        rows = [[*q.ids[read:], *q.target[:-1]] for q in questions]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=at)
        seen = [[1] * (read + len(row)) + [0] * (longest - len(row)) for row in rows]
        mask = torch.tensor(seen, device=at)
        cache_arguments = {"past_key_values": cache, "use_cache": cache is not None}
        logits = self.model(ids, attention_mask=mask, **cache_arguments).logits
        answers = []
        for question, row, scores in zip(questions, rows, logits, strict=True):
            part = scores[len(row) - len(question.target) : len(row)].float()
            answers.append(_target_likelihood(part, question.target))
        return answers

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


def _target_likelihood(logits: torch.Tensor, target: list[int]) -> dict[str, Any]:
    """Return a target's log-likelihood from the logits before each token, `[T, V]`."""
    target_ids = torch.tensor(target, device=logits.device)
    log_likelihood = logits.log_softmax(-1).gather(-1, target_ids[:, None]).sum().item()
    return {
        "log_likelihood": log_likelihood,
        "greedy": bool((logits.argmax(-1) == target_ids).all()),
    }
