"""Quantised weights for measurements: GGUF's types in memory, and bitsandbytes' while loading.

A method is measured on the weights that will be served. For GGUF's types, the quantisers of the
`gguf` package round each weight to what llama.cpp computes with, and the model keeps its dtype and
its speed. As in `llama-quantize`, norms, biases and the routers of experts stay as they are, and
the output matrix, with an embedding that is tied to it, is finer. `llama-quantize` takes Q6_K there
where rows are divisible by 256, else Q8_0; the `gguf` package cannot write Q6_K, so it is Q8_0 here
always. bitsandbytes leaves embeddings and the output matrix as they are.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rope_patch.utils.errors import Refused, did_you_mean
from rope_patch.utils.terminal import progress_bar

GGUF_TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
BITSANDBYTES = ("int8", "nf4")
_OUTPUT_TYPE = "Q8_0"
# Parts of modules' names that route tokens to experts; llama.cpp keeps ffn_gate_inp in float32.
_ROUTERS = {"gate", "router", "shared_expert_gate"}


def parse_quantization(name: str) -> str:
    """Return the name of a quantisation in the field's spelling, whatever its case.

    Raises:
        ValueError: There is none of that name, or its package is not installed.
    """
    known = {each.lower(): each for each in (*GGUF_TYPES, *BITSANDBYTES)}
    quantization = known.get(name.lower())
    if quantization is None:
        if name.upper().startswith(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ")):
            hint = (
                ": Python's gguf package reads this type and cannot write it. Quantise with "
                "llama-quantize, and evaluate its file with --gguf-file; or take"
            )
        else:
            close = did_you_mean(name.upper(), GGUF_TYPES) or did_you_mean(name, BITSANDBYTES)
            hint = f"{close}: expected"
        raise Refused(
            f"unknown quantization {name!r}{hint} {', '.join(GGUF_TYPES)} (GGUF), "
            f"{' or '.join(BITSANDBYTES)} (bitsandbytes)"
        )
    package = "gguf" if quantization in GGUF_TYPES else "bitsandbytes"
    if importlib.util.find_spec(package) is None:
        raise Refused(
            f"{package} is not installed, which the quantization {quantization} needs: "
            f"pip install {package}"
        )
    return quantization


def require_unquantized(quantization: str, config: Any, gguf_file: str | None) -> None:
    """Raise if a checkpoint is quantised already.

    Args:
        quantization: What is asked for.
        config: The checkpoint's config.
        gguf_file: A GGUF file within its folder, if that is read.

    Raises:
        ValueError: It is; says by what.
    """
    own: Any = getattr(config, "quantization_config", None)
    if gguf_file is None and own is None:
        return
    what = gguf_file
    if what is None:
        method = own.get("quant_method") if isinstance(own, dict) else own.quant_method
        what = f"its config names {getattr(method, 'value', method)}"
    raise Refused(
        f"quantization {quantization} is for weights that are not quantised yet, and these are "
        f"({what}): leave --quantization out, or give the original checkpoint"
    )


def loading_arguments(quantization: str | None, dtype: Any) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that quantise while loading; none for GGUF's.

    Args:
        quantization: One of `BITSANDBYTES`; nothing is returned for others.
        dtype: The dtype to compute in.
    """
    if quantization not in BITSANDBYTES:
        return {}
    from transformers import BitsAndBytesConfig

    # It warns in each forward of each layer that it computes int8 in float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    options: dict[str, Any] = (
        {"load_in_8bit": True}
        if quantization == "int8"
        else {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": quantization,
            "bnb_4bit_compute_dtype": dtype,
        }
    )
    return {"quantization_config": BitsAndBytesConfig(**options)}


def quantize(model: nn.Module, quantization: str | None) -> None:
    """Round a loaded model's weights to a GGUF type, in place; do nothing for other quantisations.

    Matrices whose rows are not divisible by the type's blocks of 32 stay as they are.

    Args:
        model: The model. Its dtype stays, so bfloat16 rounds the result once more.
        quantization: One of `GGUF_TYPES`.

    Raises:
        ValueError: A weight is offloaded, or none can be quantised.
    """
    if quantization not in GGUF_TYPES:
        return
    matrices = list(_matrices(model))
    if away := [name for name, weight, _ in matrices if weight.is_meta]:
        raise Refused(
            f"{away[0]} is offloaded, and only weights in memory can be quantised: expected a "
            "device_map that keeps all weights in memory, such as cpu"
        )
    output = _output_weight(model)
    done = 0
    for _, weight, rows_last in progress_bar(matrices, desc=f"quantize to {quantization}"):
        is_output = output is not None and weight.data_ptr() == output.data_ptr()
        rounding = _round_trip(_OUTPUT_TYPE if is_output else quantization)
        values = weight.detach() if rows_last else weight.detach().transpose(-1, -2)
        if values.shape[-1] % rounding.block:
            continue
        with torch.no_grad():
            values.copy_(rounding(values))
        done += 1
    if not done:
        raise Refused(
            f"{type(model).__name__} has no matrix that can be quantised to {quantization}: "
            f"expected rows divisible by 32, got {[tuple(w.shape) for _, w, _ in matrices][:3]}"
        )


def _matrices(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield each weight to quantise once: name, tensor, whether inputs are its last dimension."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        if _ROUTERS & set(name.split(".")):
            continue
        is_experts = type(module).__name__.endswith("Experts")
        for parameter_name, weight in module.named_parameters(recurse=False):
            is_matrix = isinstance(module, nn.Linear | nn.Embedding) and parameter_name == "weight"
            if id(weight) in seen or not (is_matrix or (is_experts and weight.ndim == 3)):
                continue
            seen.add(id(weight))
            rows_last = is_matrix or not getattr(module, "is_transposed", False)
            yield f"{name}.{parameter_name}", weight, rows_last


def _output_weight(model: Any) -> torch.Tensor | None:
    """Return the matrix that logits come from, which may be the embedding."""
    embeddings = model.get_output_embeddings()
    return None if embeddings is None else embeddings.weight


class _RoundTrip:
    """Quantisation to a GGUF type and back, as the `gguf` package computes both."""

    def __init__(self, block: int, round_rows: Callable[[Any], Any]) -> None:
        self.block = block
        self._round_rows = round_rows

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        rows = values.float().cpu().contiguous().numpy()
        return torch.from_numpy(self._round_rows(rows)).to(values.device, values.dtype)


def _round_trip(type_name: str) -> _RoundTrip:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    qtype = GGMLQuantizationType[type_name]
    block, _ = GGML_QUANT_SIZES[qtype]
    return _RoundTrip(block, lambda rows: dequantize(quantize(rows, qtype), qtype))
