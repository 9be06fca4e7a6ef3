"""Defects of statistics: intervals, tests between methods, retention, power."""

from regressions.defect import Defect

DEFECTS = [
    Defect(
        "a difference is shown by the t test alone, whatever its signs flips say",
        "rope_patch/statistics/clustered_mean.py",
        "tuple(by_text.tolist()), max(p_flips, p_hall))",
        "tuple(by_text.tolist()), p_hall)",
        ("tests/statistics/test_mean_test.py::test_nothing_is_shown_below_six_texts",),
    ),
    Defect(
        "the interval of a difference is that of sign flips alone, and excludes zero where p does not",
        "rope_patch/statistics/clustered_mean.py",
        "    low, high = min(flip_bounds[0], hall_bounds[0]), max(flip_bounds[1], hall_bounds[1])\n",
        "    low, high = flip_bounds\n",
        (
            "tests/statistics/test_mean_test.py::test_zero_is_outside_the_interval_where_p_is_below_the_level_and_only_there",
        ),
    ),
    Defect(
        "the t test of a difference takes no account of skewness",
        "rope_patch/statistics/clustered_mean.py",
        "    straight = np.abs(skewness) < _STRAIGHT\n",
        "    straight = np.abs(skewness) < np.inf\n",
        ("tests/statistics/test_mean_test.py::test_halls_t_is_the_papers",),
    ),
    Defect(
        "one small gain among large ones makes them doubtful, as the cubic of skewness turns flat",
        "rope_patch/statistics/clustered_mean.py",
        "bent = np.where(curve < 0, np.minimum(t, _KNEE / np.abs(curve)), t)",
        "bent = t",
        (
            "tests/statistics/test_mean_test.py::test_one_small_gain_among_large_ones_is_no_doubt_of_them",
        ),
    ),
    Defect(
        "the observed signs are left out of sampled patterns, so that p can be 0",
        "rope_patch/statistics/paired_tests.py",
        "        patterns = np.concatenate([np.zeros((1, texts), dtype=np.int8), others])\n",
        "        patterns = others\n",
        (
            "tests/statistics/test_mean_test.py::test_more_texts_than_can_be_enumerated_are_sampled_and_never_certain",
        ),
    ),
    Defect(
        "samples of one text count as independent in the mean of likelihoods",
        "rope_patch/statistics/clustered_mean.py",
        "    return cluster_sums(weights * numbers, clusters, weights)\n",
        "    return cluster_sums(weights * numbers, range(len(values)), weights)\n",
        ("tests/statistics/test_mean_test.py::test_equal_texts_have_the_interval_of_their_means",),
    ),
    Defect(
        "two means over other texts are compared by Welch's test alone, which few skewed texts fool",
        "rope_patch/statistics/clustered_mean.py",
        "    return max(permuted, 2 * float(",
        "    return max(0.0, 2 * float(",
        (
            "tests/statistics/test_mean_test.py::test_means_of_other_texts_are_compared_by_welch_s_and_a_permutation_test",
        ),
    ),
    Defect(
        "the mean of tasks pools their samples, so that the task with most samples decides",
        "rope_patch/statistics/retention.py",
        "    mean = math.fsum(s.estimate for s in strata) / count\n",
        "    mean = math.fsum(s.estimate * s.n for s in strata) / sum(s.n for s in strata)\n",
        ("tests/statistics/test_retention.py::test_the_mean_of_tasks_does_not_pool_their_samples",),
    ),
    Defect(
        "the interval of the mean of tasks is the mean of their intervals",
        "rope_patch/statistics/retention.py",
        "    below = math.hypot(*(s.estimate - s.low for s in strata)) / count\n",
        "    below = math.fsum(s.estimate - s.low for s in strata) / count / 4\n",
        (
            "tests/statistics/test_retention.py::test_the_mean_of_tasks_covers_whatever_their_numbers_of_samples",
        ),
    ),
    Defect(
        "what guessing gets counts as retained accuracy",
        "rope_patch/statistics/retention.py",
        "        estimate=interval.estimate - chance,\n        low=interval.low - chance,\n        high=interval.high - chance,\n",
        "        estimate=interval.estimate,\n        low=interval.low,\n        high=interval.high,\n",
        ("tests/statistics/test_retention.py::test_guessing_keeps_nothing",),
    ),
    Defect(
        "a length counts as usable by its estimate, whatever its lower bound",
        "rope_patch/statistics/retention.py",
        "takewhile(lambda length: kept[length].low >= share, lengths)",
        "takewhile(lambda length: kept[length].estimate >= share, lengths)",
        ("tests/statistics/test_retention.py::test_a_usable_length_and_its_interval",),
    ),
    Defect(
        "the usable length is the longest that is kept, whatever is lost below it",
        "rope_patch/statistics/retention.py",
        "    shown = list(takewhile(lambda length: kept[length].low >= share, lengths))\n",
        "    shown = [length for length in lengths if kept[length].low >= share]\n",
        ("tests/statistics/test_retention.py::test_a_usable_length_and_its_interval",),
    ),
    Defect(
        "a usable length is shown by Wilson's bound, which errs in more than 2.5% of runs",
        "rope_patch/evaluation/report/results/retrieval.py",
        "lengths=(length,), bounds=statistics.clopper_pearson)",
        "lengths=(length,), bounds=statistics.wilson)",
        (
            "tests/evaluation/report/test_task_means.py::test_so_many_texts_as_a_usable_length_needs_do",
        ),
    ),
    Defect(
        "few blocks of one document get percentiles of two draws, which cover 66% where 95% is said",
        "rope_patch/statistics/bootstrap.py",
        "if math.isfinite(estimate) and 2 <= count <= FEW_BLOCKS and len(documents) < MIN_DOCUMENTS:",
        "if False:",
        ("tests/statistics/test_bootstrap.py::test_few_blocks_get_students_t",),
    ),
    Defect(
        "percentiles of few resampled units are not widened",
        "rope_patch/statistics/bootstrap.py",
        "    level = special.ndtr(-math.sqrt(units / (units - 1)) * t)\n",
        "    level = half_alpha(confidence) + 0 * t\n",
        ("tests/statistics/test_bootstrap.py::test_bootstrap_intervals_have_their_coverage",),
    ),
    Defect(
        "blocks at a document's ends are drawn less often than others",
        "rope_patch/statistics/bootstrap.py",
        "    wrapped = np.concatenate([values, values[: length - 1]])\n    return np.lib.stride_tricks.sliding_window_view(wrapped, length)",
        "    return np.lib.stride_tricks.sliding_window_view(values, length)",
        ("tests/statistics/test_bootstrap.py::test_every_block_of_a_document_has_the_same_weight",),
    ),
    Defect(
        "a single miss raises the lower bound, as it makes samples of a text look independent",
        "rope_patch/statistics/intervals.py",
        "    low, high = min(interval.low, perfect), max(interval.high, 1 - perfect)\n",
        "    low, high = interval.low, interval.high\n",
        ("tests/statistics/test_intervals.py::test_one_miss_more_never_raises_a_bound",),
    ),
    Defect(
        "equal scores of samples that share texts count as independent",
        "rope_patch/statistics/intervals.py",
        "        effective = least\n        if np.ptp",
        "        if np.ptp",
        ("tests/statistics/test_intervals.py::test_equal_scores_count_as_one_sample_a_text",),
    ),
    Defect(
        "a failed sample counts as a miss",
        "rope_patch/statistics/intervals.py",
        "    values = as_scores([scores[i] for i in scored])\n    n = len(values)\n",
        "    scored = list(range(len(scores)))\n    values = as_scores([score or 0.0 for score in scores])\n    n = len(values)\n",
        ("tests/statistics/test_intervals.py::test_failed_samples_are_counted_and_excluded",),
    ),
    Defect(
        "pairs that share a text are tested as independent ones",
        "rope_patch/statistics/paired_tests.py",
        "    if exact and whole and len(sizes) == len(scored) and np.ptp(weights) == 0:\n",
        "    if exact and whole and np.ptp(weights) == 0:\n",
        ("tests/statistics/test_paired_tests.py::test_pairs_that_share_texts_are_not_independent",),
    ),
    Defect(
        "tasks with more samples weigh more in the test between two methods",
        "rope_patch/statistics/paired_tests.py",
        "    weights = stratum_weights([groups[i] for i in scored])\n",
        "    weights = np.ones(len(scored))\n",
        ("tests/statistics/test_paired_tests.py::test_each_stratum_counts_the_same",),
    ),
    Defect(
        "methods that agree on every sample have a difference of zero for certain",
        "rope_patch/statistics/paired_tests.py",
        "    sums = np.concatenate([sums, [size, -size]])\n    sizes = np.concatenate([sizes, [size, size]])\n",
        "",
        (
            "tests/statistics/test_paired_tests.py::test_methods_that_agree_everywhere_are_not_proven_equal",
        ),
    ),
    Defect(
        "the interval of a paired difference excludes zero where the test does not",
        "rope_patch/statistics/paired_tests.py",
        "        low, high = min(low, 0.0), max(high, 0.0)\n",
        "        pass\n",
        (
            "tests/statistics/test_paired_tests.py::test_the_interval_shows_nothing_that_the_test_does_not",
        ),
    ),
    Defect(
        "Holm's adjusted p-values fall below those of smaller ones",
        "rope_patch/statistics/paired_tests.py",
        "np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))",
        "p[order] * np.arange(len(p), 0, -1)",
        ("tests/statistics/test_paired_tests.py::test_holm_equals_hand_computed_values",),
    ),
    Defect(
        "the plan of a run counts the t test alone, and promises what few texts do not show",
        "rope_patch/statistics/power.py",
        "        shown &= ((flipped <= 0) | (flipped >= totals)).mean(axis=1) < level\n",
        "        del flipped, totals\n",
        (
            "tests/statistics/test_mean_test.py::test_four_of_five_simulated_runs_show_the_smallest_effect",
        ),
    ),
    Defect(
        "repeated looks at growing data are each tested at the whole level",
        "rope_patch/statistics/power.py",
        "    return looks * (looks + 1) if looks else 1\n",
        "    return 1\n",
        ("tests/statistics/test_mean_test.py::test_the_levels_of_all_looks_sum_to_the_level",),
    ),
]
