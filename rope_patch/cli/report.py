"""The command `report`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rope_patch.cli import options
from rope_patch.cli.options import argument, option
from rope_patch.cli.runtime import VERDICT, requires_extra, show, show_report

if TYPE_CHECKING:
    from rope_patch.evaluation.results_schema import RunRecord

logger = logging.getLogger("rope_patch")


def report(
    runs: list[Path] = argument(
        ..., "Folders of runs, or their report.json; several side by side."
    ),
    out: Path | None = option(None, "Folder for the report; the run's own if there is one run."),
    trained: list[str] | None = option(
        None,
        "A run of the same questions on weights that were trained further: it is compared with the "
        "others question by question, as a method named LABEL (left out: the folder's name); "
        "several.",
        metavar="[LABEL=]FOLDER",
    ),
    served: list[str] | None = option(
        None,
        "A run of the same questions by a server (`eval URL`): its answers stand beside those of "
        "the model in this process, question by question, in a column named LABEL (left out: the "
        "folder's name); several.",
        metavar="[LABEL=]FOLDER",
    ),
    as_json: options.Json = False,
) -> None:
    """Write a report again, or one report of several runs.

    Results are checked first: files of something else, of an older version, or that were changed
    after they were written are refused with the reason.

    \b
    Examples:
      rope-patch report out
      rope-patch report runs/llama runs/qwen --out both
      rope-patch report before --trained fine-tuned=after --out both
      rope-patch report out/here --served vllm=out/vllm --out both
    """
    from rope_patch.utils import atomic_files

    with requires_extra("evaluation needs", "eval"):
        from rope_patch.evaluation.report import conclusions
        from rope_patch.evaluation.report import writer as reporting
    if (len(runs) > 1 or trained or served) and out is None:
        raise ValueError("a report of several runs needs a folder of its own: give --out FOLDER")
    results = [result for run in runs for result in _load_results(run)]
    if trained or served:
        results = [_with_others(results, trained or [], served or [])]
    folder = out or (runs[0] if runs[0].is_dir() else runs[0].parent)
    shown = None if as_json else show
    with atomic_files.add_write_advice(
        "The saved results are as they were: REMEDY, or give another folder"
    ):
        reporting.write_report(results[0] if len(results) == 1 else results, folder, shown)
    missing = [gap for result in results for gap in conclusions.find_gaps(result)]
    if missing:
        logger.error(conclusions.gap_sentence(missing))
    show_report(folder, as_json)
    if missing:
        raise typer.Exit(VERDICT)


def _with_others(results: list[RunRecord], trained: list[str], served: list[str]) -> RunRecord:
    """Return the results with those of other weights and of servers, as further columns."""
    from rope_patch.evaluation.report.merging import add_other_weights, add_served_run, merge_runs

    merged = merge_runs(results)
    if len(merged) != 1:
        raise ValueError(
            f"{'--trained' if trained else '--served'} needs runs of one model that asked the same "
            f"questions, got {len(merged)} kinds of runs: give those of one kind alone"
        )
    (both,) = merged
    for text in trained:
        run, label, other = _labelled_run(text)
        methods = [method["label"] for method in other["methods"]]
        labels = {
            method: label if len(methods) == 1 else f"{label}: {method}" for method in methods
        }
        try:
            if "server" in other["run"]:
                raise ValueError("it is the evaluation of a server: give it as --served")
            both = add_other_weights(both, other, labels)
        except ValueError as error:
            raise ValueError(
                f"{run} cannot be compared: {error}. The command of the others asks the same, with "
                "--method none and the folder of the trained model"
            ) from error
    for text in served:
        run, label, other = _labelled_run(text)
        try:
            both = add_served_run(both, other, label)
        except ValueError as error:
            raise ValueError(
                f"{run} cannot be compared: {error}. `rope-patch eval URL` asks the same with the "
                "options of the others' command, without those of methods"
            ) from error
    return both


def _labelled_run(text: str) -> tuple[Path, str, RunRecord]:
    """Return the path, the label and the results that `[LABEL=]FOLDER` names."""
    # A folder's own name may have the sign, too, such as lr=1e-5.
    has_label = "=" in text and not Path(text).exists()
    label, _, path = text.partition("=") if has_label else ("", "", text)
    run = Path(path)
    own = _load_results(run)
    if len(own) != 1:
        raise ValueError(f"{run} holds {len(own)} runs: expected one")
    folder = run if run.is_dir() else run.parent
    return run, label or folder.resolve().name, own[0]


def _load_results(run: Path) -> list[RunRecord]:
    """Return the results in a run's folder or report.json, which may hold several runs."""
    from rope_patch.evaluation.report.writer import check_results
    from rope_patch.utils.checksums import verify_checksum

    path = run / "report.json" if run.is_dir() else run
    if not path.is_file():
        raise ValueError(
            f"there is no {path}: expected the folder of a finished evaluation, or its report.json"
        )
    content = verify_checksum(path.read_bytes(), str(path))
    runs: list[RunRecord] = content.get("runs") or [content]
    for results in runs:
        check_results(results, str(path))
    return runs
