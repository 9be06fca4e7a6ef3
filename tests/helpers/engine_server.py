"""A real HTTP server over a transformers model, with the APIs of several engines.

Each engine's API is restated from its documentation. The model rotates as its config or its own
modules say, right or wrong.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import DynamicCache

CLOSED = 0  # the status of a connection that is closed without an answer


@contextlib.contextmanager
def _running(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answering(answer):
    """Serve all requests by a function of the handler; a context manager with the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with contextlib.suppress(ConnectionError):
                answer(self)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    return _running(Handler)


def fixed_answer(status, body, seconds=0.0):
    """Serve one answer to all requests, after some seconds; a context manager with the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            time.sleep(seconds)
            with contextlib.suppress(BrokenPipeError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    return _running(Handler)


@dataclass
class EngineServer:
    """The settings of a server, and the model it serves.

    Attributes:
        model: The model.
        api: "openai", "llama.cpp" or "sglang".
        name: The served model's name.
        log_probs: How OpenAI's API shows a prompt's log-probabilities: "echo", "vllm"
            (`prompt_logprobs`) or "none".
        least_tokens: The least `max_tokens` that a request may have.
        says_ids: Whether written tokens can be asked for as ids.
        max_model_len: Tokens that a request may have; None to say nothing and take any.
        says_limit: Whether it says `max_model_len` before a request exceeds it.
        tokenizer: Makes texts of what is written; without it texts are empty.
        owner: What the server calls itself in its list of models.
        says_usage: Whether completions say how many tokens were read.
        says_tops: Whether an echo says the likeliest token of each place.
        cut_to: Tokens of a prompt that are read, its last ones; None to read all.
        statuses: What completions are answered with instead, by their number.
        dies_after: Completions after which connections are closed without an answer.
        seconds: Seconds that a completion takes at least, after the first `fast` ones.
        fast: See `seconds`.
        requests: Paths that were asked.
        prompts: Prompts that completions were asked for, of all requests that were answered.
        most_at_once: The most completions at once.
    """

    model: Any
    api: str = "openai"
    name: str = "tiny"
    log_probs: str = "echo"
    least_tokens: int = 0
    says_ids: bool = True
    max_model_len: int | None = None
    says_limit: bool = True
    tokenizer: Any = None
    owner: str = "tests"
    says_usage: bool = True
    says_tops: bool = True
    cut_to: int | None = None
    statuses: dict[int, int] = field(default_factory=dict)
    dies_after: int | None = None
    seconds: float = 0.0
    fast: int = 0

    def __post_init__(self) -> None:
        self.requests: list[str] = []
        self.prompts: list[list[int]] = []
        self.most_at_once = 0
        self._at_once = 0
        self._received = 0
        self._lock = threading.Lock()

    def running(self):
        """Serve in a thread; return a context manager that yields the address."""
        return _running(self._handler())

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        """Return status and JSON of a request."""
        self.requests.append(path)
        known = {
            "openai": {"/v1/models": self._models, "/v1/completions": self._completions},
            "llama.cpp": {
                "/v1/models": self._models,
                "/props": self._props,
                "/completion": self._completion,
                "/v1/completions": self._completions,
            },
            "sglang": {"/get_model_info": self._model_info, "/generate": self._generate},
        }[self.api]
        if path not in known:
            return 404, {"detail": "Not Found"}
        return known[path](body or {})

    def _models(self, _: dict[str, Any]) -> tuple[int, Any]:
        card = {"id": self.name, "object": "model", "owned_by": self.owner}
        if self.api == "llama.cpp":
            card["meta"] = {"n_vocab": self.model.config.vocab_size}
        elif self.max_model_len is not None and self.says_limit:
            card["max_model_len"] = self.max_model_len
        return 200, {"object": "list", "data": [card]}

    def _completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            if self.dies_after is not None and len(self.prompts) >= self.dies_after:
                return CLOSED, None
            number, self._received = self._received, self._received + 1
            if number in self.statuses:
                return self.statuses[number], {"error": {"message": "not now"}}
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            time.sleep(self.seconds if number >= self.fast else 0.0)
            return self._complete(body)
        finally:
            with self._lock:
                self._at_once -= 1
                self.prompts.append(body["prompt"])

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        ids, count = body["prompt"], body.get("max_tokens", 16)
        ids = ids if self.cut_to is None else ids[-self.cut_to :]
        if self.api == "llama.cpp" and body.get("echo"):
            return 400, {"error": {"message": "Only no echo is supported"}}
        if body["model"] != self.name:
            return 404, {"error": {"message": f"The model {body['model']} does not exist."}}
        if refusal := self._refusal(ids, count):
            return 400, {"error": {"message": refusal}}
        if count < self.least_tokens:
            return 400, {"error": {"message": f"max_tokens must be at least 1, got {count}"}}
        prompt = self.prompt_log_probs(ids)
        written, values = self.write(ids, count)
        text = self._text(written, body.get("stop") or [])
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "length"}
        if self.log_probs == "echo" and body.get("logprobs") is not None:
            shown = (ids if body.get("echo") else []) + written
            numbers = (prompt if body.get("echo") else []) + values
            as_ids = self.says_ids and body.get("return_tokens_as_token_ids")
            choice["logprobs"] = {
                "tokens": [f"token_id:{i}" if as_ids else f"<{i}>" for i in shown],
                "token_logprobs": numbers,
            }
            if self.says_tops and body.get("echo"):
                choice["logprobs"]["top_logprobs"] = self._tops(ids, prompt)
        if self.log_probs == "vllm" and body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = [
                None
                if top is None
                else {
                    str(token): {"logprob": value, "rank": 1 if value == max(top.values()) else 2}
                }
                for token, value, top in zip(ids, prompt, self._tops(ids, prompt), strict=True)
            ]
        answer = {"object": "text_completion", "model": self.name, "choices": [choice]}
        if self.says_usage:
            answer["usage"] = {"prompt_tokens": len(ids), "completion_tokens": len(written)}
        return 200, answer

    def _text(self, written: list[int], stops: list[str]) -> str:
        if self.tokenizer is None:
            return ""
        end = self.model.config.eos_token_id
        written = written[: written.index(end)] if end in written else written
        text = self.tokenizer.decode(written, skip_special_tokens=True)
        for stop in stops:
            text = text.split(stop)[0]
        return text

    @torch.no_grad()
    def _tops(self, ids: list[int], values: list[float | None]) -> list[dict[str, float] | None]:
        """Return the likeliest token of each place, and the one that is there."""
        likeliest = self.model(torch.tensor([ids]), use_cache=False).logits[0].float()
        best, places = likeliest.log_softmax(-1).max(-1)
        tops: list[dict[str, float] | None] = [None]
        for i in range(1, len(ids)):
            top = {f"<{int(places[i - 1])}>": float(best[i - 1]), f"<{ids[i]}>": values[i]}
            tops.append(top)
        return tops

    def _props(self, _: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"default_generation_settings": {"n_ctx": self.max_model_len or 4096}}

    @torch.no_grad()
    def _completion(self, body: dict[str, Any]) -> tuple[int, Any]:
        ids, count, likely = body["prompt"], body["n_predict"], body.get("n_probs", 0)
        if likely == 0 or self.log_probs == "none":
            return 200, {"content": ""}
        if count > 1:
            pairs = zip(*self.write(ids, count), strict=True)
            tokens = [{"id": token, "logprob": value} for token, value in pairs]
            return 200, {"content": "", "completion_probabilities": tokens}
        logits = self.model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        values, order = logits.log_softmax(-1).topk(min(likely, len(logits)))
        pairs = zip(order.tolist(), values.tolist(), strict=True)
        top = [{"id": token, "logprob": value} for token, value in pairs]
        return 200, {"content": "", "completion_probabilities": [{**top[0], "top_logprobs": top}]}

    def _model_info(self, _: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"model_path": self.name, "is_generation": True}

    def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        ids, info = body["input_ids"], {}
        tokens, values = self.write(ids, body["sampling_params"]["max_new_tokens"])
        if body.get("return_logprob") and self.log_probs != "none":
            info["input_token_logprobs"] = [
                [value, token, None]
                for value, token in zip(self.prompt_log_probs(ids), ids, strict=True)
            ]
            info["output_token_logprobs"] = [
                [value, token, None] for value, token in zip(values, tokens, strict=True)
            ]
        return 200, {"text": "", "meta_info": info}

    def _refusal(self, ids: list[int], count: int) -> str | None:
        size = self.model.config.vocab_size
        if max(ids) >= size:
            return f"token id {max(ids)} is out of vocabulary ({size})"
        if self.max_model_len is not None and len(ids) + count > self.max_model_len:
            return f"maximum context length is {self.max_model_len} tokens"
        return None

    @torch.no_grad()
    def prompt_log_probs(self, ids: list[int]) -> list[float | None]:
        """Return the log-probability of each token of a prompt, None for the first."""
        logits = self.model(torch.tensor([ids]), use_cache=False).logits[0].float()
        tokens = torch.tensor(ids)[1:, None]
        return [None, *logits[:-1].log_softmax(-1).gather(1, tokens)[:, 0].tolist()]

    @torch.no_grad()
    def write(self, ids: list[int], count: int) -> tuple[list[int], list[float]]:
        """Return greedy tokens and their log-probabilities, one step a token."""
        cache, piece = DynamicCache(config=self.model.config), list(ids)
        written, values = [], []
        for _ in range(count):
            logits = self.model(torch.tensor([piece]), past_key_values=cache).logits[0, -1]
            log_probs = logits.float().log_softmax(-1)
            piece = [int(log_probs.argmax())]
            written += piece
            values.append(float(log_probs[piece[0]]))
        return written, values

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self._reply(*engine.answer(self.path, None))

            def do_POST(self):
                length = int(self.headers["Content-Length"])
                self._reply(*engine.answer(self.path, json.loads(self.rfile.read(length))))

            def _reply(self, status, answer):
                if status == CLOSED:
                    self.close_connection = True
                    return
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                with contextlib.suppress(ConnectionError):  # a client that was killed, or gave up
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_):
                pass

        return Handler


class ShortTable(torch.nn.Module):
    """A rotary module with a table of cos and sin, as engines have, that ends too early.

    Args:
        rotary: The module to replace.
        rows: Positions in the table.
        wraps: Whether positions beyond start again at 0; else they get the last row.
    """

    def __init__(self, rotary: Any, rows: int, wraps: bool = True) -> None:
        super().__init__()
        self.wraps = wraps
        cos, sin = rotary(torch.zeros(1), torch.arange(rows)[None])
        self.cos, self.sin = cos[0], sin[0]

    def forward(self, x, position_ids):
        rows = len(self.cos)
        rows = position_ids % rows if self.wraps else position_ids.clamp(max=rows - 1)
        return self.cos[rows].to(x.dtype), self.sin[rows].to(x.dtype)
