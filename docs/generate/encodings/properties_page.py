"""Write docs/encoding-properties.md: `python docs/generate/encodings/properties_page.py`."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path

import torch
from encoding_properties import PROPERTIES, Verdict, property_table
from encoding_subjects import Content, Setting

from rope_patch.encodings.biases import xpos_factors
from rope_patch.encodings.tables import normalised_table
from rope_patch.ops import axial_frequencies, mixed_frequencies, n_dimensional_rope

PAGE = Path(__file__).parents[2] / "encoding-properties.md"

_GROUPS = {
    "The code": ("unique", "bounded", "linear in shift", "periodic", "n-dimensional"),
    "What attention gets": (
        "translation-invariant", "relative", "decaying", "extrapolating", "content-independent",
    ),
}  # fmt: skip
_NAMES = {
    "none": "none (NoPE)",
    "rope": "RoPE",
    "xpos": "xPos",
    "alibi": "ALiBi",
    "t5": "T5",
    "kerple": "KERPLE (log)",
    "fire": "FIRE",
    "sandwich": "Sandwich",
}
_EXACT = 1e-9


_INTRODUCTION = (
    """
    Ten properties are listed wherever positional encodings are compared, mostly as opinions. Here
    each is a numerical test. All numbers on this page are computed:
    `python docs/generate/encodings/properties_page.py` writes it, and a test compares.
    """,
    """
    The encodings are those of `rope_patch.encodings` with their usual constants: N = {length}
    tokens in training, R = {reach} (texts of {longest} tokens), {width} components, {heads} heads,
    base {base}. What is learned has random values, as before training: a table's rows, T5's
    buckets, KERPLE's and FIRE's parameters. `integer` is not scaled, `normalised` divides by N,
    `binary` has the digits that R N positions need. RoPE and xPos multiply queries and keys by
    cosines and sines, which count as their code.
    """,
)
_NOTES = """
The number in brackets is what was measured; 0 stands for less than 1e-9. "No code" means that
positions are not vectors, as in biases; "nothing" that there is nothing to test. What positions
*add to a logit* is the logit with them less the logit without.
"""
_SLIPS = (
    """
    **"RoPE decays with distance."** The product of *equal* vectors falls, in the mean, to
    {rope_fall} of its start, with ripples. Queries and keys are not equal: the products of random
    ones stay as large far away as near ({rope_random} of the size at the next token), so a model
    may look anywhere ([2410.06205](https://arxiv.org/abs/2410.06205)). Sinusoids are alike: a
    random projection in between ends the fall.
    """,
    """
    **"Sinusoidal encodings are relative."** The bare product of two codes depends on the distance
    alone (change {sinusoidal_shift}). What attention gets does not: with token vectors and
    projections the same distance gives other numbers elsewhere (change {sinusoidal_term}). RoPE and
    the biases pass both.
    """,
    """
    **"Relative encodings extrapolate."** Of RoPE's pairs {rope_pairs} have seen every angle that
    longer texts bring, of the components of sinusoids {sinusoidal_components}. The others meet new
    numbers in longer texts.
    """,
    """
    **"ALiBi extrapolates, so its inputs stay in range."** Its biases do not ({alibi_growth} times
    as large in twice the text). Attention weights do where exp(bias) has come near 0 within the
    trained length: in {alibi_heads} heads. The flattest ones see new weights.
    """,
    """
    **"Normalised positions are bounded and translation-invariant."** Divided by N, they go on to
    {reach} in a text of {reach} N. Divided by the length of each text, the same token has another
    code in a longer text: token 100 has {short} among {length}, and {long} among {twice}. Either
    way the product of two codes depends on where they are (change {normalised_shift}).
    """,
    """
    **"Binary codes are unique."** Up to a length: all digits come back {binary_period}, and digit k
    after 2<sup>k+1</sup>. Those above log<sub>2</sub> N never changed in training ({binary_digits}
    did). No matrix shifts them, as carries are not linear.
    """,
    """
    **"Sinusoids are periodic."** Each pair is, all together are not: within {longest} tokens, at
    the closest return some component still differs by {sinusoidal_return}.
    """,
    """
    **"xPos is RoPE that extrapolates."** Its products are relative and shrink with distance
    ({xpos_random}), but they are made of factors that grow without bound: up to {xpos_factor} for a
    key at token {longest}.
    """,
    """
    **"FIRE is a relative bias."** Up to its threshold. Queries beyond it divide by their own
    position, so the same distance gets another bias (change {fire_term}); that is why its inputs
    stay in range.
    """,
    """
    **"Integer positions are linear in shift."** t + s is t plus a constant, which no matrix adds.
    With a component that is always 1 beside it, it would be.
    """,
    """
    **"Learned encodings decay", "T5 decays".** Trained ones may; nothing in the function makes
    them. KERPLE, ALiBi and Sandwich fall by construction, Sandwich with ripples. FIRE learns a
    function of a number that rises with distance.
    """,
    """
    **"Any encoding works in two dimensions."** Codes do, with a share of components for each axis;
    for RoPE that is axial RoPE ([kernels](kernels.md#on-several-axes)). A sum of equal biases does
    not: one row down is one column right. Learned ones differ by axis.
    """,
    """
    **"Content-independent."** The *code* of a position is the same for all tokens, for every
    encoding here. What it adds to a logit is so for biases alone: sinusoids are multiplied with
    token vectors on the way, and RoPE rotates them.
    """,
)

_OWN = """## Your own encoding

In a clone, with `PYTHONPATH=docs/generate/encodings`:

```python
import torch
from encoding_properties import PROPERTIES, property_table
from encoding_subjects import Setting, Table

table = property_table(["rope", "alibi"], ["relative", "decaying"])
print(table["rope"]["relative"].answer, table["alibi"]["decaying"].answer)


def sawtooth(positions):
    return (positions[:, None] % torch.arange(2, 66)).double()


mine = Table("sawtooth", Setting(), sawtooth)
print(PROPERTIES["unique"](mine).answer, PROPERTIES["linear in shift"](mine).answer)
```

```text
yes yes
yes no
```"""


def build(table: dict[str, dict[str, Verdict]] | None = None) -> str:
    """Return the whole page.

    Args:
        table: What `property_table` returns, if it is known.
    """
    setting = Setting()
    table = property_table(setting=setting) if table is None else table
    values = {
        "length": setting.length,
        "reach": setting.reach,
        "longest": f"{setting.length * setting.reach:,}",
        "width": setting.width,
        "heads": setting.heads,
        "base": f"{setting.base:,.0f}",
    }
    parts = [
        "# Properties of encodings",
        *(_fill(text.format(**values)) for text in _INTRODUCTION),
        "## Table",
        *_tables(table),
        "## Definitions",
        _fill(_NOTES),
        *_definitions(),
        "## Where popular lists are wrong",
        _slips(table, setting),
        "## RoPE on two axes",
        _fill(_AXES),
        _axes_table(setting.width),
        _OWN,
    ]
    return "\n\n".join(parts) + "\n"


def _tables(table: dict[str, dict[str, Verdict]]) -> Iterable[str]:
    for title, properties in _GROUPS.items():
        lines = [f"| {title.lower()} | " + " | ".join(properties) + " |"]
        lines.append("|:--|" + ":--|" * len(properties))
        for name, row in table.items():
            cells = " | ".join(_cell(row[key]) for key in properties)
            lines.append(f"| {_NAMES.get(name, name)} | {cells} |")
        yield "\n".join(lines)


def _cell(verdict: Verdict) -> str:
    text = verdict.answer
    text = f"**{text}**" if text in ("yes", "partly") else text
    if verdict.condition:
        text += f": {verdict.condition}" if verdict.answer == "partly" else f", {verdict.condition}"
    return text if verdict.number is None else f"{text} ({show(verdict.number)})"


def show(number: float) -> str:
    """Return two digits of a number, 0 for rounding errors."""
    if math.isinf(number):
        return "overflows"
    return "0" if abs(number) < _EXACT else f"{number:.2g}"


def _definitions() -> Iterable[str]:
    for name, measure in PROPERTIES.items():
        text = inspect.getdoc(measure) or ""
        text = " ".join(text.split()).removeprefix("Test whether ")
        yield _fill(f"**{name}**: whether {text}")


def _slips(table: dict[str, dict[str, Verdict]], setting: Setting) -> str:
    numbers = _numbers(table, setting)
    return "\n".join(_fill(f"- {slip}".format(**numbers), "  ") for slip in _SLIPS)


def _numbers(table: dict[str, dict[str, Verdict]], setting: Setting) -> dict[str, str]:
    """Return what the list of wrong claims quotes."""

    def number(encoding: str, name: str) -> str:
        value = table[encoding][name].number
        assert value is not None
        return show(value)

    def condition(encoding: str, name: str) -> str:
        return table[encoding][name].condition

    longest = setting.length * setting.reach
    codes = [
        float(normalised_table(torch.tensor([100]), 1, n))
        for n in (setting.length, 2 * setting.length)
    ]
    factor = float(1 / xpos_factors(torch.tensor([longest]), setting.width).min())
    return {
        "rope_fall": number("rope", "decaying"),
        "rope_random": condition("rope", "decaying").rpartition(" ")[2],
        "rope_pairs": condition("rope", "extrapolating"),
        "sinusoidal_shift": number("sinusoidal", "translation-invariant"),
        "sinusoidal_term": number("sinusoidal", "relative"),
        "sinusoidal_components": condition("sinusoidal", "extrapolating"),
        "sinusoidal_return": number("sinusoidal", "periodic"),
        "alibi_growth": number("alibi", "bounded"),
        "alibi_heads": condition("alibi", "extrapolating"),
        "normalised_shift": number("normalised", "translation-invariant"),
        "short": f"{codes[0]:.3f}",
        "long": f"{codes[1]:.3f}",
        "length": f"{setting.length:,}",
        "twice": f"{2 * setting.length:,}",
        "reach": str(setting.reach),
        "longest": f"{longest:,}",
        "binary_period": condition("binary", "periodic"),
        "binary_digits": condition("binary", "extrapolating"),
        "xpos_random": condition("xpos", "decaying").rpartition("; ")[2],
        "xpos_factor": f"{factor:,.0f}",
        "fire_term": number("fire", "relative"),
    }


_AXES = """
RoPE on two axes ([kernels](kernels.md#on-several-axes)) for one random query and key, at steps of 0
to 7 rows and columns between them. "Shift": largest change of a product if both tokens move by 100
rows and 37 columns. "Axes": smallest difference between n rows down and n columns right. "Norm":
largest change of a vector's length. "Diagonal": what a product at r rows and c columns has beyond
those at r rows and at c columns; axial pairs see no diagonal, mixed ones do. All are shares of the
largest product or length; the base is 100.
"""


def _axes_table(width: int) -> str:
    """Return what holds for RoPE on two axes."""
    kinds = {
        "axial": axial_frequencies(width, 2, 100.0),
        "axial, alternate": axial_frequencies(width, 2, 100.0, spectrum="alternate"),
        "mixed": mixed_frequencies(width, 2, 100.0, generator=torch.Generator().manual_seed(0)),
    }
    lines = ["| frequencies | shift | axes | norm | diagonal |", "|:--|:--|:--|:--|:--|"]
    axis = torch.arange(8)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).flatten(0, -2)
    content = Content.draw(width, 0)
    for name, frequencies in kinds.items():

        def rotated(vector: torch.Tensor, positions: torch.Tensor, freqs=frequencies):
            tokens = vector.expand(1, len(positions), 1, -1)
            return n_dimensional_rope(tokens, None, positions, freqs)[0][0, :, 0]

        def products(shift: torch.Tensor, turn=rotated) -> torch.Tensor:
            query = turn(content.query, torch.zeros(1, 2) + shift)[0]
            return (turn(content.key, grid + shift) @ query).view(8, 8)

        here, moved = products(torch.zeros(2)), products(torch.tensor([100, 37]))
        scale = here.abs().max()
        left_over = here - here[:1] - here[:, :1] + here[0, 0]
        norm = content.key.norm()
        numbers = (
            (moved - here).abs().max() / scale,
            (here[1:, 0] - here[0, 1:]).abs().min() / scale,
            (rotated(content.key, grid).norm(dim=1) / norm - 1).abs().max(),
            left_over.abs().max() / scale,
        )
        lines.append(f"| {name} | " + " | ".join(show(float(n)) for n in numbers) + " |")
    return "\n".join(lines)


def _fill(text: str, indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()), 140, subsequent_indent=indent, break_on_hyphens=False
    )


if __name__ == "__main__":
    PAGE.write_text(build(), encoding="utf-8")
    print(PAGE)
