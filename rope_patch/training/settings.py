"""A recipe's keys: flat YAML, each overridable on the command line."""

from __future__ import annotations

import argparse
import copy
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments, integrations

from rope_patch.extension import Extension, require_near
from rope_patch.methods.origin import load_plugin
from rope_patch.training import recipe_files
from rope_patch.training import stage as stage_keys
from rope_patch.training.data.arguments import DataArguments
from rope_patch.training.objective.arguments import ObjectiveArguments, check_objective
from rope_patch.training.stage import Stage
from rope_patch.units import parse_tokens, split_target
from rope_patch.utils.errors import did_you_mean, one_line
from rope_patch.utils.strict_yaml import read_yaml

LOSSES = ("auto", "full", "torch", "liger")
RESOLVED = "recipe.yaml"


@dataclass
class ExtensionArguments:
    """Recipe keys for the model, its extension, and the trained weights."""

    model: str = field(default="", metadata={"help": "A folder, a name on the Hub, or demo."})
    method: str = field(
        default="", metadata={"help": "How to extend it: a name of `rope-patch methods`, or none."}
    )
    factor: float | None = field(
        default=None, metadata={"help": "Target length / trained length; or length."}
    )
    length: int | None = field(
        default=None, metadata={"help": "Target length in tokens; or factor."}
    )
    trained_length: int | None = field(
        default=None, metadata={"help": "Tokens of pretraining, if the config does not say."}
    )
    options: str | None = field(
        default=None, metadata={"help": "The method's options, such as {beta_fast: 16}."}
    )
    plugin: list[str] = field(default_factory=list, metadata={"help": "Files with methods."})
    layer_types: list[str] | None = field(
        default=None, metadata={"help": "Layers to extend, where a model has several types."}
    )
    start: str = field(
        default="auto",
        metadata={
            "help": "What a scaling in the config means for the extension: auto, unscaled (replace "
            "it) or running (stretch it further)."
        },
    )
    anyway: bool = field(
        default=False, metadata={"help": "Extend beyond 64 times the trained length, too."}
    )
    kernels: str = field(
        default="auto", metadata={"help": "Who rotates: auto, triton, reference or hf."}
    )
    train_length: int | None = field(
        default=None, metadata={"help": "Tokens of a row; the target length if left out."}
    )
    tokens: float | None = field(
        default=None, metadata={"help": "Tokens to train on in all, instead of max_steps."}
    )
    dtype: str = field(
        default="float32",
        metadata={"help": "Weights and optimizer: float32 (with bf16: true, computing in bf16)."},
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Execute Python code that the model's folder brings."}
    )
    attention: str = field(
        default="sdpa", metadata={"help": "sdpa, flash_attention_2, flex_attention, eager, ..."}
    )
    loss: str = field(
        default="auto",
        metadata={
            "help": "full: all logits at once; torch, liger: in chunks, never all; auto: torch's, "
            "but full with use_cpu, where that is several times as fast."
        },
    )
    z_loss: float = field(
        default=0.0,
        metadata={"help": "Weight of the mean (log Z)², against drifting logits; often 1e-5."},
    )
    decay_embeddings: bool = field(
        default=True,
        metadata={"help": "Apply weight_decay to embeddings, too; norms and biases never decay."},
    )
    offload_activations: bool = field(
        default=False, metadata={"help": "Keep what the backward pass needs in the CPU's memory."}
    )
    lora_rank: int = field(default=0, metadata={"help": "LoRA of this rank; 0 trains all weights."})
    lora_alpha: float = field(default=16.0, metadata={"help": "LoRA's scale, times the rank."})
    lora_targets: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"],
        metadata={"help": "Linear layers that get LoRA."},
    )
    lora_trains: list[str] = field(
        default_factory=lambda: ["embeddings", "norms"],
        metadata={"help": "Trained in full beside LoRA, as LongLoRA does; [] for neither."},
    )
    resume: str = field(
        default="no",
        metadata={"help": "auto: from the last whole checkpoint, if any; or a checkpoint; or no."},
    )
    average_checkpoints: int = field(
        default=0,
        metadata={"help": "Finish with the mean of the last so many checkpoints; 0 for the last."},
    )
    max_loss_rise: float = field(
        default=3.0,
        metadata={"help": "Stop where the loss is so much (nats) above the mean of 20 steps."},
    )
    carry_optimizer: bool = field(
        default=False,
        metadata={"help": "In a later stage: go on with the optimizer's state of the one before."},
    )
    retrieval_steps: int = field(
        default=0, metadata={"help": "Look for needles every so many steps; 0 never."}
    )
    retrieval_length: int | None = field(
        default=None, metadata={"help": "Tokens of that; the target length if left out."}
    )
    retrieval_samples: int = field(default=4, metadata={"help": "Needles each time."})
    ignore_plan: bool = field(
        default=False, metadata={"help": "Start although the plan says that memory is too small."}
    )

    def __post_init__(self) -> None:
        """Turn texts such as `4x` and `32k` into numbers."""
        self.factor, self.length = split_target(self.factor, self.length)
        for name in ("trained_length", "train_length", "retrieval_length"):
            setattr(self, name, parse_tokens(name, getattr(self, name)))


@dataclass
class TrainArguments(TrainingArguments):
    """transformers' TrainingArguments, with defaults for long contexts."""

    output_dir: str | None = field(
        default="out/finetune", metadata={"help": "Where everything goes."}
    )
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Rows per device."})
    max_steps: int = field(default=-1, metadata={"help": "Optimizer steps; or tokens."})
    learning_rate: float = field(default=2e-5, metadata={"help": "The highest learning rate."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Beta2 of AdamW."})
    gradient_checkpointing: bool | None = field(
        default=True, metadata={"help": "Keep layers' inputs only, compute the rest again."}
    )
    logging_steps: float = field(default=1, metadata={"help": "Log every so many steps."})
    save_steps: float = field(default=100, metadata={"help": "Checkpoint every so many steps."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints to keep."})

    def __post_init__(self) -> None:
        """Allow reading and planning a GPU recipe on a machine without GPUs."""
        use_cpu = self.use_cpu
        self.use_cpu = use_cpu or not torch.accelerator.is_available()
        super().__post_init__()
        self.use_cpu = use_cpu


_ARGUMENT_CLASSES: Any = (ExtensionArguments, DataArguments, ObjectiveArguments, TrainArguments)


@dataclass(frozen=True)
class Settings:
    """A whole recipe.

    Attributes:
        extension: Model, method, trained weights.
        data: Documents and packing.
        training: transformers' TrainingArguments.
        explicit: The keys set explicitly in the file or on the command line, with their values.
        objective: Terms of the objective.
        stages: The settings of each stage, if the recipe has `stages`; the rest is then stage 1's,
            except the output folder.
        stage: The place within such a recipe, if these are a stage's settings.
    """

    extension: ExtensionArguments
    data: DataArguments
    training: TrainArguments
    explicit: dict[str, Any]
    objective: ObjectiveArguments = field(default_factory=ObjectiveArguments)
    stages: tuple[Settings, ...] = ()
    stage: Stage | None = None

    @property
    def model(self) -> str:
        """Return the model's folder or name."""
        return self.extension.model

    @property
    def trust_remote_code(self) -> bool:
        """Return whether code that the model brings may be executed."""
        return self.extension.trust_remote_code

    @property
    def method_options(self) -> dict[str, Any]:
        """Return the method's options as a dict."""
        return _parse_options(self.extension.options)

    def request(self) -> Extension:
        """Return the request to extend the model."""
        names = ("factor", "length", "trained_length", "layer_types", "start", "kernels", "anyway")
        arguments: dict[str, Any] = {name: getattr(self.extension, name) for name in names}
        return Extension(self.extension.method, **arguments, options=self.method_options)

    @property
    def row_seed(self) -> int:
        """Return the seed of the rows' order: `data_seed`, else the run's own."""
        training = self.training
        return training.seed if training.data_seed is None else training.data_seed

    def leaky_target(self, trained_length: int) -> int:
        """Return the target length of `positions: leaky`, which no method gives, in tokens."""
        factor, length = self.extension.factor, self.extension.length
        if length is None:
            length = round(trained_length * (1 if factor is None else factor))
        require_near(length, trained_length, self.extension.anyway)
        return length

    @property
    def loss(self) -> str:
        """Return the loss; `auto` becomes `full` on a CPU, where chunks take far longer."""
        loss = self.extension.loss
        return "full" if loss == "auto" and self.training.use_cpu else loss

    def resolved(self) -> dict[str, Any]:
        """Return every key with its resolved value: an equivalent recipe."""
        if self.stages:
            folder = {"output_dir": self.training.output_dir}
            return stage_keys.join_stages([stage.resolved() | folder for stage in self.stages])
        return {key: value for key, value in self.values().items() if value is not None}

    def values(self) -> dict[str, Any]:
        """Return every key's resolved value, None for keys without one."""
        usable = known_keys().keys() - UNSUPPORTED_KEYS
        training = {
            key: value
            for key, value in self.training.to_dict().items()
            if key in usable and not str(value).startswith("<")
        }
        ours = (self.extension, self.data, self.objective)
        return {key: value for part in ours for key, value in asdict(part).items()} | training


def parse_settings(arguments: Sequence[str]) -> tuple[Settings, argparse.Namespace]:
    """Parse `--config NAME` and the keys that override it.

    Args:
        arguments: The command line, without the program's name.

    Returns:
        The settings, and the flags `plan` and `json`.

    Raises:
        ValueError: A key is unknown (names the closest one), a value does not fit, or the file is
            missing or not YAML.
    """
    outer = Parser(add_help=False, allow_abbrev=False)
    outer.add_argument("--config", type=Path)
    for flag in ("plan", "json"):
        outer.add_argument(f"--{flag}", action="store_true")
    flags, rest = outer.parse_known_args([_with_underscores(word) for word in arguments])
    recipe = {} if flags.config is None else read_recipe(flags.config)
    own_keys = stage_keys.split_stages(recipe, flags.config)
    if own_keys is None:
        return _settings_of(recipe, rest), flags
    return _staged(recipe, own_keys, rest), flags


def _staged(recipe: dict[str, Any], own_keys: list[dict[str, Any]], rest: list[str]) -> Settings:
    """Return the settings of a recipe with stages; the command line overrides every stage."""
    stages: list[Settings] = []
    for number, keys in enumerate(own_keys, start=1):
        place = Stage(number, len(own_keys), Path())
        with place.naming_errors():
            settings = _settings_of(stage_keys.stage_recipe(recipe, keys), rest)
        folder = Path(str(settings.training.output_dir))
        place = replace(place, recipe_folder=folder)
        settings.training.output_dir = str(place.folder)
        stages.append(replace(settings, stage=place))
    stage_keys.require_shared([settings.values() for settings in stages])
    training = copy.copy(stages[0].training)
    training.output_dir = str(folder)
    return replace(stages[0], training=training, stage=None, stages=tuple(stages))


def _settings_of(recipe: dict[str, Any], rest: list[str]) -> Settings:
    """Return the settings of a file's keys and of the command line's, which override them."""
    words = [word[2:].partition("=")[0] for word in rest if word.startswith("--")]
    for key in [*recipe, *words]:
        if key in UNSUPPORTED_KEYS:
            raise ValueError(f"recipes have no key {key}: {UNSUPPORTED_KEYS[key]}")
    inner = RecipeParser(_ARGUMENT_CLASSES)
    recipe = {key: inner.coerce(key, value) for key, value in recipe.items()}
    inner.set_recipe(recipe)
    try:
        with warnings.catch_warnings():
            # transformers 5.23 deprecates gradient_checkpointing; older ones lack the new name.
            warnings.simplefilter("ignore", FutureWarning)
            extension, data, objective, training, unknown = inner.parse_args_into_dataclasses(
                rest, return_remaining_strings=True
            )
    except (TypeError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"a setting has a value that does not fit: {error}") from error
    for word in unknown:
        if not word.startswith("--"):
            raise ValueError(f"expected --key value, got {word!r}")
        _require_known(word[2:].partition("=")[0], "on the command line")
    parts = (extension, data, objective, training)
    explicit = recipe | {key: getattr(_owner(key, *parts), key) for key in words}
    settings = Settings(extension, data, training, explicit, objective)
    for source in extension.plugin:
        load_plugin(source)
    _validate(settings)
    return settings


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the keys and values of a recipe; see `recipe_files.find_recipe`.

    Raises:
        ValueError: The recipe is missing or not flat YAML (but for `stages`), or a key is unknown.
    """
    path = recipe_files.find_recipe(path)
    try:
        recipe = read_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {one_line(str(error))}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path}: expected keys and values, got {type(recipe).__name__}")
    for key in recipe:
        if key != stage_keys.STAGES:
            _require_known(str(key), f"in {path}")
    for number, keys in enumerate(stage_keys.split_stages(dict(recipe), path) or (), start=1):
        for key in keys:
            _require_known(str(key), f"of stage {number} in {path}")
    return recipe


def known_keys() -> dict[str, str]:
    """Return every key with its help: ours first, then transformers'."""
    return {
        f.name: str(f.metadata.get("help", ""))
        for kind in _ARGUMENT_CLASSES
        for f in fields(kind)
        if f.init
    }


def usable_keys() -> dict[str, str]:
    """Return the supported keys with their help."""
    keys = {key: about for key, about in known_keys().items() if key not in UNSUPPORTED_KEYS}
    return keys | {stage_keys.STAGES: stage_keys.ABOUT}


def _require_known(key: str, location: str) -> None:
    valid_keys = known_keys()
    # `_settings_of` refuses unsupported ones with their reason.
    if key not in valid_keys and key not in UNSUPPORTED_KEYS:
        raise ValueError(
            f"unknown key {key!r} {location}{did_you_mean(key, valid_keys)}; "
            "`rope-patch finetune --keys` lists all keys"
        )


def _owner(key: str, *parts: Any) -> Any:
    return next(part for part in parts if hasattr(part, key))


def _parse_options(value: Any) -> dict[str, Any]:
    try:
        options = read_yaml(value) if isinstance(value, str) else value
    except yaml.YAMLError as error:
        raise ValueError(f"options is not YAML: {one_line(str(error))}") from error
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise ValueError(
            f"options must be keys and values, such as {{beta_fast: 16}}, got {value!r}"
        )
    return dict(options)


def _validate(settings: Settings) -> None:
    extension, training = settings.extension, settings.training
    for key in ("model", "method"):
        if not getattr(extension, key):
            raise ValueError(
                f"a recipe needs the key {key!r}: {known_keys()[key]} Say --config NAME, or --{key}"
            )
    if training.fp16:
        raise ValueError("fp16 overflows in long training: expected bf16: true, or neither")
    if extension.loss not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {extension.loss!r}")
    for key in ("factor", "length", "trained_length", "train_length", "retrieval_length"):
        value = getattr(extension, key)
        if value is not None and not 1 <= value < math.inf:
            raise ValueError(f"{key} must be at least 1, got {value}")
    if extension.average_checkpoints < 0 or extension.average_checkpoints == 1:
        raise ValueError(
            f"average_checkpoints must be 0, or 2 or more, got {extension.average_checkpoints}"
        )
    if extension.average_checkpoints and training.save_strategy != "steps":
        raise ValueError(
            "average_checkpoints needs checkpoints: expected save_strategy: steps, got "
            f"{getattr(training.save_strategy, 'value', training.save_strategy)}"
        )
    if extension.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be float32 or bfloat16, got {extension.dtype!r}")
    if unknown := set(extension.lora_trains) - {"embeddings", "norms"}:
        raise ValueError(
            f"lora_trains takes embeddings and norms, got {', '.join(sorted(unknown))}"
        )
    options = _parse_options(extension.options)
    if settings.data.positions == "leaky":
        _check_leaky(extension, options)
    check_objective(settings.objective, settings)
    for name in training.report_to or ():
        if name not in integrations.get_available_reporting_integrations():
            raise ValueError(
                f"report_to: {name} is not installed, or nothing of that name is known: pip "
                f"install {name}, or report_to: none"
            )
    if (extension.tokens is None) == (training.max_steps < 1):
        raise ValueError(
            "expected exactly one of max_steps and tokens, got "
            + ("neither" if extension.tokens is None else "both")
        )
    if extension.tokens is not None and not (
        extension.tokens > 0 and math.isfinite(extension.tokens)
    ):
        raise ValueError(f"tokens must be above 0, got {extension.tokens}")


def _check_leaky(extension: ExtensionArguments, options: dict[str, Any]) -> None:
    """Check the keys that `positions: leaky` restricts."""
    if extension.method != "none" or options:
        got = f"{extension.method} with {options}" if options else extension.method
        raise ValueError(
            "positions: leaky trains a model for the rotation that it has: expected method: none "
            f"without options, got {got}"
        )
    if (extension.factor is None) == (extension.length is None):
        raise ValueError(
            "positions: leaky trains for a longer target: expected exactly one of factor and "
            f"length, got {'neither' if extension.factor is None else 'both'}"
        )
    if extension.retrieval_steps:
        raise ValueError(
            "positions: leaky changes attention while the model is trained, so that needles would "
            "say nothing of the finished model: leave retrieval_steps out, and measure that model "
            "with rope-patch eval"
        )


UNSUPPORTED_KEYS = {
    "num_train_epochs": "rows are streamed without end: say max_steps or tokens",
    "load_best_model_at_end": "there is no validation set; retrieval_steps and rope-patch eval "
    "say how good the model is",
    "resume_from_checkpoint": "say resume: auto, or resume: PATH",
    "auto_find_batch_size": "memory is planned ahead: rope-patch finetune --plan",
    "eval_strategy": "say retrieval_steps: N",
    "eval_steps": "say retrieval_steps: N",
    "logging_nan_inf_filter": "a loss that is not a number stops the training",
    "push_to_hub": "upload the finished model's folder: hf upload NAME out/finetune/model",
    "ignore_data_skip": "rows go on where they were",
    "remove_unused_columns": "rows have no columns that are not used",
    "include_num_input_tokens_seen": "tokens are counted anyway",
    "activation_checkpointing": "say gradient_checkpointing",
    "loop": "the Trainer takes the same steps; the plain loop is recipes/experiments/"
    "training_loop.py of the repository",
}


class Parser(argparse.ArgumentParser):
    """argparse's parser, with errors that name the key."""

    def error(self, message: str) -> NoReturn:
        """Raise a ValueError instead of leaving the program."""
        message = re.sub(r"^argument --(\w+)(/--[\w-]+)?", r"\1", message)
        raise ValueError(f"{message}; `rope-patch finetune --keys` lists all keys")


class RecipeParser(HfArgumentParser, Parser):
    """A parser of a recipe's keys.

    Args:
        kinds: The dataclasses with the keys.
    """

    def __init__(self, kinds: Sequence[Any]) -> None:
        self._kinds = kinds
        super().__init__(kinds, add_help=False, allow_abbrev=False)
        for action in self._actions:
            if action.dest in _WRITTEN_KEYS:  # their dataclasses read them
                action.type = _written_number

    def coerce(self, key: str, value: Any) -> Any:
        """Return a YAML value in its key's shape: a single value, a list, or a mapping.

        Raises:
            ValueError: The value has another shape, or a list item has the wrong type.
        """
        action = next(action for action in self._actions if action.dest == key)
        if action.nargs == "+" and value is not None:
            items, item_type = value if isinstance(value, list) else [value], action.type or str
            try:
                return [item_type(part) for part in items]  # type: ignore[operator]
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{key} takes a list of {_type_name(item_type)}s, got {value!r}"
                ) from error
        shape = type(value)
        if shape in (dict, list, type(None)) and shape not in self._accepted_types(key):
            raise ValueError(f"{key} takes one {_type_name(action.type)}, got {value!r}")
        return value

    def set_recipe(self, recipe: dict[str, Any]) -> None:
        """Make a recipe's values the defaults, which the command line overrides."""
        self.set_defaults(**{key: _to_cli_string(value) for key, value in recipe.items()})

    def _accepted_types(self, key: str) -> set[Any]:
        """Return the types that a key accepts."""
        if key == "options":
            return {str, dict, type(None)}
        hint = next(hints[key] for kind in self._kinds if key in (hints := get_type_hints(kind)))
        return {get_origin(part) or part for part in (hint, *get_args(hint))}


def _written_number(text: str) -> str:
    return text


_WRITTEN_KEYS = (
    *("factor", "length", "trained_length", "train_length", "retrieval_length"),
    *("short_length", "min_document_length"),
)


def _with_underscores(word: str) -> str:
    """Return a word of the command line with a key's dashes as underscores."""
    key, equals, value = word.partition("=")
    if not key.startswith("--"):
        return word
    return key.replace("-", "_").replace("__", "--", 1) + equals + value


def _type_name(type_: Any) -> str:
    names = {"str": "text", "string_to_bool": "bool", "_written_number": "number"}
    return names.get(type_.__name__, type_.__name__)


def _to_cli_string(value: Any) -> Any:
    """Return a YAML value as a command-line string, so that both pass the same checks."""
    return str(value) if isinstance(value, bool | int | float) else value
