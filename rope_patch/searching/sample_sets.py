"""The sample sets of a search, and whether the unpatched model solves its task at all."""

from __future__ import annotations

import collections
import logging
import math
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
from rope_patch.searching.fitness import Evaluation

FITNESS_KINDS = ("needles", "documents", "both", "recall")
DEFAULT_COUNT = 8  # samples of each kind
HELD_OUT_RATIO = 2  # held-out samples / search samples
_SANITY_COUNTS = (4, 8)  # fewest and most sanity samples; between them, as many as search samples

logger = logging.getLogger(__name__)

SampleSource = Sequence[Sample] | str | os.PathLike[str]


@dataclass(frozen=True)
class SampleSets:
    """The samples of one search.

    Attributes:
        search: Samples that candidates are scored on.
        held_out: Other samples, for the final numbers.
        sanity: By kind, samples at the trained length.
        controls: By kind, the same questions without their answers in the text.
    """

    search: list[Sample]
    held_out: list[Sample]
    sanity: dict[str, list[Sample]]
    controls: dict[str, list[Sample]]


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """The samples that a search asks for: given ones, or how to make them; see `search`."""

    fitness: str | None
    count: int
    text: str | Sequence[str] | None
    samples: SampleSource | None
    held_out: SampleSource | int | None
    short: SampleSource | None
    seed: int


def prepare(space: SearchSpace, tokenizer: Any, request: SampleRequest) -> SampleSets:
    """Generate or read all samples.

    Raises:
        ValueError: Parts of the request exclude each other, samples have a wrong length, or samples
            cannot be made with this tokenizer.
    """
    held_out = request.held_out
    if request.samples is not None:
        if request.text is not None:
            raise ValueError("give samples or a text to make them of, not both")
        if held_out is None or isinstance(held_out, int):
            raise ValueError(
                "with samples of your own, give held_out as well, others of the same kind: the "
                "final numbers must not come from what the search has chosen by"
            )
        sets = _from_user(request.samples, held_out, request.short)
    else:
        held_out = HELD_OUT_RATIO * request.count if held_out is None else held_out
        if not isinstance(held_out, int):
            raise ValueError("held_out can be samples only where samples are given, too")
        for name, number in (("count", request.count), ("held_out", held_out)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1 sample, got {number}")
        if tokenizer is None:
            raise ValueError("needles and documents are made with the model's tokenizer: give it")
        fitness = _choose_fitness(space, tokenizer, request.fitness, request.text)
        sets = _generate(space, tokenizer, fitness, request, held_out)
    _require_lengths(space, sets)
    return sets


def _choose_fitness(
    space: SearchSpace, tokenizer: Any, fitness: str | None, text: str | Sequence[str] | None
) -> str:
    """Return the fitness: the requested one, else needles, or recall if needles do not fit."""
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
    reason = needles_refusal(tokenizer, trained)
    if reason is None:
        return fitness or "needles"
    if fitness is not None or text is not None:
        raise ValueError(
            f"{reason}, and the model was trained on {trained:,}: search by recall (--fitness "
            "recall, without a text), by documents, or with samples of your own (--samples)"
        )
    logger.warning(
        "%s, and the model was trained on %s: searching by recall of word pairs instead",
        reason,
        f"{trained:,}",
    )
    return "recall"


def _from_user(
    samples: SampleSource, held_out: SampleSource, short: SampleSource | None
) -> SampleSets:
    """Return the user's own samples, and controls for those within the trained length."""
    search, held_out_samples = _load_samples(samples), _load_samples(held_out)
    shared_ids = {s.ids for s in search} & {s.ids for s in held_out_samples}
    if shared_ids:
        raise ValueError(
            f"{len(shared_ids)} of the held-out samples are among those that are searched on: give "
            "others"
        )
    if short is None:
        return SampleSets(search, held_out_samples, {}, {})
    sanity = _load_samples(short)
    controls = permuted_answers(sanity)
    if [s.answers for s in controls] == [s.answers for s in sanity]:
        return SampleSets(search, held_out_samples, {"answers": sanity}, {"answers": controls})
    # Some answer has no other one of as many tokens: compare with token frequencies instead.
    return SampleSets(search, held_out_samples, {"documents": sanity}, {})


def _generate(
    space: SearchSpace,
    tokenizer: Any,
    fitness: str,
    request: SampleRequest,
    held_out_count: int,
) -> SampleSets:
    """Return samples made with the tokenizer, and sanity samples with their controls."""
    count, seed = request.count, request.seed
    texts = [request.text] if isinstance(request.text, str) else request.text
    trained = space.geometry.trained_length
    sanity_count = min(max(count, _SANITY_COUNTS[0]), _SANITY_COUNTS[1])
    sets = SampleSets([], [], {}, {})
    if fitness in ("needles", "both"):
        # Another seed makes other needles; novels are long, so it takes other excerpts, too.
        for samples, number, kind_seed in (
            (sets.search, count, seed),
            (sets.held_out, held_out_count, seed + 1),
        ):
            samples += needle_samples(tokenizer, space.length, number, kind_seed, texts)
        for by_kind, with_answers in ((sets.sanity, True), (sets.controls, False)):
            by_kind["needles"] = needle_samples(
                tokenizer, trained, sanity_count, seed, texts, with_answers
            )
    if fitness == "recall":
        for samples, number, kind_seed in (
            (sets.search, count, seed),
            (sets.held_out, held_out_count, seed + 1),
        ):
            samples += recall_samples(tokenizer, space.length, number, kind_seed)
        for by_kind, with_answers in ((sets.sanity, True), (sets.controls, False)):
            by_kind["recall"] = recall_samples(tokenizer, trained, sanity_count, seed, with_answers)
    if fitness in ("documents", "both"):
        documents = document_samples(tokenizer, space.length, count + held_out_count, seed, texts)
        sets.search.extend(documents[:count])
        sets.held_out.extend(documents[count:])
        sets.sanity["documents"] = document_samples(tokenizer, trained, sanity_count, seed, texts)
    return sets


def _load_samples(source: SampleSource) -> list[Sample]:
    if isinstance(source, str | os.PathLike):
        return read_samples(Path(source))
    samples = list(source)
    if not samples or not all(isinstance(sample, Sample) for sample in samples):
        raise ValueError(f"expected samples (searching.samples.Sample), got {source!r:.100}")
    return samples


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
    """Return the facts about the samples that stored measurements depend on."""
    return {"samples": samples_digest(sets.search), "sample_count": len(sets.search)}


MAX_LOSS_RATIO = 0.75  # the most that the model's loss may be of the control's
MIN_STANDARD_ERRORS = 3.0  # standard errors by which the model must beat the control


def unigram_loss(samples: Sequence[Sample]) -> list[float]:
    """Return the nats of each sample's scored tokens by token frequencies in all samples.

    This is the loss of a model that has only the exact frequencies of the vocabulary.
    """
    counts = collections.Counter(token for sample in samples for token in sample.ids)
    total = sum(counts.values())
    return [
        math.fsum(-math.log(counts[s.ids[p]] / total) for p in s.positions) / len(s.positions)
        for s in samples
    ]


def compare_with_control(
    kind: str, length: int, evaluation: Evaluation, control: Sequence[float | None]
) -> dict[str, Any]:
    """Compare the plain model's losses with those of a control.

    Args:
        kind: "needles", "recall", "answers" or "documents".
        length: The trained length in tokens.
        evaluation: The plain model on samples of that length.
        control: Nats of the same samples' control, in the same order.

    Returns:
        The check's result: `kind`, `length`, `nll` and `control` (nats), and `able`.
    """
    pairs = [(a, b) for a, b in zip(evaluation.nll, control, strict=True) if a is not None and b]
    gains = [b - a for a, b in pairs]
    nll, control_nll = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
    mean_gain = control_nll - nll
    deviation = math.sqrt(sum((gain - mean_gain) ** 2 for gain in gains) / max(len(gains) - 1, 1))
    is_significant = len(gains) > 1 and mean_gain > MIN_STANDARD_ERRORS * deviation / math.sqrt(
        len(gains)
    )
    return {
        "kind": kind,
        "length": length,
        "nll": nll,
        "control": control_nll,
        "able": bool(is_significant and nll <= MAX_LOSS_RATIO * control_nll),
    }


def require_competence(sanity: dict[str, Any]) -> None:
    """Raise if a model fails the sanity check.

    Args:
        sanity: What `compare_with_control` returned.

    Raises:
        ValueError: The model fails; the message has the numbers.
    """
    if sanity["able"]:
        return
    control = {
        "needles": "the same questions of texts without the needles",
        "recall": "the same questions of texts with other pairs",
        "answers": "wrong answers to the same questions",
        "documents": "how frequent each token is in these texts",
    }[sanity["kind"]]
    task = {"documents": "predict documents", "recall": "recall word pairs"}.get(
        sanity["kind"], "find needles"
    )
    raise ValueError(
        f"the model cannot {task} at its own trained length of {sanity['length']:,} tokens: a "
        f"token costs it {sanity['nll']:.3f} nats, and {sanity['control']:.3f} by {control}; "
        f"expected at most {MAX_LOSS_RATIO:g} of that. What is searched by would be noise: choose "
        "another fitness, or a model that can"
    )
