"""Statistics of measurements: intervals, retention and usable length, tests between methods.

Pure functions on numbers. Everything random is drawn from a seed, so a report made twice is the
same report. Whether a difference is shown is decided by `mean_test`, of scores by
`paired_difference`; both show nothing below six texts. `Verdict` says what a difference of losses
shows after the correction for all that were compared.
"""

from rope_patch.statistics.bootstrap import bootstrap_mean, perplexity_interval, perplexity_ratio
from rope_patch.statistics.clustered_mean import (
    ClusteredMean,
    MeanTest,
    clustered_mean,
    hall_p_values,
    mean_test,
    two_means_p,
)
from rope_patch.statistics.intervals import (
    Interval,
    accuracy,
    clopper_pearson,
    grown,
    is_precise,
    required_samples,
    wilson,
)
from rope_patch.statistics.paired_tests import (
    PairedTest,
    holm,
    least_texts,
    mcnemar,
    paired_difference,
    sign_flip_p,
    sign_flip_test,
)
from rope_patch.statistics.power import (
    POWER,
    least_number,
    look_factor,
    required_texts,
    smallest_effect,
    texts_to_decide,
)
from rope_patch.statistics.retention import (
    USABLE_SHARE,
    UsableLength,
    above_chance,
    name_texts_needed,
    retention,
    stratified_mean,
    usable_length,
)
from rope_patch.statistics.verdict import SIGNIFICANCE_LEVEL, Outcome, Verdict, family_verdicts

__all__ = [
    "POWER",
    "SIGNIFICANCE_LEVEL",
    "USABLE_SHARE",
    "ClusteredMean",
    "Interval",
    "MeanTest",
    "Outcome",
    "PairedTest",
    "UsableLength",
    "Verdict",
    "above_chance",
    "accuracy",
    "bootstrap_mean",
    "clopper_pearson",
    "clustered_mean",
    "family_verdicts",
    "grown",
    "hall_p_values",
    "holm",
    "is_precise",
    "least_number",
    "least_texts",
    "look_factor",
    "mcnemar",
    "mean_test",
    "name_texts_needed",
    "paired_difference",
    "perplexity_interval",
    "perplexity_ratio",
    "required_samples",
    "required_texts",
    "retention",
    "sign_flip_p",
    "sign_flip_test",
    "smallest_effect",
    "stratified_mean",
    "texts_to_decide",
    "two_means_p",
    "usable_length",
    "wilson",
]
