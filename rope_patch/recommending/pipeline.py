"""recommend(): the method to use on a checkpoint, measured within a budget of minutes."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.exporting import serving_engines
from rope_patch.extension import Extension
from rope_patch.inference.samples import Sample, needles_refusal, read_samples
from rope_patch.patching import current
from rope_patch.recommending import sample_sets
from rope_patch.recommending.budget import TimeBudget
from rope_patch.recommending.sample_sets import BLOCK_SIZE, SampleBlocks
from rope_patch.recommending.variants import require_servable
from rope_patch.searching.fitness import make_space
from rope_patch.searching.journal import SearchJournal
from rope_patch.searching.model import dependency_versions, eval_mode, open_model, run_identity
from rope_patch.transformers_api.remote_code import takes_remote_code
from rope_patch.units import parse_tokens
from rope_patch.utils import atomic_files
from rope_patch.utils.processes import Processes

if TYPE_CHECKING:
    from rope_patch.evaluation.decision_plan import RunPlan
    from rope_patch.recommending.result import Recommendation

logger = logging.getLogger(__name__)

MAX_SAMPLES = 96  # samples of each kind, if the budget allows as many


@takes_remote_code
def recommend(
    model: Any,
    tokenizer: Any = None,
    *,
    length: int | str,
    budget: float,
    text: str | Sequence[str] | None = None,
    samples: Sequence[Sample] | str | os.PathLike[str] | None = None,
    short_length: int | str | None = None,
    most: int = MAX_SAMPLES,
    search: bool = True,
    engines: str | Sequence[str] = (),
    trained_length: int | str | None = None,
    layer_types: list[str] | None = None,
    start: str = "auto",
    anyway: bool = False,
    seed: int = 42,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
    plan: bool = False,
    dtype: Any = None,
    device_map: Any = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    command: str | None = None,
) -> Recommendation | RunPlan:
    """Measure methods on this checkpoint and recommend one for a length, with the evidence.

    The plain model, the static methods (with those of imported plugins, where they need no
    options), their dynamic forms and the result of a search are scored
    on needle questions of the target length, or on word pairs if the trained length is too short
    for needles. Their price is measured within the trained length, on questions and on prose,
    against the plain model. All are scored on a few samples, the best on more, until the budget is
    spent. The model is left as it was. Several processes (`accelerate launch`) share the samples.

    Args:
        model: A transformers decoder with RoPE, not patched; or its folder or name.
        tokenizer: The model's tokenizer; needed for a live model unless `samples` are given.
        length: Target length in tokens.
        budget: Minutes for measuring, including earlier runs in the same folder. What a kill cut
            short does not count, so that the same call comes to the same result.
        text: Names or files to make samples of; the novels of the package unless given.
        samples: Questions to use instead, or a file of them (JSON lines with input_ids and labels):
            those longer than the trained length are for the target, the others for the price.
        short_length: Tokens of the samples within the trained length; half of the trained length
            unless given, or all of it if needles need more than half.
        most: Samples of each kind at most.
        search: Whether to search as well, with the budget that the known methods leave.
        engines: Names as in `rope_patch.export`, such as `("vllm", "llama.cpp")`: only methods that
            all of them run without this package are measured and recommended. Any may be if empty.
        trained_length: See `rope_patch.patch`.
        layer_types: See `rope_patch.patch`; one of them.
        start: See `rope_patch.patch`.
        anyway: See `rope_patch.patch`.
        seed: Seed of samples and search.
        folder: Folder for the journal, from which a killed run or one with a larger budget
            resumes, and for the result.
        progress: Whether to show a bar on stderr.
        plan: Time one short pass, and return what fits into the budget and what it can decide
            (a `rope_patch.evaluation.decision_plan.RunPlan`); nothing is measured or written.
        dtype: The dtype to load a named model in.
        device_map: As in transformers, for a named model.
        gguf_file: The GGUF file within the model's folder.
        trust_remote_code: Whether to execute Python code that the checkpoint brings.
        command: The command line to record in the result.

    Returns:
        The recommendation; print it to read it.

    Raises:
        ValueError: A request that cannot be met, or a budget too small to compare the plain model
            and one method; the message says how many minutes are needed.
        TypeError: A value of the wrong type.
        OSError: The folder is not writable, which is checked before the model is loaded; or a
            file could not be written, with how to go on.
    """
    # These import packages that a plain installation lacks, such as those for statistics.
    from rope_patch.recommending.bench import BlockScorer, earlier_usage
    from rope_patch.recommending.result import RunFacts, make_recommendation
    from rope_patch.recommending.successive_halving import SuccessiveHalving

    _validate_request(budget, most)
    engines = serving_engines(engines)
    folder = None if plan else folder
    if folder is not None:
        atomic_files.require_writable_folder(folder, "the recommendation")
    processes = Processes()
    source = open_model(
        model, tokenizer, processes, dtype=dtype, device_map=device_map, gguf_file=gguf_file
    )
    extension = Extension.of(
        "longrope",
        length=length,
        trained_length=trained_length,
        layer_types=layer_types,
        start=start,
        anyway=anyway,
    )
    _require_unpatched(source.skeleton)
    space = make_space(source.skeleton, extension)
    if engines:
        require_servable(source.skeleton, space, extension, engines)
    trained = space.geometry.trained_length
    short = _choose_short_length(
        parse_tokens("short_length", short_length),
        trained,
        source.tokenizer if samples is None else None,
    )
    sample_blocks = _build_samples(
        samples, text, source.tokenizer, space.length, trained, short, most, seed
    )
    live = source.load()
    identity = {
        "what": "recommend",
        "seed": seed,
        **run_identity(live, space),
        "short_length": short,
        "most": most,
        "block": BLOCK_SIZE,
        **sample_blocks.identity,
        "versions": dependency_versions(),
        # Runs of earlier releases, which knew no engines, go on.
        **({"engines": list(engines)} if engines else {}),
    }
    facts = RunFacts(
        model=source.name,
        weights=identity["weights"],
        short_length=short if samples is None else None,
        budget=float(budget),
        seed=seed,
        versions=identity["versions"],
        command=shlex.join(sys.argv) if command is None else command,
        folder=folder,
        engines=engines,
    )
    with eval_mode(live), SearchJournal(folder, identity, processes) as journal:
        journal.lock()
        seconds_spent, earlier = earlier_usage(journal, budget)
        clock = TimeBudget(budget, seconds_spent, processes, progress)
        scorer = BlockScorer(
            live, space, sample_blocks.by_kind, extension, journal, clock, processes, earlier
        )
        halving = SuccessiveHalving(
            live, space, extension, scorer, clock, journal, seed, search, engines
        )
        halving.not_measured += sample_blocks.not_measured
        with contextlib.closing(clock):
            if plan:
                return halving.plan()
            choice = halving.run()
        recommendation = make_recommendation(facts, halving, choice)
        if processes.is_main and folder is not None:
            recommendation.save(folder)
        processes.wait()
    return recommendation


def _validate_request(budget: float, most: int) -> None:
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise TypeError(f"budget must be a number of minutes, got {budget!r}")
    if not (budget > 0 and math.isfinite(budget)):
        raise ValueError(f"budget must be more than 0 minutes, got {budget!r}")
    if most < BLOCK_SIZE:
        raise ValueError(
            f"most must be at least {BLOCK_SIZE} samples, the fewest that tell anything"
        )


def _require_unpatched(model: Any) -> None:
    if (active_patch := current(model)) is not None:
        raise ValueError(
            f"the model is patched already ({active_patch}): methods are measured on the model as "
            "it was, so call rope_patch.unpatch(model) first"
        )


def _choose_short_length(requested: int | None, trained: int, tokenizer: Any) -> int:
    """Return the tokens of samples within the trained length: half of it, unless requested."""
    short = trained // 2 if requested is None else requested
    makes_needles = requested is None and tokenizer is not None
    # Half of a short trained length may have no room for needles.
    if makes_needles and needles_refusal(tokenizer, short):
        short = short if needles_refusal(tokenizer, trained) else trained
    if not 1 < short <= trained:
        raise ValueError(
            f"short_length must be at most the trained length of {trained:,} tokens, got "
            f"{short:,}: prices are what methods cost within it"
        )
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
    texts = [text] if isinstance(text, str) else text
    if tokenizer is None and (samples is None or texts is not None):
        raise ValueError(
            "samples are made with the model's tokenizer: give it, or samples and no text"
        )
    if samples is None:
        refusal = needles_refusal(tokenizer, short)
        if refusal is None:
            return sample_sets.needle_blocks(tokenizer, length, short, most, seed, texts)
        if texts is not None:
            raise ValueError(
                f"{refusal}, and what methods cost is measured on {short:,}: give a longer "
                "short_length (--short-length) if the model was trained on as many, samples of "
                "your own (--samples), or no text, to be asked for word pairs instead"
            )
        logger.warning(
            "%s, %s are for what methods cost: asking for word pairs instead", refusal, f"{short:,}"
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
