"""GGUF files that rotate otherwise: the same weights, with the keys that llama.cpp rotates by.

What llama.cpp reads is described in `llama_cpp` and in `rope_patch.pretrained.gguf`, which reads
the written keys back, so that the file is compared with the patched model before it gets its name.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rope_patch.entry_points import patch
from rope_patch.exporting.engine_fields import what_graph_reads
from rope_patch.exporting.llama_cpp import NAME, flags_on_file_factors, single_rotation
from rope_patch.exporting.target import LayerRotation, Target
from rope_patch.extension import Extension
from rope_patch.methods.ntk_by_parts import yarn_mscale
from rope_patch.pretrained.gguf import STRETCH_TENSORS
from rope_patch.pretrained.loading import empty_model, read_config, require_model_folder
from rope_patch.utils import atomic_files
from rope_patch.utils.errors import Refused
from rope_patch.utils.terminal import progress_bar

_TOLERANCE = 1e-5  # of a frequency: keys are float32


@dataclass(frozen=True)
class PatchedFile:
    """A GGUF file that `patch_gguf` wrote.

    Attributes:
        file: Its path.
        summary: What is in effect, in words, as `handle.summary()`.
        length: Tokens that it reads.
        keys: The keys that rotate, with their values; None where a key was removed.
    """

    file: Path
    summary: str
    length: int
    keys: dict[str, Any]


def patch_gguf(
    model: str | os.PathLike[str],
    to: str | os.PathLike[str],
    method: str | Extension,
    *,
    start: str = "auto",
    anyway: bool = False,
    **request: Any,
) -> PatchedFile:
    """Write a GGUF file that llama.cpp rotates as a patched model, without flags.

    Weights are copied as they are, quantised or not; no more than one tensor is in memory.

    Args:
        model: The GGUF file of the model as it was converted.
        to: A new file.
        method: A name from `rope_patch.list_methods()`, or a whole request, an `Extension`.
        start: See `patch`.
        anyway: See `patch`.
        **request: Further fields of `Extension`: factor, length, trained_length, layer_types, and
            the method's options.

    Returns:
        What was written.

    Raises:
        ValueError: The request is invalid, no keys of a file say the rotation, the file is a part
            of several, or the new one exists.
        OSError: Writing failed; says where.
    """
    source, target = Path(model), Path(to)
    if target.suffix != ".gguf":
        raise Refused(f"{source} is one file, expected a new one that ends with .gguf, got {to}")
    if target.exists():
        raise Refused(f"{target} exists already: expected a new file")
    require_model_folder(source.parent, source.name)
    extension = Extension.of(method, start=start, anyway=anyway, **request)
    empty = empty_model(source, read_config(source), any_kind=True)
    handle = patch(empty, replace(extension, kernels="hf"))
    rotations = Target.from_model(empty)
    from gguf import GGUFReader  # reading the config says how to install it

    reader = GGUFReader(str(source))
    if (parts := reader.get_field("split.count")) is not None and parts.contents() > 1:
        raise Refused(
            f"{source} is one of {parts.contents()} files: merge them first (llama-gguf-split "
            "--merge)"
        )
    keys = _keys(rotations, reader)
    with atomic_files.explain_write_errors(
        target.parent, target.name, "Nothing of it is left: REMEDY, and try again"
    ):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
            staging = Path(temporary) / target.name
            _copy(reader, staging, keys)
            _require_same_rotation(rotations, staging)
            staging.rename(target)
    assert handle.length is not None  # a method that follows the length has no keys
    return PatchedFile(target, handle.summary(), handle.length, keys)


def _keys(target: Target, reader: Any) -> dict[str, Any]:
    """Return the keys of a file that rotates so; None for those that it must not have."""
    target.require_no_position_map(NAME)
    target.require_static(NAME)
    architecture = str(reader.fields["general.architecture"].contents())
    reads = what_graph_reads(architecture)
    is_whole = reads == "scaling" or target.layers_differ or not target.has_windows
    if reads is None or not is_whole or target.is_mla:
        raise target.refuse(
            NAME,
            f"its graph of {architecture} is not known to take a scaling from a file's keys in "
            "every layer; `rope-patch export` says what it takes",
        )
    rotation = single_rotation(target)
    if rotation.has_temperature:
        raise target.refuse(NAME, "a temperature of queries follows the file's original length")
    scaling, theta, parameters = rotation.scaling, rotation.theta, rotation.parameters
    if any(tensor.name.removesuffix(".weight") in STRETCH_TENSORS for tensor in reader.tensors):
        scaling, theta, parameters = _beside_stretches(target, rotation, reader, architecture)
    own = [name for name in reader.fields if name.startswith(f"{architecture}.rope.scal")]
    values: dict[str, Any] = {name.removeprefix(f"{architecture}."): None for name in own}
    values |= {"context_length": target.length, "rope.freq_base": float(theta)}
    engine_factor = 1.0
    if scaling == "default":
        values["rope.scaling.type"] = "none"
    elif scaling in ("linear", "yarn"):
        values["rope.scaling.type"] = scaling
        values["rope.scaling.factor"] = float(parameters["factor"])
    else:
        raise target.refuse(
            NAME,
            "the keys of a GGUF file say a theta, linear and YaRN; convert stretches pair by pair "
            "from safetensors (`rope-patch export --engine llama.cpp --write FOLDER`), or use "
            "linear, ntk, abf or yarn",
        )
    if scaling == "yarn":
        if not parameters.get("truncate", True):
            raise target.refuse(NAME, "its YaRN is always truncated; use truncate=True")
        original = int(parameters["original_max_position_embeddings"])
        values["rope.scaling.original_context_length"] = original
        for beta, usual in (("beta_fast", 32), ("beta_slow", 1)):
            if parameters.get(beta, usual) != usual:
                values[f"rope.scaling.yarn_{beta}"] = float(parameters[beta])
        engine_factor = yarn_mscale(parameters["factor"])
    if rotation.attention_factor != engine_factor:
        values["rope.scaling.attn_factor"] = rotation.attention_factor / engine_factor
    return {f"{architecture}.{name}": value for name, value in values.items()}


def _beside_stretches(
    target: Target, rotation: LayerRotation, reader: Any, architecture: str
) -> tuple[str, float, dict[str, Any]]:
    """Return scaling, theta and parameters that multiply the file's stretches to the rotation's."""
    flags = flags_on_file_factors(rotation)
    scale = reader.get_field(f"{architecture}.rope.scaling.factor")
    if flags is None or (scale is not None and scale.contents() != 1):
        raise target.refuse(
            NAME,
            "the file has a stretch for each pair (as Llama 3.1), which keys multiply by one "
            "number or by another theta alone; use linear, ntk or abf, or convert a folder that "
            "`rope-patch export --engine llama.cpp --write FOLDER` makes of the safetensors",
        )
    scaling, number = flags[1], float(flags[3])
    if scaling == "linear":
        return scaling, float(rotation.checkpoint_parameters["rope_theta"]), {"factor": number}
    return "default", number, {}


def _copy(reader: Any, to: Path, keys: dict[str, Any]) -> None:
    """Write a file with other keys and the same tensors."""
    from gguf import GGUFValueType, GGUFWriter

    kinds = {str: GGUFValueType.STRING, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    architecture = str(reader.fields["general.architecture"].contents())
    writer = GGUFWriter(str(to), architecture, endianess=reader.endianess)
    writer.data_alignment = reader.alignment
    for field in reader.fields.values():
        # The writer adds the architecture, and `GGUF.` names the header's own fields.
        if field.name in keys or field.name.startswith(("GGUF.", "general.architecture")):
            continue
        kind = field.types[0]
        items = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=items)
    for name, value in keys.items():
        if value is not None:
            writer.add_key_value(name, value, kinds[type(value)])
    for tensor in reader.tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    size = sum(tensor.data.nbytes for tensor in reader.tensors)
    with progress_bar(total=size, unit="B", unit_scale=True, desc=f"writing {to.name}") as bar:
        for tensor in reader.tensors:
            writer.write_tensor_data(tensor.data, tensor_endianess=reader.endianess)
            bar.update(tensor.data.nbytes)
    writer.close()


def _require_same_rotation(target: Target, file: Path) -> None:
    """Raise unless a written file rotates as asked, as its keys are read back."""
    written = Target.from_model(empty_model(file, read_config(file), any_kind=True))
    for layer_type, rotation in target.rotations.items():
        asked, read = rotation.frequencies, written.rotations[layer_type].frequencies
        is_same = torch.allclose(asked.inv_freq, read.inv_freq, rtol=_TOLERANCE, atol=0)
        if not is_same or abs(asked.attention_factor / read.attention_factor - 1) > _TOLERANCE:
            raise target.refuse(
                NAME, "the keys of a GGUF file would rotate otherwise; use linear, ntk or yarn"
            )
