"""Positional encodings other than rotation: their formulas, and what changes a model by them.

`tables` and `biases` are pure functions in float64. `sites` finds where a model keeps positions,
and extends it; `patch` comes here with what does not rotate. `replacement` gives an untrained
decoder another encoding (`encode`). Open `sites/plan.py` first. Code that stores, exports, measures
or describes such models asks `encoding_facts(model)`, and a patch its `facts`.
"""

from rope_patch.utils.lazy_exports import export_lazily

export_lazily(
    __name__,
    {
        "biases": (
            "alibi_bias alibi_slopes fire_progress kerple_log kerple_power "
            "linear_slopes ntk_slopes sandwich squeeze_tail t5_bucket xpos_factors"
        ),
        "replacement.encoding": "Span",
        "replacement.entry_point": "encode list_encodings",
        "replacement.hooks": "AttentionHook biased_mask SharedTensors Slots",
        "sites.buckets": "BucketsSite",
        "sites.plan": "EncodingFacts encoding_facts",
        "sites.site": "SiteFacts",
        "sites.slopes": "SlopesSite",
        "sites.table": "LearnedTableSite SinusoidalTableSite",
        "tables": (
            "digit_count digit_table dot_products integer_table normalised_table "
            "shift_matrix sinusoidal_table stretch_table"
        ),
    },
)
