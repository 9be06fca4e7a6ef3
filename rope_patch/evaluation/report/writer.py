"""The report: a self-contained HTML page, Markdown, JSON and figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from rope_patch.evaluation.report import figures, summary
from rope_patch.evaluation.report.conclusions import Ranking, conclude, find_gaps, gap_sentence
from rope_patch.evaluation.report.figures import Picture
from rope_patch.evaluation.report.merging import merge_runs
from rope_patch.evaluation.report.model_index import model_index
from rope_patch.evaluation.report.results.run_statistics import RunStatistics, task_name
from rope_patch.evaluation.report.sections import sections
from rope_patch.evaluation.report.summary import first_screen, summary_table
from rope_patch.evaluation.report.table import Row, filter_mark, one_line
from rope_patch.evaluation.results_schema import (
    DocumentRecord,
    GeometryRecord,
    RunRecord,
    RunsRecord,
)
from rope_patch.utils import atomic_files
from rope_patch.utils.atomic_files import atomic_write
from rope_patch.utils.checksums import add_checksum, json_safe
from rope_patch.utils.errors import escape_markdown, markdown_block
from rope_patch.utils.figures import PALETTE
from rope_patch.utils.provenance import Hardware
from rope_patch.utils.terminal import format_duration

TEMPLATES = Path(__file__).parent / "templates"

_LIMITS = (
    "Numbers in brackets, and the smaller ones below others, are 95% intervals, low to high (of "
    "times: the smallest and largest of the repeats); n is how many samples they rest on, and as "
    "how many those count that share a text, also where several tasks ask the same samples.",
    "Each method has its own marker, and its colour with its dashes, the same in every figure; "
    "colours alone repeat after seven methods.",
    "Perplexity is of well-known books that every model has read: fine for comparing methods on "
    "one model, no claim about unseen text or between models.",
    "A flat curve does not prove that far context is used; only retrieval does.",
    "Intervals hold for texts and questions drawn like these, with this seed; other tasks may "
    "fare differently.",
    "Retention and usable length compare with the plain model at the shortest length, on the same "
    "tasks: a weak model can retain everything and still be weak.",
)


def write_report(
    results: RunRecord | RunsRecord | Sequence[RunRecord],
    folder: Path,
    show: Callable[[str], object] | None = None,
) -> Path:
    """Write `report.html`, `report.md`, `report.json`, `model-index.yaml` and `figures/*.png`.

    Everything is rendered before anything is written, so a failure leaves an earlier report
    unchanged. Each file is replaced at once.

    Args:
        results: One run's results, or those of several runs to show side by side. Runs of the same
            samples on the same weights are shown as one, with all methods.
        folder: The report's folder; created if missing.
        show: Called with the headline, the table and cautions as plain text, such as `print`.

    Returns:
        The path of `report.html`: one file that needs no other.
    """
    folder = Path(folder)
    runs: Sequence[RunRecord]
    if not isinstance(results, dict):
        runs = results
    elif "runs" in results:
        runs = results["runs"]
    else:
        runs = [results]
    atomic_files.require_writable_folder(folder, "the report")
    merged = merge_runs(runs)
    page, pictures = _page_and_pictures(merged)
    files: dict[str, bytes] = {f"figures/{name}.png": png for name, png in pictures.items()}
    runs = [with_conclusions(run) for run in runs]
    shown = [with_conclusions(run)["first_screen"] for run in merged]
    signed = add_checksum(runs[0] if len(runs) == 1 else {"runs": runs, "first_screens": shown})
    files["report.json"] = to_json(signed, indent=1).encode()
    files["report.md"] = render(TEMPLATES / "report.md.jinja", page).encode()
    if page["model_index"]:
        files["model-index.yaml"] = page["model_index"].encode()
    files["report.html"] = render(TEMPLATES / "report.html", page).encode()
    for name, content in files.items():
        atomic_write(folder / name, content)
    for earlier in (folder / "figures").glob("*.png"):
        if f"figures/{earlier.name}" not in files and _FIGURE.match(earlier.stem):
            earlier.unlink()
    if show is not None:
        show(summary.overview(page))
    return folder / "report.html"


def with_conclusions(results: RunRecord) -> RunRecord:
    """Return results with what follows from their samples: usable lengths and the first screen."""
    stats = RunStatistics(results)
    screen = first_screen(stats, Ranking(stats))
    return {**results, "usable": stats.usable_records(), "first_screen": screen}


def check_results(results: RunRecord, where: str) -> None:
    """Raise if a report cannot be made of one run's results.

    Args:
        results: What `checksums.verify_checksum` returned, or one of its `runs`.
        where: The file's name, for the error.

    Raises:
        ValueError: They are not what an evaluation measures, although their digest fits.
    """
    try:
        stats = RunStatistics(results)
        ranking = Ranking(stats)
        _run_page(stats, ranking, "", {}, "")
        summary_table([("", stats, ranking)])
        find_gaps(results)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where} holds what no evaluation writes ({type(error).__name__}: {error}): restore "
            "the file or run the evaluation again"
        ) from error


# Figures, each with what its headline is in: the first that was drawn stands below the headline.
_FIRST_PICTURES = {"answers": "loss", "accuracy": "accuracy", "perplexity": "perplexity"}
_FIGURE = re.compile(r"(run\d+-)?(accuracy|answers|perplexity|sliding|stretch|retrieval-.*)$")


def _page_and_pictures(runs: Sequence[RunRecord]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the data of both templates, and the pictures' files."""
    all_stats = [RunStatistics(results) for results in runs]
    rankings = [Ranking(stats) for stats in all_stats]
    titles = [one_line(f.run.get("name") or f.run.get("model")) for f in all_stats]
    contents: list[dict[str, Any]] = []
    pictures: dict[str, bytes] = {}
    for i, (title, stats, ranking) in enumerate(zip(titles, all_stats, rankings, strict=True), 1):
        prefix = f"run{i}-" if len(runs) > 1 else ""
        pictures_of_run = figures.draw_figures(stats, ranking, prefix)
        pictures |= {picture.name: picture.png for picture in pictures_of_run.values()}
        heat_maps = figures.draw_heat_maps(stats, ranking)
        pictures |= {f"{prefix}{name}": png for name, png in heat_maps.items()}
        contents.append(_run_page(stats, ranking, title, pictures_of_run, prefix))
    if len(set(titles)) < len(titles):
        titles = [f"{title} ({i})" for i, title in enumerate(titles, 1)]
        for content, title in zip(contents, titles, strict=True):
            content["title"] = title
    missing = [
        f"{title}: {gap}" if len(runs) > 1 else gap
        for title, stats in zip(titles, all_stats, strict=True)
        for gap in find_gaps(stats.results)
    ]
    table, lines = summary_table(list(zip(titles, all_stats, rankings, strict=True)))
    page = {
        "incomplete": gap_sentence(missing) if missing else None,
        "title": _title(titles[0], all_stats[0]) if len(runs) == 1 else _join_titles(titles),
        "runs": contents,
        "summary": table,
        "summary_lines": lines,
        "filters": _filters(all_stats),
        "limits": _LIMITS,
        "model_index": model_index(list(zip(titles, all_stats, rankings, strict=True))),
    }
    return page, pictures


def _title(title: str, stats: RunStatistics) -> str:
    ends = [end for label in stats.losses for end in stats.curve(label)]
    farthest = max([*ends, *stats.lengths], default=0)
    where = "beyond" if farthest > stats.trained_length else "within"
    return f"{title} {where} {stats.trained_length:,} tokens"


def _join_titles(titles: list[str]) -> str:
    return f"{len(titles)} evaluations: {', '.join(titles)}"


def _run_page(
    stats: RunStatistics, ranking: Ranking, title: str, pictures: dict[str, Picture], prefix: str
) -> dict[str, Any]:
    said = conclude(stats, ranking)
    names = sorted(_FIRST_PICTURES, key=lambda name: _FIRST_PICTURES[name] != said.measure)
    first = next((pictures[name] for name in names if name in pictures), None)
    others = {name: picture for name, picture in pictures.items() if picture is not first}
    unpatched = dict.fromkeys(("method", "paper", "options", "rope_parameters"))
    return {
        "title": title,
        "conclusion": said,
        "picture": first,
        "cautions": summary.summary_cautions(stats),
        "parts": sections(stats, ranking, others, prefix),
        "facts": _run_facts_table(stats),
        "command": stats.run.get("command"),
        "methods": [
            {
                **unpatched,
                **method,
                "name": stats.names[method["label"]],
                "key": ranking.colours[method["label"]],
            }
            for method in stats.results["methods"]
        ],
    }


def _filters(all_stats: list[RunStatistics]) -> dict[str, list[tuple[str, str]]]:
    """Return what a reader can hide: names and marks by kind, where there is a choice."""
    methods = {filter_mark(label): name for f in all_stats for label, name in f.names.items()}
    tasks = {filter_mark(task): task_name(task) for f in all_stats for task in f.tasks}
    kinds = {"method": methods, "task": tasks}
    return {
        kind: [(name, value) for value, name in names.items()]
        for kind, names in kinds.items()
        if len(names) > 1
    }


def _run_facts_table(stats: RunStatistics) -> list[tuple[str, str]]:
    """Return the rows of "What was run"; leave out those without a value."""
    run = stats.run
    count, memory = run.get("parameters"), run.get("peak_memory")
    seconds = dict(run.get("seconds") or {})
    total = seconds.pop("total", None)
    parts = ", ".join(f"{part} {format_duration(value)}" for part, value in seconds.items())
    took = "" if total is None else format_duration(total)
    per_text, precision = run.get("per_text"), run.get("precision")
    facts = {
        **_server_facts(stats),
        "Model": None if stats.is_served else run.get("model"),
        "Architecture": run.get("architecture"),
        "Parameters": f"{count:,}" if count else None,
        "Weights": run.get("weights"),
        "Trained length": f"{run['trained_length']:,} tokens",
        **({} if stats.is_served else {"Rotation": _rotation_text(run.get("geometry") or {})}),
        "Numbers": run.get("dtype"),
        "Weights quantised to": run.get("quantization"),
        "Code of the checkpoint": run.get("code"),
        "Attention kernel": run.get("attention"),
        "Device": run.get("device"),
        "Hardware": _hardware_text(run.get("hardware")),
        "Texts": "; ".join(_document_text(d) for d in stats.documents),
        "Chat template": run.get("chat_template"),
        "Samples a text": per_text if per_text and per_text > 1 else None,
        "Precision wanted": f"intervals of ±{precision:.1%}" if precision else None,
        "Looks until decided": ", ".join(map(str, run.get("looks") or []))
        + " samples a task" * bool(run.get("looks")),
        "Seed": run.get("seed"),
        "Versions": ", ".join(f"{k} {v}" for k, v in (run.get("versions") or {}).items()),
        "Git revision": run.get("git_revision"),
        "Date": re.sub(r"T(\d\d:\d\d).*(\+00:00|Z)$", r" \1 UTC", str(run.get("date") or "")),
        "Time": f"{took} ({parts})" if took and parts else took or parts,
        "Continued": _continued_text(run) if run.get("continued") else None,
        "Peak memory": f"{memory / 1e9:.2f} GB" if memory else None,
    }
    return [(k, one_line(v)) for k, v in facts.items() if v is not None and v != ""]


def _server_facts(stats: RunStatistics) -> dict[str, Any]:
    """Return the rows about servers; none for a model in one process."""
    facts: dict[str, Any] = {}
    for label, server in stats.servers.items():
        limit, at = server["max_length"], f" {label}" if label else ""
        facts |= {
            f"Server{at}": server["url"],
            f"Served model{at}": server["served_model"],
            f"Engine{at}": server["engine"],
            f"Rotation{at}": server["rotation"],
            f"Limit{at}": "not said" if limit is None else f"{limit:,} tokens",
            "Tokenizer": f"{server['tokenizer']} ({server['tokenizer_digest'][:19]})",
            "Prompts": server["prompts"],
            "Requests at once": server["concurrency"],
        }
    return facts


def _continued_text(run: Mapping[str, Any]) -> str:
    """Return whether the time of an earlier run's results is in the time of this one."""
    untimed = run.get("untimed_answers")  # reports of earlier versions lack it
    if untimed == 0:
        return "an earlier run left results, whose time is counted"
    count = "" if untimed is None else f"{untimed:,} "
    return f"an earlier run left {count}answers, whose time is not counted"


def _rotation_text(geometry: Mapping[str, GeometryRecord]) -> str:
    rotation = []
    for layer, g in geometry.items():
        text = f"theta {g['theta']:,.10g}, head_dim {g['head_dim']}"
        if g.get("rotary_dim", g["head_dim"]) != g["head_dim"]:
            text += f" ({g['rotary_dim']} of them rotate)"
        rotation.append(text if len(geometry) == 1 else f"{layer}: {text}")
    return "; ".join(rotation)


def _hardware_text(hardware: Hardware | None) -> str:
    if not hardware:
        return ""
    cores, memory = hardware.get("cores"), hardware.get("memory")
    parts = [
        *(str(gpu) for gpu in hardware.get("gpu") or []),
        str(hardware.get("cpu") or ""),
        f"{cores} cores" if cores else "",
        f"{memory / 1e9:.0f} GB" if memory else "",
    ]
    return ", ".join(part for part in parts if part)


def _document_text(document: DocumentRecord) -> str:
    text = f"{document['name']}, {document['tokens']:,} tokens"
    digest = document.get("sha256")
    return f"{text} (sha256 {str(digest)[:12]})" if digest else text


def render(template: Path, page: dict[str, Any]) -> str:
    """Return a page made from a template, which may include those of this folder."""
    environment = _environment(template.parent, template.suffix == ".html")
    return environment.get_template(template.name).render(page)


@cache
def _environment(folder: Path, is_html: bool) -> Environment:
    """Return the environment of a folder's templates, which keeps them compiled."""
    environment = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=is_html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "md": escape_markdown,
        "block": markdown_block,
        "arxiv": _arxiv_url,
        "json": to_json,
        "groups": _rows_by_group,
        "code": _code_spans,
    }
    environment.filters["heat"] = figures.heat_colours
    environment.globals |= {"palette": PALETTE, "heat": figures.HEAT}
    return environment


def _code_spans(text: str) -> Markup:
    """Return text as HTML, with what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _rows_by_group(rows: list[Row]) -> list[list[Row]]:
    """Return rows grouped by the head above them."""
    return [list(group) for _, group in groupby(rows, key=lambda row: row.group)]


def _arxiv_url(paper: Any) -> str | None:
    match = re.search(r"arXiv:(\d{4}\.\d{4,5})", str(paper))
    return f"https://arxiv.org/abs/{match[1]}" if match else None


def to_json(value: Any, indent: int | None = None) -> str:
    """Return strict JSON, which other programs read too."""
    return json.dumps(json_safe(value), indent=indent, ensure_ascii=False, allow_nan=False)
