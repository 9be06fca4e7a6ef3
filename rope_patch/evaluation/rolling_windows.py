"""Log-likelihoods of whole documents in windows, for lm-eval's rolling tasks such as `wikitext`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lm_eval.utils import get_rolling_token_windows

from rope_patch.evaluation.measures.perplexity import token_losses
from rope_patch.inference.answers import AnswerStore, answer_key
from rope_patch.utils.errors import describe_error
from rope_patch.utils.processes import Processes


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


class RollingLikelihood:
    """The part of `LongContextLM` that scores whole documents.

    Documents are split as lm-eval splits them: disjoint targets, each window with as many tokens
    before its targets as fit; the first begins with the tokenizer's prefix token. A window is one
    pass, and the logits of a few hundred positions exist at once.

    Attributes:
        rolling_window: Tokens of a window; `max_length` if None.
    """

    rolling_window: int | None = None
    prompt_tokens: int
    computed_tokens: int
    model: Any
    max_length: int
    prefix_token_id: int
    tok_encode: Callable[..., list[int]]
    _answers: AnswerStore
    _identity: Callable[[int, int], Any]
    _processes: Processes
    _progress_bar: Callable[[int], Any]
    _record_failure: Callable[[dict[str, Any], Any], str | None]
    _sync: Callable[[], None]
    _quiet: bool

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
