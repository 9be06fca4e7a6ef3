"""The session of a server: what `Session` does with a live model, by requests."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rope_patch.evaluation.measures.external_tasks import ExternalTask
from rope_patch.evaluation.measures.perplexity import token_losses
from rope_patch.evaluation.request import (
    KEY_TOKENS,
    PERPLEXITY,
    SERVED,
    SLIDING,
    EvalRequest,
)
from rope_patch.evaluation.results_schema import ModelFacts, RotationRecord, ServerRecord
from rope_patch.evaluation.session import CACHE, CachedComputation, Session
from rope_patch.inference.answers import AnswerStore, answer_key
from rope_patch.served.completions import Completions, ServedLM
from rope_patch.served.request import ServedRequest
from rope_patch.served.server import Server, rotation_of
from rope_patch.tasks import CHOICE, LIKELIHOOD, texts
from rope_patch.utils import checksums
from rope_patch.utils.errors import Refused
from rope_patch.utils.processes import Processes
from rope_patch.utils.terminal import progress_bar
from rope_patch.verifying.clients import CannotVerify
from rope_patch.verifying.probe_prompts import ProbePrompt

logger = logging.getLogger("rope_patch")

_FORMAT = "rope_patch.eval.server/1"
_PROBE_TOKENS = 4096  # tokens of the prompt that tells servers apart, at most
_FEW = 8  # of its tokens that are scored where each costs a request
# Nats a token by which a server may answer the probe otherwise and still count as the same one.
# Batches round otherwise, in bfloat16 by some hundredths on single tokens.
_SAME = 0.1
_OF_DOCUMENTS = (PERPLEXITY, KEY_TOKENS, SLIDING)
_WRITTEN = "rp_niah_single_2"  # a task whose answers are written


class ServedSession(Session):
    """One evaluation's server, and its answers so far.

    Args:
        request: What to evaluate; its model is the server's address.
        path: The tokenizer's folder or name.
        config: The config that is there.
        tokenizer: The tokenizer.
        server: The server.
        served: How it is asked.
    """

    plain_label = SERVED
    evaluator = "the served model"
    rotation_patch = None
    _rotation: RotationRecord
    aborting = (*Session.aborting, CannotVerify)

    def __init__(
        self,
        request: EvalRequest,
        path: str,
        config: Any,
        tokenizer: Any,
        server: Server,
        served: ServedRequest,
    ) -> None:
        super().__init__(request, path, config, tokenizer)
        self.server, self.served = server, served
        self.processes = Processes(alone=True)
        self.geometries = {}  # what the server rotates by is for `rotation_of` to find out
        self.weights = None
        self.model = Completions(server, tokenizer, served)
        self._tokenizer_digest = checksums.digest(tokenizer_text(tokenizer), 32)
        self._require_length()
        by_likelihood = [name for name in request.retrieval if name.endswith((LIKELIHOOD, CHOICE))]
        documents = [name for name in _OF_DOCUMENTS if name in request.tasks]
        self._require_log_probs([*by_likelihood, *request.short, *documents])

    def check_tasks(self, external: Sequence[ExternalTask]) -> None:
        """Raise if a task of lm-eval needs log-probabilities that the server does not give."""
        self._require_log_probs(
            [each.name for each in external if each.task.OUTPUT_TYPE != "generate_until"]
        )

    def load(self) -> None:
        """Read the answers of an earlier run, and find out whether this is the same server."""
        self.answers = AnswerStore(self.request.folder / CACHE)
        self.continued = len(self.answers) > 0
        self._require_same_server()
        self._rotation = rotation_of(self.server, self.path, self.request, self.served)

    @contextlib.contextmanager
    def patched(self, method: str) -> Iterator[str]:
        """Yield the label of the server's results."""
        self.methods[SERVED] = {"label": SERVED, "method": None}
        yield SERVED

    @contextlib.contextmanager
    def language_model(self, place: str, longest: int = 0) -> Iterator[Any]:
        """Yield the server for lm-eval; count the tokens that are sent."""
        longest = max(longest, self.request.longest, self.trained_length)
        limit = self.server.longest
        lm = ServedLM(
            self.server,
            self.tokenizer,
            self.served,
            longest if limit is None else min(longest, limit),
            answers=self.answers,
            identity=self.identity,
            label=place,
        )
        yield lm
        self.tokens["asked"] += lm.prompt_tokens
        self.tokens["read"] += lm.computed_tokens
        self._add_seconds(lm.stored_seconds, lm.earlier_seconds)

    def identity(self, length: int, end: int) -> dict[str, Any]:
        """Return what an answer depends on besides the prompt: nothing of it is the address."""
        server = self.server
        return {
            "served": server.model,
            "engine": server.kind,
            "version": server.version,
            "limit": server.max_length,
            "log_probs": server.log_prob_fields,
            "tokenizer": self._tokenizer_digest,
            "rope_patch": self._versions["rope_patch"],
        }

    def model_facts(self) -> ModelFacts:
        """Return those parts of a run's metadata that are about the model."""
        server = self.server
        record: ServerRecord = {
            "url": server.url,
            "served_model": server.model,
            "engine": server.kind if server.version is None else f"{server.kind} {server.version}",
            "max_length": server.max_length,
            "log_probs": server.log_prob_fields is not None,
            "tokenizer": self.served.tokenizer,
            "tokenizer_digest": f"sha256:{self._tokenizer_digest}",
            "concurrency": self.served.concurrency,
            "prompts": "token ids"
            + (f", in the chat template of {self.served.tokenizer}" if self.chat else ""),
            **self._rotation,
        }
        return {
            "name": f"{Path(server.model).name} on {server.kind}",
            "architecture": None,
            "parameters": None,
            "dtype": None,
            "attention": None,
            "peak_memory": None,
            "hardware": None,
            "quantization": None,
            "device": "a server",
            "server": record,
        }

    def _compute(self, pieces: Mapping[str, CachedComputation[Any]]) -> None:
        """Compute and store pieces, as many at once as the server is asked."""
        total = sum(piece.length for piece in pieces.values())
        bar = progress_bar(
            total=total, disable=not pieces, unit="tok", unit_scale=True, desc="documents"
        )
        with bar, ThreadPoolExecutor(self.served.concurrency) as pool:

            def compute(key: str) -> None:
                self._compute_one(key, pieces[key])
                bar.update(pieces[key].length)

            futures = [pool.submit(compute, key) for key in pieces]
            try:
                for future in futures:
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _require_length(self) -> None:
        """Raise if the server does not take the longest sample."""
        server, longest = self.server, self.request.longest
        if server.longest is not None and longest > server.longest:
            raise Refused(
                f"{server.url} takes {server.max_length:,} tokens at most, as it says, and "
                f"{longest:,} were asked for: give --lengths up to {server.longest:,}, or start "
                "the server with a longer limit (vLLM: --max-model-len, llama.cpp: -c)"
            )

    def _require_log_probs(self, tasks: Sequence[str]) -> None:
        """Raise if there are tasks that need log-probabilities, and the server gives none."""
        server = self.server
        if not tasks or server.log_prob_fields is not None:
            return
        written = [name for name in self.request.retrieval if name not in tasks]
        raise Refused(
            f"{', '.join(dict.fromkeys(tasks))}: expected the log-probabilities of a prompt's "
            f"tokens, and {server.kind} at {server.url} gives none ({server.no_log_probs}); ask "
            f"for tasks whose answers are written: --tasks {','.join(written) or _WRITTEN}"
        )

    def _require_same_server(self) -> None:
        """Raise if earlier answers came from a server that answers otherwise."""
        key = answer_key(self.identity(0, 0), self.request.longest)
        name = f"{CACHE}/server-{key}.json"
        now = self._probe()
        stored = self.run_folder.find(name, again="asked again", format=_FORMAT, key=key)
        if stored is None:
            body = {"format": _FORMAT, "key": key, "url": self.server.url, "log_probs": now}
            self.run_folder.write(name, body)
            return
        before = stored["log_probs"]
        both = before.keys() & now.keys()
        if not both and self.continued:
            logger.warning(
                "%s gives no log-probabilities: it is not checked whether it holds the model of "
                "the earlier answers, which came from %s",
                self.server.url,
                stored["url"],
            )
        if both:
            apart = sum(abs(before[place] - now[place]) for place in both) / len(both)
            if apart > _SAME:
                raise Refused(
                    f"{self.request.folder} holds answers of {self.server.model!r} at "
                    f"{stored['url']}, which gave the same prompt other log-probabilities, by "
                    f"{apart:.2f} nats a token: this server has other weights or another rotation; "
                    "give another --out"
                )
        if both and stored["url"] != self.server.url:
            logger.info(
                "earlier answers came from %s: the same model is served here, so they are kept",
                stored["url"],
            )

    def _probe(self) -> dict[str, float]:
        """Return the log-probabilities of a prompt's tokens, by their places; none without any."""
        limit = min(_PROBE_TOKENS, self.request.longest, (self.server.max_length or 2**31) - 1)
        text = texts.read_text("emma")[: 8 * _PROBE_TOKENS]
        ids = tuple(self.tokenizer(text).input_ids[:limit])
        if self.server.log_prob_fields is not None:
            losses = token_losses(self.model, list(ids), len(ids) - 1, "the same server?")
            return {str(place): -loss for place, loss in enumerate(losses.tolist(), 1)}
        if not self.server.engine.is_slow:
            return {}
        # llama.cpp tells log-probabilities of next tokens, each by a request.
        scored = tuple(range(max(1, len(ids) - _FEW), len(ids)))
        seen = self.server.engine.observe(ProbePrompt("probe", ids, scored))
        return dict(zip(map(str, seen.prompt.scored), seen.log_probs, strict=True))


def tokenizer_text(tokenizer: Any) -> str:
    """Return what tells a tokenizer from others, wherever it was read from."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return backend.to_str()
    return repr((type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())))
