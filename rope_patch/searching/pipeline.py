"""search(): from a model and a budget to the best rotation that was found."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rope_patch.inference.samples import Sample
from rope_patch.searching import model as opening
from rope_patch.searching.journal import SearchJournal, SharedJournal
from rope_patch.searching.loop import search_loop
from rope_patch.searching.measure import sample_sets
from rope_patch.searching.measure.fitness import Evaluation, Fitness, make_space
from rope_patch.searching.measure.sample_sets import (
    DEFAULT_COUNT,
    FITNESS_KINDS,
    SampleSets,
    SampleSource,
)
from rope_patch.searching.measure.sanity_check import (
    compare_with_control,
    require_competence,
    unigram_loss,
)
from rope_patch.searching.progress import SearchProgress
from rope_patch.searching.result import comparison
from rope_patch.searching.result.search_result import SearchResult
from rope_patch.searching.strategies.registry import STRATEGIES, Strategy
from rope_patch.utils import atomic_files
from rope_patch.utils.processes import Processes


def search(
    model: Any,
    tokenizer: Any = None,
    *,
    length: int | None = None,
    factor: float | None = None,
    method: str = "curve",
    budget: int = 200,
    fitness: str | None = None,
    text: str | Sequence[str] | None = None,
    samples: SampleSource | None = None,
    held_out: SampleSource | int | None = None,
    short: SampleSource | None = None,
    count: int = DEFAULT_COUNT,
    trained_length: int | None = None,
    layer_types: list[str] | None = None,
    start: str = "auto",
    seed: int = 42,
    folder: str | os.PathLike[str] | None = None,
    picture: str | os.PathLike[str] | None = None,
    progress: bool = True,
    dtype: Any = None,
    device_map: Any = None,
    gguf_file: str | None = None,
    command: str | None = None,
    **options: Any,
) -> SearchResult:
    """Searches the rotation that takes this very checkpoint to a longer context.

    Candidates are measured on the model itself, patched and put back, on samples of the target
    length. The best one and the known methods are then measured on other samples. The model is
    left as it was. Several processes (`accelerate launch`) share the samples of each candidate.

    Args:
        model: A transformers decoder with RoPE, not patched; or its folder or name.
        tokenizer: Its tokenizer; needed for a live model unless `samples` are given.
        length: Target length in tokens. Exactly one of `length` and `factor`.
        factor: Target length / trained length.
        method: How to search, one of `rope_patch.searching.strategies.registry.STRATEGIES`.
        budget: Candidates at most. YaRN, which is always measured first, is not counted.
        fitness: What a candidate is judged by, nats for a scored token: "needles" (the answers to
            needle questions), "documents" (the end of long passages), "both" of them in equal
            parts, or "recall" (of word pairs in noise, for models of a short context). Needles
            unless given, or recall where needles do not fit into the trained length.
        text: Names or files that samples are made of; the novels of the package unless given.
        samples: Samples instead, or a file of them: JSON lines with input_ids and labels.
        held_out: How many samples, or which where `samples` are given, the final numbers come from.
        short: With `samples`: others like them, within the trained length, on which the model must
            show that it can do at all what is searched by. Not looked into unless given.
        count: Samples of each kind that each candidate is measured on.
        trained_length: See `rope_patch.patch`.
        layer_types: See `rope_patch.patch`; one of them.
        start: See `rope_patch.patch`.
        seed: Of samples and proposals: the same seed searches the same.
        folder: Where the state of the search is kept, to go on after a kill, and the result saved.
        picture: An .svg or .png file that is drawn while the search runs.
        progress: Whether to show a bar on stderr.
        dtype: To read the model in, where it is a name.
        device_map: As in transformers, where the model is a name.
        gguf_file: The GGUF file within the model's folder.
        command: What to record as having been run.
        **options: The strategy's own.

    Returns:
        What was found; `rope_patch.patch(model, "longrope", **found)` uses it.

    Raises:
        ValueError: A request that cannot be met, a text shorter than the length, a model that
            cannot do at its own trained length what is searched by, a folder with the state of
            another search. Nothing has been written then.
        OSError: Nothing can be written to the folder, found out before the model is loaded; or
            a file could not be written, with how to go on.
        TypeError: A value of the wrong type.
    """
    strategy = _get_strategy(method, options)
    _validate_request(budget, fitness, folder)
    if folder is not None:
        atomic_files.require_writable_folder(folder, "the search")
    if picture is not None:
        atomic_files.require_writable_file(picture, "the picture", folder_exists=False)
    if (length is None) == (factor is None):
        given = "neither" if length is None else f"length={length} and factor={factor}"
        raise ValueError(f"give exactly one of length and factor, got {given}")
    processes = Processes()
    source = opening.open_model(
        model, tokenizer, processes, dtype=dtype, device_map=device_map, gguf_file=gguf_file
    )
    asked: dict[str, Any] = {
        "trained_length": trained_length,
        "layer_types": layer_types,
        "start": start,
    }
    space = make_space(source.skeleton, factor=factor, length=length, **asked)
    sets = sample_sets.prepare(
        space,
        source.tokenizer,
        fitness=fitness,
        count=count,
        text=text,
        samples=samples,
        held_out=held_out,
        short=short,
        seed=seed,
    )
    live = source.load()

    def measuring(chosen: Sequence[Sample]) -> Fitness:
        return Fitness(live, chosen, factor=space.factor, processes=processes, **asked)

    on = measuring(sets.search)  # refuses a model that is patched
    identity = {
        "strategy": method,
        "options": options,
        "seed": seed,
        **opening.run_identity(live, space),
        **sample_sets.identity(sets),
        "versions": opening.dependency_versions(),
    }
    title = f"{source.name}: {method}"
    shown = processes.is_main and progress
    kept_there = atomic_files.add_write_advice(SearchJournal.resume_advice(folder))
    with kept_there, opening.eval_mode(live), SharedJournal(folder, identity, processes) as kept:
        kept.require_same_budget(method, budget, strategy.continues)
        watch = SearchProgress(
            space,
            budget,
            title=title,
            picture=picture if processes.is_main else None,
            progress=shown,
        )
        try:
            _require_competent_model(sets, space.geometry.trained_length, measuring, kept)
            kept.lock()
            proposals = strategy.propose(space, budget, seed, **options)
            best, history, rate = search_loop(on, proposals, budget, kept, watch)
        finally:
            watch.close()
        judged = measuring(sets.held_out)
        labels = {comparison.FOUND: best, comparison.PLAIN: None}
        labels |= {
            reference: kept.reference_candidate(reference) for reference in comparison.REFERENCES
        }
        final = {label: kept.held_out_evaluation(judged, one) for label, one in labels.items()}
        found = SearchResult(
            model=source.name,
            weights=identity["weights"],
            strategy=method,
            seed=seed,
            factor=space.factor,
            geometry=space.geometry,
            candidate=best,
            history=history,
            held_out=comparison.compare(final, judged.samples),
            asked={k: v for k, v in asked.items() if v not in (None, "auto")},
            evaluations_per_minute=rate,
            versions=identity["versions"],
            command=shlex.join(sys.argv) if command is None else command,
            config=opening.plain_config(live),
        )
        if processes.is_main:
            watch.draw(history)
            if folder is not None:
                found.save(folder)
        processes.wait()
    return found


def _get_strategy(method: str, options: dict[str, Any]) -> Strategy:
    if method not in STRATEGIES:
        close = get_close_matches(str(method), STRATEGIES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"no strategy {method!r}{hint}: expected one of {', '.join(STRATEGIES)}")
    known = STRATEGIES[method].options
    for name in options:
        if name not in known:
            raise ValueError(
                f"the strategy {method!r} has no option {name!r}: expected "
                f"{', '.join(known) or 'none'}"
            )
    return STRATEGIES[method]


def _validate_request(
    budget: int, fitness: str | None, folder: str | os.PathLike[str] | None
) -> None:
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(f"budget must be a whole number of candidates, got {budget!r}")
    if budget < 1:
        raise ValueError(f"budget must be at least 1 candidate to measure, got {budget}")
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
    measuring: Callable[[Sequence[Sample]], Fitness],
    kept: SharedJournal,
) -> None:
    """Refuses to search where the model cannot do at its trained length what is searched by."""
    for kind, samples in sets.sanity.items():
        on = measuring(samples)
        said = kept.get_sanity(kind, samples)
        if said is None:
            plain = _require_complete(on.measure(None))
            control: Sequence[float | None] = unigram_loss(on.samples)
            if kind in sets.controls:
                control = _require_complete(measuring(sets.controls[kind]).measure(None)).nll
            said = compare_with_control(kind, length, plain, control)
        require_competence(said)
        kept.put_sanity(kind, samples, said)


def _require_complete(found: Evaluation) -> Evaluation:
    if found.error is not None:
        raise ValueError(f"the model as it is fails at its own trained length: {found.error}")
    return found
