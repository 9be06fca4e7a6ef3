"""Serve a GGUF file with llama.cpp's own HTTP server, which the wheel xllamacpp holds.

Arguments: the file, the port, the context length, and other parameters as JSON.
"""

import json
import sys
import threading

import xllamacpp


def main() -> None:
    """Serve until the process ends."""
    path, port, length, settings = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.warmup = int(length), 1, 0, False
    # Its threads wait for each other busily, which takes minutes on a busy machine.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for name, value in json.loads(settings).items():
        if name == "rope_scaling_type":
            kind = f"LLAMA_ROPE_SCALING_TYPE_{value.upper()}"
            value = getattr(xllamacpp.llama_rope_scaling_type, kind)
        setattr(params, name, value)
    server = xllamacpp.Server(params)
    print(f"llama.cpp at {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
