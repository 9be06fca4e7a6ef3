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

from rope_patch.inference.answers import Answers, key_of
from rope_patch.inference.prefix_reader import Reader, device, out_of_memory
from rope_patch.patching import current
from rope_patch.utils.errors import reason
from rope_patch.utils.processes import Processes
from rope_patch.utils.progress import progress_bar

SHORT = 512  # tokens; what is not longer is read in batches
_BATCH_TOKENS = {"cpu": 4096}
_GPU_BATCH_TOKENS = 32768
_LOGITS = 2**28  # numbers in the logits of a batch: 1 GB in float32


class Response(str):
    """A generated text that also says how likely the right answer was from the same prompt.

    Attributes:
        target_log_likelihood: Of the target, in nats; None where the sample has no target.
        error: Why there is no text, if there is none.
    """

    target_log_likelihood: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class _Job:
    """A question: its key among the answers, its prompt, and what is wanted of it."""

    key: str
    ids: list[int]
    target: list[int]
    room: int = 0
    until: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.ids) + max(len(self.target), self.room)

    @property
    def rotated(self) -> int:
        """Tokens of the pass: the prompt's, and the target's where nothing is generated."""
        return len(self.ids) + (0 if self.room else len(self.target) - 1)


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
        asked: Tokens of the prompts that were read.
        read: Tokens that went through the model for them.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_length: int,
        model_info: dict[str, Any],
        *,
        answers: Answers | None = None,
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
        self.asked = 0
        self.read = 0
        self._model_info = model_info
        self._answers = Answers() if answers is None else answers
        self._identity = identity
        self._share = share
        self._label = label
        self._processes = processes or Processes(alone=True)
        self._quiet = False
        self._last: list[dict[str, Any]] = []
        kind = device(model).type
        self._batch_tokens = min(
            _BATCH_TOKENS.get(kind, _GPU_BATCH_TOKENS),
            max(_LOGITS // model.config.get_text_config(decoder=True).vocab_size, SHORT),
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
        jobs = [self._generation(request) for request in requests]
        self._quiet = disable_tqdm
        self._work(jobs, self._generate)
        responses: list[str] = []
        for job, request in zip(jobs, requests, strict=True):
            answer = self._answers[job.key]
            response = Response(answer.get("text", ""))
            response.target_log_likelihood = answer.get("target_log_likelihood")
            response.error = self._note(answer, request)
            responses.append(response)
        return responses

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        """Log-likelihoods of continuations, and whether greedy decoding would write them."""
        self._quiet = disable_tqdm
        found = super().loglikelihood(requests, disable_tqdm=True)  # its bar is of tokenizing
        for answer, request in zip(self._last, requests, strict=True):
            self._note(answer, request)
        return found

    def _loglikelihood_tokens(self, requests: list[Any], *_: Any, **__: Any) -> list[Any]:
        jobs = []
        for _, context, continuation in requests:
            identity = self._identity(len(context) - 1, len(context) + len(continuation))
            key = key_of(identity, "loglikelihood", context, continuation)
            jobs.append(_Job(key, list(context), list(continuation)))
            self._require_fit(jobs[-1])
        self._batches([job for job in jobs if job.tokens <= SHORT])
        self._work([job for job in jobs if job.tokens > SHORT], self._score)
        self._last = [self._answers[job.key] for job in jobs]
        nothing = {"log_likelihood": float("nan"), "greedy": False}
        answers = [nothing | answer for answer in self._last]
        return [(answer["log_likelihood"], answer["greedy"]) for answer in answers]

    def _generation(self, request: Any) -> _Job:
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
        key = key_of(identity, "generate", ids, target, room, until)
        job = _Job(key, ids, target, room, until, tuple(doc.get("answers", ())))
        self._require_fit(job, f"{request.task_name}: ")
        return job

    def _work(self, jobs: list[_Job], answer: Callable[..., Any]) -> None:
        """Answers what has no answer yet, failures included, and shares that between processes."""
        known = {job.key: job for job in jobs}
        # The main process says what is missing: others may already see new answers.
        missing = self._processes.same([key for key in known if not self._answers.done(key)])
        ordered = sorted((known[key] for key in missing), key=lambda job: job.ids)  # alike: near
        mine = self._processes.share(ordered, lambda job: job.tokens)
        reader = Reader(self.model, self._share)
        with self._bar(sum(len(job.ids) for job in mine)) as bar:
            for job in mine:
                self._attempt(job, reader, answer, bar)
        self.asked += reader.asked
        self.read += reader.read
        self._meet()

    def _attempt(self, job: _Job, reader: Reader, answer: Callable[..., Any], bar: Any) -> None:
        while True:
            before = bar.n
            try:
                found = answer(job, reader(job.ids, bar.update, job.rotated), reader)
            except Exception as error:
                bar.update(before - bar.n)
                if out_of_memory(error) and reader.smaller():
                    continue
                reader.clear()  # whatever it left behind is not to be trusted
                bar.update(len(job.ids))
                found = {"error": reason(error)}
            self._answers.put(job.key, found)
            return

    def _generate(self, job: _Job, cache: Any, reader: Reader) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if job.target:
            found["target_log_likelihood"] = self._score(job, cache, reader)["log_likelihood"]
        found["text"] = self._write(job, cache)
        return found

    @torch.no_grad()
    def _write(self, job: _Job, cache: Any) -> str:
        """Greedy text after a prompt; ends early where its score cannot change any more."""
        config = getattr(self.model, "generation_config", None)
        ends = getattr(config, "eos_token_id", None)
        stops = {self.eot_token_id, *(ends if isinstance(ends, list) else [ends])}
        written: list[int] = []
        text, token = "", job.ids[-1]
        while len(written) < job.room:
            ids = torch.tensor([[token]], device=device(self.model))
            logits = self.model(ids, past_key_values=cache, use_cache=True).logits
            token = int(logits[0, -1].argmax())
            if token in stops:
                break
            written.append(token)
            text = self.tok_decode(written)
            if any(stop in text for stop in job.until) or _complete(text, job.answers):
                break
        for stop in job.until:
            text = text.split(stop)[0]
        return text

    @torch.no_grad()
    def _score(self, job: _Job, cache: Any, reader: Reader) -> dict[str, Any]:
        """Of the target after the prompt; leaves the cache as it was."""
        fed = torch.tensor([[job.ids[-1], *job.target[:-1]]], device=device(self.model))
        scratch = reader.scratch(cache, fed.shape[1])
        logits = self.model(fed, past_key_values=scratch, use_cache=True).logits[0].float()
        reader.forget(cache, scratch, fed.shape[1])
        return _likelihood(logits, job.target)

    def _batches(self, jobs: list[_Job]) -> None:
        """Short questions, in batches that are the same whatever is answered already."""
        ordered = sorted({job.key: job for job in jobs}.values(), key=lambda j: (len(j.ids), j.ids))
        batches = list(_batched(ordered, self._batch_tokens))
        missing = self._processes.same(
            [i for i, b in enumerate(batches) if not all(self._answers.done(j.key) for j in b)]
        )
        pending = [batches[i] for i in missing]
        mine = self._processes.share(pending, lambda batch: len(batch) * batch[-1].tokens)
        with self._bar(sum(job.tokens for batch in mine for job in batch)) as bar:
            for batch in mine:
                self._answer_batch(batch)
                bar.update(sum(job.tokens for job in batch))
        self._meet()

    def _answer_batch(self, jobs: list[_Job]) -> None:
        """A batch, in halves where memory runs out."""
        try:
            found = self._score_batch(jobs)
        except Exception as error:
            if len(jobs) > 1:  # one of them may be to blame, or their number
                if out_of_memory(error):
                    self._batch_tokens = max(self._batch_tokens // 2, 1)
                    torch.cuda.empty_cache()
                for half in (jobs[: len(jobs) // 2], jobs[len(jobs) // 2 :]):
                    self._answer_batch(half)
                return
            found = [{"error": reason(error)}]
        for job, answer in zip(jobs, found, strict=True):
            if not self._answers.done(job.key):  # in a batch that a kill left half written
                self._answers.put(job.key, answer)

    @torch.no_grad()
    def _score_batch(self, jobs: list[_Job]) -> list[dict[str, Any]]:
        """Targets after their prompts, row by row; a prompt that all have is read once.

        Rows are padded on the right, where a causal model does not look, and masked all the same:
        where the rotation follows a row's length, padding must not count.
        """
        at, cache, read = device(self.model), None, 0
        alike = len(jobs) > 1 and jobs[0].ids == jobs[-1].ids and len(jobs[0].ids) > 1
        handle = current(self.model)
        if alike and not (handle and handle.method.follows_length(handle.trained_length)):
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
            found.append(_likelihood(part, job.target))
        return found

    def _bar(self, tokens: int) -> tqdm[Any]:
        quiet = self._quiet or not tokens or not self._processes.main
        label = self._label or "reading"
        return progress_bar(total=tokens, disable=quiet, unit="tok", unit_scale=True, desc=label)

    def _meet(self) -> None:
        """Waits for the other processes, and reads what they found."""
        if self._processes.size > 1:
            self._processes.wait()
            self._answers.reload()

    def _note(self, answer: dict[str, Any], request: Any) -> str | None:
        error = answer.get("error")
        if error is not None:
            self.failures[request.task_name, request.doc_id] = error
        return error

    def _require_fit(self, job: _Job, place: str = "") -> None:
        if job.tokens > self.max_length:
            raise ValueError(
                f"{place}a prompt and its answer take {job.tokens:,} tokens, {self.max_length:,} "
                "were set as the longest: build the samples with this model's tokenizer, or set a "
                "longer length"
            )


def _likelihood(logits: torch.Tensor, target: list[int]) -> dict[str, Any]:
    """Of a target's tokens, given the logits before each, `[T, V]`."""
    wanted = torch.tensor(target, device=logits.device)
    found = logits.log_softmax(-1).gather(-1, wanted[:, None]).sum().item()
    return {"log_likelihood": found, "greedy": bool((logits.argmax(-1) == wanted).all())}


def _complete(text: str, answers: tuple[str, ...]) -> bool:
    """Whether all answers are there, with enough after them: `12` may become `125` or `12.5`."""
    lower = text.lower()
    return bool(answers) and all(a.lower() in lower[:-2] for a in answers)


def _batched(jobs: list[_Job], tokens: int) -> Iterator[list[_Job]]:
    """Those of one prompt together, and single ones as many as so many tokens hold, with padding.

    Args:
        jobs: Ordered by prompts.
        tokens: Of a batch, if it is of more than one prompt.
    """
    single: list[_Job] = []
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
