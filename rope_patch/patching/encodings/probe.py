"""Ask a small copy of a model where it keeps positions, and what they look like."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rope_patch.utils.errors import Refused, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 6  # in the text that the copy reads
# Fields of configs that say how many positions a table has.
LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_source_positions",
)
_LAYER_FIELDS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")


class UnknownEncoding(Refused):
    """A model was asked how it tells positions, and the answer is none that can be extended."""


@dataclass(frozen=True)
class TableSighting:
    """A module whose output was consecutive rows of a matrix of its own.

    Attributes:
        module: The module's name in the model.
        attribute: The matrix in it, a parameter or a buffer.
        first_row: The row of position 0.
        fields: The config's fields that decide how many rows there are.
        companions: Buffers that grow with the same fields, with `*` for the numbers of layers.
        initial: The matrix of the untrained copy.
    """

    module: str
    attribute: str
    first_row: int
    fields: tuple[str, ...]
    companions: tuple[str, ...]
    initial: torch.Tensor


@dataclass
class Sightings:
    """What a model did with positions.

    Attributes:
        tables: Matrices of which consecutive rows were read.
        slopes: Names of the modules that were handed a bias which is linear in the key's position,
            in the first layer, and the argument's name.
        buckets: Names of the modules that read a small table by a matrix of distances.
    """

    tables: list[TableSighting] = field(default_factory=list)
    slopes: list[tuple[str, str]] = field(default_factory=list)
    buckets: list[str] = field(default_factory=list)


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


def probe(model: PreTrainedModel) -> Sightings:
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
    for name in _LAYER_FIELDS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 1)
    config._attn_implementation = "eager"  # other kernels may need a GPU
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


def _number_rows(model: nn.Module) -> None:
    """Fill every matrix that a module could look up with the numbers of its rows."""
    with torch.no_grad():
        for _, owner, attribute in _matrices(model):
            matrix = getattr(owner, attribute)
            matrix.copy_(torch.arange(len(matrix)).float()[:, None].expand_as(matrix))


def _matrices(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
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


def _watch(model: PreTrainedModel, grown: dict[str, set[str]]) -> Sightings:
    sightings = Sightings()
    initial = {name: getattr(m, a).detach().clone() for name, m, a in _matrices(model)}
    words: Any = model.get_input_embeddings()
    # Tables of another width are not added to embeddings: RoFormer rotates heads by its own.
    widths = {words.weight.shape[1], model.config.hidden_size}

    def note_rows(name: str, attribute: str) -> Any:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            indices = next((a for a in [*args, *kwargs.values()] if _is_toeplitz(a)), None)
            if indices is not None:
                sightings.buckets.append(name)
                return
            row = _first_row(output)
            if row is None or any(t.module == name for t in sightings.tables):
                return
            if initial[name].shape[1] not in widths:
                return
            key = f"{name}.{attribute}"
            fields = tuple(n for n, keys in grown.items() if key in keys)
            companions = {_pattern(k) for n in fields for k in grown[n]} - {_pattern(key)}
            others = {_pattern(f"{n}.{a}") for n, _, a in _matrices(model)}
            more = tuple(sorted(companions - others))
            sighting = TableSighting(name, attribute, row, fields, more, initial[name])
            sightings.tables.append(sighting)

        return after

    def note_bias(name: str) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            for argument, value in kwargs.items():
                if _is_linear_bias(value) and (name, argument) not in sightings.slopes:
                    sightings.slopes.append((name, argument))

        return before

    _number_rows(model)
    for name, owner, attribute in _matrices(model):
        if owner is not words:
            owner.register_forward_hook(note_rows(name, attribute), with_kwargs=True)
    for name, module in model.named_modules():
        module.register_forward_pre_hook(note_bias(name), with_kwargs=True)
    with torch.no_grad():
        model(**_inputs(model))
    return sightings


def _inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    config = model.config
    token = 5 if getattr(config, "pad_token_id", None) != 5 else 6
    ids = torch.full((1, TOKENS), token)
    inputs: dict[str, torch.Tensor] = {}
    if model.main_input_name == "input_ids":
        inputs["input_ids"] = ids
        inputs["attention_mask"] = torch.ones_like(ids)
    elif model.main_input_name == "input_features" and hasattr(config, "num_mel_bins"):
        frames = 2 * config.max_source_positions
        inputs["input_features"] = torch.zeros(1, config.num_mel_bins, frames)
    elif model.main_input_name == "input_features":
        inputs["input_features"] = torch.zeros(1, 40, config.input_feat_per_channel)
    else:
        raise Refused(f"its input is {model.main_input_name}, expected tokens or features")
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    return inputs


def _first_row(output: Any) -> int | None:
    """Return r if the output is rows r, r + 1, ... of numbered rows; else None."""
    if not isinstance(output, torch.Tensor) or output.ndim not in (2, 3):
        return None
    rows = output[:, 0] if output.ndim == 2 else output[0, :, 0]
    steps = rows.diff()
    if len(rows) < 2 or not torch.equal(steps, torch.ones_like(steps)):
        return None
    return int(rows[0])


def _is_toeplitz(indices: Any) -> bool:
    """Return whether whole numbers in a matrix depend on column - row alone, and not all equal."""
    if not isinstance(indices, torch.Tensor) or indices.is_floating_point():
        return False
    if indices.ndim != 2 or min(indices.shape) < 2 or indices.shape[0] != indices.shape[1]:
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
