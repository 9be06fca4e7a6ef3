"""Write docs/conformance.md: `python tests/conformance/page.py`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import comparison
from agreements import AGREEMENTS, PUBLISHED_SCALINGS
from disagreements import (
    ATTENTION,
    FREQUENCIES,
    LONG_ROPE,
    NTK,
    ONLY_5_0,
    REST,
    VERSIONS,
    Disagreement,
    link,
)
from published import ALL

import rope_patch

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"

# Valid on every platform: float64 against float64, and against float32.
BOUNDS = (1e-12, 2e-6)
GROUPS = {
    "YaRN's frequencies": FREQUENCIES,
    "YaRN's attention factor": ATTENTION,
    "NTK-aware and dynamic scaling": NTK,
    "LongRoPE": LONG_ROPE,
    "Llama 3, p-RoPE, and the rest": REST,
    "transformers 5.0 and 5.23": VERSIONS,
}


def build() -> str:
    """Return the whole page."""
    return "\n\n".join([_INTRODUCTION, *_geometries(), *_methods(), *_disagreements()]) + "\n"


def bound(number: float) -> str:
    """Return the smallest bound above a difference, or the difference if there is none."""
    text = next((f"{limit:g}" for limit in BOUNDS if number < limit), f"{number:.2g}")
    return text.replace("e-0", "e-")


def percent(number: float) -> str:
    """Return a difference in percent, or above 100 % as a multiple of ours."""
    if round(number, 6) <= 1:
        return f"{100 * number:.3g} %"
    return f"× {1 + number:.3g}"


_MARKS = {"frequency": "", "attention factor": " (a)", "softmax scale": " (s)"}

_INTRODUCTION = """# Conformance

This page compares what each method computes with transformers and other implementations, on the
geometries of published models. It then lists every disagreement between implementations that we
know of, by number.

All numbers are computed: `python tests/conformance/page.py` writes this page, and the tests beside
it check it, with transformers 5.0 and 5.23. A difference is the largest one of any frequency or of
the attention factor (the multiplier of cos and sin), relative to ours. To add a model, add an entry
to `published.py` there; to add a disagreement, add one to `disagreements.py`."""


def _geometries() -> Iterable[str]:
    yield "## Geometries"
    yield _paragraph(
        """
        Read by `rope_patch` from transformers' config classes, made from the published config.json.
        Lengths are those before the model's own scaling, if it has one; thetas that a config.json
        leaves out are its class's default.
        """
    )
    yield _table(
        ["", "model", "head_dim", "rotary_dim", "theta", "trained_length", "own scaling"],
        [
            [
                model.short,
                link(
                    model.name, f"https://huggingface.co/{model.repository}/blob/main/config.json"
                ),
                str(model.head_dim),
                str(model.rotary_dim),
                f"{model.theta:,.0f}",
                f"{model.trained_length:,}",
                _scaling(model.scaling),
            ]
            for model in ALL
        ],
        right=(2, 3, 4, 5),
    )


def _scaling(scaling: dict | None) -> str:
    if not scaling:
        return ""
    kind = scaling.get("rope_type") or scaling["type"]
    return f"`{kind}` {scaling['factor']:g}" if "factor" in scaling else f"`{kind}`"


def _methods() -> Iterable[str]:
    yield "## Methods"
    factors = ", ".join(f"{factor:g}" for factor in comparison.FACTORS)
    lengths = ", ".join(f"{ratio:g}" for ratio in comparison.LENGTHS)
    yield _paragraph(
        f"""
        The largest relative difference is below what stands in the cell. Ours is computed in
        float64; 2e-6 is what float32 leaves of transformers' own (`ROPE_INIT_FUNCTIONS`, on the
        config class). Methods that it lacks are held against what it has: `ntk` against `dynamic`
        at the target length, `ntk-by-parts` against `yarn` with an attention factor of 1, `abf`
        against `default` with another theta, `mixed-*` and `dynamic-*` against the static method at
        the factor of that length. Factors {factors}; for methods that follow the length, {lengths}
        times the trained one; and options off their defaults. Where transformers has nothing, (f)
        is the formula, written out apart, and (g) the same, itself held against vectors of its
        authors' code (`tests/assets/golden.md`), as are the formulas of most other methods. The
        rows of position maps compare the frequencies below the map, plain ones and those of `yarn`;
        `tests/methods/position_maps` holds the positions against brute force.
        """
    )
    marks = {"transformers": "", "formula": " f", "golden": " g"}
    rows = []
    for method in rope_patch.list_methods():
        row = [f"`{method}`"]
        for model in ALL:
            number = comparison.largest_difference(method, model)
            row.append(bound(number) + marks[comparison.source(method, model)])
        rows.append(row)
    columns = ["", *(model.short for model in ALL)]
    yield _table(columns, rows, right=range(1, len(columns)))
    yield "The scalings that models were published with, from their config.json as it stands:"
    yield _table(
        ["model", "our method", "difference"],
        [[own.model.name, own.describe(), bound(own.number())] for own in PUBLISHED_SCALINGS],
        right=(2,),
    )
    yield _paragraph(
        """
        Engines whose formulas are ours, restated from their code, on all geometries with factor 4.
        Of the lines marked *run*, the tests run those that are Python packages where they are
        installed (last: mlx-lm 0.32.2, litgpt 0.5.13, torchtune 0.6.1, KerasHub 0.32.0,
        rotary-embedding-torch 0.9.1, x-transformers 2.31.10).
        """
    )
    yield _table(
        ["engine", "our method", "difference", ""],
        [[a.engine, a.description, bound(a.number()), a.evidence] for a in AGREEMENTS],
        right=(2,),
    )


def _disagreements() -> Iterable[str]:
    yield "## Disagreements"
    number = sum(map(len, GROUPS.values()))
    yield _paragraph(
        f"""
        There are {number}. A difference is the largest of a frequency, of the attention factor (a),
        or of the softmax scale (s), relative to ours: in percent, or, where theirs is more than
        double, as what ours would have to be multiplied by. The last columns say what we do, and
        where it can be read.
        """
    )
    for title, group in GROUPS.items():
        yield f"### {title}"
        yield _table(
            ["what", "who does otherwise", "on", "difference", "here", "read"],
            [_row(entry) for entry in group],
            right=(3,),
        )
    only = "\n".join(f"- {line}" for line in ONLY_5_0)
    yield f"Besides, transformers 5.0\n\n{only}"


def _row(entry: Disagreement) -> list[str]:
    return [
        entry.about,
        entry.who,
        entry.where,
        percent(entry.number()) + _MARKS[entry.of],
        entry.choice,
        ", ".join(entry.links),
    ]


def _paragraph(text: str) -> str:
    return textwrap.fill(
        " ".join(text.split()), 100, break_long_words=False, break_on_hyphens=False
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    edges = [":--"] * len(head)
    for column in right:
        edges[column] = "--:"
    lines = [head, edges, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(build(), encoding="utf-8")
    print(f"wrote {PAGE}")
