"""Options by which transformers expands a GGUF file to plain weights."""

from __future__ import annotations

from typing import Any

import transformers


def dense_options(gguf_file: str | None) -> dict[str, Any]:
    """Return arguments of `from_pretrained` that expand the weights of a GGUF file.

    Newer versions of transformers keep the weights packed wherever a kernel for them is installed;
    those can be neither saved nor trained.

    Args:
        gguf_file: The file within the model's folder; None for other weights.
    """
    if gguf_file is None:
        return {}
    packs = getattr(transformers, "GgufConfig", None)
    expand = {} if packs is None else {"quantization_config": packs(dequantize=True)}
    return {"gguf_file": gguf_file, **expand}


def unmark_quantized(model: Any) -> None:
    """Make transformers save and train a model whose weights were expanded.

    It marks every model of a GGUF file as quantised, those with plain weights included.

    Args:
        model: A model that was loaded with `dense_options`.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
