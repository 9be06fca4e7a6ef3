"""Test the whole way: the line that `rope-patch export` prints, a running server, its metrics."""

import json
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("vllm")
import torch
from engine import ASSETS, LONGEST, TOLERANCE, TRAINED, Reference, text

pytestmark = pytest.mark.engines

COMMAND = Path(__file__).with_name("vllm_command.py")
MODEL = ASSETS / "tiny-llama"


def free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def exported_line(*words):
    """Return the words of the `vllm serve` line that `rope-patch export` prints."""
    command = [sys.executable, "-m", "rope_patch", "export", str(MODEL), "--engine", "vllm", *words]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = printed.splitlines()[-1].strip()
    assert line.startswith("vllm serve ")
    return shlex.split(line)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Start the server as printed, with the vLLM of this environment; return its port and log."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    port = free_port()
    _, *words = exported_line("--method", "dynamic-yarn")
    options = ["--dtype", "float32", "--enforce-eager", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, COMMAND, *words, *options], stdout=output, stderr=output
        )
    try:
        for _ in range(150):
            if process.poll() is not None:
                pytest.fail(log.read_text()[-3000:])
            try:
                get(port, "/health")
                break
            except OSError:
                time.sleep(2)
        yield port, log
    finally:
        process.terminate()
        process.wait(60)


def get(port, path, body=None):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def complete(port, prompt, max_tokens):
    """Return the prompt's log-probabilities and the greedy tokens of a request."""
    body = {
        "model": str(MODEL),
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "prompt_logprobs": 0,
        "return_token_ids": True,
    }
    (choice,) = json.loads(get(port, "/v1/completions", body))["choices"]
    rows = zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)
    return torch.tensor([row[str(token)]["logprob"] for row, token in rows]), choice["token_ids"]


def test_the_printed_line_serves_each_request_by_its_own_length(server):
    port, _ = server
    reference = Reference("llama")
    for length, max_tokens in ((100, 6), (300, 6), (100, 600), (900, 100)):
        prompt = text(length, seed=9)
        got, made = complete(port, prompt, max_tokens)
        rows = reference.log_probabilities(prompt, made, max_tokens)
        expected = rows[: length - 1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]
        assert (expected - got).abs().max() < TOLERANCE
        assert rows[length - 1 :].argmax(-1).tolist() == made


def test_metrics_count_requests_by_profile(server):
    port, _ = server
    complete(port, text(20), 1)
    lines = get(port, "/metrics").splitlines()
    counts = [line for line in lines if line.startswith("rope_patch:requests_total{")]
    assert any(f'longest="{TRAINED}"' in line and 'profile="0"' in line for line in counts)


def test_the_log_names_each_profile_and_the_memory(server):
    _, log = server
    written = log.read_text()
    assert "rotation by request: dynamic-yarn; 9 profiles" in written
    assert f"profile 0: requests of 1 to {TRAINED:,} tokens, unscaled" in written
    assert f"to {LONGEST:,} tokens, pairs stretched by 1 to 4" in written
    assert "MiB of cos and sin" in written
