"""Ask a small copy of a model where it keeps positions, and what they look like."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rope_patch.encodings.sites.site import (
    DetectedBias,
    DetectedBuckets,
    DetectedPositions,
    DetectedTable,
)
from rope_patch.transformers_api.models import set_attention_implementation
from rope_patch.utils.errors import Refused, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Matrix = tuple[str, nn.Module, str]  # a module's name, the module, and the matrix's name in it
TOKENS = 6  # tokens of the text that the copy reads
# Fields of configs that say how many positions a table has.
LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_source_positions",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
    "max_text_positions",
)
_LAYER_FIELDS = (
    "num_hidden_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
)


class UnknownEncoding(Refused):
    """A model was asked how it tells positions, and the answer is none that can be extended."""


def transformers_model(model: nn.Module) -> tuple[str, PreTrainedModel]:
    """Return the outermost transformers model within a module, and its name there.

    Raises:
        ValueError: There is none.
    """
    from transformers import PreTrainedModel  # loads Triton

    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            return name, module
    raise UnknownEncoding(
        f"{type(model).__name__} holds no transformers model: expected one, or something around one"
    )


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model that reads the text: the model itself, or a part with a config of its own.

    Raises:
        ValueError: Encoder and decoder are models of their own.
    """
    from transformers import PreTrainedModel

    config = model.config.get_text_config(decoder=True)
    if isinstance(config, type(model.config)):
        return model
    if getattr(model.config, "is_encoder_decoder", False):
        raise Refused(
            f"{type(model).__name__} joins models with configs of their own: extend each by "
            "itself, for example rope_patch.patch(model.decoder, ...)"
        )
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and type(part.config) is type(config):
            return part
    return model


def probe(model: PreTrainedModel) -> DetectedPositions:
    """Run a copy of one layer on a few tokens, and return where it kept positions.

    The copy has the model's class and config but for layers and vocabulary, and weights of its own,
    so the model itself may be empty, quantized or anywhere.

    Raises:
        ValueError: The copy cannot be made or run.
    """
    try:
        with torch.random.fork_rng(devices=[]):  # the copies draw weights
            small = _copy(model)
            grown = {name: _grown_shapes(model, name) for name in _length_fields(model.config)}
            return _watch(small, grown)
    except Exception as error:  # any code of any model
        raise UnknownEncoding(
            f"a small copy of {type(model).__name__} could not be asked how it tells positions: "
            f"{one_line(error)}"
        ) from error


def small_config(config: Any) -> Any:
    """Return a copy of a config with one layer and a small vocabulary."""
    config = copy.deepcopy(config)
    for name in ("quantization_config", "dtype", "torch_dtype"):
        config.__dict__.pop(name, None)
    layers = [getattr(config, name, None) for name in _LAYER_FIELDS]
    for name, count in zip(_LAYER_FIELDS, layers, strict=True):
        if isinstance(count, int):
            with suppress(NotImplementedError):  # ProphetNet's and Funnel's cannot be set
                setattr(config, name, 1)
    for name, value in list(vars(config).items()):  # Longformer's windows, one a layer
        if isinstance(value, list) and len(value) in layers and isinstance(value[0], int):
            setattr(config, name, value[:1])
    if getattr(config, "default_language", "") is None:  # X-MOD has adapters by language
        config.default_language = next(iter(config.languages))
    if not hasattr(config, "initializer_range"):  # Pix2Struct's text part asks for it
        config.initializer_range = 0.02
    config.use_cache = False  # one layer may have no cache that counts tokens
    set_attention_implementation(config, "eager")  # other kernels may need a GPU
    if (types := getattr(config, "attention_types", None)) is not None:  # GPT-Neo
        config.attention_types = [[types[0][0], 1]]
        config.attention_layers = config.attention_layers[:1]
    special = [
        value
        for name in ("pad_token_id", "decoder_start_token_id", "bos_token_id", "eos_token_id")
        for value in [getattr(config, name, None)]
        if isinstance(value, int)
    ]
    if isinstance(getattr(config, "vocab_size", None), int):
        config.vocab_size = min(config.vocab_size, max([64, *special]) + 1)
    return config


def _copy(model: PreTrainedModel, **fields: Any) -> PreTrainedModel:
    config = small_config(model.config)
    for name, value in fields.items():
        setattr(config, name, value)
    return type(model)(config).eval()


def _length_fields(config: Any) -> list[str]:
    names = [config.attribute_map.get(name, name) for name in LENGTH_FIELDS]
    return [n for n in dict.fromkeys(names) if isinstance(getattr(config, n, None), int)]


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.shape for name, tensor in tensors}


def _grown_shapes(model: PreTrainedModel, name: str) -> set[str]:
    """Return the tensors whose shapes follow a field of the config."""
    length = getattr(model.config, name)
    with torch.device("meta"):
        before, after = (_shapes(_copy(model, **{name: n})) for n in (length, length + 8))
    return {key for key, shape in before.items() if after.get(key) != shape}


def _number_rows(matrices: list[Matrix]) -> None:
    """Fill every matrix that a module could look up with the numbers of its rows."""
    with torch.no_grad():
        for _, owner, attribute in matrices:
            matrix = getattr(owner, attribute)
            matrix.copy_(torch.arange(len(matrix)).float()[:, None].expand_as(matrix))


def _indexed(model: nn.Module, grown: set[str]) -> list[Matrix]:
    """Return matrices that follow a length and belong to a module with others (CTRL)."""
    return [
        (name, module, attribute)
        for name, module in model.named_modules()
        if list(module.children())
        for attribute, tensor in {**module._parameters, **module._buffers}.items()
        if tensor is not None
        and tensor.ndim == 2
        and tensor.is_floating_point()
        and (f"{name}.{attribute}" if name else attribute) in grown
    ]


def _matrices(model: nn.Module) -> list[Matrix]:
    """Return modules that own one matrix and nothing else, and are no linear maps."""
    return [
        (name, module, attribute)
        for name, module in model.named_modules()
        if not isinstance(module, nn.Linear) and not list(module.children())
        for tensors in [{**module._parameters, **module._buffers}]
        for attribute, tensor in tensors.items()
        if attribute in ("weight", "weights")
        and tensor is not None
        and tensor.ndim == 2
        and tensor.is_floating_point()
    ]


def _watch(model: PreTrainedModel, grown: dict[str, set[str]]) -> DetectedPositions:
    detected = DetectedPositions()
    found = detected.tables
    indexed = _indexed(model, {key for keys in grown.values() for key in keys})
    initial = {
        f"{name}.{a}" if name else a: getattr(m, a).detach().clone()
        for name, m, a in [*_matrices(model), *indexed]
    }
    words = _word_table(model)
    widths = {model.config.hidden_size} | ({words.weight.shape[1]} if words is not None else set())

    def note_table(name: str, attribute: str, output: Any) -> None:
        key = f"{name}.{attribute}" if name else attribute
        row = _first_row(output[0] if isinstance(output, tuple) else output)
        if row is None or any((t.module, t.attribute) == (name, attribute) for t in found):
            return
        # RoFormer rotates heads by a fixed table of their width; LiLT adds a narrow learned one.
        is_fixed = not getattr(model.get_submodule(name), attribute).requires_grad
        if is_fixed and initial[key].shape[1] not in widths:
            return
        fields = tuple(n for n, keys in grown.items() if key in keys)
        if not fields and output.shape[-2] != TOKENS:
            return  # its rows count something else, such as Pegasus-X's global tokens
        companions = {_pattern(k) for n in fields for k in grown[n]} - {_pattern(key)}
        others = {_pattern(f"{n}.{a}") for n, _, a in _matrices(model)}
        more = tuple(sorted(companions - others))
        found.append(DetectedTable(name, attribute, row, fields, more, initial[key]))

    def note_rows(name: str, attribute: str) -> Any:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            indices = next((a for a in [*args, *kwargs.values()] if _is_toeplitz(a)), None)
            if indices is not None:
                detected.buckets.append(DetectedBuckets(name, indices.shape[-2:]))
            else:
                note_table(name, attribute, output)

        return after

    def note_bias(name: str) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            for argument, value in kwargs.items():
                if _is_linear_bias(value):
                    bias = DetectedBias(name, argument, not value[..., -1].any())
                    if bias not in detected.slopes:
                        detected.slopes.append(bias)

        return before

    _number_rows([*_matrices(model), *indexed])
    for name, owner, attribute in _matrices(model):
        if owner is not words:
            owner.register_forward_hook(note_rows(name, attribute), with_kwargs=True)
    for name, module in model.named_modules():
        module.register_forward_pre_hook(note_bias(name), with_kwargs=True)
    with torch.no_grad(), _IndexWatch(indexed, note_table):
        model(**_inputs(model))
    read = {f"{t.module}.{t.attribute}" for t in found}
    followed = {key for t in found for name in t.fields for key in grown[name]}
    detected.unread = [key for key in initial if key in followed - read]
    return detected


class _IndexWatch(TorchFunctionMode):
    """Watch matrices that a module indexes in its own forward (CTRL)."""

    def __init__(self, matrices: list[Matrix], note: Callable[[str, str, Any], None]) -> None:
        super().__init__()
        self.matrices = matrices
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs or {})
        if func is torch.Tensor.__getitem__:
            for name, owner, attribute in self.matrices:
                if getattr(owner, attribute) is args[0]:
                    self.note(name, attribute, output)
        return output


def _word_table(model: nn.Module) -> Any:
    """Return the module that embeds tokens; None if there are several, or none that says so."""
    try:
        words = model.get_input_embeddings()  # type: ignore[operator]
    except NotImplementedError:
        return None
    return words if isinstance(getattr(words, "weight", None), torch.Tensor) else None


def _inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    config = model.config
    token = 5 if getattr(config, "pad_token_id", None) != 5 else 6
    ids = torch.full((1, TOKENS), token)
    inputs: dict[str, torch.Tensor] = {}
    if model.main_input_name == "input_ids":
        rows = getattr(config, "num_codebooks", 1)  # MusicGen's decoder
        inputs["input_ids"] = ids.expand(rows, -1)
        inputs["attention_mask"] = torch.ones_like(ids)
    elif model.main_input_name == "input_features" and hasattr(config, "num_mel_bins"):
        frames = 2 * config.max_source_positions
        inputs["input_features"] = torch.zeros(1, config.num_mel_bins, frames)
    elif model.main_input_name == "input_features":
        inputs["input_features"] = torch.zeros(1, 40, config.input_feat_per_channel)
    elif model.main_input_name == "input_values":
        inputs["input_values"] = torch.zeros(1, 16000)  # a second of sound
    elif model.main_input_name == "flattened_patches":  # Pix2Struct: row, column and pixels
        width = 2 + config.vision_config.patch_embed_hidden_size
        inputs["flattened_patches"] = torch.ones(1, TOKENS, width)
    else:
        raise Refused(f"its input is {model.main_input_name}, expected tokens or features")
    accepted = inspect.signature(model.forward).parameters
    if "bbox" in accepted:  # places on a page
        has_fractions = hasattr(config, "relative_bias_args")  # UDOP; others count pixels
        inputs["bbox"] = torch.zeros(
            1, TOKENS, 4, dtype=torch.float if has_fractions else torch.long
        )
    if "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = ids
    return inputs


def _first_row(output: Any) -> int | None:
    """Return r if the output begins with rows r, r + 1, ... of numbered rows; else None."""
    if not isinstance(output, torch.Tensor) or output.ndim not in (2, 3):
        return None
    rows = output[:, 0] if output.ndim == 2 else output[0, :, 0]
    rows = rows[:TOKENS]  # the text's own: Longformer pads it to its window
    steps = rows.diff()
    if len(rows) < 2 or not torch.equal(steps, torch.ones_like(steps)):
        return None
    return int(rows[0])


def _is_toeplitz(indices: Any) -> bool:
    """Return whether whole numbers in a matrix depend on column - row alone, and not all equal."""
    if not isinstance(indices, torch.Tensor) or indices.is_floating_point():
        return False
    if indices.ndim == 3 and len(indices) == 1:
        indices = indices[0]
    if indices.ndim != 2 or min(indices.shape) < 2:
        return False
    return torch.equal(indices[1:, 1:], indices[:-1, :-1]) and len(indices.unique()) > 1


def _is_linear_bias(value: Any) -> bool:
    """Return whether a bias grows evenly with the key's position, by another slope in each head."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.ndim < 3:
        return False
    if value.shape[-2] != 1 or value.shape[-1] < TOKENS:
        return False
    steps = value.double().diff(dim=-1).flatten(0, -2)
    slope = steps[:, :1]
    even = (steps - slope).abs() <= 0.02 * slope.abs()
    return bool(even.all() and (slope > 0).all())


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
