"""The model as lm-eval sees it: nothing cut silently, nothing computed or asked twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import DynamicCache

from rope_patch.inference.answers import AnswerStore, answer_key
from rope_patch.inference.prefix_reader import PrefixReader, input_device, is_out_of_memory
from rope_patch.patching import current
from rope_patch.utils.errors import describe_error
from rope_patch.utils.processes import Processes
from rope_patch.utils.progress import progress_bar

BATCHABLE_TOKENS = 512  # tokens; what is not longer is read in batches
_BATCH_TOKENS = {"cpu": 4096}
_GPU_BATCH_TOKENS = 32768
_MAX_BATCH_LOGITS = 2**28  # numbers in the logits of a batch: 1 GB in float32


class Response(str):
    """A generated text that also says how likely the right answer was from the same prompt.

    Attributes:
        target_log_likelihood: Of the target, in nats; None where the sample has no target.
        error: Why there is no text, if there is none.
    """

    target_log_likelihood: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class _Question:
    """A question: its key among the answers, its prompt, and what is wanted of it."""

    key: str
    ids: list[int]
    target: list[int]
    max_new_tokens: int = 0
    until: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.ids) + max(len(self.target), self.max_new_tokens)

    @property
    def pass_tokens(self) -> int:
        """Tokens of the pass: the prompt's, and the target's where nothing is generated."""
        return len(self.ids) + (0 if self.max_new_tokens else len(self.target) - 1)


class LongContextLM(HFLM):
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
        kind = input_device(model).type
        self._batch_tokens = min(
            _BATCH_TOKENS.get(kind, _GPU_BATCH_TOKENS),
            max(
                _MAX_BATCH_LOGITS // model.config.get_text_config(decoder=True).vocab_size,
                BATCHABLE_TOKENS,
            ),
        )

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
        """Generates greedily.

        Raises:
            ValueError: A prompt and its answer room do not fit, or a task that wants to sample;
                nothing is cut silently.
        """
        jobs = [self._generation_question(request) for request in requests]
        self._quiet = disable_tqdm
        self._answer_missing(jobs, self._generate)
        responses: list[str] = []
        for job, request in zip(jobs, requests, strict=True):
            answer = self._answers[job.key]
            response = Response(answer.get("text", ""))
            response.target_log_likelihood = answer.get("target_log_likelihood")
            response.error = self._record_failure(answer, request)
            responses.append(response)
        return responses

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        """Log-likelihoods of continuations, and whether greedy decoding would write them."""
        self._quiet = disable_tqdm
        found = super().loglikelihood(requests, disable_tqdm=True)  # its bar is of tokenizing
        for answer, request in zip(self._last_answers, requests, strict=True):
            self._record_failure(answer, request)
        return found

    def _loglikelihood_tokens(self, requests: list[Any], *_: Any, **__: Any) -> list[Any]:
        jobs = []
        for _, context, continuation in requests:
            identity = self._identity(len(context) - 1, len(context) + len(continuation))
            key = answer_key(identity, "loglikelihood", context, continuation)
            jobs.append(_Question(key, list(context), list(continuation)))
            self._require_fit(jobs[-1])
        self._answer_in_batches([job for job in jobs if job.tokens <= BATCHABLE_TOKENS])
        self._answer_missing(
            [job for job in jobs if job.tokens > BATCHABLE_TOKENS], self._score_target
        )
        self._last_answers = [self._answers[job.key] for job in jobs]
        nothing = {"log_likelihood": float("nan"), "greedy": False}
        answers = [nothing | answer for answer in self._last_answers]
        return [(answer["log_likelihood"], answer["greedy"]) for answer in answers]

    def _generation_question(self, request: Any) -> _Question:
        context, given = request.args
        settings = dict(given)
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
        job = _Question(key, ids, target, room, until, tuple(doc.get("answers", ())))
        self._require_fit(job, f"{request.task_name}: ")
        return job

    def _answer_missing(self, jobs: list[_Question], answer: Callable[..., Any]) -> None:
        """Answers what has no answer yet, failures included, and shares that between processes."""
        known = {job.key: job for job in jobs}
        # The main process says what is missing: others may already see new answers.
        missing = self._processes.broadcast(
            [key for key in known if not self._answers.is_answered(key)]
        )
        ordered = sorted((known[key] for key in missing), key=lambda job: job.ids)  # alike: near
        mine = self._processes.own_share(ordered, lambda job: job.tokens)
        reader = PrefixReader(self.model, self._share)
        with self._progress_bar(sum(len(job.ids) for job in mine)) as bar:
            for job in mine:
                self._answer_with_retry(job, reader, answer, bar)
        self.prompt_tokens += reader.prompt_tokens
        self.computed_tokens += reader.tokens_read
        self._sync()

    def _answer_with_retry(
        self, job: _Question, reader: PrefixReader, answer: Callable[..., Any], bar: Any
    ) -> None:
        while True:
            before = bar.n
            try:
                found = answer(job, reader(job.ids, bar.update, job.pass_tokens), reader)
            except Exception as error:
                bar.update(before - bar.n)
                if is_out_of_memory(error) and reader.halve_chunk():
                    continue
                reader.clear()  # whatever it left behind is not to be trusted
                bar.update(len(job.ids))
                found = {"error": describe_error(error)}
            self._answers.put(job.key, found)
            return

    def _generate(self, job: _Question, cache: Any, reader: PrefixReader) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if job.target:
            found["target_log_likelihood"] = self._score_target(job, cache, reader)[
                "log_likelihood"
            ]
        found["text"] = self._generate_text(job, cache)
        return found

    @torch.no_grad()
    def _generate_text(self, job: _Question, cache: Any) -> str:
        """Greedy text after a prompt; ends early where its score cannot change any more."""
        config = getattr(self.model, "generation_config", None)
        ends = getattr(config, "eos_token_id", None)
        stops = {self.eot_token_id, *(ends if isinstance(ends, list) else [ends])}
        written: list[int] = []
        text, token = "", job.ids[-1]
        while len(written) < job.max_new_tokens:
            ids = torch.tensor([[token]], device=input_device(self.model))
            logits = self.model(ids, past_key_values=cache, use_cache=True).logits
            token = int(logits[0, -1].argmax())
            if token in stops:
                break
            written.append(token)
            text = self.tok_decode(written)
            if any(stop in text for stop in job.until) or _can_stop(text, job.answers):
                break
        for stop in job.until:
            text = text.split(stop)[0]
        return text

    @torch.no_grad()
    def _score_target(self, job: _Question, cache: Any, reader: PrefixReader) -> dict[str, Any]:
        """Of the target after the prompt; leaves the cache as it was."""
        fed = torch.tensor([[job.ids[-1], *job.target[:-1]]], device=input_device(self.model))
        scratch = reader.borrow(cache, fed.shape[1])
        logits = self.model(fed, past_key_values=scratch, use_cache=True).logits[0].float()
        reader.give_back(cache, scratch, fed.shape[1])
        return _target_likelihood(logits, job.target)

    def _answer_in_batches(self, jobs: list[_Question]) -> None:
        """Short questions, in batches that are the same whatever is answered already."""
        ordered = sorted({job.key: job for job in jobs}.values(), key=lambda j: (len(j.ids), j.ids))
        batches = list(_make_batches(ordered, self._batch_tokens))
        missing = self._processes.broadcast(
            [
                i
                for i, b in enumerate(batches)
                if not all(self._answers.is_answered(j.key) for j in b)
            ]
        )
        pending = [batches[i] for i in missing]
        mine = self._processes.own_share(pending, lambda batch: len(batch) * batch[-1].tokens)
        with self._progress_bar(sum(job.tokens for batch in mine for job in batch)) as bar:
            for batch in mine:
                self._answer_batch(batch)
                bar.update(sum(job.tokens for job in batch))
        self._sync()

    def _answer_batch(self, jobs: list[_Question]) -> None:
        """A batch, in halves where memory runs out."""
        try:
            found = self._score_batch(jobs)
        except Exception as error:
            if len(jobs) > 1:  # one of them may be to blame, or their number
                if is_out_of_memory(error):
                    self._batch_tokens = max(self._batch_tokens // 2, 1)
                    torch.cuda.empty_cache()
                for half in (jobs[: len(jobs) // 2], jobs[len(jobs) // 2 :]):
                    self._answer_batch(half)
                return
            found = [{"error": describe_error(error)}]
        for job, answer in zip(jobs, found, strict=True):
            if not self._answers.is_answered(job.key):  # in a batch that a kill left half written
                self._answers.put(job.key, answer)

    @torch.no_grad()
    def _score_batch(self, jobs: list[_Question]) -> list[dict[str, Any]]:
        """Targets after their prompts, row by row; a prompt that all have is read once.

        Rows are padded on the right, where a causal model does not look, and masked all the same:
        where the rotation follows a row's length, padding must not count.
        """
        at, cache, read = input_device(self.model), None, 0
        alike = len(jobs) > 1 and jobs[0].ids == jobs[-1].ids and len(jobs[0].ids) > 1
        handle = current(self.model)
        if alike and not (handle and handle.method.is_length_dependent(handle.trained_length)):
            # All but the last token, which goes before every target.
            read = len(jobs[0].ids) - 1
            cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
            prompt = torch.tensor([jobs[0].ids[:-1]], device=at)
            self.model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.batch_repeat_interleave(len(jobs))
        rows = [[*job.ids[read:], *job.target[:-1]] for job in jobs]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=at)
        seen = [[1] * (read + len(row)) + [0] * (longest - len(row)) for row in rows]
        mask = torch.tensor(seen, device=at)
        given = {"past_key_values": cache, "use_cache": cache is not None}
        logits = self.model(ids, attention_mask=mask, **given).logits
        found = []
        for job, row, scores in zip(jobs, rows, logits, strict=True):
            part = scores[len(row) - len(job.target) : len(row)].float()
            found.append(_target_likelihood(part, job.target))
        return found

    def _progress_bar(self, tokens: int) -> tqdm[Any]:
        quiet = self._quiet or not tokens or not self._processes.is_main
        label = self._label or "reading"
        return progress_bar(total=tokens, disable=quiet, unit="tok", unit_scale=True, desc=label)

    def _sync(self) -> None:
        """Waits for the other processes, and reads what they found."""
        if self._processes.size > 1:
            self._processes.wait()
            self._answers.reload()

    def _record_failure(self, answer: dict[str, Any], request: Any) -> str | None:
        error = answer.get("error")
        if error is not None:
            self.failures[request.task_name, request.doc_id] = error
        return error

    def _require_fit(self, job: _Question, place: str = "") -> None:
        if job.tokens > self.max_length:
            raise ValueError(
                f"{place}a prompt and its answer take {job.tokens:,} tokens, {self.max_length:,} "
                "were set as the longest: build the samples with this model's tokenizer, or set a "
                "longer length"
            )


def _target_likelihood(logits: torch.Tensor, target: list[int]) -> dict[str, Any]:
    """Of a target's tokens, given the logits before each, `[T, V]`."""
    wanted = torch.tensor(target, device=logits.device)
    found = logits.log_softmax(-1).gather(-1, wanted[:, None]).sum().item()
    return {"log_likelihood": found, "greedy": bool((logits.argmax(-1) == wanted).all())}


def _can_stop(text: str, answers: tuple[str, ...]) -> bool:
    """Whether all answers are there, with enough after them: `12` may become `125` or `12.5`."""
    lower = text.lower()
    return bool(answers) and all(a.lower() in lower[:-2] for a in answers)


def _make_batches(jobs: list[_Question], tokens: int) -> Iterator[list[_Question]]:
    """Those of one prompt together, and single ones as many as so many tokens hold, with padding.

    Args:
        jobs: Ordered by prompts.
        tokens: Of a batch, if it is of more than one prompt.
    """
    single: list[_Question] = []
    for _, group in groupby(jobs, key=lambda job: job.ids):
        same = list(group)
        if len(same) > 1:
            yield same
            continue
        longest = max((job.tokens for job in [*single, *same]), default=0)
        if single and (len(single) + 1) * longest > tokens:
            yield single
            single = []
        single += same
    if single:
        yield single
