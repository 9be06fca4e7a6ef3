"""Names of methods that extend encodings other than rotation, for lists and errors.

They are formulas of `rope_patch.patching.encodings` and no classes of this package. Names that
rotary methods have, too (`linear`, `ntk`, `dynamic-linear`), are left out.
"""

from __future__ import annotations

PAGE = "docs/other-encodings.md"

# By name: what it extends, and what it does.
ENCODING_METHODS = {
    "cubic": ("learned tables of positions", "Bicubic interpolation between trained rows."),
    "tile": ("learned tables of positions", "Trained rows, repeated."),
    "dynamic-ntk": ("ALiBi's slopes", "ntk by a factor that follows the text."),
    "log-tail": (
        "T5's buckets of distances",
        "Near distances keep their buckets; longer ones are squeezed into trained buckets.",
    ),
    "max-distance": ("T5's buckets of distances", "The last bucket begins later."),
    "dynamic-log-tail": (
        "T5's buckets of distances",
        "log-tail by a factor that follows the text.",
    ),
}
