"""Report on a recipe's data, as text or JSON: what `rope-patch finetune --inspect-data` prints."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import read_tokenizer
from rope_patch.training.data.arguments import check_data_arguments
from rope_patch.training.inspection import histogram
from rope_patch.training.inspection.packing_yield import PackingYield, packing_yield
from rope_patch.training.inspection.survey import SourceSurvey, read_sources, source_names
from rope_patch.training.memory import plan
from rope_patch.training.settings import Settings
from rope_patch.utils import atomic_files
from rope_patch.utils.plain_text import align

_SHOWN_DUPLICATES = 5


@dataclass(frozen=True)
class _Use:
    """A source's use in rows.

    Attributes:
        name: The source.
        short: Whether it is for short rows.
        share: Its share of the recipe's tokens.
        result: What a pass over it gives.
        passes: How often the recipe reads it; infinite if it gives no row.
    """

    name: str
    short: bool
    share: float
    result: PackingYield
    passes: float


@dataclass(frozen=True)
class Inspection:
    """What a recipe's data are.

    Attributes:
        surveys: Each source's documents.
        trained_length: The model's trained length in tokens.
        target_length: The length in tokens that the recipe extends to.
        row_length: Tokens per row.
        packing: How rows are packed.
        tokens: Tokens that the recipe trains on.
        uses: Each source's use in long rows and in short ones.
        with_duplicates: Whether duplicates were looked for.
        clean_folder: Where documents without duplicates were written; None if they were not.
    """

    surveys: list[SourceSurvey]
    trained_length: int
    target_length: int
    row_length: int
    packing: str
    tokens: int
    uses: list[_Use]
    with_duplicates: bool
    clean_folder: Path | None

    @property
    def marks(self) -> dict[str, int]:
        """Return the lengths in tokens that documents are compared with, by name."""
        marks = {"trained": self.trained_length, "target": self.target_length}
        if self.target_length <= self.trained_length:
            del marks["target"]
        return marks


def inspect_recipe(
    settings: Settings,
    *,
    limit: int | None = None,
    duplicates: bool = False,
    clean_folder: Path | None = None,
    picture: Path | None = None,
) -> list[Inspection]:
    """Inspect the data of each of a recipe's stages, or of a recipe without stages; see there.

    Each stage has a folder of its own in `clean_folder`, and a picture with its number in the name.
    """
    options: dict[str, Any] = {"limit": limit, "duplicates": duplicates}
    if not settings.stages:
        return [inspect_data(settings, clean_folder=clean_folder, picture=picture, **options)]
    if clean_folder is not None:
        atomic_files.require_new_folder(clean_folder, "the documents")
    inspections = []
    for number, stage in enumerate(settings.stages, start=1):
        assert stage.stage is not None
        name = f"stage-{number}"
        with stage.stage.naming_errors():
            inspection = inspect_data(
                stage,
                clean_folder=clean_folder and clean_folder / name,
                picture=picture and picture.with_stem(f"{picture.stem}-{name}"),
                **options,
            )
        inspections.append(inspection)
    return inspections


def inspect_data(
    settings: Settings,
    *,
    limit: int | None = None,
    duplicates: bool = False,
    clean_folder: Path | None = None,
    picture: Path | None = None,
) -> Inspection:
    """Read a recipe's data without training.

    Args:
        settings: The recipe, or one of its stages.
        limit: The most documents to read of each source; None for all.
        duplicates: Whether to look for duplicates.
        clean_folder: A new folder for the documents that are no duplicates; None writes none.
        picture: An .svg or .png file for the histogram; None draws none.

    Raises:
        ValueError: The recipe does not fit its model, a source is missing, a document is damaged,
            or a package is missing.
        OSError: The folder or the picture cannot be written.
    """
    if picture is not None:
        histogram.require_plot(picture)
    trained, target, row_length = plan.lengths(settings)
    data = settings.data
    check_data_arguments(data, row_length)
    tokenizer = read_tokenizer(demo.resolve_model_path(settings.extension.model))
    tokenizer.model_max_length = 10**9  # no warnings: packing cuts documents into rows
    surveys = read_sources(
        data, tokenizer, limit=limit, duplicates=duplicates, clean_folder=clean_folder
    )
    tokens = _training_tokens(settings, row_length)
    lengths = {survey.name: survey.lengths for survey in surveys}
    is_kept = {survey.name: survey.is_kept for survey in surveys}
    uses = []
    for name, short, share in _shares(settings):
        result = packing_yield(
            data,
            tokenizer,
            lengths[name],
            is_kept[name],
            row_length=row_length,
            trained_length=trained,
            seed=settings.row_seed,
            short=short,
        )
        passes = share * tokens / (result.rows * row_length) if result.rows else math.inf
        uses.append(_Use(name, short, share, result, passes))
    inspection = Inspection(
        surveys=surveys,
        trained_length=trained,
        target_length=target,
        row_length=row_length,
        packing=data.packing,
        tokens=tokens,
        uses=uses,
        with_duplicates=duplicates or clean_folder is not None,
        clean_folder=clean_folder,
    )
    if picture is not None:
        histogram.write_length_plot(lengths, inspection.marks, picture)
    return inspection


def _training_tokens(settings: Settings, row_length: int) -> int:
    """Return the tokens that the recipe trains on, in whole steps of this launch's processes."""
    training = settings.training
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps
    step = rows * int(os.environ.get("WORLD_SIZE", "1")) * row_length
    if settings.extension.tokens is None:
        return training.max_steps * step
    return math.ceil(settings.extension.tokens / step) * step


def _shares(settings: Settings) -> list[tuple[str, bool, float]]:
    """Return each source, whether for short rows, and its share of the recipe's tokens."""
    data, shares = settings.data, []
    for short in (False, True):
        names = source_names(data, short=short)
        weights = data.data_weights if not short or data.short_data is None else None
        weights = weights or [1.0] * len(names)
        part = data.short_share if short else 1 - data.short_share
        shares += [
            (name, short, part * weight / sum(weights))
            for name, weight in zip(names, weights, strict=True)
        ]
    return shares


def format_inspections(inspections: Sequence[Inspection], *, as_json: bool = False) -> str:
    """Return the inspections of a recipe's stages as text or JSON."""
    if as_json:
        dicts = [to_dict(inspection) for inspection in inspections]
        return json.dumps(dicts[0] if len(dicts) == 1 else {"stages": dicts}, indent=2)
    texts = ["\n".join(_lines(inspection)) for inspection in inspections]
    if len(texts) > 1:
        texts = [f"stage {number}\n\n{text}" for number, text in enumerate(texts, start=1)]
    return "\n\n".join(texts)


def _lines(inspection: Inspection) -> list[str]:
    lines = [*_source_lines(inspection), ""]
    every = [length for survey in inspection.surveys for length in survey.lengths]
    lines += histogram.format_bins(histogram.length_bins(every), inspection.marks)
    lines += ["", *_row_lines(inspection)]
    if inspection.with_duplicates:
        lines += ["", *_duplicate_lines(inspection)]
    if inspection.clean_folder is not None:
        kept = sum(len(s.lengths) - len(s.duplicates) for s in inspection.surveys)
        lines.append(f"the other {kept:,} documents are in {inspection.clean_folder}")
    return lines


def to_dict(inspection: Inspection) -> dict[str, Any]:
    """Return an inspection as JSON data; lengths in tokens."""
    every = [length for survey in inspection.surveys for length in survey.lengths]
    return {
        "trained_length": inspection.trained_length,
        "target_length": inspection.target_length,
        "row_length": inspection.row_length,
        "packing": inspection.packing,
        "tokens": inspection.tokens,
        "sources": [_source_dict(survey, inspection) for survey in inspection.surveys],
        "lengths": [each._asdict() for each in histogram.length_bins(every)],
        "rows": [
            {"source": use.name, "short": use.short, "share": use.share, **asdict(use.result)}
            | {"passes": use.passes if math.isfinite(use.passes) else None}
            for use in inspection.uses
        ],
        "clean_folder": inspection.clean_folder and str(inspection.clean_folder),
    }


def _source_dict(survey: SourceSurvey, inspection: Inspection) -> dict[str, Any]:
    numbers = {
        "source": survey.name,
        "documents": len(survey.lengths),
        "is_complete": survey.is_complete,
        "tokens": survey.tokens,
        "median": median(survey.lengths),
        "longest": max(survey.lengths),
        "share_above_trained": share_above(survey.lengths, inspection.trained_length),
        "share_above_target": share_above(survey.lengths, inspection.target_length),
    }
    if inspection.with_duplicates:
        for kind in ("exact", "near"):
            numbers[f"{kind}_duplicates"] = survey.count_duplicates(exact=kind == "exact")
            numbers[f"{kind}_duplicate_tokens"] = survey.duplicate_tokens[kind]
        numbers["duplicates"] = [duplicate._asdict() for duplicate in survey.duplicates]
    return numbers


def share_above(lengths: Sequence[int], limit: int) -> float:
    """Return the share of tokens in documents of more than `limit` tokens."""
    total = sum(lengths)
    return sum(length for length in lengths if length > limit) / total if total else 0.0


def _source_lines(inspection: Inspection) -> list[str]:
    marks = inspection.marks
    rows = [["source", "documents", "tokens", "median", "longest"]]
    rows[0] += [f"above {name} {length:,}" for name, length in marks.items()]
    groups = [
        (s.name if s.is_complete else f"{s.name} (the first ones)", s.lengths)
        for s in inspection.surveys
    ]
    if len(groups) > 1:
        groups.append(("all", [n for _, lengths in groups for n in lengths]))  # type: ignore[arg-type]
    for name, lengths in groups:
        numbers = [len(lengths), sum(lengths), round(median(lengths)), max(lengths)]
        rows.append([name, *(f"{number:,}" for number in numbers)])
        rows[-1] += [f"{share_above(lengths, length):.1%}" for length in marks.values()]
    shares = " and ".join(f"longer than the {name} length" for name in marks)
    return [*align(rows, right=True), f"(above: the share of tokens in documents {shares})"]


def _row_lines(inspection: Inspection) -> list[str]:
    title = f"rows of {inspection.row_length:,} tokens, packing: {inspection.packing}; one pass"
    rows = [["", "rows", "padding", "documents whole", "cut", "too short", "filtered"]]
    rows[0] += ["tokens left out", "passes"]
    for use in inspection.uses:
        result, name = use.result, f"short: {use.name}" if use.short else use.name
        numbers = [result.whole, result.cut, result.left_out, result.filtered]
        numbers.append(result.left_out_tokens)
        filled = result.tokens + result.padding
        padding = result.padding / filled if filled else 0.0
        passes = f"{use.passes:,.2f}" if math.isfinite(use.passes) else "none"
        cells = [name, f"{result.rows:,}", f"{padding:.1%}"]
        rows.append([*cells, *(f"{number:,}" for number in numbers), passes])
    lines = [title, *align(rows, right=True)]
    lines.append(f"(passes: how often the recipe's {inspection.tokens:,} tokens need each source)")
    lines += [
        f"{use.name} gives no row: its longest document has {max(s.lengths):,} tokens, and "
        f"{use.result.filtered:,} are filtered; say a shorter train_length, another packing or a "
        "wider compression_ratio"
        for use in inspection.uses
        for s in inspection.surveys
        if s.name == use.name and not use.result.rows
    ]
    return lines


def _duplicate_lines(inspection: Inspection) -> list[str]:
    rows = [["duplicates", "exact", "tokens", "near", "tokens"]]
    for survey in inspection.surveys:
        cells = [survey.name]
        for kind in ("exact", "near"):
            cells.append(f"{survey.count_duplicates(exact=kind == 'exact'):,}")
            cells.append(f"{survey.duplicate_tokens[kind]:,}")
        rows.append(cells)
    lines = align(rows, right=True)
    for exact in (True, False):
        found = [d for s in inspection.surveys for d in s.duplicates if d.is_exact == exact]
        for duplicate in found[:_SHOWN_DUPLICATES]:
            likeness = "equals" if exact else f"resembles (Jaccard {duplicate.similarity:.2f})"
            lines.append(f"{duplicate.location} {likeness} {duplicate.original}")
        if len(found) > _SHOWN_DUPLICATES:
            lines.append(f"... and {len(found) - _SHOWN_DUPLICATES:,} more; --json lists all")
    return lines
