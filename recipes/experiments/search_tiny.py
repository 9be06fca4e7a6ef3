"""Measure what each strategy of search finds on the tiny models, and after how many evaluations.

What: the models of train_tiny.py, trained on 256 tokens, are taken to 1,024 and 2,048 tokens by
every strategy of `rope_patch.searching`. All strategies search on the same recall
sequences. Their results, and the methods that need no search, are then measured on held-out
sequences. This shows how many evaluations a strategy needs, and whether its result holds beyond the
sequences that it searched on.

Why 24 keys a sequence, where training had at most 8: with 8, YaRN answers nearly all, and a
search has little to gain. More keys are harder to tell from each other, at every length.

How, from the repository root (deterministic on its one thread, about 90 minutes of a CPU core):

    python recipes/experiments/search_tiny.py

writes eval/results/tiny-search/24-keys: README.md with tables and definitions, results.json,
history.png. `--keys 8` asks for what the models were trained on. Every measurement is kept in
out/search_tiny, a folder a search, so a killed run continues. `--models` and `--lengths` measure a
part; `--report` writes the finished cases without measuring.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import search_tiny_picture as picture
import search_tiny_tables as tables
import torch
import train_tiny as tiny
from transformers import AutoModelForCausalLM

from rope_patch.extension import Extension
from rope_patch.inference.samples import Sample, from_labelled_tensors, samples_digest
from rope_patch.searching import search_result
from rope_patch.searching.candidates import Candidate
from rope_patch.searching.fitness import Evaluation, Fitness
from rope_patch.searching.journal import SearchJournal, candidate_to_dict
from rope_patch.searching.loop import SearchProgress, search_loop
from rope_patch.searching.model import dependency_versions, run_identity
from rope_patch.searching.strategies.registry import STRATEGIES
from rope_patch.utils import atomic_files
from rope_patch.utils.processes import Processes


class Sizes(NamedTuple):
    """Numbers of sequences per length."""

    search: int
    held_out: int


SIZES = {  # by the keys of a sequence, and its length
    24: {1024: Sizes(24, 384), 2048: Sizes(24, 192)},
    8: {1024: Sizes(24, 96), 2048: Sizes(12, 64)},
}
BUDGETS = {"curve": 100, "longrope2": 200, "longrope": 200, "yarn-rcd": 20, "ntk-rcd": 20}
# Start tokens have no form in any engine's config: all strategies search what all engines can run.
OPTIONS: dict[str, dict[str, Any]] = {"longrope": {"start_tokens": False}}
SEED, HELD_OUT_SEED = 42, 43
REFERENCES = {name: Candidate(name, name) for name in search_result.REFERENCES}


class Case(NamedTuple):
    """One search problem.

    Attributes:
        name: Name of a tiny model.
        length: Tokens per sequence.
        keys: Keys per sequence, all queried.
    """

    name: str
    length: int
    keys: int

    @property
    def title(self) -> str:
        """The case's name in tables."""
        return f"{tiny.ARCHITECTURES[self.name].title}, {self.length:,}"

    @property
    def sizes(self) -> Sizes:
        """The case's numbers of sequences."""
        return SIZES[self.keys][self.length]

    def questions(self, count: int, seed: int) -> list[Sample]:
        """Return recall sequences as samples that score only the queried values."""
        generator = torch.Generator().manual_seed(seed)
        return from_labelled_tensors(*tiny.recall_batch(generator, count, self.length, self.keys))

    def settings(self) -> dict[str, Any]:
        """Return everything the numbers depend on besides the model."""
        facts = {
            "length": self.length,
            "sizes": self.sizes._asdict(),
            "keys": self.keys,
            "budgets": BUDGETS,
            "early": early_evaluations(),
            "options": OPTIONS,
            "seeds": [SEED, HELD_OUT_SEED],
            "versions": dependency_versions(),
        }
        return json.loads(json.dumps(facts))


def open_journal(folder: Path, fitness: Fitness, settings: dict[str, Any]) -> SearchJournal:
    """Return the journal of measurements on a set of sequences."""
    identity = run_identity(fitness.model, fitness.space) | {
        "samples": samples_digest(fitness.samples)
    }
    return SearchJournal(
        folder,
        {**settings, **identity, "versions": dependency_versions()},
        Processes(),
    )


def search_with(
    fitness: Fitness, strategy: str, folder: Path
) -> tuple[Candidate, list[dict[str, Any]]]:
    """Return a strategy's result and its evaluations; entry 0 is YaRN, the baseline."""
    options, budget = OPTIONS.get(strategy, {}), BUDGETS[strategy]
    settings = {"strategy": strategy, "options": options, "seed": SEED, "budget": budget}
    with open_journal(folder, fitness, settings) as journal:
        journal.lock()
        bar = SearchProgress(fitness.space, budget, title=strategy)
        try:
            proposals = STRATEGIES[strategy].propose(fitness.space, budget, SEED, **options)
            best, history, _ = search_loop(fitness, proposals, budget, journal, bar)
        finally:
            bar.close()
    return best, history


def evaluate_held_out(
    fitness: Fitness, candidates: dict[str, Candidate | None], folder: Path
) -> dict[str, dict[str, Any]]:
    """Return held-out loss and recall by label, with paired comparisons `against yarn` etc."""
    with open_journal(folder, fitness, {}) as journal:
        evaluations = {
            label: journal.held_out_evaluation(fitness, candidate)
            for label, candidate in candidates.items()
        }
    references = {label: evaluations[label] for label in ("yarn", *tables.EVOLUTIONS)}
    return {
        label: compare_with(evaluation, references, fitness.samples)
        for label, evaluation in evaluations.items()
    }


def compare_with(
    evaluation: Evaluation, references: dict[str, Evaluation], samples: Sequence[Sample]
) -> dict[str, Any]:
    """Return an evaluation's numbers and its comparisons with others."""
    numbers = search_result.compare_on_held_out(
        {search_result.FOUND: evaluation, **references}, samples
    )
    comparisons = {f"against {label}": numbers.get(f"against {label}") for label in references}
    return {**numbers[search_result.FOUND], **comparisons}


def early_evaluations() -> int:
    """Return the evaluations after which curve is compared with a finished evolution."""
    return min(BUDGETS[name] for name in tables.EVOLUTIONS) // tables.SHARE


def best_of(history: list[dict[str, Any]]) -> Candidate:
    """Return the best candidate of a history, the result of a search that ended there."""
    best = min((e for e in history if e["complete"]), key=lambda e: e["fitness"])
    return Candidate(best["origin"], best["method"], best["options"])


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Run all searches of one model at one length, and evaluate them on held-out sequences."""
    model = AutoModelForCausalLM.from_pretrained(f"tests/assets/tiny-{case.name}").eval()
    extension = Extension("longrope", length=case.length)
    search_fitness = Fitness(model, case.questions(case.sizes.search, SEED), extension)
    held_out_fitness = Fitness(model, case.questions(case.sizes.held_out, HELD_OUT_SEED), extension)
    results, histories = {}, {}
    for strategy in BUDGETS:
        print(f"{folder.name}: {strategy}", file=sys.stderr)
        results[strategy], histories[strategy] = search_with(
            search_fitness, strategy, folder / strategy
        )
    results[tables.EARLY] = best_of(histories["curve"][: early_evaluations() + 1])
    candidates = {**results, **REFERENCES, search_result.PLAIN: None}
    return {
        "settings": case.settings(),
        "found": {strategy: candidate_to_dict(best) for strategy, best in results.items()},
        "history": histories,
        "held_out": evaluate_held_out(held_out_fitness, candidates, folder / "held-out"),
    }


def load_finished(case: Case, file: Path) -> dict[str, Any] | None:
    """Return a case's measurements if it is finished with these settings, else None."""
    if not file.exists():
        return None
    case_data = json.loads(file.read_text(encoding="utf-8"))
    if case_data["settings"] != case.settings():
        return None
    for history in case_data["history"].values():
        for entry in history:  # JSON has no infinities
            entry |= {k: math.inf for k in ("fitness", "best") if entry[k] is None}
    return case_data


def without_infinities(value: Any) -> Any:
    """Replace infinities, which JSON lacks, with None."""
    if isinstance(value, dict):
        return {key: without_infinities(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def without_options(case: dict[str, Any]) -> dict[str, Any]:
    """Return a case without the candidates' stretches, which are most of its size."""
    short = {
        strategy: [{k: v for k, v in entry.items() if k != "options"} for entry in history]
        for strategy, history in case["history"].items()
    }
    return {**case, "history": short}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line; measure, write and print the tables."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="eval/results/tiny-search/KEYS-keys if left out")
    parser.add_argument("--work", type=Path, default=Path("out/search_tiny"))
    parser.add_argument(
        "--models", nargs="+", choices=tiny.ARCHITECTURES, default=[*tiny.ARCHITECTURES]
    )
    lengths = list(dict.fromkeys(length for sizes in SIZES.values() for length in sizes))
    parser.add_argument("--lengths", nargs="+", type=int, choices=lengths, default=lengths)
    parser.add_argument("--keys", type=int, choices=SIZES, default=next(iter(SIZES)))
    parser.add_argument("--report", action="store_true", help="of finished cases, measuring none")
    options = parser.parse_args(arguments)
    out = options.out or Path(f"eval/results/tiny-search/{options.keys}-keys")
    torch.set_num_threads(1)
    every = [Case(name, length, options.keys) for length in lengths for name in tiny.ARCHITECTURES]
    cases: dict[str, dict[str, Any]] = {}
    for case in every:
        if case.name not in options.models or case.length not in options.lengths:
            continue
        folder = options.work / f"{case.name}-{case.length}-{case.keys}"
        case_data = load_finished(case, folder / "case.json")
        if case_data is None and not options.report:
            case_data = measure(case, folder)
            atomic_files.write_json(folder / "case.json", without_infinities(case_data))
        if case_data is not None:
            cases[case.title] = case_data
    if not cases:
        sys.exit(f"error: no finished case in {options.work}: run without --report")
    measuring_arguments = [argument for argument in arguments if argument != "--report"]
    command = shlex.join(["python", "recipes/experiments/search_tiny.py", *measuring_arguments])
    missing = [case.title for case in every if case.title not in cases]
    text = tables.render_readme(cases, missing, command)
    report = {
        "command": command,
        "missing": missing,
        "summary": tables.summary(cases),
        "cases": {name: without_options(case) for name, case in cases.items()},
    }
    atomic_files.write_json(out / "results.json", without_infinities(report))
    picture.draw(out / "history.png", cases)
    atomic_files.atomic_write(out / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
