"""Write the results below the mark of docs/lab.md: `python docs/generate/lab.py`.

They are those of eval/results/lab/report.json, which `rope-patch lab` wrote.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from rope_patch.evaluation.report.table import Cell, Table
from rope_patch.lab.report import headline, length_table, published_table
from rope_patch.lab.results import LOSS, RIGHT, LabResults
from rope_patch.lab.settings import RECALL, TEXT
from rope_patch.lab.statements import check_statements

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "eval" / "results" / "lab"
PAGE = ROOT / "docs" / "lab.md"
IMAGES = ROOT / "docs" / "images"
MARK = "<!-- Below: written by docs/generate/lab.py -->\n"

_TASKS = {
    TEXT: ("Text", LOSS, "Loss", "Loss on text against test length, a line per encoding"),
    RECALL: ("Recall", RIGHT, "Recalled", "Recall against test length, a line per encoding"),
}


def build(page: str) -> str:
    """Return the page with the results below its mark."""
    results = LabResults.load(RESULTS / "report.json")
    findings = check_statements(results)
    parts = [headline(results, findings)]
    for task, (heading, quantity, name, alt) in _TASKS.items():
        if results.encodings_of(task):
            table = length_table(results, task, quantity, name)
            parts += [
                f"### {heading}",
                f"![{alt}](images/lab-{task}.png)",
                f"{table.name}, with 95% intervals:",
                as_markdown(table),
            ]
    parts += [
        "### Beside what papers found",
        "Differences: the first less the second thing that a statement compares.",
        as_markdown(published_table(findings), with_tips=True),
    ]
    above, _, _ = page.partition(MARK)
    return above + MARK + "\n" + "\n\n".join(parts) + "\n"


def as_markdown(table: Table, with_tips: bool = False) -> str:
    """Return a table's rows as Markdown, with a bold row above each group."""

    def text(cell: Cell) -> str:
        beside = [cell.note, cell.tip] if with_tips else [cell.note]
        beside = [part for part in beside if part]
        return f"{cell.text} ({'; '.join(beside)})" if beside else cell.text

    lines = [f"| {' | '.join([table.corner, *map(text, table.columns)])} |"]
    lines.append("|:--|" + "--:|" * len(table.columns))
    group = ""
    for row in table.rows:
        if row.group != group:
            group = row.group
            lines.append(f"| **{group}** |{' |' * len(table.columns)}")
        lines.append(f"| {' | '.join([row.name, *map(text, row.cells)])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(build(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for figure in RESULTS.glob("figures/length-*.png"):
        shutil.copyfile(figure, IMAGES / f"lab-{figure.stem.removeprefix('length-')}.png")
