"""Bootstrap intervals: of means over clusters, of perplexity, of ratios of perplexities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy import special

from rope_patch.statistics.intervals import Interval, half_alpha

RESAMPLES = 2000
MIN_DOCUMENTS = 6  # below, too few different resamples of documents exist for a 95% interval
FEW_BLOCKS = 12  # up to here runs leave too few draws: Student's t covers better than they do
DRAWS_AT_ONCE = 1 << 19  # draws that exist at once: small enough for the processor's cache

Losses = Sequence[Sequence[float]]


def bootstrap_mean(
    values: Losses,
    weights: Losses | None = None,
    run_length: int | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return the weighted mean of values in documents, with an interval for few or many of them.

    With at least six documents, whole documents are drawn, and the interval holds for other
    documents like these. Fewer documents show no spread when drawn again; then runs of
    consecutive blocks are drawn from all documents (the block bootstrap of Künsch 1989, with runs
    that wrap around a document's end, Politis & Romano 1992, so that every block counts alike),
    and the interval holds for other passages of these documents. A trend along the document
    widens that interval. The bounds are percentiles, moved out for few units (Hesterberg 2015,
    arXiv:1411.5279).

    Up to twelve blocks leave few draws, whose percentiles cannot lie beyond the data. The
    interval is Student's t on the blocks then, which takes them as independent.

    Args:
        values: The blocks' values of each document, such as mean losses in nats per token. The
            interval reaches infinite values; NaN makes estimate and bounds NaN.
        weights: Each block's weight above 0, such as its tokens; None if all weigh the same.
        run_length: Blocks in a run, about as many as depend on each other; None takes the cube root
            of the number of blocks (Hall, Horowitz & Jing 1995). At most the shortest document.
        confidence: Two-sided level, between 0 and 1.
        resamples: The number of means to draw.
        seed: The seed of the draws.

    Returns:
        The interval. `unit` names the drawn units: "documents", or "blocks" (then `effective_n` is
        the number of runs). With less than two runs there are no bounds: `-inf` and `inf`.

    Raises:
        ValueError: If there are no values, or weights that do not fit them.
    """
    documents = [np.asarray(document, dtype=float) for document in values if len(document)]
    if not documents:
        raise ValueError("expected at least one block of losses, got none; score some text first")
    shares = _checked_weights(values, weights)
    products = [value * weight for value, weight in zip(documents, shares, strict=True)]
    count = sum(len(document) for document in documents)
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, which is what it should be
        estimate = float(np.concatenate(products).sum() / np.concatenate(shares).sum())
        if math.isfinite(estimate) and 2 <= count <= FEW_BLOCKS and len(documents) < MIN_DOCUMENTS:
            return _student_interval(
                np.concatenate(documents), np.concatenate(shares), estimate, confidence
            )
        if len(documents) >= MIN_DOCUMENTS:
            unit, n, draws = "documents", len(documents), len(documents)
            sums = np.array([product.sum() for product in products])
            sizes = np.array([share.sum() for share in shares])
        else:
            length = max(1, min(run_length or math.ceil(count ** (1 / 3)), *map(len, documents)))
            unit, n, draws = "blocks", count, count // length
            sums = np.concatenate([_run_sums(product, length) for product in products])
            sizes = np.concatenate([_run_sums(share, length) for share in shares])
        if math.isnan(estimate):
            return Interval(math.nan, math.nan, math.nan, n, draws, unit=unit)
        if draws < 2:
            return Interval(estimate, -math.inf, math.inf, n, draws, unit=unit)
        means = resample_means(sums, sizes, draws, resamples, seed)
    low, high = percentile_bounds(means, draws, confidence)
    return Interval(estimate, min(low, estimate), max(high, estimate), n, draws, unit=unit)


def _student_interval(
    values: np.ndarray, weights: np.ndarray, mean: float, confidence: float
) -> Interval:
    """Return Student's t interval of a weighted mean of independent values."""
    # `values` and `weights` are those of n >= 2 blocks, and `mean` is their weighted mean.
    n, share = len(values), weights / weights.sum()
    error = math.sqrt(n / (n - 1) * float((share**2 * (values - mean) ** 2).sum()))
    half = float(special.stdtrit(n - 1, 1 - half_alpha(confidence))) * error
    return Interval(mean, mean - half, mean + half, n, n, unit="blocks")


def perplexity_interval(
    losses: Losses,
    weights: Losses | None = None,
    run_length: int | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return perplexity, `exp` of the mean loss, its interval as in `bootstrap_mean`.

    Args:
        losses: For each document its blocks' mean losses, nats per token.
        weights: The blocks' tokens; None if all blocks have as many.
        run_length: Blocks drawn together, see `bootstrap_mean`.
        confidence: Two-sided level, between 0 and 1.
        resamples: How many means are drawn.
        seed: Of the draws.
    """
    return _exp_interval(bootstrap_mean(losses, weights, run_length, confidence, resamples, seed))


def perplexity_ratio(
    losses_a: Losses,
    losses_b: Losses,
    weights: Losses | None = None,
    run_length: int | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return perplexity of a over that of b on the same tokens, below 1 where a is better.

    Both are drawn together: what makes a passage hard for both cancels, so this interval is much
    narrower than the two perplexities' own (Miller 2024, arXiv:2411.00640).

    Args:
        losses_a: For each document its blocks' mean losses under a, nats per token.
        losses_b: The same blocks' under b.
        weights: The blocks' tokens; None if all blocks have as many.
        run_length: Blocks drawn together, see `bootstrap_mean`.
        confidence: Two-sided level, between 0 and 1.
        resamples: How many means are drawn.
        seed: Of the draws.

    Returns:
        The ratio; NaN where both are infinite on one block, as nothing then compares them.

    Raises:
        ValueError: If the two do not have the same blocks.
    """
    shape_a, shape_b = [list(map(len, losses)) for losses in (losses_a, losses_b)]
    if shape_a != shape_b:
        raise ValueError(
            f"expected the same blocks under both methods, got {shape_a} and {shape_b} blocks "
            "in the documents; score both on the same text"
        )
    with np.errstate(invalid="ignore"):
        differences = [
            np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
            for a, b in zip(losses_a, losses_b, strict=True)
        ]
    return _exp_interval(
        bootstrap_mean(differences, weights, run_length, confidence, resamples, seed)
    )


def resample_means(
    sums: np.ndarray, sizes: np.ndarray, draws: int, resamples: int, seed: int
) -> np.ndarray:
    """Return means of units drawn with replacement, `[resamples]`.

    Args:
        sums: Each unit's summed values, `[units]`.
        sizes: Each unit's weight, `[units]`.
        draws: Units in a resample.
        resamples: How many.
        seed: Of the draws.
    """
    generator = np.random.default_rng(seed)
    rows = max(1, DRAWS_AT_ONCE // draws)
    means = []
    for start in range(0, resamples, rows):
        shape = (min(rows, resamples - start), draws)
        units = generator.integers(len(sums), size=shape)
        means.append(sums[units].sum(axis=1) / sizes[units].sum(axis=1))
    return np.concatenate(means)


def percentile_bounds(means: np.ndarray, units: int, confidence: float) -> tuple[float, float]:
    """Return percentile bounds of resampled means, widened for few units by Student's t.

    Plain percentiles are too narrow for few units, by `sqrt((units - 1) / units)` and for want of
    Student's t; the level is moved so that for a normal mean both are made up (Hesterberg 2015).
    """
    t = special.stdtrit(units - 1, 1 - half_alpha(confidence))
    level = special.ndtr(-math.sqrt(units / (units - 1)) * t)
    # Outward to a mean that was drawn: between a finite one and an infinite one lies nothing.
    low = np.quantile(means, level, method="lower")
    high = np.quantile(means, 1 - level, method="higher")
    return float(low), float(high)


def _checked_weights(values: Losses, weights: Losses | None) -> list[np.ndarray]:
    if weights is None:
        return [np.ones(len(document)) for document in values if len(document)]
    shapes = [list(map(len, part)) for part in (values, weights)]
    weights_of_documents = [
        np.asarray(document, dtype=float) for document in weights if len(document)
    ]
    if shapes[0] != shapes[1] or not all((weight > 0).all() for weight in weights_of_documents):
        raise ValueError(
            f"expected a weight above 0 for every block, got {shapes[1]} weights for {shapes[0]} "
            "blocks in the documents; give every block's number of scored tokens"
        )
    return weights_of_documents


def _run_sums(values: np.ndarray, length: int) -> np.ndarray:
    """Return sums of `length` consecutive values from every start, wrapping at the end, `[n]`."""
    wrapped = np.concatenate([values, values[: length - 1]])
    return np.lib.stride_tricks.sliding_window_view(wrapped, length).sum(axis=1)


def _exp_interval(interval: Interval) -> Interval:
    with np.errstate(over="ignore"):
        estimate, low, high = np.exp([interval.estimate, interval.low, interval.high]).tolist()
    return replace(interval, estimate=estimate, low=low, high=high)
