"""The command `report`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_patch.cli.options import Json
from rope_patch.cli.runtime import requires_extra

if TYPE_CHECKING:
    from rope_patch.evaluation.results_schema import RunRecord

logger = logging.getLogger("rope_patch")


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs, or their report.json; several side by side."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; the run's own if there is one run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a report again, or one report of several runs.

    Results are checked first: files of something else, of an older version, or that were changed
    after they were written are refused with the reason.

    \b
    Examples:
      rope-patch report out
      rope-patch report runs/llama runs/qwen --out both
    """
    from rope_patch.utils import atomic_files

    with requires_extra("evaluation needs", "eval"):
        from rope_patch.evaluation.report import gaps
        from rope_patch.evaluation.report import writer as reporting
        from rope_patch.utils import checksums
    if len(runs) > 1 and out is None:
        raise ValueError("a report of several runs needs a folder of its own: give --out FOLDER")
    results = [
        result
        for run in runs
        for result in _load_results(run, checksums.verify_checksum, reporting.check_results)
    ]
    folder = out or (runs[0] if runs[0].is_dir() else runs[0].parent)
    show = None if as_json else print
    with atomic_files.add_write_advice(
        "The saved results are as they were: REMEDY, or give another folder"
    ):
        page = reporting.write_report(results[0] if len(results) == 1 else results, folder, show)
    missing = [gap for result in results for gap in gaps.find_gaps(result)]
    if missing:
        logger.error(gaps.gap_sentence(missing))
    if as_json:
        print((folder / "report.json").read_text(encoding="utf-8"))
    else:
        print(f"\n{page}")
    if missing:
        raise typer.Exit(1)


def _load_results(run: Path, verify: Any, check: Any) -> list[RunRecord]:
    """Return the results in a run's folder or report.json, which may hold several runs."""
    path = run / "report.json" if run.is_dir() else run
    if not path.is_file():
        raise ValueError(
            f"there is no {path}: expected the folder of a finished evaluation, or its report.json"
        )
    content = verify(path.read_bytes(), str(path))
    runs: list[RunRecord] = content.get("runs") or [content]
    for results in runs:
        check(results, str(path))
    return runs
