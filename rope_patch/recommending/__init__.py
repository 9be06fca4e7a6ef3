"""Recommend a method for one checkpoint by measuring all of them on it."""

from rope_patch.recommending.pipeline import recommend
from rope_patch.utils.lazy_exports import export_lazily

__all__ = ["recommend"]

export_lazily(
    __name__,
    {
        "budget": "BlockCosts minimum_seconds plan_budget",
        "decision_rule": (
            "choose gain_over_control MeasuredVariant score_difference Scores usable_length_of "
            "VariantScores"
        ),
        "result": "Recommendation recommendation_markdown",
        "sample_sets": "from_user_samples needle_blocks",
        "variants": "export_command patch_call rotation_key standard_variants UNPATCHED Variant",
    },
)
