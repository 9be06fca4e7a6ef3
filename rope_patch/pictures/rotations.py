"""Pictures of rotary encodings, of their distances, and of what extending does to their angles."""

from __future__ import annotations

import math
from typing import Any

import torch

from rope_patch.encodings.biases import (
    alibi_bias,
    alibi_slopes,
    exact_distances,
    fire_progress,
    kerple_log,
    kerple_power,
    sandwich,
    t5_bucket,
)
from rope_patch.encodings.sites.buckets import squeeze_distances
from rope_patch.encodings.sites.site import Stretch
from rope_patch.encodings.tables import dot_products, sinusoidal_table
from rope_patch.geometry import Geometry
from rope_patch.methods import build
from rope_patch.methods.position_map import PositionMap
from rope_patch.methods.registry import get_method
from rope_patch.ops.n_dimensional import axial_frequencies, mixed_frequencies
from rope_patch.pictures.picture import PictureOptions, register_picture
from rope_patch.pictures.renderer import Curve, Curves, Dial, Dials, Picture
from rope_patch.pictures.subject import read_rotation
from rope_patch.utils.errors import Refused

_ROTATION: dict[str, Any] = {"model": None, "trained": 64, "width": 64, "base": 10000.0}


def rotation_of(options: PictureOptions) -> tuple[str, Geometry]:
    """Return the rotation that the options describe, or the model's, with a name for it."""
    if options.model is None:
        geometry = Geometry(
            head_dim=options.width, theta=options.base, trained_length=options.trained
        )
        return f"base {options.base:g}", geometry
    options.refuse(("width", "base"), "the model decides it")
    return read_rotation(options.model, options.trained if "trained" in options.given else None)


@register_picture("clock", **_ROTATION, position=50)
def draw_clock(options: PictureOptions) -> Picture:
    """Draw a clock with a hand for each pair, and the angles that training has seen."""
    name, geometry = rotation_of(options)
    inv_freq, trained = geometry.inv_freq(), geometry.trained_length
    shown = torch.linspace(0, len(inv_freq) - 1, min(8, len(inv_freq))).round().long().unique()
    dials = [
        Dial(
            f"pair {int(pair)}",
            float(options.position * inv_freq[pair]) % (2 * math.pi),
            min(2 * math.pi, float((trained - 1) * inv_freq[pair])),
        )
        for pair in shown
    ]
    return Picture(
        [Dials(f"{name}: position {options.position:,}, trained on {trained:,} tokens", dials)],
        f"Some of the {len(inv_freq)} pairs. Each turns like the hand of a clock, from the right "
        "and against the clock, the first one fastest. Shaded are the angles of training. Hands "
        "that never completed a turn meet new angles in longer texts.",
    )


@register_picture("wavelengths", **_ROTATION, factor=4.0)
def draw_wavelengths(options: PictureOptions) -> Picture:
    """Draw how many tokens each pair takes for a turn."""
    name, geometry = rotation_of(options)
    inv_freq, trained = geometry.inv_freq(), geometry.trained_length
    pairs = torch.arange(len(inv_freq))
    lengths = {
        f"trained length, {trained:,}": torch.full_like(inv_freq, trained),
        f"target length, {trained * options.factor:,.0f}": torch.full_like(
            inv_freq, trained * options.factor
        ),
    }
    curves = [
        Curve(
            "wavelength", pairs, 2 * math.pi / inv_freq.where(inv_freq > 0, math.nan), marked=True
        )
    ]
    curves += [Curve(label, pairs, y) for label, y in lengths.items()]
    return Picture(
        [Curves(name, curves, "pair", "wavelength (tokens for a full turn)", y_log=True)],
        "Pairs below the trained length completed turns in training, so all of their angles are "
        "known. Those above it did not, and they are what a longer text breaks.",
    )


@register_picture("rotation", model=None, width=64, base=10000.0)
def draw_rotation(options: PictureOptions) -> Picture:
    """Draw one pair of a vector, rotated by positions 0 to 7."""
    name, geometry = rotation_of(options)
    inv_freq = geometry.inv_freq()
    pair = min(1, len(inv_freq) - 1)
    angles = torch.arange(8) * inv_freq[pair]
    curves = [
        Curve(
            f"position {n}",
            torch.tensor([0.0, float(angle.cos())]),
            torch.tensor([0.0, float(angle.sin())]),
        )
        for n, angle in enumerate(angles)
    ]
    return Picture(
        [Curves(f"{name}, pair {pair}", curves, "first component", "second component", equal=True)],
        "The length of the vector stays, and each token turns it by the same angle. So the product "
        "of a query and a key depends on the difference of their positions alone.",
    )


@register_picture("angles", **_ROTATION, method="yarn", factor=4.0)
def draw_angles(options: PictureOptions) -> Picture:
    """Draw what a method does to the largest angle of each pair."""
    name = options.method or "yarn"
    if issubclass(get_method(name), PositionMap):
        raise Refused(f"{name} stretches no angles, expected a method of frequencies, such as yarn")
    source, geometry = rotation_of(options)
    plain, trained = geometry.inv_freq(), geometry.trained_length
    target = trained * options.factor
    method = build(name, factor=options.factor)
    scaled = method.frequencies(geometry, target).inv_freq
    pairs = torch.arange(len(plain))
    turn = 2 * math.pi
    curves = [
        Curve("seen in training", pairs, plain * (trained - 1) / turn),
        Curve("target length, as it is", pairs, plain * (target - 1) / turn),
        Curve(f"target length, {name}", pairs, scaled * (target - 1) / turn, marked=True),
        Curve("one turn", pairs, torch.ones_like(plain)),
    ]
    return Picture(
        [
            Curves(
                f"{source}: {trained:,} to {round(target):,} tokens",
                curves,
                "pair",
                "turns at the last position",
                y_log=True,
            )
        ],
        "Above one turn every angle is known, whatever the length. Below it, a pair must not turn "
        "further than it did in training: there the method's points should lie on the line of what "
        "was seen.",
    )


@register_picture("grid", width=64, base=10000.0)
def draw_grid(options: PictureOptions) -> Picture:
    """Draw which axis of an image each pair serves, in three kinds of two-dimensional RoPE."""
    width, base = options.width, options.base
    if width % 4:
        raise Refused(f"width must be a multiple of 4, two pairs for two axes, got {width}")
    kinds = {
        "axial, halves (Qwen2-VL)": axial_frequencies(width, 2, base),
        "axial, in turn (Pixtral)": axial_frequencies(width, 2, base, spectrum="alternate"),
        "mixed (RoPE-Mixed)": mixed_frequencies(
            width, 2, base, generator=torch.Generator().manual_seed(0)
        ),
    }
    panels = []
    for title, frequencies in kinds.items():
        # A pair of another axis does not turn: it has no point on a logarithmic axis.
        sizes = frequencies.abs().where(frequencies != 0, math.nan)
        pairs = torch.arange(len(sizes))
        curves = [
            Curve(name, pairs, sizes[:, axis], marked=True)
            for axis, name in enumerate(("along the height", "along the width"))
        ]
        panels.append(Curves(title, curves, "pair", "radians per patch", y_log=True))
    return Picture(
        panels,
        "Axial RoPE gives each pair one axis: it turns with the row or with the column, never with "
        "both. Either each axis has a half of the pairs with all wavelengths, or the wavelengths "
        "are dealt to the axes in turn. Mixed RoPE turns every pair with both axes, in directions "
        "that are random at first and then learned.",
    )


_BUCKETS = 32  # buckets of distances in T5's decoders
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
