"""Draw encodings that are added to embeddings: their tables, components and differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.encodings.tables import (
    digit_count,
    digit_table,
    integer_table,
    normalised_table,
    sinusoidal_table,
    stretch_table,
)
from rope_patch.geometry import Geometry
from rope_patch.ops.reference import rotate
from rope_patch.pictures.picture import PictureOptions, register_picture
from rope_patch.pictures.renderer import Curve, Curves, HeatMap, Path, Picture
from rope_patch.pictures.subject import learned_tables
from rope_patch.utils.errors import Refused, did_you_mean

_STRETCHED_ROWS = 16  # trained rows that the picture `stretch` shows
_TABLE: dict[str, Any] = {
    "encoding": None,
    "model": None,
    "length": 128,
    "width": 64,
    "base": 10000.0,
}


@register_picture("table", **_TABLE)
def draw_table(options: PictureOptions) -> Picture:
    """Draw an encoding of absolute positions as a heat map."""
    name = encoding_name(options)
    if name == "rope":
        angles = rope_angles(options)
        panels = [
            HeatMap(f"{wave} of RoPE's angles", values, "pair", "position (tokens)", (-1, 1), wave)
            for wave, values in (("cosine", angles.cos()), ("sine", angles.sin()))
        ]
        return Picture(
            panels,
            "The numbers that turn each pair of a query or key at each position. They are "
            "sinusoids, as those that the first transformers added, but they multiply: pair k of "
            "the vector is rotated by its angle, and its length stays.",
        )
    panels = []
    for title, table in encoding_tables(options).items():
        panels.append(
            HeatMap(
                f"{title}, {len(table)} positions",
                table,
                "component",
                "position (tokens)",
                _inner_limits(table) if options.model is not None else None,
            )
        )
    caption = f"Each row is what is added to the token at that position. {ENCODINGS[name].about}"
    if options.model is not None:
        caption += " Colours end at the 1st and the 99th percentile."
    return Picture(panels, caption)


def _inner_limits(values: torch.Tensor) -> tuple[float, float]:
    """Return the 1st and the 99th percentile, because outliers would flatten all else."""
    low, high = values.quantile(torch.tensor([0.01, 0.99], dtype=values.dtype)).tolist()
    return low, high


@register_picture("waves", **_TABLE)
def draw_waves(options: PictureOptions) -> Picture:
    """Draw single components over positions."""
    panels = []
    for title, table in encoding_tables(options).items():
        width = table.shape[1]
        positions = torch.arange(len(table))
        chosen = sorted({0, width // 3, width // 2, width - 2})
        curves = [Curve(f"component {n}", positions, table[:, n]) for n in chosen]
        panels.append(Curves(title, curves, "position (tokens)", "value"))
    name = encoding_name(options)
    see = ENCODINGS[name].about
    if name == "learned":
        see += (
            " Neighbours came to be similar in training, so the lines are mostly smooth: that is "
            "what lets a table be read between its rows."
        )
    elif "base" in ENCODINGS[name].options:
        see += (
            " The fastest pair changes with every token, the slowest hardly at all, as the digits "
            "of a number do."
        )
    return Picture(panels, f"Single components over positions. {see}")


@register_picture("digits", length=32)
def draw_digits(options: PictureOptions) -> Picture:
    """Draw binary digits beside sinusoids: the same idea, in steps and smooth."""
    length = options.length
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
        "Digit k has a period of 2^(k+1) positions. A sine of that period alternates likewise but "
        "changes smoothly, so that near positions have near codes.",
    )


@register_picture("bases", length=64)
def draw_bases(options: PictureOptions) -> Picture:
    """Draw positions written in bases 2, 4, 8 and 16."""
    positions = torch.arange(options.length)
    panels = []
    for base in (2, 4, 8, 16):
        count = digit_count(options.length, base)
        table = digit_table(positions, count, base=base)
        panels.append(
            HeatMap(
                f"base {base}", table, "digit", "position (tokens)", (0, 1), "digit / (base - 1)"
            )
        )
    return Picture(
        panels,
        "The same positions, the fastest digit first. A larger base needs fewer digits, each of "
        "which takes more values and falls from the largest to 0 when it overflows. The base of "
        "sinusoids is another kind: it sets how the wavelengths spread.",
    )


@register_picture("difference", **_TABLE, position=50)
def draw_difference(options: PictureOptions) -> Picture:
    """Draw differences between the encodings of two positions."""
    panels = []
    for title, table in encoding_tables(options).items():
        components = torch.arange(table.shape[1])
        last = len(table) - 1
        pairs = sorted({(min(options.position, last), 0), (last, 0)})
        curves = [
            Curve(f"{a:,} minus {b}", components, table[a] - table[b], marked=True)
            for a, b in pairs
        ]
        limits = None
        if options.model is not None:
            low, high = _inner_limits(torch.stack([curve.y for curve in curves]))
            limits = (2 * low, 2 * high)
        panels.append(
            Curves(title, curves, "component", "difference of two positions", y_limits=limits)
        )
    about = "What tells two positions apart."
    if "base" in ENCODINGS[encoding_name(options)].options:
        about += (
            " Fast components differ between any two positions, slow ones only where positions are "
            "far apart: they tell far from near."
        )
    if options.model is not None:
        about += (
            " Every component of a learned table may take part. The axis ends at twice the 1st and "
            "the 99th percentile, so single components may lie outside."
        )
    return Picture(panels, about)


@register_picture("walk", length=32)
def draw_walk(options: PictureOptions) -> Picture:
    """Draw positions as points of a walk in three dimensions: bits jump, sinusoids glide."""
    positions = torch.arange(options.length)
    bits = digit_table(positions % 8, 3)
    angles = positions[:, None] * torch.tensor([math.pi / 4, math.pi / 16])
    smooth = torch.stack([angles[:, 0].sin(), angles[:, 0].cos(), angles[:, 1].sin()], dim=1)
    return Picture(
        [
            Path("three lowest bits", bits, ("bit 0", "bit 1", "bit 2")),
            Path("sine, cosine, slower sine", smooth, ("sine", "cosine", "slower sine")),
        ],
        "Each point is a position, joined to the next one. With bits, the next position may be at "
        "the other corner of the cube. With sines and cosines each step is as short as the one "
        "before.",
    )


@register_picture("stretch", model=None, trained=64, width=64, base=10000.0, factor=4.0)
def draw_stretch(options: PictureOptions) -> Picture:
    """Draw a learned table stretched to more rows."""
    if options.model is None:
        # Stands for a learned table: smooth over positions, as trained ones are.
        positions = torch.arange(options.trained)
        table = sinusoidal_table(positions, options.width, base=options.base)
        component = 2 * (options.width // 32)  # fast enough to bend between two rows
        source = "a smooth table in the place of a learned one"
    else:
        options.refuse(("width", "base", "trained"), "the model's table decides it")
        name, table = next(iter(learned_tables(options.model).items()))
        # Not row 0: where all texts begin with one token, it is unlike the others.
        component = int(table[1:_STRETCHED_ROWS].var(dim=0).argmax())
        source = f"{name}, component {component}"
    column, trained = table[:, [component]], len(table)
    rows = round(trained * options.factor)
    places = torch.arange(rows) * trained / rows
    near = places < _STRETCHED_ROWS
    curves = [
        Curve(how, places[near], stretch_table(column, rows, how)[near, 0])
        for how in ("linear", "cubic")
    ]
    shown = torch.arange(min(trained, _STRETCHED_ROWS))
    curves.append(Curve("trained rows", shown, column[shown, 0], marked=True))
    return Picture(
        [
            Curves(
                f"{trained} trained rows read as {rows}, the first of them ({source})",
                curves,
                "position in the trained table (tokens)",
                "value of a component",
            )
        ],
        "Interpolation reads the table between its rows. With a whole factor, linear interpolation "
        "keeps every trained row in its place. Cubic interpolation, as image models use it, takes "
        "rows for the middles of cells and shifts them by up to half a row.",
    )


Tables = dict[str, torch.Tensor]  # tables by their titles, each `[positions, components]` float64


@dataclass(frozen=True)
class Encoding:
    """An encoding of absolute positions.

    Attributes:
        tables: Computes its tables.
        about: What to see in its rows.
        options: The options that decide them, besides the length.
    """

    tables: Callable[[PictureOptions], Tables]
    about: str
    options: tuple[str, ...] = ("width",)


def _digits(base: int) -> Callable[[PictureOptions], Tables]:
    def tables(options: PictureOptions) -> Tables:
        count = digit_count(options.length, base)
        positions = torch.arange(options.length)
        title = f"digits in base {base}"
        return {title: digit_table(positions, options.width, count=count, base=base)}

    return tables


def _sinusoids(title: str, layout: str, law: str) -> Callable[[PictureOptions], Tables]:
    def tables(options: PictureOptions) -> Tables:
        positions = torch.arange(options.length)
        return {
            title: sinusoidal_table(
                positions, options.width, base=options.base, layout=layout, law=law
            )
        }

    return tables


def rope_angles(options: PictureOptions) -> torch.Tensor:
    """Return the angle of each pair at each position, `[length, width // 2]` radians."""
    geometry = Geometry(head_dim=options.width, theta=options.base, trained_length=options.trained)
    return torch.arange(options.length)[:, None] * geometry.inv_freq()


def _rotated_ones(options: PictureOptions) -> Tables:
    angles = rope_angles(options)
    ones = torch.ones(options.length, options.width, dtype=torch.float64)
    return {"RoPE of a vector of ones": rotate(ones, angles.cos(), angles.sin(), interleaved=True)}


def _learned(options: PictureOptions) -> Tables:
    if options.model is None:
        raise Refused(
            "encoding 'learned' needs a model with such a table: expected model, a folder or a "
            "name on the Hub, such as openai-community/gpt2"
        )
    tables = {}
    for name, table in learned_tables(options.model).items():
        if options.length > len(table) and "length" in options.given:
            raise Refused(
                f"length must be at most the {len(table):,} rows of {name}, got {options.length:,}"
            )
        tables[f"learned, {name}"] = table[: options.length]
    return tables


_DIGITS = (
    "Digit k changes every base^k positions, so rows are unique and bounded. But neighbours can "
    "differ in all digits, and a longer text needs a digit that was 0 throughout training."
)
_SINUSOIDS = (
    "Each pair of components is a sine and a cosine of one wavelength, from 6 tokens to many "
    "thousands. Rows are bounded, change smoothly, and go on for any length."
)

ENCODINGS: dict[str, Encoding] = {
    "integer": Encoding(
        lambda o: {"integers": integer_table(torch.arange(o.length), o.width)},
        "The number grows without bound, and soon drowns the embedding that it is added to.",
    ),
    "normalised": Encoding(
        lambda o: {
            "integers / length": normalised_table(torch.arange(o.length), o.width, o.length)
        },
        "Values stay below 1. But a step is 1 / length: in a text of another length the same "
        "position has another number.",
    ),
    "binary": Encoding(_digits(2), _DIGITS),
    "base4": Encoding(_digits(4), _DIGITS),
    "base8": Encoding(_digits(8), _DIGITS),
    "base16": Encoding(_digits(16), _DIGITS),
    "sinusoidal": Encoding(
        _sinusoids("sinusoidal", "interleaved", "vaswani"), _SINUSOIDS, ("width", "base")
    ),
    "sinusoidal-halves": Encoding(
        _sinusoids("sinusoidal, sines first", "halves", "vaswani"), _SINUSOIDS, ("width", "base")
    ),
    "tensor2tensor": Encoding(
        _sinusoids("tensor2tensor's sinusoids", "halves", "tensor2tensor"),
        "All sines come first, then all cosines. The slowest pair turns by exactly 1 / base a "
        "token, a little more slowly than in the paper. XGLM, M2M-100 and Whisper use it.",
        ("width", "base"),
    ),
    "rope": Encoding(
        _rotated_ones,
        "RoPE turns each pair of a query or key. Here it turns a vector of ones.",
        ("width", "base"),
    ),
    "learned": Encoding(
        _learned,
        "A learned table has a row for each position of training, and no formula for the next one.",
        ("model",),
    ),
}
_DECIDING = ("width", "base", "model")


def encoding_name(options: PictureOptions) -> str:
    """Return the encoding shown: a model's learned table unless another one is chosen.

    Raises:
        ValueError: It is unknown, or an option is chosen that does not decide it.
    """
    name = options.encoding or ("sinusoidal" if options.model is None else "learned")
    if name not in ENCODINGS:
        raise Refused(
            f"unknown encoding {name!r}{did_you_mean(name, ENCODINGS)}; there are "
            f"{', '.join(ENCODINGS)}"
        )
    unused = [option for option in _DECIDING if option not in ENCODINGS[name].options]
    options.refuse(unused, f"the encoding {name!r} does not depend on it")
    return name


def encoding_tables(options: PictureOptions) -> Tables:
    """Return the tables of the chosen encoding, one unless a model has several.

    Raises:
        ValueError: The encoding is unknown, or cannot be shown with these options.
    """
    return ENCODINGS[encoding_name(options)].tables(options)
