"""Tables of absolute positions that pictures show, by the encoding's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rope_patch.encodings.counted import digit_count, digit_table, integer_table, normalised_table
from rope_patch.encodings.sinusoidal import sinusoidal_table
from rope_patch.geometry import Geometry
from rope_patch.ops.reference import rotate
from rope_patch.pictures.picture import PictureOptions
from rope_patch.pictures.subject import learned_tables
from rope_patch.utils.errors import Refused, did_you_mean

Tables = dict[str, torch.Tensor]  # by title, each `[positions, components]` float64


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
