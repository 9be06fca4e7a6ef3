"""Write the lab's report: a self-contained page, Markdown, JSON and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rope_patch.evaluation.report.format import one_line
from rope_patch.evaluation.report.sections import Section
from rope_patch.evaluation.report.table import aligned_text
from rope_patch.evaluation.report.writer import TEMPLATES, render, to_json
from rope_patch.lab.report.figure import draw_length_figure
from rope_patch.lab.report.headline import headline
from rope_patch.lab.report.tables import length_table, position_table, published_table
from rope_patch.lab.results import LAST_HALF, LOSS, RIGHT, LabResults
from rope_patch.lab.results_schema import FORMAT, FindingRecord
from rope_patch.lab.settings import RECALL, TEXT
from rope_patch.lab.statements import Finding, check_statements
from rope_patch.utils import atomic_files
from rope_patch.utils.atomic_files import atomic_write
from rope_patch.utils.checksums import json_safe, seal

_LIMITS = (
    "Numbers below others are 95% intervals. They hold for samples drawn like these and, with "
    "several seeds, for other seeds: the squares of both half widths add up, by Student's t, which "
    "is 4.3 for three seeds.",
    "The models have about a hundred thousand parameters and are trained for minutes. An order "
    "among them is no claim about models a thousand times as large; a disagreement with a paper "
    "says that its finding does not carry over to such models.",
    "Each encoding gets the same first weights, data and steps, and none gets settings of its own.",
    "An extension's number at a length is that of the extension to this length. At the trained "
    "length it is that of the farthest extension: its price.",
    "No model is trained after it is extended, although several of the methods ask for that.",
    "A learned table has no rows beyond the trained length; `tile` repeats them, and changes "
    "nothing within it.",
    "A loss whose interval is wider than ±0.25 nats is called unclear, and recall that a guess "
    "might reach is called chance: no number is printed there.",
)


def write_report(
    results: Mapping[str, Any], folder: Path, show: Callable[[str], object] | None = None
) -> Path:
    """Write `report.html`, `report.md`, `report.json` and `figures/*.png`.

    Everything is rendered before anything is written.

    Args:
        results: What `run_lab` returned.
        folder: The report's folder; made if missing.
        show: Called with the headline and the tables as plain text, such as `print`.

    Returns:
        The path of `report.html`: one file that needs no other.
    """
    lab = LabResults(results)
    findings = check_statements(lab)
    parts = _sections(lab, findings)
    page = _page(lab, findings, parts)
    pictures = [part.picture for part in parts if part.picture is not None]
    files = {f"figures/{picture.name}.png": picture.png for picture in pictures}
    published = [_finding_record(finding) for finding in findings]
    body = json_safe({**results, "published": published, "format": FORMAT})
    files["report.json"] = to_json(seal(body)).encode()
    files["report.md"] = render(TEMPLATES / "report.md.jinja", page).encode()
    files["report.html"] = render(TEMPLATES / "report.html", page).encode()
    atomic_files.require_writable_folder(folder, "the report")
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / name, content)
    if show is not None:
        tables = [aligned_text(part.tables[0]) for part in parts if part.picture]
        show("\n\n".join([page["runs"][0]["headline"], *tables]))
    return folder / "report.html"


def _sections(lab: LabResults, findings: list[Finding]) -> list[Section]:
    parts = []
    if lab.encodings_of(TEXT):
        tables = [
            length_table(lab, TEXT, LOSS, "Loss"),
            length_table(lab, TEXT, LAST_HALF, "Loss of the last half of each window"),
        ]
        by_position = position_table(lab)
        parts.append(
            Section(
                heading="Text: the next character",
                notes=[
                    "Held-out novels. All lengths score the same excerpts, cut into shorter or "
                    "longer windows. A longer window has fewer early characters, which lowers its "
                    "mean; the last half of windows leaves that out."
                ],
                picture=draw_length_figure(lab, TEXT),
                tables=[*tables, *([by_position] if by_position else [])],
            )
        )
    if lab.encodings_of(RECALL):
        parts.append(
            Section(
                heading="Recall: values of keys, asked for at the end",
                notes=["Half of each batch is recall, half repeated segments; lengths grow."],
                picture=draw_length_figure(lab, RECALL),
                tables=[
                    length_table(lab, RECALL, RIGHT, "Recalled"),
                    length_table(lab, RECALL, LOSS, "Loss of answers"),
                ],
            )
        )
    parts.append(
        Section(
            heading="Beside what papers found",
            notes=[
                "A statement says that a difference is below a bound, zero unless stated: the "
                "first less the second thing that it compares, paired by sample and seed. It "
                "agrees if the whole interval is below, disagrees if the whole interval is above, "
                "and cannot be told otherwise."
            ],
            tables=[published_table(findings)],
        )
    )
    return parts


def _page(lab: LabResults, findings: list[Finding], parts: list[Section]) -> dict[str, Any]:
    run = lab.results["run"]
    title = f"{len(lab.encodings)} positional encodings, trained on {lab.length:,} tokens"
    warnings = []
    if lab.seeds == 1:
        warnings.append(
            "One seed: intervals hold for these trained models, not for training them again. "
            "Three seeds or more (--seeds 3) show how far luck goes."
        )
    content = {
        "title": title,
        "headline": headline(lab, findings),
        "warnings": warnings,
        "details": _descriptions(lab),
        "parts": parts,
        "cautions": [],
        "facts": _facts(lab, run),
        "command": run["command"],
        "methods": [],
    }
    return {
        "incomplete": None,
        "title": title,
        "runs": [content],
        "summary": None,
        "summary_lines": [],
        "filters": {},
        "limits": _LIMITS,
    }


def _descriptions(lab: LabResults) -> list[str]:
    """Return what each encoding does, with the scale and loss that its first training found."""
    lines = []
    for task in lab.tasks:
        for name in lab.encodings_of(task):
            record = lab.records(task, name)[0]
            losses = record["training_loss"]
            first, last = losses[0], losses[-1]  # the same of a single step
            about = record["encoding"]
            lines.append(f"{name}, {task}: {about}; training loss {first:.2f} to {last:.2f}")
    return lines


def _facts(lab: LabResults, run: Mapping[str, Any]) -> list[tuple[str, str]]:
    settings = run["settings"]
    cells = lab.results["cells"]
    seconds = sum(sum(cell["cpu_seconds"].values()) for cell in cells)
    machine = run["hardware"]
    counts = [cell["parameters"] for cell in cells]
    samples = {
        TEXT: f"{settings['samples'][TEXT]} excerpts of {lab.tests[-1]:,} characters",
        RECALL: f"{settings['samples'][RECALL]} recall sequences",
    }
    facts = {
        "Model": "Llama, 2 layers, 64 wide, 4 heads (2 of keys), tied embeddings",
        "Parameters": f"{min(counts):,} to {max(counts):,}",
        "Trained length": f"{lab.length:,} tokens",
        "Test lengths": ", ".join(f"{n:,}" for n in lab.tests),
        "Steps": ", ".join(f"{task} {count:,}" for task, count in settings["steps"].items()),
        "Seeds": ", ".join(map(str, range(lab.seeds))),
        "Samples a length": "; ".join(samples[task] for task in lab.tasks),
        "CPU time": f"{seconds / 60:.0f} min, one thread a cell",
        "Hardware": f"{machine['cpu']}, {machine['cores']} cores",
        "Versions": ", ".join(f"{name} {text}" for name, text in run["versions"].items()),
        "Date": run["date"],
    }
    return [(key, one_line(value)) for key, value in facts.items()]


def _finding_record(finding: Finding) -> FindingRecord:
    statement, difference = finding.statement, finding.difference
    return {
        "paper": statement.paper,
        "claim": statement.claim,
        "numbers": statement.numbers,
        "setting": statement.setting,
        "published": statement.published,
        "bound": statement.bound,
        "difference": None
        if difference is None
        else [round(x, 5) for x in (difference.estimate, difference.low, difference.high)],
        "verdict": finding.verdict,
    }
