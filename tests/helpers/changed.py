"""Run the tests that a change can break, nearest first, for some minutes.

`python tests/helpers/changed.py [REVISION] [--minutes 2]` compares the checkout with a revision
(HEAD if left out). A test file is as far from the change as there are imports between the two; what
does not import the change at all is left out. As a plugin of pytest, it ends the run in time.

Coverage would choose more exactly (pytest-testmon), but nearly every test runs the code of a method
or of an error, so a change there would select thousands; the import graph tells near from far.
"""

import argparse
import ast
import os
import subprocess
import sys
import time
from collections import defaultdict, deque
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
FILES = 40  # more are not reached in two minutes, and each has to be imported


def pytest_addoption(parser):
    parser.addoption("--until", type=float, metavar="SECONDS", help="skip tests after this time")


def pytest_runtest_setup(item):
    until = item.config.getoption("until")
    if until is not None and time.time() > until:
        pytest.skip("the time is over")


def changed_files(revision):
    """Return the paths that differ from a revision, untracked ones among them."""
    commands = (
        ("diff", "--name-only", revision),
        ("ls-files", "--others", "--exclude-standard"),
    )
    outputs = [
        subprocess.run(["git", *each], cwd=PROJECT, capture_output=True, text=True, check=True)
        for each in commands
    ]
    return [PROJECT / line for output in outputs for line in output.stdout.splitlines()]


def nearest_tests(paths):
    """Return the tests that a change of some files can break, nearest first, with distances."""
    sources = {
        path: path.read_text(encoding="utf-8")
        for folder in ("rope_patch", "tests")
        for path in (PROJECT / folder).rglob("*.py")
    }
    removed = [path for path in paths if path.suffix == ".py" and not path.exists()]
    names = {module_name(path): path for path in [*sources, *removed]}
    for path, source in sources.items():
        if path.name == "__init__.py":
            package = module_name(path)
            for module, words in front_names(source).items():
                names |= {f"{package}.{word}": names[f"{package}.{module}"] for word in words}
    importers = defaultdict(set)
    for path, source in sources.items():
        for name in imported_names(path, source):
            # `from package import name` may name a module or something in the package.
            imported = names.get(name) or names.get(name.rpartition(".")[0])
            importers[imported].add(path)
        if path.name == "conftest.py":
            importers[path].update(each for each in sources if path.parent in each.parents)
    distance = dict.fromkeys(paths, 0)
    queue = deque(paths)
    while queue:
        path = queue.popleft()
        users = importers[path]
        if path.suffix != ".py":  # a template, a recipe, a table: who names it?
            users = {each for each, source in sources.items() if path.name in source}
        elif not users:  # some modules are imported by a list of their names
            users = {each for each, source in sources.items() if f'"{path.stem}"' in source}
        for user in users - distance.keys():
            distance[user] = distance[path] + 1
            queue.append(user)
    tests = [path for path in distance if path.name.startswith("test_") and path.is_file()]
    rooms = {path.relative_to(PROJECT).parts[1] for path in paths if path.parent != PROJECT}

    def order(path):  # a room's own tests know it by its front, some imports away
        is_own = not rooms.isdisjoint(path.relative_to(PROJECT).parts)
        return distance[path] + (0 if is_own else 3), path

    return {path: distance[path] for path in sorted(tests, key=order)}


def module_name(path):
    parts = path.relative_to(PROJECT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "tests" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path, source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module


def front_names(source):
    """Return the modules whose names a package gives by `utils.lazy_exports`, with these names."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "export_lazily"
        ):
            table = ast.literal_eval(node.args[1])
            return {module: words.split() for module, words in table.items()}
    return {}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", default="HEAD")
    parser.add_argument("--minutes", type=float, default=2)
    arguments = parser.parse_args()
    until = time.time() + 60 * arguments.minutes
    paths = changed_files(arguments.revision)
    if not paths:
        sys.exit(f"nothing differs from {arguments.revision}: name an earlier revision")
    tests = nearest_tests(paths)
    if not tests:
        sys.exit("no test imports what was changed: run `make test`")
    chosen = dict(list(tests.items())[:FILES])
    print(
        f"{len(paths)} files differ from {arguments.revision}; {len(tests)} test files import "
        f"them. The nearest {len(chosen)}, at most {max(chosen.values())} imports away, run for "
        f"{arguments.minutes:g} minutes; `make test` runs all.",
        flush=True,
    )
    options = ["-n", "2", "--dist", "load", "-p", "helpers.changed", f"--until={until}"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, chosen)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT / "tests")}
    sys.exit(subprocess.run(command, cwd=PROJECT, env=environment).returncode)


if __name__ == "__main__":
    main()
