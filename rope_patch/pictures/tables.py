"""Pictures of encodings that are added to embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from rope_patch.encodings.counted import digit_count, digit_table, integer_table, normalised_table
from rope_patch.encodings.learned import stretch_table
from rope_patch.encodings.sinusoidal import sinusoidal_table
from rope_patch.pictures.picture import (
    Curve,
    Curves,
    HeatMap,
    Path,
    Picture,
    PictureOptions,
    register_picture,
)
from rope_patch.utils.errors import Refused, did_you_mean

_STRETCHED_ROWS = 16  # trained rows that the picture `stretch` shows

TABLES: dict[str, Callable[[PictureOptions], torch.Tensor]] = {
    "integer": lambda o: integer_table(torch.arange(o.length), o.width),
    "normalised": lambda o: normalised_table(torch.arange(o.length), o.width, o.length),
    "binary": lambda o: _digits(o, 2),
    "base4": lambda o: _digits(o, 4),
    "sinusoidal": lambda o: sinusoidal_table(torch.arange(o.length), o.width, base=o.base),
    "sinusoidal-halves": lambda o: sinusoidal_table(
        torch.arange(o.length), o.width, base=o.base, layout="halves"
    ),
}


def encoding_table(options: PictureOptions) -> torch.Tensor:
    """Return the table of an encoding, `[length, width]`.

    Raises:
        ValueError: The encoding is unknown, or its digits are more than the components.
    """
    name = options.encoding
    if name not in TABLES:
        raise Refused(
            f"unknown encoding {name!r}{did_you_mean(name, TABLES)}; there are {', '.join(TABLES)}"
        )
    return TABLES[name](options)


def _digits(options: PictureOptions, base: int) -> torch.Tensor:
    count = digit_count(options.length, base)
    return digit_table(torch.arange(options.length), options.width, count=count, base=base)


@register_picture("table")
def draw_table(options: PictureOptions) -> Picture:
    """Draw an encoding of absolute positions as a heat map."""
    panel = HeatMap(
        f"{options.encoding}, {options.length} positions",
        encoding_table(options),
        "component",
        "position (tokens)",
    )
    return Picture(
        [panel],
        "Each row is what is added to the embedding of the token at that position. Rows must "
        "differ, and for a model to reach further, rows beyond training should look like trained "
        "ones.",
    )


@register_picture("waves")
def draw_waves(options: PictureOptions) -> Picture:
    """Draw single components over positions."""
    table = encoding_table(options)
    positions = torch.arange(options.length)
    chosen = sorted({0, options.width // 3, options.width // 2, options.width - 2})
    curves = [Curve(f"component {n}", positions, table[:, n]) for n in chosen]
    return Picture(
        [Curves(options.encoding, curves, "position (tokens)", "value")],
        "The first components of a sinusoidal encoding change with every token, the last ones over "
        "the whole text, as the digits of a number do.",
    )


@register_picture("digits")
def draw_digits(options: PictureOptions) -> Picture:
    """Draw binary digits beside sinusoids: the same idea, in steps and smooth."""
    length = min(options.length, 32)
    count = digit_count(length)
    bits = digit_table(torch.arange(length), count, signed=True)
    # Wavelengths that double, as those of bits do: bit k repeats after 2 ** (k + 1) positions.
    # Half a token later, so that the fastest sine is not read at its zeros.
    middles = torch.arange(length, dtype=torch.float64)[:, None] + 0.5
    waves = -(middles * math.pi / 2.0 ** torch.arange(count)).sin()
    return Picture(
        [
            HeatMap("binary digits", bits, "digit", "position (tokens)", (-1, 1)),
            HeatMap("sines of the same periods", waves, "component", "position (tokens)", (-1, 1)),
        ],
        "A bit alternates with a period of its own. A sine of that period alternates likewise but "
        "changes smoothly, so that near positions have near codes.",
    )


@register_picture("difference")
def draw_difference(options: PictureOptions) -> Picture:
    """Draw differences between the encodings of two positions."""
    table = encoding_table(options)
    components = torch.arange(options.width)
    last = options.length - 1
    pairs = sorted({(min(options.position, last), 0), (last, 0)})
    curves = [
        Curve(f"position {a} minus position {b}", components, table[a] - table[b], marked=True)
        for a, b in pairs
    ]
    return Picture(
        [Curves(options.encoding, curves, "component", "difference")],
        "Fast components differ between any two positions. Slow ones differ only where positions "
        "are far apart: they tell far from near.",
    )


@register_picture("walk")
def draw_walk(options: PictureOptions) -> Picture:
    """Draw positions as points of a walk in three dimensions: bits jump, sinusoids glide."""
    positions = torch.arange(min(options.length, 32))
    bits = digit_table(positions % 8, 3)
    angles = positions[:, None] * torch.tensor([math.pi / 4, math.pi / 16])
    smooth = torch.stack([angles[:, 0].sin(), angles[:, 0].cos(), angles[:, 1].sin()], dim=1)
    return Picture(
        [Path("three lowest bits", bits), Path("sine, cosine, slower sine", smooth)],
        "With bits, the next position may be at the other corner of the cube. With sines and "
        "cosines each step is as short as the one before.",
    )


@register_picture("stretch")
def draw_stretch(options: PictureOptions) -> Picture:
    """Draw a learned table stretched to more rows."""
    trained = options.trained
    rows = round(trained * options.factor)
    # Stands for a learned table: smooth over positions, as trained ones are.
    table = sinusoidal_table(torch.arange(trained), options.width, base=options.base)
    component = table[:, [2 * (options.width // 32)]]  # fast enough to bend between two rows
    places = torch.arange(rows) * trained / rows
    near = places < _STRETCHED_ROWS
    curves = [
        Curve(how, places[near], stretch_table(component, rows, how)[near, 0])
        for how in ("linear", "cubic")
    ]
    trained_rows = torch.arange(min(trained, _STRETCHED_ROWS))
    curves.append(Curve("trained rows", trained_rows, component[trained_rows, 0], marked=True))
    return Picture(
        [
            Curves(
                f"{trained} trained rows read as {rows}, the first of them",
                curves,
                "position in the trained table (tokens)",
                "value of a component",
            )
        ],
        "Interpolation reads the table between its rows. With a whole factor, linear interpolation "
        "keeps every trained row in its place. Cubic interpolation, as image models use it, takes "
        "rows for the middles of cells and shifts them by up to half a row.",
    )
