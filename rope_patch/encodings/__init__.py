"""Positional encodings other than rotation, as pure functions in float64."""

from rope_patch.utils.front import front

front(
    __name__,
    {
        "alibi": "alibi_bias alibi_slopes linear_slopes ntk_slopes",
        "counted": "digit_count digit_table integer_table normalised_table",
        "decay": "fire_progress kerple_log kerple_power sandwich xpos_factors",
        "learned": "stretch_table",
        "sinusoidal": "dot_products shift_matrix sinusoidal_table",
        "t5_buckets": "squeeze_tail t5_bucket",
    },
)
