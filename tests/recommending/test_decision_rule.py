"""Test the decision rule of recommendations on made-up scores, and the plan of a budget."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from rope_patch.recommending import (
    BlockCosts,
    MeasuredVariant,
    Scores,
    Variant,
    VariantScores,
    choose,
    gain_over_control,
    minimum_seconds,
    plan_budget,
    score_difference,
    usable_length_of,
)

TEXTS = 24


def scores(nll=0.1, accuracy=1.0, spread=0.05, seed=0, count=TEXTS, answers=4):
    """Return losses around a mean, and a share of right answers, each of a separate text.

    The same seed draws the same texts, so methods of one seed differ by their means alone.
    """
    rng = random.Random(seed)
    losses = [nll + spread * rng.gauss(0, 1) for _ in range(count)]
    hits = [tuple(rng.random() < accuracy for _ in range(answers)) for _ in range(count)]
    return Scores(tuple(losses), tuple(hits), tuple(str(i) for i in range(count)))


def add_noise(scores, deviation, seed):
    """Return the scores of a method that differs by chance alone, on the same samples."""
    rng = random.Random(seed)
    losses = tuple(loss + rng.gauss(0, deviation) for loss in scores.nll)
    return Scores(losses, scores.hits, scores.groups)


def make_variant(name, long=None, short=None, **more):
    return MeasuredVariant(name, long or scores(), short or scores(seed=1), **more)


PLAIN = make_variant("plain", scores(5.0, 0.1), option_count=-1)


def test_a_significantly_worse_method_is_not_chosen():
    decision = choose(
        [PLAIN, make_variant("yarn"), make_variant("linear", scores(1.5, 0.6))], PLAIN
    )
    assert (decision.name, decision.verdict, decision.best) == ("yarn", "use", "yarn")
    assert decision.ties == ("yarn",)
    assert decision.behind["linear"].is_worse
    assert decision.behind["linear"].nll.estimate == pytest.approx(1.4)
    assert decision.behind["yarn"].nll.estimate == 0


def test_ties_with_the_best_are_decided_by_the_price_on_short_texts():
    best = scores(0.1)
    tied = add_noise(best, 0.2, seed=3)
    short_scores = scores(0.4, 0.9, seed=1)
    for loss, other in ((best, tied), (tied, best)):
        decision = choose(
            [make_variant("dear", loss, short_scores), make_variant("cheap", other)], PLAIN
        )
        assert set(decision.ties) == {"dear", "cheap"}
        assert decision.name == "cheap"
        assert decision.price["dear"][0].is_worse
        assert decision.price["cheap"][0].nll.estimate == 0


@pytest.mark.parametrize("cost", [0.0, 0.005])
def test_ties_in_price_are_decided_by_engines_and_then_by_simplicity(cost):
    short = Scores(*(vars(scores(seed=1)) | {"nll": tuple(
        loss + cost + random.Random(i).gauss(0, 0.05) for i, loss in enumerate(scores(seed=1).nll)
    )}).values())  # fmt: skip
    static = make_variant("yarn", short=short)
    dynamic_method = make_variant("dynamic-yarn", engines_lost=6, dynamic=True)
    searched = make_variant("searched", short=short, option_count=3)
    decision = choose([dynamic_method, searched, static], PLAIN)
    assert decision.name == "yarn"
    assert any(
        "dynamic-yarn, which leaves them as they are" in reason for reason in decision.reasons
    )
    # A method that engines do not run is chosen if no other is left.
    assert choose([dynamic_method], PLAIN).name == "dynamic-yarn"
    # If as many engines run both, the one with fewer options wins.
    assert (
        choose(
            [make_variant("many", option_count=17), make_variant("few", option_count=3)], PLAIN
        ).name
        == "few"
    )
    alike = [make_variant("follows", dynamic=True), make_variant("stays")]
    assert choose(alike, PLAIN).name == "stays"
    # Engines come before simplicity, and fewer options before a static rotation.
    assert choose(
        [make_variant("simple", engines_lost=1), make_variant("everywhere", option_count=3)], PLAIN
    ).name == ("everywhere")
    mixed = [make_variant("follows", dynamic=True), make_variant("many", option_count=3)]
    assert choose(mixed, PLAIN).name == "follows"


def test_a_static_method_with_a_price_loses_to_a_dynamic_one():
    static = make_variant("yarn", short=scores(0.3, seed=1))
    dynamic_method = make_variant("dynamic-yarn", engines_lost=6, dynamic=True)
    assert choose([static, dynamic_method], PLAIN).name == "dynamic-yarn"


def test_a_loss_on_prose_is_a_price_as_well():
    prose = scores(3.0, answers=0, seed=2)
    worse = scores(3.2, answers=0, seed=2)
    plain = make_variant("plain", scores(5.0, 0.1), prose=prose, option_count=-1)
    static = make_variant("yarn", prose=worse)
    dynamic_method = make_variant("dynamic-yarn", prose=prose, engines_lost=6, dynamic=True)
    decision = choose([static, dynamic_method], plain)
    assert decision.name == "dynamic-yarn"
    answer, text = decision.price["yarn"]
    assert not answer.is_worse
    assert text.hits is None
    assert text.nll.estimate == pytest.approx(0.2)


def test_a_significant_but_tiny_difference_is_a_tie():
    a, b = scores(0.1), scores(0.105)
    assert score_difference(b, a).nll.low > 0
    assert not score_difference(b, a).is_worse
    assert score_difference(scores(0.12), a).is_worse


@pytest.mark.parametrize(("texts", "is_shown"), [(5, False), (6, True)])
def test_nothing_is_worse_and_no_gain_is_shown_below_six_texts(texts, is_shown):
    good, bad = scores(0.1, count=texts), scores(9.0, accuracy=0.0, count=texts)
    assert score_difference(bad, good).is_worse == is_shown
    assert (score_difference(bad, good).nll.low > 0) == is_shown
    assert math.isinf(score_difference(bad, good).nll.high) != is_shown
    assert (gain_over_control(good, bad).low > 0) == is_shown
    ties = choose([make_variant("good", good), make_variant("bad", bad)], PLAIN).ties
    assert ("bad" in ties) != is_shown


def test_fewer_right_answers_are_worse_at_the_same_loss():
    a, b = scores(accuracy=1.0), scores(accuracy=0.6)
    assert score_difference(b, a).nll.estimate == 0
    assert score_difference(b, a).is_worse
    assert not score_difference(a, b).is_worse


def test_the_plain_model_is_recommended_if_nothing_beats_it():
    plain = make_variant("plain", option_count=-1)
    assert choose([make_variant("yarn", add_noise(scores(), 0.2, 5)), plain], plain).name == "plain"


@pytest.mark.parametrize(
    ("accuracy", "holds"), [(0.9, True), (0.6, True), (0.3, False), (0, False)]
)
def test_a_method_must_keep_half_of_the_answers(accuracy, holds):
    decision = choose([PLAIN, make_variant("yarn", scores(0.1, accuracy))], PLAIN)
    assert (decision.name == "yarn") == holds
    assert decision.verdict == ("use" if holds else "nothing holds")
    hits, _ = scores(0.1, accuracy).flat_hits()
    base, _ = PLAIN.short.flat_hits()
    assert decision.retained_share.estimate == pytest.approx(np.mean(hits) / np.mean(base))
    assert (
        decision.retained_share.low
        <= decision.retained_share.estimate
        <= decision.retained_share.high
    )


def test_a_method_must_beat_the_control():
    best = make_variant("yarn", scores(2.0, 1.0, spread=0.5))
    decision = choose([best], PLAIN, control=scores(6.0, 0, spread=0.5, seed=9))
    assert decision.name == "yarn"
    assert decision.information_gain.low > 3
    blind = choose([best], PLAIN, control=add_noise(best.long, 0.3, seed=4))
    assert (blind.name, blind.verdict) == (None, "nothing holds")
    assert blind.information_gain.low < 0
    assert "no likelier" in blind.reasons[-1]


def test_losses_alone_decide_if_the_plain_model_answers_nothing():
    """The plain model has no whole answer right."""
    plain = make_variant("plain", scores(5.0, 0), scores(1.0, 0, seed=1), option_count=-1)
    decision = choose([make_variant("yarn", scores(1.0, 0))], plain, scores(5.0, 0))
    assert (decision.name, decision.retained_share) == ("yarn", None)


def test_a_choice_from_no_variants_is_refused():
    with pytest.raises(ValueError, match="expected contenders"):
        choose([], PLAIN)


def test_intervals_are_paired_and_clustered_by_text():
    """Samples of one text count as one, and a text's difficulty cancels out."""
    easy, hard = scores(0.1, spread=3.0), scores(0.4, spread=3.0)
    assert score_difference(hard, easy).nll.half_width < 0.01 < easy.loss_interval().half_width
    rng = random.Random(1)
    text_losses = [rng.gauss(0.3, 1.0) for _ in range(12)]
    nll = [loss for loss in text_losses for _ in range(10)]
    groups = tuple(str(i // 10) for i in range(120))
    zero = Scores((0.0,) * 120, ((),) * 120, groups)
    clustered = score_difference(Scores(tuple(nll), ((),) * 120, groups), zero).nll
    t = stats.t.interval(0.95, 11, np.mean(text_losses), stats.sem(text_losses))
    assert clustered.low == pytest.approx(t[0], abs=0.15)
    assert clustered.high == pytest.approx(t[1], abs=0.15)


def test_a_control_is_compared_on_the_same_texts_in_any_order():
    plain = scores(1.0, spread=1.0)
    order = list(range(TEXTS))[::-1][: TEXTS - 2]
    control = Scores(
        tuple(plain.nll[i] + 2 for i in order),
        tuple(() for _ in order),
        tuple(plain.groups[i] for i in order),
    )
    gain = gain_over_control(plain, control)
    assert (gain.low, gain.estimate, gain.high) == pytest.approx((2, 2, 2))
    with pytest.raises(ValueError, match="same texts"):
        gain_over_control(plain, Scores((1.0,), ((),), ("another",)))


@pytest.mark.parametrize("left", [1, 30, 100, 1000, 10**5])
@pytest.mark.parametrize("within", [0.1, 3.0])
@pytest.mark.parametrize("searchable", [0, 4])
def test_a_plan_fits_into_its_time(left, within, searchable):
    costs = BlockCosts(5.0, within)
    plan = plan_budget(left, costs, rotations=4, max_blocks=16, max_search_blocks=searchable)
    blocks = plan.samples // 6
    alive = [2 + plan.first_rotations + bool(plan.evaluations)]
    spent = (
        plan.first_rotations * costs.both
        + plan.search_seconds
        + bool(plan.search_seconds) * costs.both
        + costs.long
    )
    done = 1
    while done < blocks:
        alive.append(min(alive[-1], max(3, math.ceil(alive[-1] / 2))))  # the better half
        new = min(2 * done, blocks)
        spent += (new - done) * (alive[-1] + 1) * costs.both  # the plain model, too
        done = new
    assert spent <= max(left, costs.long)
    assert plan.evaluations * plan.search_blocks * costs.long <= plan.search_seconds + 1e-9
    assert plan.evaluations == 0 or plan.evaluations >= 10
    if left == 10**5:
        assert (plan.first_rotations, plan.samples) == (4, 96)
        assert (plan.search_blocks == 4) == bool(searchable)


def test_more_time_never_plans_less():
    plans = [plan_budget(left, BlockCosts(5.0, 1.0), 4, 16, 4) for left in range(0, 4000, 7)]
    for a, b in pairwise(plans):
        assert (a.first_rotations, a.search_seconds) <= (b.first_rotations, b.search_seconds)
        assert a.search_blocks <= b.search_blocks


def test_a_search_gets_the_time_that_samples_leave():
    """With no more samples, all time is spent except for the estimates' margin."""
    costs, left = BlockCosts(5.0, 1.0), 10**4
    plan = plan_budget(left, costs, rotations=4, max_blocks=2, max_search_blocks=4)
    first, comparison, control = 4 * costs.both, costs.both, costs.long
    again = 5 * costs.both  # the better half of seven, and the plain model
    assert plan.samples == 12
    assert plan.search_seconds + first + comparison + again + control == pytest.approx(left / 1.1)
    assert plan_budget(left, costs, 4, max_blocks=2, max_search_blocks=0).search_seconds == 0


def test_the_minimum_time_is_that_of_two_methods_and_two_controls():
    costs = BlockCosts(long=10.0, short=3.0)
    seconds = minimum_seconds(costs, short=2.0) / 1.1
    assert seconds == pytest.approx(2 * (10 + 3) + 10 + 2)
    assert minimum_seconds(costs, short=2.0, measured=1) / 1.1 == pytest.approx((10 + 3) + 10)
    assert math.isfinite(seconds)


# -- usable length ---------------------------------------------------------------------------------


def measured(name, long, short):
    return VariantScores(Variant(name), long=long, short=short)


@pytest.mark.parametrize(
    ("count", "accuracy", "expected"),
    [
        (23, 1.0, "at least 16,384 tokens (the longest measured)"),
        (22, 1.0, "not shown (takes 23 texts)"),
        (40, 0.0, "4,096 tokens (4,096 to 16,384)"),
    ],
)
def test_a_usable_length_is_of_the_plain_model_s_answers_within_its_length(
    count, accuracy, expected
):
    """One answer a text: 23 that are all right show 85%, since .85^23 is below 2.5%."""
    right, other = (scores(seed=seed, count=count, answers=1) for seed in (1, 2))
    plain = measured("plain", scores(5.0, 0.0, count=count, answers=1), right)
    method = measured("yarn", scores(accuracy=accuracy, count=count, answers=1), other)
    lengths = {"short": 4096, "long": 16384}
    assert str(usable_length_of(method, plain, lengths)) == expected
    assert str(usable_length_of(plain, plain, lengths)) == "4,096 tokens (4,096 to 16,384)"
    follows = measured("dynamic-yarn", method.long, right)
    assert usable_length_of(follows, plain, lengths).low >= 4096
    blind = measured("plain", plain.long, scores(5.0, 0.0, count=count, answers=1))
    assert usable_length_of(method, blind, lengths) is None
