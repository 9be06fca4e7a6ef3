"""search(): from a model and a budget to the best rotation for it."""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rope_patch.evaluation.decision_plan import PassTime, RunPlan, try_plan
from rope_patch.extension import Extension
from rope_patch.inference.samples import Sample, samples_digest
from rope_patch.searching import sample_sets, search_result
from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.fitness import Evaluation, Fitness, make_space
from rope_patch.searching.journal import SearchJournal
from rope_patch.searching.loop import SearchProgress, search_loop
from rope_patch.searching.model import (
    dependency_versions,
    eval_mode,
    open_model,
    plain_config,
    run_identity,
)
from rope_patch.searching.sample_sets import (
    DEFAULT_COUNT,
    FITNESS_KINDS,
    SampleRequest,
    SampleSets,
    SampleSource,
    compare_with_control,
    require_competence,
    unigram_loss,
)
from rope_patch.searching.search_result import SearchResult
from rope_patch.searching.strategies.registry import STRATEGIES, Strategy
from rope_patch.searching.strategies.trust_region import require_optuna
from rope_patch.statistics import SIGNIFICANCE_LEVEL, least_texts
from rope_patch.transformers_api.remote_code import takes_remote_code
from rope_patch.utils import atomic_files
from rope_patch.utils.errors import did_you_mean
from rope_patch.utils.processes import Processes
from rope_patch.utils.terminal import format_duration

logger = logging.getLogger("rope_patch")

MIN_EVALUATIONS = 10  # a search with fewer is not worth its time


@takes_remote_code
def search(
    model: Any,
    tokenizer: Any = None,
    *,
    length: int | str | None = None,
    factor: float | str | None = None,
    method: str = "curve",
    budget: int = 200,
    minutes: float | None = None,
    fitness: str | None = None,
    text: str | Sequence[str] | None = None,
    samples: SampleSource | None = None,
    held_out: SampleSource | int | None = None,
    short: SampleSource | None = None,
    count: int = DEFAULT_COUNT,
    trained_length: int | str | None = None,
    layer_types: list[str] | None = None,
    start: str = "auto",
    anyway: bool = False,
    seed: int = 42,
    folder: str | os.PathLike[str] | None = None,
    picture: str | os.PathLike[str] | None = None,
    progress: bool = True,
    plan: bool = False,
    dtype: Any = None,
    device_map: Any = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    command: str | None = None,
    **options: Any,
) -> SearchResult | RunPlan:
    """Search for the rotation that takes this checkpoint to a longer context.

    Each candidate patches the model, is scored on samples of the target length, and is undone. The
    best one and the known methods are then measured on held-out samples. The model is left as it
    was. Several processes (`accelerate launch`) share the samples of each candidate.

    Args:
        model: A transformers decoder with RoPE, not patched; or its folder or name.
        tokenizer: The model's tokenizer; needed for a live model unless `samples` are given.
        length: Target length in tokens. Give exactly one of `length` and `factor`.
        factor: Target length / trained length.
        method: The strategy, one of `rope_patch.searching.strategies.registry.STRATEGIES`.
        budget: Candidates at most. YaRN is always measured first and not counted.
        minutes: Minutes for measuring, the comparison in the end included; no limit unless given.
        fitness: The loss that candidates are compared by, nats for a scored token: "needles" (the
            answers to needle questions), "documents" (the end of long passages), "both" in equal
            parts, or "recall" (of word pairs in noise, for models of a short context). By default
            needles, or recall if needles do not fit into the trained length.
        text: Names or files to make samples of; the novels of the package unless given.
        samples: Samples to use instead, or a file of them: JSON lines with input_ids and labels.
        held_out: The number of samples for the final numbers; with `samples`, the samples.
        short: With `samples`: similar ones within the trained length, for the sanity check. There
            is no sanity check unless they are given.
        count: Samples of each kind that each candidate is measured on.
        trained_length: See `rope_patch.patch`.
        layer_types: See `rope_patch.patch`; one of them.
        start: See `rope_patch.patch`.
        anyway: See `rope_patch.patch`.
        seed: Seed of samples and proposals: the same seed searches the same.
        folder: Folder for the journal, from which a killed search resumes, and for the result.
        picture: An .svg or .png file that is redrawn while the search runs.
        progress: Whether to show a bar on stderr.
        plan: Time one short pass, and return how long the search takes (a
            `rope_patch.evaluation.decision_plan.RunPlan`); nothing is measured or written.
        dtype: The dtype to load a named model in.
        device_map: As in transformers, for a named model.
        gguf_file: The GGUF file within the model's folder.
        trust_remote_code: Whether to execute Python code that the checkpoint brings.
        command: The command line to record in the result.
        **options: The strategy's own options.

    Returns:
        The best rotation; `rope_patch.patch(model, "longrope", **found)` uses it.

    Raises:
        ValueError: A request that cannot be met, a text shorter than the length, a model that
            fails the sanity check at its trained length, or a folder with the journal of another
            search. Nothing has been written then.
        OSError: The folder is not writable, which is checked before the model is loaded; or a
            file could not be written, with how to go on.
        TypeError: A value of the wrong type.
    """
    strategy = _get_strategy(method, options)
    _validate_request(budget, fitness, folder, minutes)
    folder, picture = (None, None) if plan else (folder, picture)
    if folder is not None:
        atomic_files.require_writable_folder(folder, "the search")
    if picture is not None:
        atomic_files.require_writable_file(picture, "the picture", folder_exists=False)
    if (length is None) == (factor is None):
        received = "neither" if length is None else f"length={length} and factor={factor}"
        raise ValueError(f"give exactly one of length and factor, got {received}")
    processes = Processes()
    source = open_model(
        model, tokenizer, processes, dtype=dtype, device_map=device_map, gguf_file=gguf_file
    )
    extension = Extension.of(
        "longrope",
        factor=factor,
        length=length,
        trained_length=trained_length,
        layer_types=layer_types,
        start=start,
        anyway=anyway,
    )
    space = make_space(source.skeleton, extension)
    request = SampleRequest(
        fitness=fitness,
        count=count,
        text=text,
        samples=samples,
        held_out=held_out,
        short=short,
        seed=seed,
    )
    sets = sample_sets.prepare(space, source.tokenizer, request)
    live = source.load()

    def make_fitness(sample_set: Sequence[Sample]) -> Fitness:
        return Fitness(live, sample_set, extension, processes)

    on_search = make_fitness(sets.search)  # raises for a patched model
    with eval_mode(live):
        if plan:
            return _plan(live, sets, space, budget, minutes)
        expected = processes.broadcast(try_plan(lambda: _plan(live, sets, space, budget, minutes)))
    if expected is not None:
        for line in str(expected).splitlines():
            logger.info("plan: %s", line)
        if expected.missing:
            raise ValueError(f"minutes must be more, got {minutes:g}: {expected.missing}")
    identity = {
        "strategy": method,
        "options": options,
        "seed": seed,
        **run_identity(live, space),
        **sample_sets.identity(sets),
        "versions": dependency_versions(),
    }
    with eval_mode(live), SearchJournal(folder, identity, processes) as journal:
        journal.require_same_budget(method, budget, strategy.resumable)
        bar = SearchProgress(
            space,
            budget,
            title=f"{source.name}: {method}",
            picture=picture if processes.is_main else None,
            progress=processes.is_main and progress,
        )
        try:
            _require_competent_model(sets, space.geometry.trained_length, make_fitness, journal)
            journal.lock()
            proposals = strategy.propose(space, budget, seed, **options)
            seconds = math.inf if minutes is None else 60 * minutes
            seconds -= 0.0 if expected is None else expected.reserve
            best, history, rate = search_loop(on_search, proposals, budget, journal, bar, seconds)
        finally:
            bar.close()
        on_held_out = make_fitness(sets.held_out)
        candidates = {search_result.FOUND: best, search_result.PLAIN: None}
        candidates |= {name: Candidate(name, name) for name in search_result.REFERENCES}
        evaluations = {
            label: journal.held_out_evaluation(on_held_out, candidate)
            for label, candidate in candidates.items()
        }
        result = SearchResult(
            model=source.name,
            weights=identity["weights"],
            strategy=method,
            seed=seed,
            factor=space.factor,
            geometry=space.geometry,
            candidate=best,
            history=history,
            held_out=search_result.compare_on_held_out(evaluations, on_held_out.samples),
            asked=replace(extension, factor=None, length=None).arguments(),
            evaluations_per_minute=rate,
            versions=identity["versions"],
            command=shlex.join(sys.argv) if command is None else command,
            config=plain_config(live),
        )
        if processes.is_main:
            bar.draw(history)
            if folder is not None:
                result.save(folder)
        processes.wait()
    return result


def _plan(
    model: Any, sets: SampleSets, space: SearchSpace, budget: int, minutes: float | None
) -> RunPlan:
    """Return how long a search takes by one short pass, and what its end can show."""
    times = PassTime(model, space.length)

    def read(samples: Sequence[Sample]) -> float:
        return sum(times.seconds(len(sample.ids)) for sample in samples)

    each, compared = read(sets.search), 2 + len(search_result.REFERENCES)
    checks = sum(map(read, [*sets.sanity.values(), *sets.controls.values()]))
    reserve = checks + compared * read(sets.held_out)
    seconds, allowed = reserve + (budget + 1) * each, None if minutes is None else 60 * minutes
    count, missing = budget, ""
    if allowed is not None and seconds > allowed:
        count = max(0, int((allowed - reserve) / each) - 1)  # YaRN is measured first
        seconds = allowed
        if count < min(budget, MIN_EVALUATIONS):
            least = reserve + (min(budget, MIN_EVALUATIONS) + 1) * each
            missing = f"{count} candidates fit; it takes about {format_duration(least)}"
    texts, least_count = (
        len({sample.group for sample in sets.held_out}),
        least_texts(SIGNIFICANCE_LEVEL),
    )
    decides = f"{texts} texts compare the result with YaRN in the end, {least_count} decide"
    measures = (
        f"YaRN and {count} candidates on {len(sets.search)} samples of {space.length:,} tokens",
        f"{compared} rotations on {len(sets.held_out)} others in the end",
    )
    return RunPlan(
        measures=measures,
        seconds=seconds,
        budget=allowed,
        reserve=reserve,
        decides=(decides,),
        missing=missing,
    )


def _get_strategy(method: str, options: dict[str, Any]) -> Strategy:
    if method not in STRATEGIES:
        hint = did_you_mean(method, STRATEGIES)
        raise ValueError(f"no strategy {method!r}{hint}: expected one of {', '.join(STRATEGIES)}")
    if method == "curve":  # before anything is measured
        require_optuna()
    names = STRATEGIES[method].options
    for name in options:
        if name not in names:
            raise ValueError(
                f"the strategy {method!r} has no option {name!r}: expected "
                f"{', '.join(names) or 'none'}"
            )
    return STRATEGIES[method]


def _validate_request(
    budget: int,
    fitness: str | None,
    folder: str | os.PathLike[str] | None,
    minutes: float | None,
) -> None:
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(f"budget must be a whole number of candidates, got {budget!r}")
    if budget < 1:
        raise ValueError(f"budget must be at least 1 candidate to measure, got {budget}")
    if minutes is not None and not (minutes > 0 and math.isfinite(minutes)):
        raise ValueError(f"minutes must be more than 0, got {minutes!r}")
    if fitness is not None and fitness not in FITNESS_KINDS:
        raise ValueError(f"fitness must be one of {', '.join(FITNESS_KINDS)}, got {fitness!r}")
    if folder is not None and list(Path(folder).glob("*.safetensors")):
        raise ValueError(
            f"{folder} holds a model, whose config.json the result would overwrite: give a folder "
            "of its own"
        )


def _require_competent_model(
    sets: SampleSets,
    length: int,
    make_fitness: Callable[[Sequence[Sample]], Fitness],
    journal: SearchJournal,
) -> None:
    """Raise if the unpatched model fails the search's task at its trained length."""
    for kind, samples in sets.sanity.items():
        fitness = make_fitness(samples)
        key = f"able/{kind}/{samples_digest(samples)}"
        sanity = journal.get(key)
        if sanity is None:
            plain = _require_complete(fitness.measure(None))
            control: Sequence[float | None] = unigram_loss(fitness.samples)
            if kind in sets.controls:
                control = _require_complete(make_fitness(sets.controls[kind]).measure(None)).nll
            sanity = compare_with_control(kind, length, plain, control)
        require_competence(sanity)
        journal.put_with_next(key, sanity)


def _require_complete(evaluation: Evaluation) -> Evaluation:
    if evaluation.error is not None:
        raise ValueError(f"the model as it is fails at its own trained length: {evaluation.error}")
    return evaluation
