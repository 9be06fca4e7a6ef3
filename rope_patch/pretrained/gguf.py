"""Load GGUF files with their weights expanded, and rotated as the file says.

transformers leaves the rotation that a file names out of the config. llama.cpp rotates by it
without flags (src/llama-model.cpp and src/llama-context.cpp, 2026-10):

- `rope.scaling.type` is linear where the key is missing, and `rope.scale_linear` is the factor's
  old name. A type of "none" ignores the factor.
- YaRN is truncated and multiplies the paper's attention factor by `rope.scaling.attn_factor`. That
  key acts with every other type, too.
- `rope_freqs.weight` divides the frequency of each pair, beside the factor (Llama 3.1). Only files
  of Llama's architecture may hold it.
- In Gemma 3, the windows take no scaling.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from rope_patch.methods.ntk_by_parts import yarn_mscale
from rope_patch.rope_config import by_layer_type
from rope_patch.utils.errors import Refused

logger = logging.getLogger("rope_patch")


def split_gguf(
    path: str | os.PathLike[str], gguf_file: str | None = None
) -> tuple[str | os.PathLike[str], str | None]:
    """Return a model's folder and the GGUF file in it, which a path may name by itself.

    Args:
        path: A folder, a name on the Hub, or the path of a GGUF file.
        gguf_file: The file within the folder, if it is named apart.
    """
    file = Path(path)
    if gguf_file is None and file.suffix == ".gguf" and file.is_file():
        return str(file.parent), file.name
    return path, gguf_file


def announce_size(file: Path, dtype: Any) -> None:
    """Log how much memory a GGUF file's weights take when they are expanded.

    Args:
        file: The file.
        dtype: What they are expanded to; anything but a dtype means float32.
    """
    from gguf import GGUFReader

    tensors = GGUFReader(str(file)).tensors
    numbers: Counter[str] = Counter()  # by type: a file holds its embedding and norms in others
    for tensor in tensors:
        numbers[tensor.tensor_type.name] += int(tensor.n_elements)
    given = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    to = given if isinstance(given, torch.dtype) else torch.float32
    logger.info(
        "%s: %.3g GB of weights, most of them %s, are expanded to %.3g GB (%s)",
        file.name,
        file.stat().st_size / 1e9,
        numbers.most_common(1)[0][0],
        numbers.total() * to.itemsize / 1e9,
        str(to).removeprefix("torch."),
    )


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


_STRETCHES = "rope_freqs"
_TWO_SETS = ("rope_factors_long", "rope_factors_short")
STRETCH_TENSORS = (_STRETCHES, *_TWO_SETS)
_FACTOR, _OLD_FACTOR = "scaling.factor", "scale_linear"
_READ = ("scaling.type", _FACTOR, "scaling.original_context_length", "scaling.attn_factor")
_BETAS = {"scaling.yarn_beta_fast": "beta_fast", "scaling.yarn_beta_slow": "beta_slow"}
_UNSCALED_KEYS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
# Values with which a key changes nothing; None for any.
_NEUTRAL = {"scaling.finetuned": None, "scaling.yarn_ext_factor": 1, "scaling.yarn_attn_factor": 1}


class GgufRotationError(Refused):
    """No config of transformers expresses the rotation of a GGUF file."""


def apply_gguf_rotation(config: Any, file: Path) -> None:
    """Write the rotation that a GGUF file names into the config that transformers made of it.

    Raises:
        GgufRotationError: The file rotates in a way that no config expresses; says how.
    """
    text = config.get_text_config(decoder=True)
    if not getattr(text, "rope_parameters", None):
        return
    from gguf import GGUFReader  # reading the config says how to install it

    reader = GGUFReader(str(file))
    keys = {name: field.contents() for name, field in reader.fields.items() if ".rope." in name}
    rope = {name.partition(".rope.")[2]: value for name, value in keys.items()}
    tensors = {tensor.name.removesuffix(".weight"): tensor for tensor in reader.tensors}
    stretches: list[float] | None = None
    if names := sorted(tensors.keys() & set(_TWO_SETS)):
        raise _refusal(file, f"the tensor {names[0]}", "keys, or rope_freqs alone")
    if _STRETCHES in tensors:
        architecture = reader.fields["general.architecture"].contents()
        if architecture != "llama":
            raise _refusal(file, f"{_STRETCHES} beside {architecture!r}", "it in Llama's files")
        stretches = [float(value) for value in tensors[_STRETCHES].data]
    parameters = by_layer_type(text.rope_parameters)
    layer_type = "full_attention" if set(parameters) != {None} else None
    own = {k: v for k, v in parameters[layer_type].items() if k in _UNSCALED_KEYS}
    scaling = _scaling(file, rope, stretches, text.max_position_embeddings, text)
    if layer_type is None:
        text.rope_parameters = {**own, **scaling}
    elif scaling["rope_type"] != "default":
        if text.model_type != "gemma3_text" or "attn_factor" in str(rope):
            raise _refusal(file, f"{rope} for layers that differ", "it in Gemma 3's files")
        text.rope_parameters = {**parameters, layer_type: {**own, **scaling}}


def _scaling(
    file: Path, rope: dict[str, Any], stretches: list[float] | None, length: int, text: Any
) -> dict[str, Any]:
    """Return `rope_parameters` of the file's scaling, without theta."""
    for key, value in rope.items():
        is_unread = key.startswith("scal") and key not in (*_READ, *_BETAS, _OLD_FACTOR)
        if is_unread and (key not in _NEUTRAL or _NEUTRAL[key] not in (None, value)):
            raise _refusal(file, f"rope.{key} = {value!r}", "it left out")
    kind = rope.get("scaling.type", "linear")
    factor = _number(file, rope, _FACTOR if _FACTOR in rope else _OLD_FACTOR)
    attention = _number(file, rope, "scaling.attn_factor")
    if kind not in ("none", "linear", "yarn"):
        raise _refusal(file, f"rope.scaling.type {kind!r}", "none, linear or yarn")
    if kind == "none":
        factor = 1.0
    names = {"scaling.original_context_length": "original_max_position_embeddings"}
    original = {name: int(rope[key]) for key, name in names.items() if key in rope}
    if kind == "yarn" and factor != 1:
        if factor < 1 or stretches is not None:
            raise _refusal(file, f"YaRN by {factor:g} or with a tensor", "a factor above 1 alone")
        yarn = {name: _number(file, rope, key) for key, name in _BETAS.items() if key in rope}
        if attention != 1:
            yarn["attention_factor"] = yarn_mscale(factor) * attention
        original = {"original_max_position_embeddings": length, **original}
        return {"rope_type": "yarn", "factor": factor, **original, **yarn}
    if stretches is None and attention == 1:
        linear = {"rope_type": "linear", "factor": factor, **original}
        return {"rope_type": "default"} if factor == 1 else linear
    pairs = _pairs(text)
    stretches = [1.0] * pairs if stretches is None else stretches
    if len(stretches) != pairs or not all(math.isfinite(s) and s > 0 for s in stretches):
        raise _refusal(file, f"{len(stretches)} numbers in {_STRETCHES}", f"{pairs}, each above 0")
    stretches = [factor * stretch for stretch in stretches]
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "long_factor": stretches,
        "short_factor": stretches,
        "attention_factor": attention,
        "original_max_position_embeddings": length,
    }


def _pairs(text: Any) -> int:
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(head_dim * text.rope_parameters.get("partial_rotary_factor", 1.0)) // 2


def _number(file: Path, rope: dict[str, Any], key: str) -> float:
    """Return a positive number of the file; 1 where it is missing or 0, as in llama.cpp."""
    value = rope.get(key, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise _refusal(file, f"rope.{key} = {value!r}", "a number above 0")
    return float(value) or 1.0


def _refusal(file: Path, got: str, expected: str) -> GgufRotationError:
    return GgufRotationError(
        f"{file} has {got}, expected {expected}: no config of transformers rotates so; run the "
        "file in llama-server (`rope-patch verify` takes its address), or load the model's "
        "safetensors"
    )
