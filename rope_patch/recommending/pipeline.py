"""recommend(): which method to use on this checkpoint, measured within a budget of minutes."""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.inference.samples import Sample, needles_refusal, read_samples
from rope_patch.patching import current
from rope_patch.searching import model as opening
from rope_patch.searching.journal import SearchJournal, SharedJournal
from rope_patch.searching.measure.fitness import make_space
from rope_patch.searching.result.search_result import SearchResult
from rope_patch.utils import atomic_files
from rope_patch.utils.processes import Processes

if TYPE_CHECKING:
    from rope_patch.recommending.result import Recommendation
    from rope_patch.recommending.sample_sets import SampleBlocks

logger = logging.getLogger(__name__)

MAX_SAMPLES = 96  # samples of each kind, if there is time


def recommend(
    model: Any,
    tokenizer: Any = None,
    *,
    length: int,
    budget: float,
    text: str | Sequence[str] | None = None,
    samples: Sequence[Sample] | str | os.PathLike[str] | None = None,
    short_length: int | None = None,
    most: int = MAX_SAMPLES,
    search: bool = True,
    trained_length: int | None = None,
    layer_types: list[str] | None = None,
    start: str = "auto",
    seed: int = 42,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
    dtype: Any = None,
    device_map: Any = None,
    gguf_file: str | None = None,
    command: str | None = None,
) -> Recommendation:
    """Measures methods on this checkpoint and says which to use at a length, with the evidence.

    The plain model, the static methods, the same following the length, and what a search finds are
    scored on needle questions of the target length (on pairs of words where the model was trained
    on too few tokens for needles). What each costs is measured within the trained
    length, on questions and on prose, against the plain model. All are scored on a few samples, the
    best on more, until the budget is spent. The model is left as it was. Several processes
    (`accelerate launch`) share the samples.

    Args:
        model: A transformers decoder with RoPE, not patched; or its folder or name.
        tokenizer: Its tokenizer; needed for a live model unless `samples` are given.
        length: Target length in tokens.
        budget: Minutes for measuring, those of earlier runs in the same folder included.
        text: Names or files that samples are made of; the novels of the package unless given.
        samples: Questions instead, or a file of them (JSON lines with input_ids and labels): those
            longer than the trained length are for the target, the others for the price.
        short_length: Tokens of what is measured within the trained length; half of that unless
            given, or all of it where needles need more than half.
        most: Samples of each kind at most.
        search: Whether to search as well, with what the known methods leave of the budget.
        trained_length: See `rope_patch.patch`.
        layer_types: See `rope_patch.patch`; one of them.
        start: See `rope_patch.patch`.
        seed: Of samples and search.
        folder: Where measurements are kept, to go on after a kill or with a larger budget, and the
            result is saved.
        progress: Whether to show a bar on stderr.
        dtype: To read the model in, where it is a name.
        device_map: As in transformers, where the model is a name.
        gguf_file: The GGUF file within the model's folder.
        command: What to record as having been run.

    Returns:
        The recommendation; print it to read it.

    Raises:
        ValueError: A request that cannot be met, or a budget in which not even the plain model and
            one method can be compared; says how many minutes are needed.
        TypeError: A value of the wrong type.
        OSError: Nothing can be written to the folder, found out before the model is loaded; or
            a file could not be written, with how to go on.
    """
    # What these need, statistics above all, is no part of a plain installation.
    from rope_patch.recommending import variants
    from rope_patch.recommending.bench import BLOCK_SIZE, Bench, TimeBudget, earlier_usage
    from rope_patch.recommending.result import SEARCH_FOLDER, Recommendation, to_rows
    from rope_patch.recommending.scoreboard import held_out_table
    from rope_patch.recommending.successive_halving import Race
    from rope_patch.recommending.summary import verdict_sentence

    _validate_request(budget, most, BLOCK_SIZE)
    if folder is not None:
        atomic_files.require_writable_folder(folder, "the recommendation")
    processes = Processes()
    source = opening.open_model(
        model, tokenizer, processes, dtype=dtype, device_map=device_map, gguf_file=gguf_file
    )
    asked: dict[str, Any] = {
        "trained_length": trained_length,
        "layer_types": layer_types,
        "start": start,
    }
    if (standing := current(source.skeleton)) is not None:
        raise ValueError(
            f"the model is patched already ({standing}): methods are measured on the model as it "
            "was, so call rope_patch.unpatch(model) first"
        )
    space = make_space(source.skeleton, length=length, **asked)
    trained = space.geometry.trained_length
    short = trained // 2 if short_length is None else short_length
    if samples is None and short_length is None and source.tokenizer is not None:
        short = _short_length_for_needles(source.tokenizer, short, trained)
    if not 1 < short <= trained:
        raise ValueError(
            f"short_length must be at most the trained length of {trained:,} tokens, got "
            f"{short:,}: prices are what methods cost within it"
        )
    sets = _build_samples(samples, text, source.tokenizer, space.length, trained, short, most, seed)
    live = source.load()
    identity = {
        "what": "recommend",
        "seed": seed,
        **opening.run_identity(live, space),
        "short_length": short,
        "most": most,
        "block": BLOCK_SIZE,
        **sets.identity,
        "versions": opening.dependency_versions(),
    }
    kept_there = atomic_files.add_write_advice(SearchJournal.resume_advice(folder))
    with kept_there, opening.eval_mode(live), SharedJournal(folder, identity, processes) as kept:
        kept.lock()
        spent, searched = earlier_usage(kept)
        clock = TimeBudget(budget, spent, processes, progress)
        bench = Bench(live, space, sets.by_kind, asked, kept, clock, processes)
        bench.candidates_searched = searched
        judge = Race(live, space, asked, bench, clock, kept, seed, search)
        judge.not_measured += sets.not_measured
        try:
            choice = judge.run()
        finally:
            clock.close()
        rows = to_rows(list(judge.rows.values()), choice)
        searched_in = None if folder is None else str(Path(folder) / SEARCH_FOLDER)
        python = shell = ""
        if choice.name is not None:
            row = judge.rows[choice.name]
            python = variants.patch_call(row.variant, space, asked, searched_in)
            shell = variants.export_command(row.variant, space, asked, source.name, row.engines)
        looked = judge.search_outcome
        found = Recommendation(
            model=source.name,
            weights=identity["weights"],
            length=space.length,
            trained_length=trained,
            short_length=short if samples is None else None,
            budget=float(budget),
            seconds=clock.spent(),
            method=choice.name,
            outcome=choice.verdict,
            verdict=verdict_sentence(choice, rows, space.length, trained),
            reasons=choice.reasons,
            python=python,
            shell=shell,
            rows=rows,
            samples=judge.block_count * BLOCK_SIZE,
            scored=bench.samples_scored,
            not_measured=tuple(judge.not_measured),
            seed=seed,
            versions=identity["versions"],
            command=shlex.join(sys.argv) if command is None else command,
            found=None
            if looked is None
            else SearchResult(
                model=source.name,
                weights=identity["weights"],
                strategy=looked.strategy,
                seed=seed,
                factor=space.factor,
                geometry=space.geometry,
                candidate=looked.candidate,
                history=looked.history,
                held_out=held_out_table(judge.rows),
                asked={k: v for k, v in asked.items() if v not in (None, "auto")},
                evaluations_per_minute=looked.rate,
                versions=identity["versions"],
                command=shlex.join(sys.argv) if command is None else command,
                config=opening.plain_config(live),
            ),
        )
        if processes.is_main and folder is not None:
            found.save(folder)
        processes.wait()
    return found


def _validate_request(budget: float, most: int, fewest: int) -> None:
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise TypeError(f"budget must be a number of minutes, got {budget!r}")
    if not (budget > 0 and math.isfinite(budget)):
        raise ValueError(f"budget must be more than 0 minutes, got {budget!r}")
    if most < fewest:
        raise ValueError(f"most must be at least {fewest} samples, the fewest that tell anything")


def _short_length_for_needles(tokenizer: Any, short: int, trained: int) -> int:
    """Return the short length, or the trained one where only that has room for needles."""
    if needles_refusal(tokenizer, short) and not needles_refusal(tokenizer, trained):
        return trained
    return short


def _build_samples(
    samples: Sequence[Sample] | str | os.PathLike[str] | None,
    text: str | Sequence[str] | None,
    tokenizer: Any,
    length: int,
    trained: int,
    short: int,
    most: int,
    seed: int,
) -> SampleBlocks:
    from rope_patch.recommending import sample_sets

    texts = [text] if isinstance(text, str) else text
    if tokenizer is None and (samples is None or texts is not None):
        raise ValueError(
            "samples are made with the model's tokenizer: give it, or samples and no text"
        )
    if samples is None:
        why = needles_refusal(tokenizer, short)
        if why is None:
            return sample_sets.needle_blocks(tokenizer, length, short, most, seed, texts)
        if texts is not None:
            raise ValueError(
                f"{why}, and what methods cost is measured on {short:,}: give a longer "
                "short_length (--short-length) if the model was trained on as many, samples of "
                "your own (--samples), or no text, to be asked for word pairs instead"
            )
        logger.warning(
            "%s, %s are for what methods cost: asking for word pairs instead", why, f"{short:,}"
        )
        return sample_sets.recall_blocks(tokenizer, length, short, most, seed)
    if isinstance(samples, str | os.PathLike):
        samples = read_samples(Path(samples))
    longest = max((len(sample.ids) for sample in samples), default=0)
    if longest > length:
        raise ValueError(
            f"samples of up to {longest:,} tokens, to measure at {length:,}: give a longer length "
            "or shorter samples"
        )
    return sample_sets.from_user_samples(samples, trained, tokenizer, short, most, seed, texts)
