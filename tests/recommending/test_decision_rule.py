"""The rule that a recommendation follows, on made-up measurements, and what fits into a budget."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from rope_patch.recommending import budget
from rope_patch.recommending.budget import BlockCosts
from rope_patch.recommending.decision_rule import MeasuredVariant, choose
from rope_patch.recommending.scores import Scores, gain_over_control, score_difference

TEXTS = 24


def scores(nll=0.1, right=1.0, spread=0.05, seed=0, count=TEXTS, asked=4):
    """Losses around a mean, and as many right answers, on texts of their own.

    The same seed draws the same texts, so methods of one seed differ by their means alone.
    """
    rng = random.Random(seed)
    losses = [nll + spread * rng.gauss(0, 1) for _ in range(count)]
    hits = [tuple(rng.random() < right for _ in range(asked)) for _ in range(count)]
    return Scores(tuple(losses), tuple(hits), tuple(str(i) for i in range(count)))


def noisy(scores, by, seed):
    """The same samples under a method that differs by chance alone."""
    rng = random.Random(seed)
    losses = tuple(loss + rng.gauss(0, by) for loss in scores.nll)
    return Scores(losses, scores.hits, scores.groups)


def contender(name, long=None, short=None, **more):
    return MeasuredVariant(name, long or scores(), short or scores(seed=1), **more)


PLAIN = contender("plain", scores(5.0, 0.1), option_count=-1)


def test_a_method_that_is_told_apart_is_not_chosen():
    found = choose([PLAIN, contender("yarn"), contender("linear", scores(1.5, 0.6))], PLAIN)
    assert (found.name, found.verdict, found.best) == ("yarn", "use", "yarn")
    assert found.ties == ("yarn",)
    assert found.behind["linear"].is_worse
    assert found.behind["linear"].nll.estimate == pytest.approx(1.4)
    assert found.behind["yarn"].nll.estimate == 0


def test_what_cannot_be_told_from_the_best_goes_by_the_price_of_short_texts():
    best = scores(0.1)
    tied = noisy(best, 0.2, seed=3)
    dear = scores(0.4, 0.9, seed=1)
    for loss, other in ((best, tied), (tied, best)):
        found = choose([contender("dear", loss, dear), contender("cheap", other)], PLAIN)
        assert set(found.ties) == {"dear", "cheap"}
        assert found.name == "cheap"
        assert found.price["dear"][0].is_worse
        assert found.price["cheap"][0].nll.estimate == 0


@pytest.mark.parametrize("cost", [0.0, 0.005])
def test_among_prices_that_could_be_chance_engines_decide_and_then_simplicity(cost):
    short = Scores(*(vars(scores(seed=1)) | {"nll": tuple(
        loss + cost + random.Random(i).gauss(0, 0.05) for i, loss in enumerate(scores(seed=1).nll)
    )}).values())  # fmt: skip
    static = contender("yarn", short=short)
    following = contender("dynamic-yarn", engines_lost=6, dynamic=True)
    searched = contender("searched", short=short, option_count=3)
    found = choose([following, searched, static], PLAIN)
    assert found.name == "yarn"
    assert any("dynamic-yarn, which leaves them as they are" in one for one in found.reasons)
    # What the engines do not run is chosen where nothing else is left.
    assert choose([following], PLAIN).name == "dynamic-yarn"
    # Where as many engines run both, the one with fewer numbers.
    assert (
        choose([contender("many", option_count=17), contender("few", option_count=3)], PLAIN).name
        == "few"
    )
    alike = [contender("follows", dynamic=True), contender("stays")]
    assert choose(alike, PLAIN).name == "stays"
    # Engines come before simplicity, and numbers before staying the same.
    assert choose(
        [contender("simple", engines_lost=1), contender("everywhere", option_count=3)], PLAIN
    ).name == ("everywhere")
    mixed = [contender("follows", dynamic=True), contender("many", option_count=3)]
    assert choose(mixed, PLAIN).name == "follows"


def test_the_dearer_static_method_loses_to_the_one_that_follows():
    static = contender("yarn", short=scores(0.3, seed=1))
    following = contender("dynamic-yarn", engines_lost=6, dynamic=True)
    assert choose([static, following], PLAIN).name == "dynamic-yarn"


def test_prose_is_a_price_as_well():
    prose = scores(3.0, asked=0, seed=2)
    worse = scores(3.2, asked=0, seed=2)
    plain = contender("plain", scores(5.0, 0.1), prose=prose, option_count=-1)
    static = contender("yarn", prose=worse)
    following = contender("dynamic-yarn", prose=prose, engines_lost=6, dynamic=True)
    found = choose([static, following], plain)
    assert found.name == "dynamic-yarn"
    answer, text = found.price["yarn"]
    assert not answer.is_worse
    assert text.hits is None
    assert text.nll.estimate == pytest.approx(0.2)


def test_what_does_not_matter_is_a_tie_however_sure_it_is():
    a, b = scores(0.1), scores(0.105)
    assert score_difference(b, a).nll.low > 0
    assert not score_difference(b, a).is_worse
    assert score_difference(scores(0.12), a).is_worse


def test_fewer_right_answers_are_worse_at_the_same_loss():
    a, b = scores(right=1.0), scores(right=0.6)
    assert score_difference(b, a).nll.estimate == 0
    assert score_difference(b, a).is_worse
    assert not score_difference(a, b).is_worse


def test_the_plain_model_is_recommended_where_nothing_beats_it():
    plain = contender("plain", option_count=-1)
    assert choose([contender("yarn", noisy(scores(), 0.2, 5)), plain], plain).name == "plain"


@pytest.mark.parametrize(("right", "holds"), [(0.9, True), (0.6, True), (0.3, False), (0, False)])
def test_a_method_must_keep_half_of_the_answers(right, holds):
    found = choose([PLAIN, contender("yarn", scores(0.1, right))], PLAIN)
    assert (found.name == "yarn") == holds
    assert found.verdict == ("use" if holds else "nothing holds")
    hits, _ = scores(0.1, right).flat_hits()
    base, _ = PLAIN.short.flat_hits()
    assert found.retained_share.estimate == pytest.approx(np.mean(hits) / np.mean(base))
    assert found.retained_share.low <= found.retained_share.estimate <= found.retained_share.high


def test_a_method_must_know_more_than_the_control():
    best = contender("yarn", scores(2.0, 1.0, spread=0.5))
    told = choose([best], PLAIN, control=scores(6.0, 0, spread=0.5, seed=9))
    assert told.name == "yarn"
    assert told.information_gain.low > 3
    blind = choose([best], PLAIN, control=noisy(best.long, 0.3, seed=4))
    assert (blind.name, blind.verdict) == (None, "nothing holds")
    assert blind.information_gain.low < 0
    assert "no likelier" in blind.reasons[-1]


def test_nothing_to_keep_is_no_reason_against_a_method():
    """Where the plain model has no whole answer right, losses alone decide."""
    plain = contender("plain", scores(5.0, 0), scores(1.0, 0, seed=1), option_count=-1)
    found = choose([contender("yarn", scores(1.0, 0))], plain, scores(5.0, 0))
    assert (found.name, found.retained_share) == ("yarn", None)


def test_nothing_measured_is_refused():
    with pytest.raises(ValueError, match="expected contenders"):
        choose([], PLAIN)


def test_intervals_are_paired_and_of_texts():
    """Samples of one text count as one, and what makes a text hard for both cancels."""
    easy, hard = scores(0.1, spread=3.0), scores(0.4, spread=3.0)
    assert score_difference(hard, easy).nll.half_width < 0.01 < easy.loss_interval().half_width
    rng = random.Random(1)
    of_text = [rng.gauss(0.3, 1.0) for _ in range(12)]
    nll = [loss for loss in of_text for _ in range(10)]
    groups = tuple(str(i // 10) for i in range(120))
    zero = Scores((0.0,) * 120, ((),) * 120, groups)
    clustered = score_difference(Scores(tuple(nll), ((),) * 120, groups), zero).nll
    t = stats.t.interval(0.95, 11, np.mean(of_text), stats.sem(of_text))
    assert clustered.low == pytest.approx(t[0], abs=0.15)
    assert clustered.high == pytest.approx(t[1], abs=0.15)


def test_a_control_is_held_against_the_same_texts_in_any_order():
    plain = scores(1.0, spread=1.0)
    order = list(range(TEXTS))[::-1][: TEXTS - 2]
    control = Scores(
        tuple(plain.nll[i] + 2 for i in order),
        tuple(() for _ in order),
        tuple(plain.groups[i] for i in order),
    )
    found = gain_over_control(plain, control)
    assert (found.low, found.estimate, found.high) == pytest.approx((2, 2, 2))
    with pytest.raises(ValueError, match="same texts"):
        gain_over_control(plain, Scores((1.0,), ((),), ("another",)))


@pytest.mark.parametrize("left", [1, 30, 100, 1000, 10**5])
@pytest.mark.parametrize("within", [0.1, 3.0])
@pytest.mark.parametrize("searchable", [0, 4])
def test_a_plan_fits_into_its_time(left, within, searchable):
    costs = BlockCosts(5.0, within)
    plan = budget.plan_budget(left, costs, rotations=4, max_blocks=16, max_search_blocks=searchable)
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
        alive.append(budget.halve(alive[-1]))
        new = min(2 * done, blocks)
        spent += (new - done) * (alive[-1] * costs.both + costs.within)
        done = new
    assert spent <= max(left, costs.long)
    assert plan.evaluations * plan.search_blocks * costs.long <= plan.search_seconds + 1e-9
    assert plan.evaluations == 0 or plan.evaluations >= budget.MIN_EVALUATIONS
    if left == 10**5:
        assert (plan.first_rotations, plan.samples) == (4, 96)
        assert (plan.search_blocks == 4) == bool(searchable)


def test_more_time_never_plans_less():
    plans = [budget.plan_budget(left, BlockCosts(5.0, 1.0), 4, 16, 4) for left in range(0, 4000, 7)]
    for a, b in pairwise(plans):
        assert (a.first_rotations, a.search_seconds) <= (b.first_rotations, b.search_seconds)
        assert a.search_blocks <= b.search_blocks


def test_a_search_gets_what_samples_do_not_need():
    """All is spent where there are no more samples, but for the margin that estimates need."""
    costs, left = BlockCosts(5.0, 1.0), 10**4
    plan = budget.plan_budget(left, costs, rotations=4, max_blocks=2, max_search_blocks=4)
    first, found, control = 4 * costs.both, costs.both, costs.long
    again = 4 * costs.both + costs.within  # the better half of seven, and the plain model
    assert plan.samples == 12
    assert plan.search_seconds + first + found + again + control == pytest.approx(left / 1.1)
    assert budget.plan_budget(left, costs, 4, max_blocks=2, max_search_blocks=0).search_seconds == 0


def test_the_least_is_two_methods_and_two_controls():
    costs = BlockCosts(long=10.0, within=3.0)
    whole = budget.minimum_seconds(costs, short=2.0) / 1.1
    assert whole == pytest.approx(2 * (10 + 3) + 10 + 2)
    assert budget.minimum_seconds(costs, short=2.0, done=1) / 1.1 == pytest.approx((10 + 3) + 10)
    assert math.isfinite(whole)
