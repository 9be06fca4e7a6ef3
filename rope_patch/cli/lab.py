"""The command `lab`."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from rope_patch.cli import options
from rope_patch.cli.options import option
from rope_patch.cli.runtime import (
    command_line,
    handle_interrupt,
    requires_extra,
    show_report,
    show_result,
)
from rope_patch.utils.errors import Refused

logger = logging.getLogger("rope_patch")


def lab(
    encodings: str = option(
        "all", "Which encodings, by commas; `all`, or names of `rope_patch.encode`."
    ),
    length: int | None = option(
        None, "Trained length, in tokens.  [default: 256; 64 with --quick]", written=True
    ),
    test: str | None = option(
        None,
        "Test lengths, by commas, beginning with the trained one; once, twice, 4 and 8 times that "
        "if left out.",
    ),
    tasks: str | None = option(
        None, "text, recall or both, by commas.  [default: both; text with --quick]"
    ),
    steps: str | None = option(
        None,
        "Optimizer steps of every task, or of each: text=400,recall=1200, which is the default.",
    ),
    seeds: int = option(1, "Trainings of each encoding on each task; 3 for a table to publish."),
    quick: bool = option(
        False, "Text alone, 64 tokens and 200 steps, unless you name others.", "--quick"
    ),
    processes: int | None = option(
        None, "Trainings at the same time, a thread each.  [default: 2, or 1 core]"
    ),
    out: Path = option(
        Path("out/lab"), "Folder of the report, and of what a later run continues from."
    ),
    plan: options.Plan = False,
    as_json: options.Json = False,
) -> None:
    """Train a tiny decoder with each positional encoding, and test each beyond its length.

    All get the same first weights, data and steps. Measures loss on held-out novels, and recall of
    values by their keys, plain and with the extension methods of `rope-patch patch`; and says of
    what papers found whether it came out here. Writes report.html, report.md and report.json.
    The same command continues an interrupted run; more seeds or encodings add to it.

    \b
    Examples:
      rope-patch lab --quick --encodings rope,alibi,none
      rope-patch lab --encodings all --length 256 --test 256,512,1024,2048
      rope-patch lab --length 64 --seeds 3 --out out/lab-64
    """
    from rope_patch.lab import settings as lab_settings

    with requires_extra("the lab's report needs", "eval"):
        from rope_patch.lab.report import write_report
    from rope_patch.lab.pipeline import plan_lab, run_lab

    text_steps, recall_steps = _steps(steps, quick)
    default_length = lab_settings.QUICK_LENGTH if quick else lab_settings.LENGTH
    settings = lab_settings.LabSettings(
        encodings=lab_settings.encoding_names(encodings),
        tasks=tuple(options.split_commas(tasks or ("text" if quick else "text,recall"))),
        length=default_length if length is None else length,
        tests=() if test is None else tuple(options.split_commas(test)),
        text_steps=text_steps,
        recall_steps=recall_steps,
        seeds=seeds,
    )
    at_once = min(2, os.cpu_count() or 1) if processes is None else processes
    if at_once < 1:
        raise Refused(f"--processes must be at least 1, got {at_once}")
    with handle_interrupt():
        expected = plan_lab(settings, at_once)
        if plan:
            show_result(expected, as_json)
            return
        for line in str(expected).splitlines():
            logger.info("plan: %s", line)
        results = run_lab(settings, out, at_once, command_line())
    write_report(results, out, None if as_json else print)
    show_report(out, as_json)


def _steps(text: str | None, quick: bool) -> tuple[int, int]:
    """Return the steps of text and of recall."""
    from rope_patch.lab.settings import QUICK_TEXT_STEPS, RECALL_STEPS, TASKS, TEXT_STEPS

    given = {"text": QUICK_TEXT_STEPS if quick else TEXT_STEPS, "recall": RECALL_STEPS}
    if text is not None:
        words = options.split_commas(text) if "=" in text else [f"{task}={text}" for task in TASKS]
        for word in words:
            task, _, count = word.partition("=")
            if task not in given or not count.isdecimal():
                raise Refused(
                    f"--steps takes a number, or text=400,recall=1200, got {text!r}: expected "
                    "tasks with whole numbers"
                )
            given[task] = int(count)
    return given["text"], given["recall"]
