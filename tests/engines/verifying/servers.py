"""Start real engines on the tiny trained Llama, each in a process of its own."""

import contextlib
import json
import sys
from pathlib import Path

from helpers.server_processes import free_port, running_server

ASSETS = Path(__file__).parents[2] / "assets"
TINY = ASSETS / "tiny-llama"
TRAINED, FACTOR = 256, 4.0
LONGEST = round(FACTOR * TRAINED)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": FACTOR,
    "original_max_position_embeddings": TRAINED,
}


@contextlib.contextmanager
def vllm(model, parameters, log, *, dtype="float32", with_tokenizer=False, by_plugin=False):
    """Serve with vLLM; yield the address.

    Args:
        model: The model's folder.
        parameters: The override of `rope_parameters`; None for none.
        log: Where the server's output goes.
        dtype: Of weights and computation.
        with_tokenizer: Whether it makes texts of what it writes.
        by_plugin: Whether rope_patch's plugin rotates, from the trained length on.
    """
    overrides = {"max_position_embeddings": TRAINED if by_plugin else LONGEST}
    if parameters is not None:
        overrides["rope_parameters"] = parameters
    port = free_port()
    words = [
        *("--model", str(model), "--port", str(port), "--dtype", dtype, "--enforce-eager"),
        *("--max-model-len", str(LONGEST), "--served-model-name", "tiny"),
        *("--hf-overrides", json.dumps(overrides)),
    ]
    if not with_tokenizer:
        words.append("--skip-tokenizer-init")
    environment = {
        "VLLM_PLUGINS": "rope_patch" if by_plugin else "",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    with running_server(command, port, log, environment) as url:
        yield url


@contextlib.contextmanager
def llama_cpp(path, settings, log):
    """Serve a GGUF file with llama.cpp; yield the address.

    Args:
        path: The file.
        settings: Fields of llama.cpp's parameters.
        log: Where the server's output goes.
    """
    port = free_port()
    script = Path(__file__).with_name("serve_llama_cpp.py")
    command = [sys.executable, str(script), str(path), str(port), str(LONGEST)]
    with running_server([*command, json.dumps(settings)], port, log) as url:
        yield url
