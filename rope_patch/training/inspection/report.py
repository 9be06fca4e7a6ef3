"""Inspect a recipe's data without training, as `rope-patch finetune --inspect-data` does.

In comes a recipe. Every document is read and tokenised, and one pass over each source is packed by
the real packing: `PackedRows` packs empty documents of the same lengths. Out comes an `Inspection`:
as text or JSON, with the documents' lengths, the duplicates, and what a pass gives in full rows,
padding and cut documents; and as a picture of the lengths.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import read_tokenizer
from rope_patch.training.data.arguments import DataArguments, check_data_arguments
from rope_patch.training.data.documents import TokenizedDocument
from rope_patch.training.data.packing import PackedRows
from rope_patch.training.data.readers import Cursor, DocumentRef
from rope_patch.training.inspection.survey import SourceSurvey, read_sources, source_names
from rope_patch.training.memory import plan
from rope_patch.training.settings import Settings
from rope_patch.transformers_api.remote_code import takes_remote_code
from rope_patch.utils import atomic_files
from rope_patch.utils.figures import (
    PAPER,
    canvas,
    legend_label,
    require_plot_path,
    write_figure,
)
from rope_patch.utils.terminal import align

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_SHOWN_DUPLICATES = 5


@dataclass(frozen=True)
class _Use:
    """A source's use in rows: its share of the recipe's tokens, and what a pass over it gives."""

    name: str
    short: bool  # whether it is for short rows
    share: float
    result: PackingYield
    passes: float  # how often the recipe reads it; infinite if it gives no row


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


@takes_remote_code
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
        require_plot(picture)
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
        write_length_plot(lengths, inspection.marks, picture)
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
    lines += format_bins(length_bins(every), inspection.marks)
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
        "lengths": [each._asdict() for each in length_bins(every)],
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


_BAR = 30  # characters of the table's longest bar
_BINS_PER_DOUBLING = 4  # bins of the picture for each doubling of the length
_WIDTH, _HEIGHT = 912, 560  # CSS pixels
_COLOURS = ("m0", "m1", "m2", "m3", "m4", "m5", "m6")
_NAME_LENGTH = 24  # characters of a source in the legend
_REST = "the other sources"


class LengthBin(NamedTuple):
    """Documents of similar lengths.

    Attributes:
        shortest: The shortest length of the bin, in tokens.
        longest: The longest length of the bin, in tokens.
        documents: Documents of these lengths.
        tokens: Tokens of these documents.
    """

    shortest: int
    longest: int
    documents: int
    tokens: int


def length_bins(lengths: Sequence[int]) -> list[LengthBin]:
    """Return a bin for each doubling of the length, from the shortest to the longest document.

    Documents without tokens have a bin of their own.
    """
    documents: dict[int, int] = {}
    tokens: dict[int, int] = {}
    for length in lengths:
        exponent = length.bit_length() - 1  # -1 without tokens
        documents[exponent] = documents.get(exponent, 0) + 1
        tokens[exponent] = tokens.get(exponent, 0) + length
    if not documents:
        return []
    return [
        LengthBin(
            2**exponent if exponent >= 0 else 0,
            2 ** (exponent + 1) - 1 if exponent >= 0 else 0,
            documents.get(exponent, 0),
            tokens.get(exponent, 0),
        )
        for exponent in range(min(documents), max(documents) + 1)
    ]


def format_bins(bins: Sequence[LengthBin], marks: Mapping[str, int]) -> list[str]:
    """Return the table's lines.

    Args:
        bins: See `length_bins`.
        marks: Lengths in tokens to mark, by name.
    """
    total = sum(each.tokens for each in bins) or 1
    largest = max((each.tokens for each in bins), default=0) or 1
    width = max((len(f"{each.longest:,}") for each in bins), default=1)
    lines = [f"{'length in tokens':>{2 * width + 3}}  documents  of all tokens"]
    pending = sorted(marks.items(), key=lambda mark: mark[1])
    for each in bins:
        while pending and pending[0][1] < each.shortest:
            lines.append(_mark_line(width, *pending.pop(0)))
        inside = [name for name, length in pending if length <= each.longest]
        names = ", ".join(f"{name} {dict(pending)[name]:,}" for name in inside)
        pending = pending[len(inside) :]
        bar = "#" * math.ceil(_BAR * each.tokens / largest)
        span = f"{each.shortest:>{width},} – {each.longest:>{width},}"
        line = f"{span}  {each.documents:>9,}  {each.tokens / total:>13.1%}  "
        line += f"{bar:<{_BAR}}  <- {names}" if names else bar
        lines.append(line.rstrip())
    return lines + [_mark_line(width, *mark) for mark in pending]


def _mark_line(width: int, name: str, length: int) -> str:
    return f"{'':>{2 * width + 3}}  {'':>9}  {'':>13}  {'':<{_BAR}}  <- {name} {length:,}"


def write_length_plot(
    lengths: Mapping[str, Sequence[int]], marks: Mapping[str, int], path: str | os.PathLike[str]
) -> None:
    """Write the picture as .svg or .png; see `make_length_figure`."""
    require_plot(path)
    write_figure(make_length_figure(lengths, marks), path)


def require_plot(path: str | os.PathLike[str]) -> None:
    """Raise if the picture cannot be written.

    Raises:
        ValueError: The suffix is no picture's, or matplotlib or the folder is missing.
        OSError: The folder cannot be written.
    """
    require_plot_path(path)
    atomic_files.require_writable_file(path, "the picture", folder_exists=True)


def make_length_figure(lengths: Mapping[str, Sequence[int]], marks: Mapping[str, int]) -> Figure:
    """Return a figure: documents, and their tokens, by the logarithm of the length.

    Args:
        lengths: Each source's documents' lengths in tokens. Documents without tokens are left out.
        marks: Lengths in tokens to mark, by name.
    """
    import numpy

    shown = {name: numpy.array([n for n in each if n > 0]) for name, each in _grouped(lengths)}
    every = numpy.concatenate([*shown.values(), numpy.array(list(marks.values()))])
    first = math.floor(math.log2(every.min()) - 0.5)
    last = math.floor(math.log2(every.max()) + 1.5)
    exponents = numpy.arange(first * _BINS_PER_DOUBLING, last * _BINS_PER_DOUBLING + 1)
    edges = 2.0 ** (exponents / _BINS_PER_DOUBLING)
    total = sum(int(each.sum()) for each in shown.values()) or 1
    documents = {name: numpy.histogram(each, edges)[0] for name, each in shown.items()}
    tokens = {
        name: numpy.histogram(each, edges, weights=each / total * 100)[0]
        for name, each in shown.items()
    }
    with canvas(_WIDTH, _HEIGHT) as page:
        upper, lower = page.figure.subplots(2, 1, sharex=True)
        page.figure.subplots_adjust(left=0.1, right=0.95, top=0.84, bottom=0.1, hspace=0.14)
        _draw_bars(upper, edges, documents, "documents")
        _draw_bars(lower, edges, tokens, "of all tokens (%)")
        for axes in (upper, lower):
            axes.set_xscale("log", base=2)
            axes.set_xlim(edges[0], edges[-1])
            _draw_marks(axes, marks, named=axes is upper)
        upper.tick_params(labelbottom=False)
        step = max(1, math.ceil((last - first) / 12))
        ticks = [2**exponent for exponent in range(max(0, first), last + 1, step)]
        lower.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        lower.minorticks_off()
        lower.set_xlabel("length of a document (tokens)")
        upper.legend(loc="lower left", bbox_to_anchor=(0, 1.17), ncols=4, borderaxespad=0)
    return page.figure


def _grouped(lengths: Mapping[str, Sequence[int]]) -> list[tuple[str, Sequence[int]]]:
    """Return the sources, those beyond the colours as one."""
    sources = list(lengths.items())
    if len(sources) <= len(_COLOURS):
        return sources
    rest = [length for _, each in sources[len(_COLOURS) :] for length in each]
    return [*sources[: len(_COLOURS)], (_REST, rest)]


def _draw_bars(axes: Axes, edges: Any, counts: Mapping[str, Any], label: str) -> None:
    below = 0 * edges[:-1]
    for (name, heights), key in zip(counts.items(), (*_COLOURS, "rest"), strict=False):
        style: Any = {
            "color": PAPER[key],
            "label": legend_label(_shortened(name)),
            "align": "edge",
            "zorder": 3,
        }
        style |= {"edgecolor": PAPER["paper"], "linewidth": 0.6}
        axes.bar(edges[:-1], heights, edges[1:] - edges[:-1], below, **style)
        below = below + heights
    axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_formatter("{x:,.10g}")


def _shortened(name: str) -> str:
    """Return the end of a long name, as paths differ there."""
    return name if len(name) <= _NAME_LENGTH else "…" + name[1 - _NAME_LENGTH :]


def _draw_marks(axes: Axes, marks: Mapping[str, int], *, named: bool) -> None:
    """Draw the lengths as lines; their names are above the axes, each on a line of its own."""
    dashes: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)))
    for row, ((name, length), dash) in enumerate(zip(marks.items(), dashes, strict=False)):
        axes.axvline(length, color=PAPER["ink"], lw=1.4, ls=dash, zorder=4)
        if named:
            low, high = (math.log2(limit) for limit in axes.get_xlim())
            is_left = math.log2(length) < (low + 3 * high) / 4
            axes.annotate(
                f"{name} {length:,}",
                (length, 1),
                (-2 if is_left else 2, 4 + 16 * row),
                xycoords=axes.get_xaxis_transform(),
                textcoords="offset points",
                color=PAPER["ink"],
                ha="left" if is_left else "right",
                va="bottom",
            )


_NAME = "novels:emma"  # any source that exists, because its reader is replaced


@dataclass(frozen=True)
class PackingYield:
    """What one pass over a source's documents gives.

    Attributes:
        rows: Full rows.
        tokens: Tokens of documents in them.
        padding: Tokens in them that are of no document.
        whole: Documents that lie in one row and in one piece.
        cut: Documents of which a part lies in another row or piece, or in none.
        left_out: Documents that are too short for the packing.
        filtered: Documents that `compression_ratio` leaves out.
        left_out_tokens: Tokens of those too short, and ends of cut documents, that no row has.
    """

    rows: int
    tokens: int
    padding: int
    whole: int
    cut: int
    left_out: int
    filtered: int
    left_out_tokens: int


def packing_yield(
    arguments: DataArguments,
    tokenizer: Any,
    lengths: Sequence[int],
    is_kept: Sequence[bool],
    *,
    row_length: int,
    trained_length: int,
    seed: int,
    short: bool = False,
) -> PackingYield:
    """Return what one pass over a source's documents gives.

    A row at the end that is not full counts for the next pass. Best-fit packing goes on until a
    window of it ends, and the numbers are scaled to one pass.

    Args:
        arguments: How the recipe packs.
        tokenizer: The model's tokenizer.
        lengths: The documents' lengths in tokens.
        is_kept: Of each document, whether `compression_ratio` keeps it. Short rows keep all.
        row_length: Tokens per row.
        trained_length: The model's trained length in tokens.
        seed: Seed of the shuffling.
        short: Whether the source is for short rows.
    """
    alone = DataArguments(
        data=[_NAME],
        packing=arguments.packing,
        packing_window=arguments.packing_window,
        short_length=arguments.short_length,
        min_document_length=arguments.min_document_length,
        shuffle_window=arguments.shuffle_window,
    )
    used = [n for n, kept in zip(lengths, is_kept, strict=True) if kept or short]
    rows = _EmptyRows(
        alone,
        tokenizer,
        used,
        row_length=row_length,
        trained_length=trained_length,
        seed=seed,
        short=short,
    )
    shortest = rows.min_tokens()
    short_documents = [length for length in lengths if length < shortest]
    left_out, left_out_tokens = len(short_documents), sum(short_documents)
    accepted = sum(length >= shortest for length in used)
    filtered = len(lengths) - left_out - accepted
    if not accepted:  # `PackedRows` would raise
        return PackingYield(0, 0, 0, 0, 0, left_out, filtered, left_out_tokens)
    is_best_fit = alone.is_best_fit and not short
    row_yield = {"tokens": 0, "padding": 0, "documents": 0, "cut": 0}
    count = 0
    try:
        for count, row in enumerate(rows, start=1):  # noqa: B007 -- used after the loop
            state = row["row"]["state"]
            row_yield = state["row_yield"]
            if is_best_fit and rows.source.state["epoch"] and state["window"]["row"] == 0:
                break
    except _PassEnded:
        ends = rows.source.state["left_out_tokens"] - sum(n for n in used if n < shortest)
        left_out_tokens += ends
    scale = Fraction(accepted, row_yield["documents"]) if is_best_fit else 1
    return PackingYield(
        rows=round(count * scale),
        tokens=round(row_yield["tokens"] * scale),
        padding=round(row_yield["padding"] * scale),
        whole=round((row_yield["documents"] - row_yield["cut"]) * scale),
        cut=round(row_yield["cut"] * scale),
        left_out=left_out,
        filtered=filtered,
        left_out_tokens=left_out_tokens,
    )


class _PassEnded(Exception):
    """The second pass begins."""


class _LengthReader:
    """A reader of documents that only have lengths; `endless` if they can be read again."""

    def __init__(self, lengths: Sequence[int], *, endless: bool) -> None:
        self._lengths, self._endless = lengths, endless
        self._was_read = False

    def read(self, number: int = 0, cursor: Cursor | None = None) -> Iterator[DocumentRef]:
        if self._was_read and not self._endless:
            raise _PassEnded
        self._was_read = True
        for document, length in enumerate(self._lengths):
            yield DocumentRef(document, "", partial(torch.zeros, length, dtype=torch.int64), {})


class _EmptyRows(PackedRows):
    """Rows of documents that only have lengths."""

    def __init__(
        self, arguments: DataArguments, tokenizer: Any, lengths: Sequence[int], *, short: bool,
        **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(arguments, tokenizer, **settings)
        kind = "short" if short else "long"
        endless = arguments.is_best_fit and not short
        self._readers = {(kind, _NAME): [_LengthReader(lengths, endless=endless)]}
        self._short_share = Fraction(1 if short else 0)

    def min_tokens(self) -> int:
        """Return the tokens of the shortest document that is not left out."""
        self._make_sources()
        return self.source.min_tokens

    def _encode(self, document: DocumentRef) -> TokenizedDocument:
        ids = document.load()
        return TokenizedDocument(document.location, ids, ids)

    def _make_sources(self) -> dict[str, list[Any]]:
        sources = super()._make_sources()
        ((self.source,),) = (each for each in sources.values() if each)
        self.source.quiet = True
        return sources
