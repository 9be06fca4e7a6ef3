"""Test bootstrapped losses and perplexities against scipy and simulated data."""

import math

import numpy as np
import pytest
from scipy import stats

from rope_patch import statistics


def test_many_documents_are_resampled_whole():
    """The reference is scipy's percentile bootstrap of document means at an adjusted level."""
    generator = np.random.default_rng(1)
    losses = 2.5 + 0.3 * generator.standard_normal((12, 1)) + generator.random((12, 30))
    got = statistics.bootstrap_mean(losses.tolist(), resamples=20_000)
    level = 2 * stats.norm.cdf(-math.sqrt(12 / 11) * stats.t.ppf(0.975, 11))
    expected = stats.bootstrap(
        (losses.mean(axis=1),), np.mean, confidence_level=1 - level, method="percentile",
        n_resamples=20_000, rng=np.random.default_rng(7),
    ).confidence_interval  # fmt: skip
    assert (got.unit, got.n, got.effective_n) == ("documents", 12, 12)
    assert got.estimate == pytest.approx(losses.mean())
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), abs=0.02)


def test_few_documents_are_resampled_in_runs_of_blocks():
    generator = np.random.default_rng(1)
    losses = generator.random((2, 500))
    got = statistics.bootstrap_mean(losses.tolist(), run_length=5)
    assert (got.unit, got.n, got.effective_n) == ("blocks", 1000, 200)
    assert got.half_width == pytest.approx(1.96 * losses.std() / math.sqrt(1000), rel=0.15)


def test_every_block_of_a_document_has_the_same_weight():
    """One bad block in the middle or at the end gives the same interval."""
    middle, end = [1.0] * 40, [1.0] * 40
    middle[20] = end[-1] = 9.0
    one, other = [statistics.bootstrap_mean([losses], run_length=4) for losses in (middle, end)]
    assert (one.low, one.high) == pytest.approx((other.low, other.high), abs=0.01)


def dependent_losses(generator, sets, documents, blocks, between):
    """Return losses around 2.5, correlated between blocks, with a spread `between` documents."""
    noise = 0.3 * generator.standard_normal((sets, documents, blocks + 30))
    for i in range(1, noise.shape[-1]):
        noise[..., i] += 0.5 * noise[..., i - 1]
    return 2.5 + noise[..., 30:] + between * generator.standard_normal((sets, documents, 1))


@pytest.mark.parametrize(
    ("documents", "blocks", "between", "unit", "least_coverage"),
    [(6, 20, 0.2, "documents", 0.92), (12, 20, 0.2, "documents", 0.92), (1, 600, 0, "blocks", 0.9)],
)
def test_bootstrap_intervals_have_their_coverage(documents, blocks, between, unit, least_coverage):
    covered = naive_covered = 0
    for seed, losses in enumerate(
        dependent_losses(np.random.default_rng(3), 400, documents, blocks, between)
    ):
        got = statistics.bootstrap_mean(losses.tolist(), resamples=1000, seed=seed)
        assert got.unit == unit
        covered += got.low <= 2.5 <= got.high
        naive_covered += abs(losses.mean() - 2.5) <= 1.96 * losses.std() / math.sqrt(losses.size)
    assert covered / 400 >= least_coverage
    assert naive_covered / 400 < 0.8  # blocks taken as independent


def test_perplexity_is_exp_of_the_weighted_mean():
    losses, tokens = [[2.0, 3.0], [4.0, 5.0, 6.0]], [[63, 64], [63, 64, 64]]
    total = 2 * 63 + 3 * 64 + 4 * 63 + 5 * 64 + 6 * 64
    got = statistics.perplexity_interval(losses, tokens)
    assert got.estimate == pytest.approx(math.exp(total / (63 + 64 + 63 + 64 + 64)))
    assert got.low < got.estimate < got.high
    mean = statistics.bootstrap_mean(losses, tokens)
    assert (got.low, got.high) == pytest.approx((math.exp(mean.low), math.exp(mean.high)))


def test_a_paired_ratio_is_more_certain_than_either_perplexity():
    losses = dependent_losses(np.random.default_rng(2), 1, 4, 200, 0.3)[0]
    better = losses - 0.02 + 0.01 * np.random.default_rng(5).standard_normal(losses.shape)
    got = statistics.perplexity_ratio(better.tolist(), losses.tolist())
    assert got.estimate == pytest.approx(math.exp((better - losses).mean()))
    assert got.low < math.exp(-0.02) < got.high < 1
    one = statistics.perplexity_interval(better.tolist())
    other = statistics.perplexity_interval(losses.tolist())
    assert one.high > other.low  # the single intervals overlap
    assert statistics.perplexity_ratio(losses.tolist(), losses.tolist()).half_width == 0


def test_infinite_losses_reach_into_the_interval():
    losses = [[2.0, 3.0, 2.5, 2.2] * 5 for _ in range(6)]
    losses[0][3] = math.inf
    got = statistics.perplexity_interval(losses)
    assert (got.estimate, got.high) == (math.inf, math.inf)
    assert math.exp(2) < got.low < math.exp(3)  # resamples without that document are finite
    fine = [[2.0] * 20 for _ in range(6)]
    assert statistics.perplexity_ratio(losses, fine).high == math.inf
    assert statistics.perplexity_ratio(fine, losses).low == 0
    assert statistics.perplexity_interval(losses[:1]).high == math.inf
    assert statistics.perplexity_interval([[800.0] * 9]).estimate == math.inf


def test_undefined_losses_give_an_undefined_interval():
    for losses in ([[2.0, math.nan, 3.0]], [[2.0, math.nan]] * 7):
        got = statistics.perplexity_interval(losses)
        assert all(map(math.isnan, (got.estimate, got.low, got.high)))
    both = [[1.0, math.inf]]
    assert math.isnan(statistics.perplexity_ratio(both, both).estimate)


def test_one_block_has_no_bounds():
    got = statistics.perplexity_interval([[2.0], []])
    assert got.estimate == pytest.approx(math.exp(2))
    assert (got.low, got.high) == (0, math.inf)


@pytest.mark.parametrize("blocks", [4, 6, 8, 12])
@pytest.mark.parametrize("documents", [1, 2])
def test_few_blocks_get_students_t(documents, blocks):
    """Against scipy; the intervals of 3,000 sets of independent blocks cover as they say."""
    per_document = blocks // documents
    sets = 2.5 + 0.3 * np.random.default_rng(5).standard_normal((3000, documents, per_document))
    covered = 0
    for losses in sets:
        got = statistics.bootstrap_mean(losses.tolist())
        covered += got.low <= 2.5 <= got.high
    truth = stats.ttest_1samp(sets[-1].ravel(), 0).confidence_interval()
    assert (got.low, got.high) == pytest.approx((truth.low, truth.high))
    assert (got.unit, got.n, got.effective_n) == ("blocks", blocks, blocks)
    assert 0.937 <= covered / 3000 <= 0.963  # three standard errors around .95
