"""Change random lines of numerics, one at a time, and count which changes a test catches.

`make test-mutants` needs cosmic-ray, whose operators change the lines: another number, another
comparison, `or` for `and`, a loop that does nothing. Each mutant is met by the tests that are
nearest by imports, for two minutes. What a run has measured stands in a journal, so a run goes on.
"""

import argparse
import ast
import json
import random
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from helpers.changed import nearest_tests

from regressions.copies import copy_project, run_tests
from regressions.defect import PROJECT

ROOMS = ("methods", "ops", "patching", "statistics")
FILES = 12  # of tests for a mutant
PATIENCE = 120.0  # seconds for a mutant
QUICK = "not slow and not installed and not engines and not regress"


def all_mutants():
    """Return the mutants of each line of the rooms: (file, line) -> [(operator, occurrence)]."""
    operators = {name: plugins.get_operator(name) for name in plugins.operator_names()}
    operators = {name: each() for name, each in operators.items() if not each.arguments()}
    mutants = defaultdict(list)
    for room in ROOMS:
        for path in sorted((PROJECT / "rope_patch" / room).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            nodes = list(ast_nodes(get_ast(source)))
            annotated = annotation_lines(source)
            for name, operator in operators.items():
                places = [place for node in nodes for place in operator.mutation_positions(node)]
                for occurrence, ((line, _), _) in enumerate(places):
                    if line not in annotated:  # they are not evaluated
                        mutants[path.relative_to(PROJECT), line].append((name, occurrence))
    return mutants


def annotation_lines(source):
    """Return the lines with annotations in which an operator could stand, such as `int | None`."""
    annotations = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            annotations.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            annotations.append(node.returns)
    return {
        line
        for annotation in annotations
        if annotation is not None
        and any(isinstance(node, ast.BinOp) for node in ast.walk(annotation))
        for line in range(annotation.lineno, annotation.end_lineno + 1)
    }


def measure(copy, path, line, operator, occurrence):
    """Return what tests say of a mutant."""
    source = (PROJECT / path).read_text(encoding="utf-8")
    mutant = mutate_code(source, plugins.get_operator(operator)(), occurrence)
    start = time.monotonic()
    changed = [
        (old, new)
        for old, new in zip(source.splitlines(), mutant.splitlines(), strict=False)
        if old != new
    ]
    nearest = list(nearest_tests([PROJECT / path]))[:FILES]
    tests = [str(test.relative_to(PROJECT)) for test in nearest]
    (copy / path).write_text(mutant, encoding="utf-8")
    try:
        code, output = run_tests(copy, ["-m", QUICK, *tests], PATIENCE)
    finally:
        shutil.copyfile(PROJECT / path, copy / path)
    # 2 and 4: tests, or their conftest, cannot import the mutant. 5: nothing was collected. -9: what
    # hangs is caught, too, but what is slow is not.
    outcomes = {0: "survived", 1: "caught", 2: "caught", 4: "caught", 5: "untested"}
    outcomes[-9] = "no answer"
    outcome = outcomes[code] if code >= 0 or code == -9 else "crashed"
    failures = [part for part in output.splitlines() if part.startswith("FAILED ")]
    test = failures[0].removeprefix("FAILED ").partition(" - ")[0] if failures else None
    if test is not None and not passes(copy, test):
        raise RuntimeError(f"{test} fails in the copy without a mutant, too: mend it first")
    return {
        "file": str(path),
        "line": line,
        "operator": operator,
        "occurrence": occurrence,
        "old": changed[0][0].strip(),
        "new": changed[0][1].strip(),
        "outcome": outcome,
        "test": test,
        "seconds": round(time.monotonic() - start, 1),
    }


@cache
def passes(copy, test):
    """Return whether a test passes in the copy as it is."""
    code, _ = run_tests(copy, ["-m", QUICK, test], PATIENCE)
    return code == 0


def summary(results):
    """Return a table of the share that is caught, by room, with an interval of 95%."""
    from rope_patch.statistics import wilson  # forked processes import this module first

    rows = ["| room | mutants | caught | interval |", "|:--|--:|--:|:--|"]
    for room in (*ROOMS, ""):
        outcomes = Counter(
            result["outcome"]
            for result in results
            if result["file"].startswith(f"rope_patch/{room}")
        )
        if n := outcomes.total():
            share = wilson(outcomes["caught"], n)
            interval = f"{share.low:.2f} to {share.high:.2f}"
            rows.append(f"| {room or 'all'} | {n} | {outcomes['caught'] / n:.2f} | {interval} |")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=300, help="how many lines to change (300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--journal", type=Path, default=PROJECT / "out" / "mutants.jsonl")
    arguments = parser.parse_args()
    mutants, generator = all_mutants(), random.Random(arguments.seed)
    lines = generator.sample(sorted(mutants), arguments.lines)
    sample = [(*place, *generator.choice(mutants[place])) for place in lines]
    results = []
    if arguments.journal.exists():
        results = [json.loads(line) for line in arguments.journal.read_text().splitlines()]
    keys = ("file", "line", "operator", "occurrence")
    measured = {tuple(result[key] for key in keys) for result in results}
    arguments.journal.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_project(Path(folder))
        for n, (path, *rest) in enumerate(sample, 1):
            if (str(path), *rest) in measured:
                continue
            results.append(measure(copy, path, *rest))
            with arguments.journal.open("a") as journal:
                journal.write(json.dumps(results[-1]) + "\n")
            print(
                "{}/{} {file}:{line} {outcome} in {seconds} s: {new}".format(
                    n, len(sample), **results[-1]
                ),
                flush=True,
            )
    print(summary(results))
    for result in results:
        if result["outcome"] != "caught":
            print("{file}:{line} {outcome}: {old}  ->  {new}".format(**result))


if __name__ == "__main__":
    main()
