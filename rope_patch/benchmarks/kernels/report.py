"""Report of the kernel benchmark: JSON, text, Markdown, and one self-contained HTML page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rope_patch.benchmarks.kernels.benchmark import COPIES, FILE, as_json, part_key
from rope_patch.benchmarks.kernels.problems import LAYOUTS, SHAPES, TOLERANCES
from rope_patch.benchmarks.kernels.tables import (
    REFERENCE_LENGTH,
    default_layout_cases,
    draw,
    launch_table,
    shape_tables,
    step_table,
)
from rope_patch.benchmarks.kernels.timing import BACKWARD, BOTH, FORWARD, GRAPH, WALL
from rope_patch.evaluation.report import writer
from rope_patch.evaluation.report.table import aligned_text, one_line
from rope_patch.utils.atomic_files import atomic_write

TEMPLATES = Path(__file__).parent / "templates"
_OUR_IMPLEMENTATIONS = (
    "ours-tables",
    "ours",
    "ours-reference",
)  # the fastest of them represents ours

_NOTES = (
    "Per cent are of a copy's bandwidth: the bytes that a contender must move, over its time, as a "
    "share of the bytes per second that a copy moves, measured in turns with it. A rotation, and a "
    "norm with it, read N and write N forward; a rotation does backward, too. The norm's backward "
    "must move 3 N: it reads the gradients and what forward saved, and writes gradients. N is the "
    "size of queries and keys. Beside it is the median time of a call.",
    "The copy is the faster of two, for each number: torch's copy_ and, on a GPU, a Triton kernel "
    "with accesses of 128 bits. There copy_ is a memcpy of the driver and no kernel. Below about "
    "8,192 tokens a copy's start takes a share of its time, so percentages can exceed 100.",
    "Outputs and gradients of every contender are compared with float64 at exact angles in the "
    "same run. One that is off by more than {allowed} in {dtype} is shown as wrong. Contenders "
    "that take cos and sin get them as transformers computes and rounds them.",
    "Each call gets other tensors than the one before it, as many as fill the last cache four "
    "times, but 8 at most. Contenders that write over their inputs get fresh ones, made while no "
    "clock runs.",
    'The row with "(auto)" is what a model patched with kernels="auto", the default, does on this '
    "machine. Exact angles are computed from positions in the call; the row that is given cos and "
    "sin gets transformers' tables.",
    "One token stands for decoding: forward alone, without gradients.",
    "Kept for backward is what one layer's call keeps until its backward, without weights and "
    "tables of cos and sin; beside outputs, without the rotated queries and keys, too, which "
    "attention keeps in any case. It grows with the tokens, so it is scaled by them to a model's.",
    "Unsloth's norm and rotation has no gradients of the norms' weights: its backward does less. "
    "Compare it with rope_patch with frozen weights, which has none either.",
    "torch.compile compiles once for all lengths above one token, with the length dynamic.",
)
_ON_GPU = (
    "A GPU sleeps before each call while the CPU queues the call's kernels, and longer where the "
    'sleep ended too early. Times marked "with launches" are of calls that no sleep covered: '
    "they include time in which the GPU waited for the CPU."
)
_IN_L2 = (
    "in L2: all samples of this size, inputs and outputs, fit into the L2 cache of {megabytes:.1f} "
    "MB, so neither the contenders nor the copy are limited by memory."
)
_LAUNCHES = (
    "Launches are counted on random models with all layers, {by}. Those of norms and rotation are "
    "what the step launches more than with rope_patch, and rope_patch's own."
)
_BY_PROFILER = "but narrow ones, by the profiler"
_BY_OPERATORS = (
    "but narrow ones, on a CPU: operators that would launch a kernel, and launches of our kernels "
    "in Triton's interpreter"
)
_NOTHING_MEASURED = "Nothing was measured."
_INTERPRETED = "Triton ran in its interpreter: times and speeds of its kernels say nothing."
_WIDE = (
    "Whole models are random, with {layers} layers of the real width, and train on {length:,} "
    "tokens; they are patched with YaRN, and weights are shared."
)
_NARROW = (
    "Whole models are random and, on a CPU, narrow: {layers} layers of a few hundred dimensions, "
    "which train on {length:,} tokens. Real widths need a GPU."
)


def write_all(results: dict[str, Any], folder: Path) -> Path:
    """Write `bench.json`, `bench.md`, `bench.html` and `bench.png`.

    The numbers come first, because measuring takes long. Each file is replaced atomically.

    Args:
        results: Results of `benchmark.bench`.
        folder: Target folder; created if missing.

    Returns:
        The path of `bench.html`, which is self-contained.
    """
    atomic_write(folder / FILE, as_json(results))
    picture = draw(results)
    page = _content(results) | {"picture": picture}
    files: dict[str, str | bytes] = {
        "bench.md": writer.render(TEMPLATES / "page.md.jinja", page),
        "bench.html": writer.render(TEMPLATES / "page.html", page),
    }
    if picture is not None:
        files["bench.png"] = picture.png
    for name, content in files.items():
        atomic_write(folder / name, content)
    return folder / "bench.html"


def as_text(results: dict[str, Any]) -> str:
    """Return the results as text for a terminal."""
    content = _content(results)
    parts = ["\n".join([content["title"], *content["verdict"]])]
    for title, tables in content["sections"]:
        parts += [title, *map(aligned_text, tables)]
    parts += [f"not measured: {subject}: {reason}" for subject, reason in content["missing"]]
    return "\n\n".join(parts)


def _content(results: dict[str, Any]) -> dict[str, Any]:
    """Return the content that all formats share."""
    sections = [(str(SHAPES[shape]), shape_tables(results, shape)) for shape in results["shapes"]]
    steps = [row for row in results["steps"] if "token" in row]
    launches = [row for row in results["launches"] if "whole" in row]
    models = [step_table(results)] * bool(steps) + [launch_table(results)] * bool(launches)
    if models:
        sections.append(("Whole models", models))
    allowed = {str(dtype).removeprefix("torch."): limit for dtype, limit in TOLERANCES.items()}
    values = {"allowed": f"{allowed[results['dtype']]:g}", "dtype": results["dtype"]}
    notes = [_INTERPRETED] * results["interpreted"] + [note.format(**values) for note in _NOTES]
    notes += [f"Layout {name}: {meaning}." for name, meaning in LAYOUTS.items()]
    if l2_bytes := results["l2_bytes"]:
        notes += [_ON_GPU, _IN_L2.format(megabytes=l2_bytes / 1e6)]
    for row in launches[:1]:
        notes.append(_LAUNCHES.format(by=_BY_PROFILER if row["profiler"] else _BY_OPERATORS))
    for row in steps[:1]:
        about = _WIDE if row["wide"] else _NARROW
        notes.append(about.format(layers=row["layers"], length=row["train_length"]))
    return {
        "title": f"Rotating queries and keys on {results['device']}, in {results['dtype']}",
        "verdict": [*_unfinished(results), *(list(_verdict(results)) or [_NOTHING_MEASURED])],
        "sections": [section for section in sections if section[1]],
        "missing": list(_not_measured_notes(results)),
        "notes": notes,
        "facts": _run_facts(results),
        "command": results.get("command"),
    }


def _unfinished(results: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence if parts are missing."""
    parts = len(results["missing"]) + len(results["seconds"])
    if results["missing"]:
        yield (
            f"Not finished: {len(results['missing'])} of {parts} parts are missing, the next is "
            f"{results['missing'][0]}."
        )


def _verdict(results: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence per shape, at the length nearest to `REFERENCE_LENGTH`."""
    for shape in results["shapes"]:
        default_cases = default_layout_cases(results, shape)
        cases = [case for case in default_cases if case["length"] > 1]
        if not cases:
            yield from _decoding(results, shape, default_cases)
            continue
        case = min(
            cases,
            key=lambda case: (abs(math.log(case["length"] / REFERENCE_LENGTH)), case["batch"]),
        )
        speeds = {
            row["contender"]: [
                row["times"][phase]["percent"] for phase in (BOTH, FORWARD, BACKWARD)
            ]
            for row in case["rows"]
            if row["contender"] not in COPIES and BOTH in row["times"] and not row["wrong"]
        }
        contenders = _verdict_rows(sorted(speeds, key=lambda name: speeds[name], reverse=True))
        texts = [
            f"{results['titles'][name]} forward {speeds[name][1]:.0f}%, backward "
            f"{speeds[name][2]:.0f}%"
            for name in contenders
        ]
        if texts:
            size = f"{case['length']:,} tokens × {case['batch']}"
            yield f"{shape}, {size}, of a copy's bandwidth: {'; '.join(texts)}."


def _decoding(results: dict[str, Any], shape: str, cases: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence for a shape that was measured at single tokens only."""
    for case in cases[:1]:
        phase = next(phase for phase in (GRAPH, WALL) if phase in case["rows"][0]["times"])
        speeds = {
            row["contender"]: row["times"][phase]["percent"]
            for row in case["rows"]
            if row["contender"] not in COPIES and phase in row["times"] and not row["wrong"]
        }
        contenders = _verdict_rows(sorted(speeds, key=lambda name: speeds[name], reverse=True))
        texts = [f"{results['titles'][name]} {speeds[name]:.1f}%" for name in contenders]
        if texts:
            yield f"{shape}, 1 token × {case['batch']}, of a copy's bandwidth: {'; '.join(texts)}."


def _verdict_rows(best: list[str]) -> list[str]:
    """Return the fastest of ours, the fastest of the others, and transformers."""
    names = [name for name in best if name in _OUR_IMPLEMENTATIONS][:1]
    names += [name for name in best if not name.startswith("ours")][:1]
    return names + ["hf"] * ("hf" in best and "hf" not in names)


def _not_measured_notes(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the implementations not measured, with the cases concerned, and the reasons."""
    cases = [case for case in results["cases"] if case["rows"]]
    for case in results["cases"]:
        if "not_measured" in case:
            yield _case_label(case), case["not_measured"]
    reasons: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in cases:
        for row in case["rows"]:
            title = results["titles"][row["contender"]]
            if "not_measured" in row:
                reasons.setdefault((title, row["not_measured"]), []).append(case)
            for phase, reason in row.get("failed", {}).items():
                reasons.setdefault((f"{title}, {phase}", reason), []).append(case)
    for (subject, reason), affected in reasons.items():
        shapes = [
            s for s in results["shapes"] if all(c in affected for c in cases if c["shape"] == s)
        ]
        places = shapes + [_case_label(case) for case in affected if case["shape"] not in shapes]
        everywhere = len(affected) == len(cases)
        yield subject if everywhere else f"{subject} ({'; '.join(places)})", reason
    for kind, name in (("steps", "whole model"), ("launches", "launches of")):
        for row in results[kind]:
            if "not_measured" in row:
                yield f"{name} {row['model']}", row["not_measured"]


def _case_label(case: dict[str, Any]) -> str:
    return part_key("cases", case)


def _run_facts(results: dict[str, Any]) -> list[tuple[str, str]]:
    copies = [case["rows"][0]["bytes_per_second"] for case in results["cases"] if case["rows"]]
    facts = {
        "Device": results["device"],
        "Threads": results["threads"],
        "Copy, fastest": f"{max(copies) / 1e9:,.0f} GB/s read and written" if copies else "",
        "L2 cache": f"{results['l2_bytes'] / 1e6:.1f} MB" if results["l2_bytes"] else "",
        "Repeats": results["repeats"],
        "Measured in": f"{sum(results['seconds'].values()) / 60:.1f} minutes",
        "Versions": ", ".join(f"{k} {v}" for k, v in results["versions"].items()),
        "Date": re.sub(r"T(\d\d:\d\d).*", r" \1 UTC", results["date"]),
    }
    return [(key, one_line(value)) for key, value in facts.items() if value]
