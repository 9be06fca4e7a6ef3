"""The folder to publish: the model, its card, exports to engines, and the evidence."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rope_patch.entry_points import patch
from rope_patch.evaluation.report.table import markdown_text
from rope_patch.exporting import ENGINES, engine_refusals, export
from rope_patch.extending.proof import Candidate
from rope_patch.extending.request import ExtendRequest
from rope_patch.extension import Extension
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import empty_model, read_config, read_original_config
from rope_patch.pretrained.model_card import card_header, card_title, loading_snippet, made_by
from rope_patch.pretrained.patched_checkpoint import patch_checkpoint
from rope_patch.pretrained.sidecar import extension_from_sidecar, read_sidecar
from rope_patch.recommending.variants import Variant, export_refusals, require_servable
from rope_patch.searching.fitness import make_space
from rope_patch.utils import atomic_files
from rope_patch.utils.errors import (
    Refused,
    escape_markdown,
    markdown_block,
    markdown_code,
    markdown_prose,
)

MODEL = "model"
EXPORTS, REPORT = "exports", "report"


def publish(
    request: ExtendRequest,
    candidate: Candidate | Path,
    length: int,
    report: Path,
    facts: dict[str, Any],
) -> Path:
    """Write the folder to publish, all of it or nothing.

    Args:
        request: The extension.
        candidate: The method for the request's own weights, or the folder of a trained model.
        length: The target in tokens.
        report: The folder of the evidence.
        facts: What the card says; see `render_card`.

    Returns:
        The folder.
    """
    target = request.out / MODEL
    with (
        atomic_files.explain_write_errors(
            request.out, MODEL, "What was measured is kept: REMEDY, and give the same command"
        ),
        tempfile.TemporaryDirectory(prefix=f".{MODEL}-", dir=request.out) as temporary,
    ):
        staging = Path(temporary) / MODEL
        if isinstance(candidate, Path):
            shutil.copytree(candidate, staging)
        else:
            patch_checkpoint(
                request.model,
                staging,
                candidate.method,
                length=length,
                trained_length=request.trained_length,
                start=request.start,
                anyway=request.anyway,
                **candidate.options,
            )
        write_exports(staging, request.engines)
        shutil.copytree(report, staging / REPORT, ignore=shutil.ignore_patterns("cache", ".lock"))
        atomic_files.atomic_write(staging / "README.md", render_card(staging, facts))
        shutil.rmtree(target, ignore_errors=True)  # a run that was killed after the move left it
        staging.rename(target)
    return target


def require_servable_method(request: ExtendRequest, length: int) -> None:
    """Raise unless one of the methods to measure runs in the engines that a request names.

    Args:
        request: The extension.
        length: The target in tokens.

    Raises:
        ValueError: Names the engines and the reason.
    """
    model, extension = _empty_model(request), _extension(request, length)
    require_servable(model, make_space(model, extension), extension, request.engines)


def serving_refusals(request: ExtendRequest, candidate: Candidate, length: int) -> dict[str, str]:
    """Return why engines that a request names cannot run a candidate, by engine.

    Args:
        request: The extension.
        candidate: The method.
        length: The target in tokens.
    """
    variant = Variant(candidate.method, candidate.method, candidate.options)
    extension = _extension(request, length)
    return export_refusals(_empty_model(request), variant, extension, request.engines)


def _extension(request: ExtendRequest, length: int) -> Extension:
    """Return the extension that a request asks for, whatever the method."""
    return Extension(
        "longrope",
        length=length,
        trained_length=request.trained_length,
        start=request.start,
        anyway=request.anyway,
    )


def _empty_model(request: ExtendRequest) -> Any:
    """Return a request's model without weights, as it is before the extension."""
    path = demo.resolve_model_path(request.model)
    config = read_original_config(path, request.start, request.trained_length)
    return empty_model(path, config)


def write_exports(folder: Path, engines: Sequence[str] = ()) -> None:
    """Write what each engine is given for a model: a file an engine, and a page of all lines.

    Args:
        folder: The model's folder.
        engines: Engines that must run it without this package; they come first on the page.

    Raises:
        ValueError: One of them cannot; says why.
    """
    model = _rotating_model(folder)
    if refusals := engine_refusals(model, engines):
        raise Refused(f"nothing is published: {'; '.join(refusals.values())}")
    lines = [
        "# Engines",
        "",
        "What makes an engine rotate as this model does. These lines were written from what "
        "engines read, and were not run.",
    ]
    for engine in dict.fromkeys([*engines, *ENGINES]):
        lines += ["", f"## {engine}", ""]
        try:
            result = export(model, engine)
        except Refused as error:
            lines.append(f"Not from this folder: {markdown_prose(error)}.")
            continue
        atomic_files.write_json(folder / EXPORTS / f"{engine}.json", result.to_dict())
        lines.append(markdown_block("\n".join(str(result).splitlines()[1:])))
        if engine == "vllm":
            typed = shlex.join(["vllm", "serve", ".", *result.arguments])
            lines += ["", markdown_code(typed)]
    atomic_files.atomic_write(folder / EXPORTS / "README.md", "\n".join(lines) + "\n")


def _rotating_model(folder: Path) -> Any:
    """Return a folder's model without weights, rotated as its sidecar says."""
    sidecar = read_sidecar(folder)
    if sidecar is None or sidecar.get("native"):
        return empty_model(str(folder), read_config(str(folder)))
    extension = replace(extension_from_sidecar(sidecar), kernels="hf")
    config = read_original_config(folder, extension.start, extension.trained_length)
    model = empty_model(str(folder), config)
    patch(model, extension)
    return model


def render_card(folder: Path, facts: dict[str, Any]) -> str:
    """Return the card as Markdown, with the Hub's YAML header.

    Args:
        folder: The folder of the model, with its sidecar.
        facts: `model`, `method` (its name in tables), `trained_length`, `length`, `sentences` of
            the decision, `usable` (the usable length in words), `evaluations` for the header,
            `table` and `lines` of the evidence, `left_out`, `training` (what was trained, or
            None), `samples` (questions at each length, and texts) and `command`.
    """
    model = facts["model"]
    training, sidecar = facts["training"], read_sidecar(folder)
    method = sidecar["method"] if sidecar else facts["method"]
    questions, count = facts["samples"]
    parts = [
        card_header(model, method, facts["evaluations"]),
        f"# {card_title(model)}, {facts['trained_length']:,} → {facts['length']:,} tokens",
        markdown_prose(facts["sentences"][0]) if facts["sentences"] else "",
        "\n".join(
            [
                "| | |",
                "|:--|:--|",
                f"| method | {escape_markdown(facts['method'])} |",
                f"| trained length before | {facts['trained_length']:,} tokens |",
                f"| target length | {facts['length']:,} tokens |",
                f"| usable length, 85% of the short-context score | {facts['usable']} |",
                f"| weights | {_weights_text(training)} |",
            ]
        ),
        "## Evidence",
        f"{questions} questions about {count} texts at each length, the same for all methods; "
        "others than those that the method was chosen by.",
        markdown_text(facts["table"]) if facts["table"] is not None else "",
        "\n".join(f"- {markdown_prose(each)}" for each in [*facts["sentences"], *facts["lines"]]),
        "All numbers: [report/report.md](report/report.md). How the method was chosen: "
        "[report/recommendation.md](report/recommendation.md).",
        "## Not measured",
        "\n".join(f"- {markdown_prose(each)}" for each in facts["left_out"]),
        "## Use",
        loading_snippet(sidecar),
        "Other engines: [exports/README.md](exports/README.md).",
        made_by(facts["command"] or "rope_patch.extend"),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _weights_text(training: dict[str, Any] | None) -> str:
    if training is None:
        return "as they were: nothing was trained"
    first, last = training["losses"]
    data = ", ".join(map(escape_markdown, training["data"]))
    return (
        f"fine-tuned: {training['mode']}, {training['steps']:,} steps, {training['tokens']:,} "
        f"tokens of {data}, learning rate {training['learning_rate']:g}, "
        f"loss {first:.4f} to {last:.4f}"
    )
