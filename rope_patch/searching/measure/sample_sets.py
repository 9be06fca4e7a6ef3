"""The sets of samples of one search: to search on, to judge by, and to see what the model can."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.inference.samples import (
    Sample,
    document_samples,
    needle_samples,
    needles_refusal,
    permuted_answers,
    read_samples,
    recall_samples,
    require_text_length,
    samples_digest,
)
from rope_patch.searching.candidates import SearchSpace

FITNESS_KINDS = ("needles", "documents", "both", "recall")
DEFAULT_COUNT = 8  # samples of each kind
HELD_OUT_RATIO = 2  # times as many, for the final numbers
_SANITY_COUNTS = (
    4,
    8,
)  # what the model must manage first: as many as are searched by, within these

logger = logging.getLogger(__name__)

SampleSource = Sequence[Sample] | str | os.PathLike[str]


@dataclass(frozen=True)
class SampleSets:
    """Samples of one search.

    Attributes:
        search: What candidates are scored on.
        held_out: Others, for the final numbers.
        sanity: What the model must manage as it was trained, by kind.
        controls: By kind, the same without what makes it possible.
    """

    search: list[Sample]
    held_out: list[Sample]
    sanity: dict[str, list[Sample]]
    controls: dict[str, list[Sample]]


def prepare(
    space: SearchSpace,
    tokenizer: Any,
    *,
    fitness: str | None,
    count: int,
    text: str | Sequence[str] | None,
    samples: SampleSource | None,
    held_out: SampleSource | int | None,
    short: SampleSource | None,
    seed: int,
) -> SampleSets:
    """Builds or reads all samples; arguments as `search` has them.

    Raises:
        ValueError: They cannot be had, do not go together, or are of other lengths than needed.
    """
    if samples is not None:
        if text is not None:
            raise ValueError("give samples or a text to make them of, not both")
        if held_out is None or isinstance(held_out, int):
            raise ValueError(
                "with samples of your own, give held_out as well, others of the same kind: the "
                "final numbers must not come from what the search has chosen by"
            )
        sets = _from_user(samples, held_out, short)
    else:
        judged = HELD_OUT_RATIO * count if held_out is None else held_out
        if not isinstance(judged, int):
            raise ValueError("held_out can be samples only where samples are given, too")
        for name, number in (("count", count), ("held_out", judged)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1 sample, got {number}")
        if tokenizer is None:
            raise ValueError("needles and documents are made with the model's tokenizer: give it")
        fitness = _choose_fitness(space, tokenizer, fitness, text)
        sets = _generate(space, tokenizer, fitness, count, judged, text, seed)
    _require_lengths(space, sets)
    return sets


def _choose_fitness(
    space: SearchSpace, tokenizer: Any, fitness: str | None, text: str | Sequence[str] | None
) -> str:
    """Return what to search by: needles unless told, or recall where needles do not fit.

    Raises:
        ValueError: Needles were asked for and do not fit, or recall of a text.
    """
    if fitness == "recall" and text is not None:
        raise ValueError(
            "recall asks for pairs of the tokenizer's own words: leave the text out, or search by "
            "needles or documents"
        )
    if fitness in ("documents", "recall"):
        return fitness
    if text is not None:
        require_text_length(tokenizer, [text] if isinstance(text, str) else text, space.length)
    trained = space.geometry.trained_length
    why = needles_refusal(tokenizer, trained)
    if why is None:
        return fitness or "needles"
    if fitness is not None or text is not None:
        raise ValueError(
            f"{why}, and the model was trained on {trained:,}: search by recall (--fitness recall, "
            "without a text), by documents, or with samples of your own (--samples)"
        )
    logger.warning(
        "%s, and the model was trained on %s: searching by recall of word pairs instead",
        why,
        f"{trained:,}",
    )
    return "recall"


def _from_user(
    samples: SampleSource, held_out: SampleSource, short: SampleSource | None
) -> SampleSets:
    search, judged = _load_samples(samples), _load_samples(held_out)
    both = {s.ids for s in search} & {s.ids for s in judged}
    if both:
        raise ValueError(
            f"{len(both)} of the held-out samples are among those that are searched on: give others"
        )
    if short is None:
        return SampleSets(search, judged, {}, {})
    able = _load_samples(short)
    controls = permuted_answers(able)
    if [s.answers for s in controls] == [s.answers for s in able]:
        return SampleSets(search, judged, {"answers": able}, {"answers": controls})
    return SampleSets(
        search, judged, {"documents": able}, {}
    )  # whose answers are all of other lengths


def _generate(
    space: SearchSpace,
    tokenizer: Any,
    fitness: str,
    count: int,
    judged: int,
    text: str | Sequence[str] | None,
    seed: int,
) -> SampleSets:
    texts = [text] if isinstance(text, str) else text
    trained = space.geometry.trained_length
    able = min(max(count, _SANITY_COUNTS[0]), _SANITY_COUNTS[1])
    sets = SampleSets([], [], {}, {})
    if fitness in ("needles", "both"):
        # Held-out ones are of another seed; novels are long, so other places in them as well.
        for into, number, of in ((sets.search, count, seed), (sets.held_out, judged, seed + 1)):
            into += needle_samples(tokenizer, space.length, number, of, texts)
        for asked, planted in ((sets.sanity, True), (sets.controls, False)):
            asked["needles"] = needle_samples(tokenizer, trained, able, seed, texts, planted)
    if fitness == "recall":
        for into, number, of in ((sets.search, count, seed), (sets.held_out, judged, seed + 1)):
            into += recall_samples(tokenizer, space.length, number, of)
        for asked, planted in ((sets.sanity, True), (sets.controls, False)):
            asked["recall"] = recall_samples(tokenizer, trained, able, seed, planted)
    if fitness in ("documents", "both"):
        found = document_samples(tokenizer, space.length, count + judged, seed, texts)
        sets.search.extend(found[:count])
        sets.held_out.extend(found[count:])
        sets.sanity["documents"] = document_samples(tokenizer, trained, able, seed, texts)
    return sets


def _load_samples(given: SampleSource) -> list[Sample]:
    if isinstance(given, str | os.PathLike):
        return read_samples(Path(given))
    found = list(given)
    if not found or not all(isinstance(sample, Sample) for sample in found):
        raise ValueError(f"expected samples (searching.samples.Sample), got {given!r:.100}")
    return found


def _require_lengths(space: SearchSpace, sets: SampleSets) -> None:
    trained = space.geometry.trained_length
    for name, samples in (("samples", sets.search), ("held-out samples", sets.held_out)):
        longest = max(len(sample.ids) for sample in samples)
        shortest = min(sample.answers[-1][1] - 1 for sample in samples)
        if longest > space.length:
            raise ValueError(
                f"{name} of up to {longest:,} tokens, to search for {space.length:,}: give a "
                "longer length or shorter samples"
            )
        if shortest <= trained:
            raise ValueError(
                f"{name} must be longer than the trained length of {trained:,} tokens up to their "
                f"last answer, since shorter ones are not what is extended; got {shortest:,}"
            )
    for samples in sets.sanity.values():
        if (longest := max(len(sample.ids) for sample in samples)) > trained:
            raise ValueError(
                f"short samples show what the model can within its trained length of {trained:,} "
                f"tokens, got one of {longest:,}"
            )


def identity(sets: SampleSets) -> dict[str, Any]:
    """What of the samples the measurements of candidates depend on."""
    return {"samples": samples_digest(sets.search), "sample_count": len(sets.search)}
