"""Draw README's picture, docs/images/answers.svg, from the committed report on SmolLM2.

    python docs/generate/readme_picture.py

A loss in nats a token is drawn as the probability that goes with it, exp(-loss): the geometric mean
over the tokens of the right answers. Bars are the report's 95% intervals. A code host shows the
file as an image, which follows the reader's light or dark mode by itself.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.utils.figures import PALETTE

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "eval" / "results" / "smollm2" / "report.json"
PICTURE = ROOT / "docs" / "images" / "answers.svg"
# Label in the report: (class, words at the line's end, how far they stand below it).
LINES = {"none": ("plain", "plain model", -14), "yarn ×2": ("patched", "patched: yarn ×2", -58)}
LENGTHS = (4096, 8192, 12288, 16384)
WIDTH, HEIGHT = 860, 372
LEFT, RIGHT, TOP, BOTTOM = 64, 820, 56, 312  # of the axes
MOST = 0.8  # the axis' highest probability


def column(length: float) -> float:
    """Return where a length lies, in pixels from the left."""
    first, last = 3072, 16896
    return LEFT + (length - first) / (last - first) * (RIGHT - LEFT)


def row(probability: float) -> float:
    """Return where a probability lies, in pixels from the top."""
    return BOTTOM - probability / MOST * (BOTTOM - TOP)


def line_of(stats: RunStatistics, label: str) -> list[str]:
    """Return the elements of one method's line."""
    name, words, below = LINES[label]
    points, marks = [], []
    for length in LENGTHS:
        loss = stats.answer_loss(label, length)
        assert loss is not None, f"{REPORT} has no losses of {label} at {length}"
        nats = (loss.mean.estimate, loss.mean.low, loss.mean.high)
        likely, most, least = (math.exp(-each) for each in nats)
        x, y = column(length), row(likely)
        points.append(f"{x:.1f},{y:.1f}")
        marks.append(f'<path d="M{x:.1f} {row(least):.1f}V{row(most):.1f}" class="{name} bar"/>')
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" class="{name} mark"/>')
        percent = f"{likely:.0%}" if likely >= 0.01 else f"{likely:.1%}"
    end = f'<text x="{RIGHT}" y="{y + below:.1f}" text-anchor="end" class="{name} words">'
    return [
        f'<polyline points="{" ".join(points)}" class="{name} line"/>',
        *marks,
        f"{end}{words}, {percent}</text>",
    ]


def style() -> str:
    """Return the picture's colours on light and on dark pages."""

    def rules(mode: int) -> str:
        ink, muted, grid, shade, plain, patched = (
            PALETTE[name][mode] for name in ("ink", "muted", "line", "shade", "m1", "m0")
        )
        return (
            f".title,.ticks{{fill:{muted}}}.title{{fill:{ink}}}.grid{{stroke:{grid}}}"
            f".trained{{fill:{shade}}}.plain.line,.plain.bar{{stroke:{plain}}}"
            f".patched.line,.patched.bar{{stroke:{patched}}}"
            f".plain.mark,.plain.words{{fill:{plain}}}.patched.mark,.patched.words{{fill:{patched}}}"
        )

    return (
        ".line{fill:none;stroke-width:3.5;stroke-linejoin:round}.bar{stroke-width:1.5}"
        ".words{font-size:17px;font-weight:600}.title{font-size:17px}.ticks{font-size:14px}"
        f"{rules(0)}@media (prefers-color-scheme: dark){{{rules(1)}}}"
    )


def draw() -> str:
    """Return the picture as SVG."""
    stats = RunStatistics(json.loads(REPORT.read_text(encoding="utf-8")))
    trained = stats.trained_length
    elements = [
        f'<rect x="{LEFT}" y="{TOP}" width="{column(trained) - LEFT:.1f}" '
        f'height="{BOTTOM - TOP}" class="trained"/>',
        f'<text x="{LEFT + 10}" y="{TOP + 20}" class="ticks">the length it was trained on</text>',
        f'<text x="{LEFT - 44}" y="28" class="title">'
        "How likely the right answer is, per token, when the text gets longer</text>",
    ]
    for tenth in range(0, 9, 2):
        y = row(tenth / 10)
        elements.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" class="grid"/>')
        elements.append(
            f'<text x="{LEFT - 8}" y="{y + 5:.1f}" text-anchor="end" class="ticks">'
            f"{tenth * 10}%</text>"
        )
    for length in LENGTHS:
        elements.append(
            f'<text x="{column(length):.1f}" y="{BOTTOM + 24}" text-anchor="middle" '
            f'class="ticks">{length:,}</text>'
        )
    elements.append(
        f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 48}" text-anchor="middle" class="ticks">'
        "tokens in the text</text>"
    )
    for label in LINES:
        elements += line_of(stats, label)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'aria-label="Beyond the trained length the plain model no longer finds the answer; '
            "the patched one does\" font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, "
            'sans-serif">',
            f"<style>{style()}</style>",
            *elements,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
