"""Pictures of what encodings do with the distance between two tokens."""

from __future__ import annotations

import torch

from rope_patch.encodings.alibi import alibi_bias, alibi_slopes
from rope_patch.encodings.decay import fire_progress, kerple_log, kerple_power, sandwich
from rope_patch.encodings.sinusoidal import dot_products, sinusoidal_table
from rope_patch.encodings.t5_buckets import exact_distances, t5_bucket
from rope_patch.patching.encodings.buckets import squeeze_distances
from rope_patch.patching.encodings.site import Stretch
from rope_patch.pictures.panels import Curve, Curves, Picture
from rope_patch.pictures.picture import PictureOptions, register_picture

_BUCKETS = 32  # of T5's decoders
_SQUEEZES = {"log-tail": "far distances squeezed", "linear": "all distances divided"}
# FIRE's initial values (arXiv:2310.04418); both are learned.
FIRE_RATE, FIRE_THRESHOLD = 0.1, 512.0


@register_picture("decay", length=128, width=64, heads=8, base=10000.0)
def draw_decay(options: PictureOptions) -> Picture:
    """Draw dot products and biases against distance."""
    distances = torch.arange(options.length)
    products = dot_products(distances, options.width, options.base)
    generator = torch.Generator().manual_seed(0)
    size = (options.width, options.width)
    projected = []
    angles = sinusoidal_table(distances, options.width, base=options.base)
    for _ in range(3):
        weights = torch.randn(size, generator=generator, dtype=torch.float64) / options.width**0.5
        projected.append((angles @ weights @ angles[0]) / (options.width / 2))
    slope = alibi_slopes(options.heads)[options.heads // 2]
    first = [Curve("sinusoids, RoPE", distances, products / products[0])]
    first += [Curve(f"projection {n}", distances, y) for n, y in enumerate(projected, 1)]
    biases = [
        Curve("ALiBi", distances, alibi_bias(slope[None], distances)[0]),
        Curve("KERPLE, logarithmic", distances, kerple_log(distances, 1.0, 0.1)),
        Curve("KERPLE, power", distances, kerple_power(distances, 0.2, 0.5)),
        Curve("Sandwich", distances, sandwich(distances, options.heads)[options.heads // 2]),
        Curve("T5, synthetic table", distances, -t5_bucket(-distances).double().log1p()),
    ]
    progress = []
    for query in (options.length - 1, 8 * options.length - 1):
        share = fire_progress(
            torch.full_like(distances, query), query - distances, FIRE_RATE, FIRE_THRESHOLD
        )
        progress.append(Curve(f"query at {query:,}", distances, share))
    return Picture(
        [
            Curves("products of encodings", first, "distance (tokens)", "product / that at 0"),
            Curves("biases on logits", biases, "distance (tokens)", "added to the logit"),
            Curves("input of FIRE's network", progress, "distance (tokens)", "share"),
        ],
        "Products of sinusoids, and of equal vectors under RoPE, fall with distance, but after "
        "random projections, as in attention, nothing of that is left. Biases fall by "
        "construction: ALiBi in a line, KERPLE ever more slowly, Sandwich with the ripples of the "
        "sinusoids that it sums. "
        "T5 learns a number for each bucket; the steps here are those of its buckets, and their "
        "heights -ln(1 + bucket) are made up. FIRE learns a network on top of the share of the "
        f"query's own distance, so that share is drawn, with its initial c = {FIRE_RATE:g} and "
        f"threshold {FIRE_THRESHOLD:g}: of later queries the same distance is a smaller share.",
    )


@register_picture("buckets", trained=64, factor=4.0)
def draw_buckets(options: PictureOptions) -> Picture:
    """Draw T5's bucket of each distance, and how longer texts are put into trained buckets."""
    target = round(options.trained * options.factor)
    distances = torch.arange(target)
    curves = [Curve("as trained", distances, t5_bucket(-distances))]
    for method, label in _SQUEEZES.items():
        stretch = Stretch(method, options.trained, target)
        squeezed = squeeze_distances(distances, stretch, exact_distances(_BUCKETS))
        curves.append(Curve(label, distances, t5_bucket(-squeezed)))
    return Picture(
        [
            Curves(
                "32 buckets up to 128",
                curves,
                "distance (tokens)",
                "bucket",
                bounds={"trained length": options.trained},
            )
        ],
        "Near distances have a bucket each. Buckets that only distances beyond the trained length "
        "reach are untrained. Squeezing the far ones avoids those and keeps the near order; "
        "dividing all distances loses it.",
    )
