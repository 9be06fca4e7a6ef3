"""Start real engines on the tiny trained Llama, each in a process of its own."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ASSETS = Path(__file__).parents[2] / "assets"
TINY = ASSETS / "tiny-llama"
TRAINED, FACTOR = 256, 4.0
LONGEST = round(FACTOR * TRAINED)
_PATIENCE = 300  # seconds until a server answers

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": FACTOR,
    "original_max_position_embeddings": TRAINED,
}


@contextlib.contextmanager
def vllm(model, parameters, log, *, dtype="float32"):
    """Serve with vLLM; yield the address.

    Args:
        model: The model's folder.
        parameters: The override of `rope_parameters`; None for none.
        log: Where the server's output goes.
        dtype: Of weights and computation.
    """
    overrides = {"max_position_embeddings": LONGEST}
    if parameters is not None:
        overrides["rope_parameters"] = parameters
    port = _free_port()
    words = [
        *("--model", str(model), "--port", str(port), "--dtype", dtype, "--enforce-eager"),
        *("--skip-tokenizer-init", "--max-model-len", str(LONGEST)),
        *("--hf-overrides", json.dumps(overrides)),
    ]
    environment = {
        "VLLM_PLUGINS": "",  # vLLM as it is
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    with _running(command, environment, log):
        yield _when_it_answers(f"http://127.0.0.1:{port}", "/health", log)


@contextlib.contextmanager
def llama_cpp(path, settings, log):
    """Serve a GGUF file with llama.cpp; yield the address.

    Args:
        path: The file.
        settings: Fields of llama.cpp's parameters.
        log: Where the server's output goes.
    """
    port = _free_port()
    script = Path(__file__).with_name("serve_llama_cpp.py")
    command = [sys.executable, str(script), str(path), str(port), str(LONGEST)]
    with _running([*command, json.dumps(settings)], {}, log):
        yield _when_it_answers(f"http://127.0.0.1:{port}", "/health", log)


@contextlib.contextmanager
def _running(command, environment, log):
    with Path(log).open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **environment}
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _when_it_answers(url, path, log):
    for _ in range(_PATIENCE):
        with contextlib.suppress(OSError), urllib.request.urlopen(url + path, timeout=5):
            return url
        time.sleep(1)
    raise AssertionError(Path(log).read_text()[-3000:])


def _free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]
