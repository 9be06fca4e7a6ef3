"""The lab's report: a page, Markdown, JSON and figures, on the evaluation's templates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rope_patch.evaluation.report.conclusions import Conclusion
from rope_patch.evaluation.report.figures import Line, Panel, Picture, draw_panels
from rope_patch.evaluation.report.sections import Section
from rope_patch.evaluation.report.table import (
    NOTHING,
    Cell,
    Row,
    Table,
    aligned_text,
    join_words,
    length_groups,
    length_heads,
    n_text,
    one_line,
    percent,
    percent_range,
)
from rope_patch.evaluation.report.writer import TEMPLATES, render, to_json
from rope_patch.lab.results import (
    BY_POSITION,
    FORMAT,
    LAST_HALF,
    LOSS,
    RIGHT,
    FindingRecord,
    LabResults,
    seeded_difference,
    seeded_mean,
    unit,
)
from rope_patch.lab.settings import PLAIN, RECALL, TEXT
from rope_patch.lab.statements import (
    AGREES,
    DISAGREES,
    LEAST_SEEDS,
    UNCLEAR,
    UNMEASURED,
    Finding,
    check_statements,
)
from rope_patch.lab.tasks import PAIRS
from rope_patch.statistics import Interval
from rope_patch.utils import atomic_files
from rope_patch.utils.atomic_files import atomic_write
from rope_patch.utils.checksums import json_safe, seal
from rope_patch.utils.terminal import SignedFormat

CHANCE = 1 / PAIRS  # share of right answers if a model guesses among the values of a sequence
_NATS, _POINTS = SignedFormat(2, minus="−", zero=""), SignedFormat(0, minus="−", zero="")
WIDEST = 0.25  # nats; a loss with a wider half interval tells nothing


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
        show("\n\n".join([page["runs"][0]["conclusion"].headline, *tables]))
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


def _page(lab: LabResults, findings: list[Finding], parts: list[Section]) -> dict[str, Any]:
    run = lab.results["run"]
    title = f"{len(lab.encodings)} positional encodings, trained on {lab.length:,} tokens"
    warnings = []
    if lab.seeds == 1:
        warnings.append(
            "One seed: intervals hold for these trained models, not for training them again. "
            "Three seeds or more (--seeds 3) show how far luck goes."
        )
    first = next((part.picture for part in parts if part.picture is not None), None)
    parts = [replace(part, picture=None) if part.picture is first else part for part in parts]
    told = [
        Section(heading="Cautions", lines=warnings),
        Section(heading="What each encoding does", lines=_descriptions(lab)),
    ]
    content = {
        "title": title,
        "conclusion": Conclusion(headline=headline(lab, findings)),
        "picture": first,
        "parts": [*(part for part in told if part.lines), *parts],
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


_FLAT = 0.05  # nats; a loss up to here counts as none


def headline(results: LabResults, findings: Sequence[Finding]) -> str:
    """Return what came out in a few sentences.

    Args:
        results: The results.
        findings: What they say to published statements.
    """
    sentences = [
        *_text_sentences(results),
        *_recall_sentences(results),
        _published_sentence(results, findings),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _text_sentences(results: LabResults) -> list[str]:
    """Return which encodings keep their loss at the longest test, and which lose."""
    longest, trained = results.tests[-1], results.length
    flat, worse, unclear = [], [], []
    for name in results.encodings_of(TEXT):
        far = results.scores(TEXT, name, longest)
        near = results.scores(TEXT, name, trained)
        if far is None or near is None or longest == trained:
            continue
        gap = seeded_difference(far, near)
        if gap.high < _FLAT:
            flat.append(name)
        elif gap.low > _FLAT:
            worse.append((gap.estimate, name))
        else:
            unclear.append(name)
    times = f"{longest / trained:g} times the trained length"
    sentences = []
    if flat:
        sentences.append(f"At {times} {join_words(flat)} lose less than {_FLAT} nats a character.")
    if worse:
        names = [f"{name} +{gap:.2f}" for gap, name in sorted(worse)]
        sentences.append(f"More is lost by {join_words(names)}.")
    if unclear:
        sentences.append(f"It cannot be told of {join_words(unclear)}.")
    return sentences


def _recall_sentences(results: LabResults) -> list[str]:
    longest = results.tests[-1]
    clear = []
    for name in results.encodings_of(RECALL):
        scores = results.scores(RECALL, name, longest, quantity=RIGHT)
        if scores is None:
            continue
        share = seeded_mean(scores, is_share=True)
        if share.low > 1 / PAIRS:
            clear.append((-share.estimate, f"{name} {share.estimate:.0%}"))
    if not results.encodings_of(RECALL):
        return []
    if not clear:
        return [f"At {longest:,} tokens no encoding is shown to recall more than a guess does."]
    return [
        f"At {longest:,} tokens {join_words([text for _, text in sorted(clear)])} are recalled."
    ]


def _published_sentence(results: LabResults, findings: Sequence[Finding]) -> str:
    counts = Counter(finding.verdict for finding in findings)
    measured = len(findings) - counts[UNMEASURED]
    if not measured:
        return ""
    if results.seeds < LEAST_SEEDS:
        return (
            "One seed says nothing about what papers found, because another one moves models by as "
            "much: give --seeds 3."
        )
    return (
        f"Of {measured} published statements {counts[AGREES]} agree, {counts[DISAGREES]} disagree "
        f"and {counts[UNCLEAR]} cannot be told."
    )


def length_table(results: LabResults, task: str, quantity: str, name: str) -> Table:
    """Return a quantity by encoding and test length, extensions below their encoding.

    Args:
        results: The results.
        task: The task.
        quantity: What is shown.
        name: The table's title.
    """
    is_share = quantity == RIGHT
    make: Callable[..., Cell] = share_cell if is_share else loss_cell
    rows = []
    for encoding in _ranked_encodings(results, task, quantity):
        for method in results.methods(task, encoding):
            cells = []
            for length in results.tests:
                scores = results.scores(task, encoding, length, method, quantity)
                mean = None if scores is None else seeded_mean(scores, is_share=is_share)
                missing = "no rows" if (encoding, method) == ("learned", PLAIN) else NOTHING
                cells.append(make(mean, beyond=length > results.length, missing=missing))
            label = encoding if method == PLAIN else f"{encoding} + {method}"
            rows.append(Row(name=label, cells=cells, key=colour_of(encoding)))
    columns = length_heads(results.tests, results.length)
    return Table(
        name=f"{name}, {unit(task, quantity)}",
        corner="test length",
        columns=columns,
        rows=rows,
        groups=length_groups(columns, results.length),
    )


def position_table(results: LabResults) -> Table | None:
    """Return the loss by position in the longest windows; None without text."""
    encodings = results.encodings_of(TEXT)
    longest = results.tests[-1]
    edges: Sequence[int] = ()
    rows = []
    for encoding in _ranked_encodings(results, TEXT, LOSS):
        for method in results.methods(TEXT, encoding):
            scores = results.scores(TEXT, encoding, longest, method, BY_POSITION)
            if scores is None:
                continue
            edges = results.records(TEXT, encoding)[0]["bands"]
            cells = [
                loss_cell(
                    seeded_mean([[sample[band] for sample in seed] for seed in scores]),
                    beyond=low >= results.length,
                )
                for band, low in enumerate(edges[:-1])
            ]
            label = encoding if method == PLAIN else f"{encoding} + {method}"
            rows.append(Row(name=label, cells=cells, key=colour_of(encoding)))
    if not encodings or not rows:
        return None
    columns = [
        Cell(text=f"{low:,}–{high - 1:,}", beyond=low >= results.length)
        for low, high in pairwise(edges)
    ]
    return Table(
        name=f"Loss by position in windows of {longest:,} characters, nats a character",
        corner="positions",
        columns=columns,
        rows=rows,
        groups=length_groups(columns, results.length),
    )


def published_table(findings: Sequence[Finding]) -> Table:
    """Return each published statement beside what came out, and the verdict.

    Args:
        findings: What the run says to each statement.
    """
    rows = []
    for finding in findings:
        statement, is_share = finding.statement, finding.statement.first.quantity == RIGHT
        text = NOTHING
        if statement.published is not None:
            text = difference_text(statement.published, is_share=False)
        given = Cell(text=text, note=statement.numbers, tip=statement.setting)
        rows.append(
            Row(
                name=statement.claim,
                group=statement.paper,
                cells=[
                    _verdict_cell(finding),
                    _difference_cell(finding.difference, is_share),
                    given,
                ],
            )
        )
    return Table(
        name="What papers found, and what came out here",
        corner="the statement",
        columns=[
            Cell(text="verdict"),
            Cell(text="here"),
            Cell(text="the paper"),
        ],
        rows=rows,
        groups=[],
    )


def _ranked_encodings(results: LabResults, task: str, quantity: str) -> list[str]:
    """Return encodings in the order of what they score at the longest test, best first."""

    def score(encoding: str) -> float:
        scores = results.scores(task, encoding, results.tests[-1], quantity=quantity)
        if scores is None:  # a table without rows there comes last
            return float("inf")
        mean = seeded_mean(scores).estimate
        return -mean if quantity == RIGHT else mean

    return sorted(results.encodings_of(task), key=score)


def loss_cell(interval: Interval | None, *, beyond: bool = False, missing: str = NOTHING) -> Cell:
    """Return a loss in nats with its interval.

    Args:
        interval: The loss.
        beyond: Whether it is of texts beyond the trained length.
        missing: What stands where there is none.
    """
    if interval is None:
        return Cell(text=missing, beyond=beyond)
    span = f"{interval.low:.2f} to {interval.high:.2f}"
    if interval.half_width > WIDEST:
        return Cell(text="unclear", note=span, tip=_tip(interval, span), beyond=beyond)
    return Cell(text=f"{interval.estimate:.2f}", note=span, tip=_tip(interval, span), beyond=beyond)


def share_cell(interval: Interval | None, *, beyond: bool = False, missing: str = NOTHING) -> Cell:
    """Return a share of answers with its interval; one that may be a guess says so.

    Args:
        interval: The share.
        beyond: Whether it is of texts beyond the trained length.
        missing: What stands where there is none.
    """
    if interval is None:
        return Cell(text=missing, beyond=beyond)
    span = percent_range(interval)
    tip = _tip(interval, span)
    text = percent(interval.estimate) if interval.low > CHANCE else "chance or less"
    if interval.low <= CHANCE and interval.estimate > CHANCE:
        text = "maybe chance"
    return Cell(text=text, note=span, tip=tip, beyond=beyond)


def _tip(interval: Interval, span: str) -> str:
    return f"95% interval {span}, {n_text(interval)}"


def _verdict_cell(finding: Finding) -> Cell:
    bound = finding.statement.bound
    text = difference_text(bound, is_share=False)
    return Cell(text=finding.verdict, note=f"bound {text}" if bound else "")


def _difference_cell(difference: Interval | None, is_share: bool) -> Cell:
    if difference is None:
        return Cell(text=NOTHING)
    return Cell(
        text=difference_text(difference.estimate, is_share=is_share),
        note=difference_range(difference, is_share=is_share),
    )


def difference_text(value: float, *, is_share: bool) -> str:
    """Return a difference with its sign: +0.12 nats, or −4 points."""
    return f"{_POINTS.number(100 * value)} points" if is_share else f"{_NATS.number(value)} nats"


def difference_range(interval: Interval, *, is_share: bool) -> str:
    """Return the interval of a difference: −0.02 to +0.05."""
    if is_share:
        return _POINTS.range(100 * interval.low, 100 * interval.high)
    return _NATS.range(interval.low, interval.high)


# Titles of families, and their encodings. Those without positions are in every panel, to compare.
FAMILIES: dict[str, tuple[str, ...]] = {
    "Vectors added to embeddings": ("sinusoidal", "learned", "binary", "normalised", "integer"),
    "Biases by distance": ("alibi", "t5", "kerple", "fire", "sandwich"),
    "Rotations": ("rope", "rnope", "xpos"),
}
REFERENCE = "none"
_COLOURS = ("m0", "m1", "m2", "m3", "m4", "m5", "m6", "m7")
_MARKERS = ("o", "s", "D", "v", "^", "P", "X", "h")
_DASHES = ((4.0, 2.0), (1.0, 1.5))  # of lines: an encoding's first extension, and its others
_QUESTIONS = {
    TEXT: "Loss against length: who reads on beyond the trained length? (lower is better)",
    RECALL: "Recall against length: who finds a value again? (higher is better)",
}


def draw_length_figure(results: LabResults, task: str) -> Picture:
    """Draw one line an encoding, extensions dashed, and the trained length as a bar.

    Args:
        results: The results.
        task: "text" or "recall".
    """
    quantity = LOSS if task == TEXT else RIGHT
    panels = [
        _family_panel(results, task, quantity, title, names)
        for title, names in _families(results, task).items()
    ]
    if task == TEXT:
        values = [y for panel in panels for line in panel.lines for _, y in line.points]
        pad = 0.06 * (max(values) - min(values)) + 0.01
        limits = (max(min(values) - pad, 0.0), max(values) + pad)
        panels = [replace(panel, y_limits=limits) for panel in panels]
    alt = f"{unit(task, quantity)} against test length, a line per encoding, extensions dashed"
    return draw_panels(f"length-{task}", _QUESTIONS[task], alt, panels)


def colour_of(name: str) -> str:
    """Return the colour of an encoding in the figures."""
    if name == REFERENCE:
        return "plain"
    for names in FAMILIES.values():
        if name in names:
            return _COLOURS[names.index(name)]
    return _COLOURS[-1]


def _families(results: LabResults, task: str) -> dict[str, list[str]]:
    """Return the measured encodings of each family, with the reference behind them."""
    measured = results.encodings_of(task)
    known = {name for names in FAMILIES.values() for name in names}
    families = {
        title: [name for name in names if name in measured] for title, names in FAMILIES.items()
    }
    families["Others"] = [name for name in measured if name not in known | {REFERENCE}]
    families = {title: names for title, names in families.items() if names}
    if REFERENCE in measured:
        families = families or {"No positions": []}
        families = {title: [*names, REFERENCE] for title, names in families.items()}
    return families


def _family_panel(
    results: LabResults, task: str, quantity: str, title: str, names: list[str]
) -> Panel:
    lines = []
    for name in names:
        key = colour_of(name)
        marker = _MARKERS[_COLOURS.index(key)] if key in _COLOURS else "."
        for nth, method in enumerate(results.methods(task, name)):
            points, intervals = [], []
            for length in results.tests:
                if method != PLAIN and length == results.length:
                    continue  # the line of the unextended encoding has this point
                scores = results.scores(task, name, length, method, quantity)
                if scores is None:
                    continue
                mean = seeded_mean(scores, is_share=quantity == RIGHT)
                points.append((float(length), mean.estimate))
                intervals.append((float(length), mean.low, mean.high))
            dashed = method != PLAIN
            if dashed and name == REFERENCE and title != next(iter(_families(results, task))):
                continue
            if points:
                label = f"{name} + {method}" if dashed else name
                spans = [] if dashed else intervals
                dashes = _DASHES[min(nth, len(_DASHES)) - 1] if dashed else ()
                lines.append(Line(label, key, points, marker, "", spans, dashes))
    return Panel(
        lines,
        results.length,
        "test length (tokens, log2)" if task == RECALL else "test length (characters, log2)",
        "recalled" if quantity == RIGHT else unit(task),
        title + (f"; a guess is right in {1 / PAIRS:.0%}" if quantity == RIGHT else ""),
        log_x=True,
        log_y=False,
        as_percent=quantity == RIGHT,
        bands=False,
        ticks=[float(n) for n in results.tests],
        least=0.0,
    )
