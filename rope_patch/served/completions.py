"""Ask a server for completions through lm-eval's client of such APIs, and store what it answers.

`Completions` sends prompts of token ids, several at once, and reads texts and log-probabilities.
`ServedLM` is the language model for lm-eval that answers its questions that way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from aiohttp import ClientError, ClientResponse, ClientSession
from lm_eval.models import api_models
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

from rope_patch.evaluation.answers import Question
from rope_patch.evaluation.language_model import QuestionLM, Window
from rope_patch.evaluation.measures.perplexity import token_losses
from rope_patch.inference.answers import AnswerStore
from rope_patch.patching.undo_log import UndoLog
from rope_patch.served.request import ServedRequest
from rope_patch.served.server import Server, require_whole_prompt
from rope_patch.utils.errors import Refused, describe_error, one_line, parse_json
from rope_patch.verifying.clients import (
    BUSY,
    COMPLETIONS_PATH,
    MAX_ANSWER_BYTES,
    CannotReach,
    CannotVerify,
    HttpError,
    error_message,
    prompt_log_probs,
)

logger = logging.getLogger("rope_patch")

_REFUSED = (401, 403, 404)  # every other request would be refused as well


@dataclass(frozen=True)
class Answer:
    """What a server answers to a question.

    Attributes:
        text: The text that it wrote, if one was asked for.
        log_probs: Of each token of the target, in nats; empty if there is no target.
        greedy: Whether greedy decoding writes the target; None if the server does not say.
        error: Why there is no answer, if there is none.
    """

    text: str = ""
    log_probs: tuple[float, ...] = ()
    greedy: bool | None = None
    error: str | None = None


class Completions(LocalCompletionsAPI):
    """A server's completions of prompts of token ids.

    lm-eval's class keeps the number of requests at once, and sends one again after growing waits.
    This one checks that the server read what was sent, tells errors that pass from those that stay,
    and hands each answer on as it comes.

    Args:
        server: The server.
        tokenizer: The model's tokenizer.
        served: How the server is asked.
    """

    def __init__(self, server: Server, tokenizer: Any, served: ServedRequest) -> None:
        super().__init__(
            model=server.model,
            base_url=f"{server.url}{COMPLETIONS_PATH}",
            tokenizer_backend=None,  # it would look for one under the served model's name
            num_concurrent=served.concurrency,
            max_retries=served.tries,
            timeout=served.timeout,
            header=server.headers,
        )
        self.tokenizer, self.tokenizer_backend = tokenizer, "huggingface"
        self.tokenized_requests = True
        self.add_bos_token = None  # special tokens by the tokenizer's own rule, as in `HFLM`
        self._server = server

    def answer(
        self, questions: Sequence[Question], on_answer: Callable[[Question, Answer], None]
    ) -> None:
        """Answer questions, several at once.

        Args:
            questions: A text is written where there is room for one, and the target is scored where
                there is one.
            on_answer: Called with each answer as soon as it is there.

        Raises:
            CannotReach: The server does not answer any more, after as many tries as are allowed.
            CannotVerify: It refuses, reads other tokens than were sent, or answers otherwise.
        """
        run = _Run(on_answer)
        # What lm-eval passes on as keys of its cache is each call's own question.
        calls = self.get_batched_requests(
            [question.ids for question in questions], [(run, question) for question in questions]
        )
        try:
            _run_coroutine(calls)
        except _Passing as error:
            raise CannotReach(
                f"{error}, after {self.max_retries} tries; what was answered is kept: see that the "
                "server is up, and the same command goes on"
            ) from error.__cause__
        if run.refusal is not None:
            raise run.refusal

    async def amodel_call(
        self, session: ClientSession, sem: Any, messages: Any, *, cache_keys: Any, **_: Any
    ) -> list[None]:
        """Answer one question and hand the answer on; raise what is worth another try."""
        ((run, question),) = cache_keys
        async with sem:
            if run.refusal is None:  # else all that is left returns at once
                try:
                    answer = await self._try(session, run, question)
                    run.on_answer(question, answer)
                except _Passing as error:
                    run.warn(str(error))
                    raise
                except Exception as error:
                    run.refusal = error
        return [None]

    async def _try(self, session: ClientSession, run: _Run, question: Question) -> Answer:
        run.tries[id(question)] += 1
        try:
            return await self._answer(session, question)
        except asyncio.TimeoutError as error:
            raise _Passing(
                f"{self.base_url} took more than {self.timeout} s for {question.tokens:,} tokens "
                "(--timeout)"
            ) from error
        except HttpError as error:
            if error.status in BUSY:
                raise _Passing(str(error)) from error
            if error.status in _REFUSED:
                raise
            if error.status >= 500 and run.tries[id(question)] < self.max_retries:
                raise _Passing(str(error)) from error
            return Answer(error=str(error))
        except (ClientError, OSError) as error:
            raise _Passing(
                f"no server answers at {self.base_url} ({describe_error(error)})"
            ) from error
        except Refused:
            raise
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise CannotVerify(
                f"{self.base_url} answers in an unknown form ({describe_error(error)}), expected "
                "OpenAI's completions"
            ) from error

    async def _answer(self, session: ClientSession, question: Question) -> Answer:
        text = ""
        log_probs: tuple[float, ...] = ()
        greedy = None
        if question.max_new_tokens:
            settings = {"max_gen_toks": question.max_new_tokens, "until": list(question.until)}
            payload = self._create_payload(question.ids, generate=True, gen_kwargs=settings)
            choice = await self._choice(session, payload)
            text = choice["text"]
            if not isinstance(text, str):
                raise TypeError(f"its text is {one_line(text, 60)}")
            for stop in question.until:
                text = text.split(stop)[0]
        if question.target and self._server.log_prob_fields is not None:
            payload = self._create_payload([*question.ids, *question.target])
            choice = await self._choice(session, payload)
            log_probs, greedy = _target_scores(choice, payload["prompt"], len(question.ids))
        if broken := sum(map(math.isnan, log_probs)):
            return Answer(error=f"the server answers NaN for {broken} of {len(log_probs)} tokens")
        return Answer(text, log_probs, greedy)

    def _create_payload(
        self, messages: Any, generate: bool = False, gen_kwargs: Any = None, **options: Any
    ) -> dict[str, Any]:
        payload = super()._create_payload(messages, generate, gen_kwargs, **options)
        if generate:
            return payload
        payload = {key: value for key, value in payload.items() if key not in ("echo", "logprobs")}
        return (
            payload
            | (self._server.log_prob_fields or {})
            | {"max_tokens": self._server.least_tokens}
        )

    async def _choice(self, session: ClientSession, payload: dict[str, Any]) -> dict[str, Any]:
        """Return the only choice of an answer to a prompt that was read whole."""
        async with session.post(
            self.base_url, json=payload, headers=self.header, allow_redirects=False
        ) as response:
            body = await _read(response)
        if response.status != 200:
            raise HttpError(self.base_url, response.status, error_message(body))
        answer = parse_json(body)
        require_whole_prompt(answer, len(payload["prompt"]), self._server.url)
        return answer["choices"][0]


class _Passing(Exception):
    """An error that may pass, so that the request is sent again."""


class _Run:
    """The state of one call of `Completions.answer`."""

    def __init__(self, on_answer: Callable[[Question, Answer], None]) -> None:
        self.on_answer = on_answer
        self.refusal: Exception | None = None  # ends the run: nothing is asked after it
        self.tries: Counter[int] = Counter()
        self._warned: set[str] = set()

    def warn(self, message: str) -> None:
        """Say once of each kind of error that requests are sent again."""
        kind = message.partition(": ")[0].partition(" tokens")[0].rstrip("0123456789,")
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s: trying again", message)


@contextlib.contextmanager
def without_foreign_bars() -> Iterator[None]:
    """Hide lm-eval's bar of requests, whose place the bars of tokens take, while the block runs."""
    swaps = UndoLog()
    gather = SimpleNamespace(gather=lambda *tasks, **_: asyncio.gather(*tasks))
    swaps.set(api_models, "tqdm_asyncio", gather)
    try:
        yield
    finally:
        swaps.undo()


def _run_coroutine(coroutine: Any) -> None:
    """Run a coroutine to its end, also within a notebook, whose thread has a loop that runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(coroutine)
        return
    raised: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(coroutine)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


async def _read(response: ClientResponse) -> bytes:
    """Return a body, up to `MAX_ANSWER_BYTES` bytes."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise CannotVerify(
                f"{response.url} answers with more than {MAX_ANSWER_BYTES:,} bytes, expected an "
                "answer to one prompt"
            )
    return bytes(body)


def _target_scores(
    choice: dict[str, Any], ids: list[int], first: int
) -> tuple[tuple[float, ...], bool | None]:
    """Return the log-probabilities from an index on, and whether each token is the likeliest."""
    values = prompt_log_probs(choice, ids) or {}
    places = range(first, len(ids))
    if any(place not in values for place in places):
        raise CannotVerify(
            f"the server gives log-probabilities of {len(values):,} tokens of a prompt of "
            f"{len(ids):,}, expected those of all but the first"
        )
    tops = (choice.get("logprobs") or {}).get("top_logprobs")
    entries = choice.get("prompt_logprobs")
    greedy = None
    if entries:  # vLLM's own field says each token's rank
        ranks = [entries[place][str(ids[place])].get("rank") for place in places]
        greedy = None if None in ranks else all(rank == 1 for rank in ranks)
    elif tops and all(tops[place] for place in places):
        greedy = all(values[place] >= max(tops[place].values()) for place in places)
    return tuple(values[place] for place in places), greedy


@token_losses.register
def _served_losses(
    model: Completions, ids: list[int], scored: int, label: str, read_last: bool = True
) -> torch.Tensor:
    """Return losses of the last `scored` tokens, from one request."""
    answers: list[Answer] = []
    question = Question("", ids[:-scored], ids[-scored:])
    model.answer([question], lambda _, answer: answers.append(answer))
    if answers[0].error is not None:
        raise Refused(answers[0].error)
    return -torch.tensor(answers[0].log_probs)


class ServedLM(QuestionLM, Completions):
    """A server's model for lm-eval, with stored answers.

    Args:
        server: The server.
        tokenizer: The model's tokenizer.
        served: How the server is asked.
        max_length: Tokens of the longest sample.
        answers: Where answers are kept.
        identity: What answers depend on besides the prompts.
        label: Says on the progress bar what runs.
    """

    max_gen_toks = 256  # lm-eval's, where a task does not say
    tok_encode = HFLM.tok_encode  # so that prompts are those of a live model

    def __init__(
        self,
        server: Server,
        tokenizer: Any,
        served: ServedRequest,
        max_length: int,
        *,
        answers: AnswerStore,
        identity: Callable[[int, int], Any],
        label: str,
    ) -> None:
        super().__init__(server, tokenizer, served)
        info = {"model": server.model, "server": server.kind, "version": server.version}
        self._set_up(info, answers, identity, label)
        self.max_length = max_length

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes under `config`."""
        return self._model_info

    def _score(self, questions: list[Question]) -> None:
        self._ask(questions)

    def _write(self, questions: list[Question]) -> None:
        self._ask(questions)

    def _answer_windows(self, windows: list[Window]) -> None:
        self._ask([Question(w.key, w.ids[: -w.scored], w.ids[-w.scored :]) for w in windows])

    def _ask(self, questions: list[Question]) -> None:
        """Ask what has no stored answer, and store each answer as it comes."""
        by_key = {question.key: question for question in questions}
        # Neighbours begin alike, so the server's prefix caching reads a beginning once.
        pending = sorted(self._answers.missing(by_key.values()), key=lambda question: question.ids)
        if not pending:
            return
        last = time.monotonic()
        with self._progress_bar(sum(question.tokens for question in pending)) as bar:

            def store(question: Question, answer: Answer) -> None:
                nonlocal last
                now = time.monotonic()  # the share of this answer, since several come at once
                self._answers.put(question.key, _stored(question, answer), now - last)
                last = now
                self.prompt_tokens += len(question.ids)
                self.computed_tokens += len(question.ids)
                bar.update(question.tokens)

            self.answer(pending, store)


def _stored(question: Question, answer: Answer) -> dict[str, Any]:
    """Return an answer as `LongContextLM` stores it."""
    if answer.error is not None:
        return {"error": answer.error}
    total = math.fsum(answer.log_probs)
    if question.max_new_tokens:
        score = {"target_log_likelihood": total} if answer.log_probs else {}
        return {**score, "text": answer.text}
    if answer.greedy is None:
        raise CannotVerify(
            "the server does not say which token is the likeliest (top_logprobs, or a rank in "
            "prompt_logprobs), expected it: likelihood tasks count a greedy answer as right"
        )
    return {"log_likelihood": total, "greedy": answer.greedy}
