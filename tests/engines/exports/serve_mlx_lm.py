"""Serve a model by mlx-lm or mlx-vlm, with OpenAI's completions and log-probabilities of a prompt.

Their own servers take text only, and give log-probabilities of what they write only. Model,
weights, config, prompts in pieces and cached keys are theirs here.

Arguments: the folder, the port, and the package: mlx_lm or mlx_vlm.
"""

import importlib
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import mlx.core as mx

_PIECE = 100  # tokens of a prompt at once, so that most of them meet cached keys


def prompt_log_probs(model, cache, ids):
    """Return the log-probability of each token but the first, for which None stands."""
    values = [None]
    for start in range(0, len(ids), _PIECE):
        piece = ids[start : start + _PIECE]
        output = model(mx.array([piece]), cache=cache)
        logits = getattr(output, "logits", output)[0].astype(mx.float32)
        log_probs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        following = ids[start + 1 : start + len(piece) + 1]
        rows = mx.arange(len(following))
        values += log_probs[rows, mx.array(following, dtype=mx.int32)].tolist() if following else []
    return values


def main():
    """Serve until the process ends."""
    folder, port, package = sys.argv[1:]
    make_prompt_cache = importlib.import_module(f"{package}.models.cache").make_prompt_cache
    loaded = importlib.import_module(f"{package}.utils").load_model(Path(folder))
    model = loaded[0] if isinstance(loaded, tuple) else loaded.language_model

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path in ("/health", "/v1/models"):
                self.answer({"data": [{"id": Path(folder).name}]})
            else:
                self.answer({"error": "unknown path"}, 404)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not (self.path == "/v1/completions" and body.get("echo") and body.get("logprobs")):
                self.answer({"error": "expected a completion with echo and logprobs"}, 400)
                return
            values = prompt_log_probs(model, make_prompt_cache(model), body["prompt"])
            self.answer({"choices": [{"logprobs": {"token_logprobs": values}}]})

        def answer(self, content, status=200):
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
