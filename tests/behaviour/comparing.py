"""Compare two records: print each file that differs, with the first lines that do.

Records hold what was printed and written as it was. What no two runs have alike is masked here, so
that a mask can be mended without another record.
"""

import difflib
import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

WIDTH = 160  # characters; longer lines are cut into pieces, or a page would be one line
TIMED = ("cases/bench/",)  # all numbers are times there
DURATION = r"\d[\d,.]*(?:e-\d+)? ?(?:s|ms|h|min|seconds?|minutes?|hours?)\b"
# What is replaced in texts, in this order: each with its reason. The folder of the checkout, which
# about.json names, is replaced before.
MASKS = [
    (r"/\S*/site-packages/", "PACKAGES/", "each checkout has an environment of its own"),
    (r"\S*/bin/python[\d.]*", "PYTHON", "the same"),
    (r"\b[0-9a-f]{40}\b\+?", "REVISION", "what is recorded"),
    (r"[^\n\r]*\d+%\|[^\n\r]*[\n\r]", "", "progress bars"),
    (r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?(\.\d+)?([+-]\d\d:\d\d|Z)?)?", "DATE", "dates"),
    (rf"{DURATION}(?: {DURATION})*", "DURATION", "durations, also of two units"),
    (r"\d[\d.]* of DURATION", "DURATION", "the same"),
    (r"done, [a-z ]*(?:DURATION|minute)s? left", "done", "what is left of the time"),
    (r"(budget\W{1,3})\d+\.\d{6,}", r"\1DURATION", "what earlier durations leave"),
    (r'aria-valuenow="\d+"><div style="width: \d+%"', "PROGRESS", "a share of the time"),
    (r"(Peak memory\W[^\d\n]*)[\d.]+", r"\1#", "depends on what the process imported before"),
    (r"\d[\d,.]*(?:e\+\d+)?(/min| a minute)\b", r"#\1", "speeds"),
]
# Values of JSON that are replaced, by their keys: each with its reason.
MASKED_KEYS = {
    "seconds": "a duration",
    "stored_seconds": "durations",
    "cpu_seconds": "durations",
    "spent": "durations",
    "allotted": "what earlier durations leave",
    "used": "a duration",
    "elapsed": "a duration",
    "evaluations_per_minute": "a speed",
    "tokens_per_second": "a speed",
    "peak_memory": "depends on what the process imported before",
    "memory_gb": "the same",
    "git_revision": "what is recorded",
    "date": "a time",
    "trainer_state.json": "size and seal of a file with speeds",
}
SEAL = "digest"  # of a file's or a line's whole content, times included
# Of what a record was made, and what runs left when they were killed: `continued` depends on it.
NOT_COMPARED = ("about.json", "interrupted/")


def compare(a, b, tolerance=0.0, lines=20):
    """Print all differences of two records; return 1 if there is one, else 0."""
    first, second = recorded_files(a), recorded_files(b)
    found = {
        name: difference(name, (first[name], second[name]), (checkout(a), checkout(b)), tolerance)
        for name in first.keys() & second.keys()
    }
    found |= only_in(a, first, second) | only_in(b, second, first)
    if not found:
        raise SystemExit(f"{a} and {b} record nothing: expected files beside about.json")
    differing = sorted(name for name, texts in found.items() if texts)
    for name in differing:
        print(name, *(f"  {line}" for line in found[name][:lines]), sep="\n")
        if len(found[name]) > lines:
            print(f"  ... and {len(found[name]) - lines} more lines")
    print(f"{len(differing)} of {len(found)} differ")
    return int(bool(differing))


def only_in(record, files, others):
    """Return a line for each file that the other record lacks, or for a whole case of files."""
    names, cases = files.keys() - others.keys(), set(map(case_of, others))
    return {
        name if case_of(name) in cases else case_of(name): [f"only in {record}"] for name in names
    }


def case_of(name):
    return "/".join(name.split("/")[:2])


def recorded_files(record):
    """Return a record's files by their names within it."""
    if not (record / "about.json").is_file():
        raise SystemExit(f"{record} is no record: expected about.json in it")
    paths = {path.relative_to(record).as_posix(): path for path in record.rglob("*")}
    return {
        name: path
        for name, path in paths.items()
        if path.is_file() and not name.startswith(NOT_COMPARED)
    }


def checkout(record):
    """Return the folder of the checkout that was recorded."""
    return str(Path(json.loads((record / "about.json").read_text())["package"]).parent)


def difference(name, paths, checkouts, tolerance):
    """Return the lines that say how two files differ; none if they are alike."""
    first, second = (path.read_bytes() for path in paths)
    if first == second:
        return []
    if name.endswith(".safetensors"):
        return tensor_differences(*map(load_file, paths), tolerance)
    try:
        texts = [
            canonical(name, content.decode().replace(folder, "CHECKOUT"))
            for content, folder in zip((first, second), checkouts, strict=True)
        ]
    except UnicodeDecodeError:
        return [f"other bytes, {len(first)} and {len(second)}"]
    command = [texts[0][0]] if texts[0] and texts[0][0].startswith("$ ") else []
    _, _, *found = [*difflib.unified_diff(*texts, n=1, lineterm="")] or [None, None]
    return command + found if found else []


def tensor_differences(first, second, tolerance):
    found = []
    for name in sorted(first.keys() | second.keys()):
        a, b = first.get(name), second.get(name)
        if a is None or b is None:
            found.append(f"{name}: only in the {'second' if a is None else 'first'}")
        elif a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{name}: {a.dtype} {[*a.shape]} and {b.dtype} {[*b.shape]}")
        elif not torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance, equal_nan=True):
            largest = (a.double() - b.double()).abs().max().item()
            found.append(f"{name}: differs by up to {largest:.3g}")
    return found


def canonical(name, text):
    """Return a text's lines: JSON as sorted values, masked, and long lines in pieces."""
    if name.endswith(".jsonl"):
        parts = text.splitlines(keepends=True)
    else:  # a command's stdout is JSON with --json
        parts = re.split(r"(?m)(?<=^-- stdout\n)|^(?=-- stderr$)", text)
    text = masked("".join(map(as_values, parts)))
    if name.startswith(TIMED):  # the command and its exit code stand above what it printed
        head, mark, printed = text.rpartition("-- stdout\n")
        text = head + mark + re.sub(r"-?\d[\d,.]*(e-\d+)?", "#", printed)
    return [
        piece for line in text.splitlines() for piece in re.findall(f".{{1,{WIDTH}}}", line) or [""]
    ]


def as_values(text):
    """Return JSON with sorted keys, a value a line; any other text as it is."""
    if not text.startswith(("{", "[")):
        return text
    try:
        values = without_masked_keys(json.loads(text))
        if isinstance(values, dict) and SEAL in values:
            values[SEAL] = "#"
    except ValueError:
        return text
    return json.dumps(values, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def without_masked_keys(value):
    if isinstance(value, dict):
        return {
            key: "#" if key in MASKED_KEYS else without_masked_keys(each)
            for key, each in value.items()
        }
    return [without_masked_keys(each) for each in value] if isinstance(value, list) else value


def masked(text):
    """Return a text without what no two runs have alike."""
    for pattern, replacement, _ in MASKS:
        text = re.sub(pattern, replacement, text)
    return text
