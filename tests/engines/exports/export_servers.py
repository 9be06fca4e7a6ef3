"""Start engines with what `rope-patch export` prints, each in a process of its own."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
from helpers.llama_cpp_flags import read_flags
from helpers.server_processes import free_port, running_server

_HERE = Path(__file__).parent
_VLLM = _HERE.parent / "vllm" / "vllm_command.py"
_LLAMA_CPP = _HERE.parent / "verifying" / "serve_llama_cpp.py"


@contextlib.contextmanager
def vllm(folder, words, log):
    """Serve a folder by `vllm serve`, as it is without rope_patch's plugin; yield the address.

    Args:
        folder: The checkpoint's folder.
        words: What export prints.
        log: Where the server's output goes.
    """
    port = free_port()
    command = [sys.executable, str(_VLLM), "serve", str(folder), *words]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--skip-tokenizer-init"]
    environment = {
        "VLLM_PLUGINS": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with running_server(command, port, log, environment) as url:
        yield url


@contextlib.contextmanager
def llama_cpp(path, words, log):
    """Serve a GGUF file with llama.cpp's own server; yield the address.

    Args:
        path: The file. `--override-kv` changes it, because the wheel has no parameter for that.
        words: What export prints.
        log: Where the server's output goes.
    """
    settings, overridden_keys = read_flags(words)
    for key in overridden_keys:
        _override_key(path, key)
    port = free_port()
    length = settings.pop("n_ctx")
    command = [sys.executable, str(_LLAMA_CPP), str(path), str(port), str(length)]
    with running_server([*command, json.dumps(settings)], port, log) as url:
        yield url


@contextlib.contextmanager
def mlx_lm(folder, log, package="mlx_lm"):
    """Serve a folder with mlx-lm's model of it, or mlx-vlm's; yield the address."""
    port = free_port()
    command = [sys.executable, str(_HERE / "serve_mlx_lm.py"), str(folder), str(port), package]
    with running_server(command, port, log) as url:
        yield url


def _override_key(path, word):
    """Write a key of a GGUF file, or add it, as `--override-kv KEY=TYPE:VALUE` has it read."""
    key, _, typed = word.partition("=")
    kind, _, value = typed.partition(":")
    reader = gguf.GGUFReader(str(path))
    writer = gguf.GGUFWriter(f"{path}.new", reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", key):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    {"int": writer.add_uint32, "float": writer.add_float32}[kind](
        key, {"int": int, "float": float}[kind](value)
    )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    Path(f"{path}.new").replace(path)


def find_converter():
    """Return the folder of llama.cpp's converter, where `make test-engines` puts it; or None."""
    folder = Path(os.environ.get("LLAMA_CPP", f"{sys.prefix}/llama.cpp"))
    return folder if (folder / "convert_hf_to_gguf.py").is_file() else None


def convert(folder, path):
    """Convert a checkpoint's folder to a GGUF file by llama.cpp's own converter."""
    command = [sys.executable, str(_HERE / "convert_without_tokenizer.py")]
    command += [str(find_converter()), str(folder), "--outfile", str(path), "--outtype", "f32"]
    if "qwen3_5" in (Path(folder) / "config.json").read_text():
        command.append("--no-mtp")  # the tiny checkpoint predicts one token at a time
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
