"""Test the size of the house: lines and files of each room, and what a call goes through.

A number that is lowered goes into the table; raising one is a decision that the commit's message
argues. Lines are those of `wc -l`, docstrings and comments included.
"""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rope_patch"

# Room: (most lines, most files)
BUDGETS = {
    "": (1_560, 9),
    "benchmarks": (4_425, 19),
    "cli": (3_180, 24),
    "diagnosing": (3_095, 11),
    "encodings": (4_200, 19),
    "evaluation": (11_645, 35),
    "exporting": (2_955, 16),
    "extending": (1_880, 9),
    "inference": (1_300, 6),
    "integrations": (650, 4),
    "lab": (2_400, 8),
    "methods": (3_060, 31),
    "ops": (6_280, 30),
    "patching": (11_330, 43),
    "pictures": (1_700, 8),
    "pretrained": (3_385, 13),
    "recommending": (2_915, 9),
    "runs": (400, 3),
    "searching": (3_580, 20),
    "served": (1_200, 7),
    "serving": (1_300, 11),
    "statistics": (1_655, 8),
    "tasks": (5_730, 33),
    "training": (8_945, 31),
    "transformers_api": (1_340, 9),
    "utils": (1_645, 13),
    "verifying": (2_905, 10),
}

# Folders of peers: a file for each task, engine, method or command.
PEERS = {"cli": 23, "exporting": 15, "methods": 30, "tasks": 24}
MOST_FILES = 12
MOST_LINES = 800


def room_of(path):
    """Return the folder below the package that a file stands in; "" for its top modules."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def sizes():
    """Return the lines and the files of each room."""
    lines, files = Counter(), Counter()
    for path in PACKAGE.rglob("*.py"):
        lines[room_of(path)] += path.read_text(encoding="utf-8").count("\n")
        files[room_of(path)] += 1
    return {room: (lines[room], files[room]) for room in sorted(files)}


def test_rooms_keep_to_their_budgets():
    measured = sizes()
    assert measured.keys() == BUDGETS.keys(), "each room has a line in BUDGETS"
    over = {
        room or "top modules": f"{measured[room]}, expected at most {BUDGETS[room]}"
        for room in measured
        if any(size > most for size, most in zip(measured[room], BUDGETS[room], strict=True))
    }
    assert not over, f"lines and files: {over}. What a room gains, it first removes"


def test_files_are_read_from_top_to_bottom():
    long = {
        path.relative_to(ROOT).as_posix(): count
        for path in PACKAGE.rglob("*.py")
        if (count := path.read_text(encoding="utf-8").count("\n")) > MOST_LINES
    }
    assert not long, f"files of more than {MOST_LINES} lines: {long}"


def test_folders_are_seen_at_a_glance():
    files = Counter(path.parent for path in PACKAGE.rglob("*.py") if path.name[0] != "_")
    most = {folder.relative_to(PACKAGE).as_posix(): count for folder, count in files.items()}
    over = {name: count for name, count in most.items() if count > PEERS.get(name, MOST_FILES)}
    assert not over, f"files in a folder, expected at most {MOST_FILES}: {over}"


def test_private_docstrings_have_one_line():
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    long = [
        f"{path.relative_to(ROOT).as_posix()}:{node.lineno} {node.name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds) and node.name.startswith("_") and not node.name.startswith("__")
        if "\n" in (ast.get_docstring(node) or "")
    ]
    assert not long, f"{long}: expected one line. What says why is a comment at its code"


# -- what a call goes through ----------------------------------------------------------------------

# Its last line prints the files whose functions the profiled calls run, and the imported modules.
COUNTER = """
import os, sys, threading
import torch, transformers
import rope_patch
package = os.path.dirname(rope_patch.__file__) + os.sep  # the checkout may have the same name
names = set()
def count(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(package):
        if frame.f_code.co_name != "<module>":
            names.add(frame.f_code.co_filename)
def profiled(function, *arguments, **options):
    names.clear()
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        return function(*arguments, **options)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
def imported():
    return len([name for name in sys.modules if name.split(".")[0] == "rope_patch"])
"""

# 64 tokens are the trained length: the 65th makes frequencies grow, the 66th keeps them.
CALLS = """
def make_model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=64,
    )).eval()
model = make_model()
profiled(rope_patch.patch, model, "yarn", factor=4)
measured = [len(names), imported()]
model = make_model()
rope_patch.patch(model, "dynamic-yarn", factor=4)
tokens = torch.arange(64)[None] % 64
with torch.no_grad():
    cache = model(tokens, use_cache=True).past_key_values
    for _ in range(2):
        profiled(model, tokens[:, :1], past_key_values=cache)
        measured.append(len(names))
print(*measured)
"""

# As the command `eval` does it, to its report.
EVALUATE = """
from contextlib import suppress
from rope_patch.cli import main
with suppress(SystemExit):
    main()
print(imported())
"""


def counts(code, *words):
    """Run code in a new interpreter and return the numbers of its last line."""
    run = subprocess.run(
        [sys.executable, "-c", COUNTER + code, *words], capture_output=True, text=True, check=True
    )
    return tuple(map(int, run.stdout.splitlines()[-1].split()))


def test_a_call_goes_through_few_files():
    patch, modules, growing_step, step = counts(CALLS)
    assert patch <= 35
    assert modules <= 119
    assert growing_step <= 23
    assert step <= 14


@pytest.mark.slow
def test_an_evaluation_imports_few_modules(tmp_path):
    words = ["eval", "tests/assets/tiny-llama", "--method", "none", "--lengths", "256"]
    words += ["--tasks", "perplexity", "--perplexity-length", "512"]
    words += ["--text", "tests/assets/start-of-emma.txt", "--out", str(tmp_path / "report")]
    (measured,) = counts(EVALUATE, *words)
    assert (tmp_path / "report" / "report.json").is_file()
    assert measured <= 232
