"""Pictures of rotary encodings, and of what extending does to their angles."""

from __future__ import annotations

import math

import torch

from rope_patch.geometry import Geometry
from rope_patch.methods import build
from rope_patch.methods.position_map import PositionMap
from rope_patch.methods.registry import get_method
from rope_patch.pictures.picture import (
    Curve,
    Curves,
    Dial,
    Dials,
    Picture,
    PictureOptions,
    register_picture,
)
from rope_patch.utils.errors import Refused


def geometry_of(options: PictureOptions) -> Geometry:
    """Return the rotation that the options describe."""
    return Geometry(head_dim=options.width, theta=options.base, trained_length=options.trained)


@register_picture("clock")
def draw_clock(options: PictureOptions) -> Picture:
    """Draw a clock with a hand for each pair, and the angles that training has seen."""
    inv_freq = geometry_of(options).inv_freq()
    shown = torch.linspace(0, len(inv_freq) - 1, min(8, len(inv_freq))).round().long().unique()
    dials = [
        Dial(
            f"pair {int(pair)}",
            float(options.position * inv_freq[pair]) % (2 * math.pi),
            min(2 * math.pi, float((options.trained - 1) * inv_freq[pair])),
        )
        for pair in shown
    ]
    return Picture(
        [Dials(f"position {options.position}, trained on {options.trained} tokens", dials)],
        "Each pair turns like a hand of a clock, the first one fastest. Shaded are the angles that "
        "occurred in training. Hands that never completed a turn meet new angles in longer texts.",
    )


@register_picture("wavelengths")
def draw_wavelengths(options: PictureOptions) -> Picture:
    """Draw how many tokens each pair takes for a turn."""
    inv_freq = geometry_of(options).inv_freq()
    pairs = torch.arange(len(inv_freq))
    lengths = {
        "trained length": torch.full_like(inv_freq, options.trained),
        "target length": torch.full_like(inv_freq, options.trained * options.factor),
    }
    curves = [Curve("wavelength", pairs, 2 * math.pi / inv_freq, marked=True)]
    curves += [Curve(name, pairs, y, dashed=True) for name, y in lengths.items()]
    return Picture(
        [
            Curves(
                f"base {options.base:g}",
                curves,
                "pair",
                "tokens for a full turn",
                y_log=True,
            )
        ],
        "Pairs below the trained length completed turns in training, so all of their angles are "
        "known. Those above it did not, and they are what a longer text breaks.",
    )


@register_picture("rotation")
def draw_rotation(options: PictureOptions) -> Picture:
    """Draw one pair of a vector, rotated by positions 0 to 7."""
    inv_freq = geometry_of(options).inv_freq()
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
        [Curves(f"pair {pair}", curves, "first component", "second component", equal=True)],
        "The length of the vector stays, and each token turns it by the same angle. So the product "
        "of a query and a key depends on the difference of their positions alone.",
    )


@register_picture("angles")
def draw_angles(options: PictureOptions) -> Picture:
    """Draw what a method does to the largest angle of each pair."""
    if issubclass(get_method(options.method), PositionMap):
        raise Refused(
            f"{options.method} stretches no angles, expected a method of frequencies, such as yarn"
        )
    geometry = geometry_of(options)
    plain = geometry.inv_freq()
    method = build(options.method, factor=options.factor)
    scaled = method.frequencies(geometry, options.trained * options.factor).inv_freq
    target = options.trained * options.factor
    pairs = torch.arange(len(plain))
    turn = 2 * math.pi
    curves = [
        Curve("seen in training", pairs, plain * (options.trained - 1) / turn),
        Curve("target length, as it is", pairs, plain * (target - 1) / turn, dashed=True),
        Curve(f"target length, {options.method}", pairs, scaled * (target - 1) / turn, marked=True),
    ]
    return Picture(
        [
            Curves(
                f"{options.trained} to {round(target)} tokens",
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
