"""Record README's terminal, docs/images/terminal.svg: real commands and what they print.

    python docs/generate/terminal.py

It needs the package's extra `demo` and the demo's weights. Each line appears as it was
printed; waits are cut to a moment, and the picture lasts 20 seconds. Where a reader's system asks
for less motion, all lines are there at once.
"""

from __future__ import annotations

import html
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
SECONDS = 20.0
COLUMNS = 100
CHARACTER, LINE, MARGIN, BAR = 8.43, 19, 18, 30  # pixels, at 14 pixels a letter

# A command, and how many of its lines are shown; the rest is told by an ellipsis.
COMMANDS = [
    ("rope-patch diagnose demo --length 16384", 5),
    ("rope-patch patch demo --method yarn --factor 2 --to smollm2-16k", 9),
    ("rope-patch export smollm2-16k --engine llama.cpp", 4),
    ("rope-patch report eval/results/smollm2 --out page", 20),
]


def run(command: str) -> list[str]:
    """Return the lines that a command prints, wrapped as a terminal of that width wraps them.

    Raises:
        SystemExit: The command failed.
    """
    words = [str(ROOT / word) if "/" in word else word for word in shlex.split(command)[1:]]
    environment = os.environ | {"COLUMNS": str(COLUMNS), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "rope_patch", *words],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if result.returncode:
        raise SystemExit(f"{command} ended with {result.returncode}:\n{result.stderr}")
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    return [
        line[start : start + COLUMNS]
        for line in text.splitlines()
        for start in range(0, max(len(line), 1), COLUMNS)
    ]


def moments(texts: list[tuple[str, str]]) -> list[float]:
    """Return when each line appears, in seconds: a pause before a command and after its typing."""
    weights = [6.0 if kind == "typed" else 1.0 for kind, _ in texts]
    pace = (SECONDS - 5) / sum(weights)  # the end stands for five seconds
    return [pace * sum(weights[: number + 1]) - pace for number in range(len(texts))]


def draw(texts: list[tuple[str, str]]) -> str:
    """Return the recording as SVG; `texts` are (class, line)."""
    width = round(2 * MARGIN + COLUMNS * CHARACTER)
    height = BAR + 2 * MARGIN + LINE * len(texts)
    rows = []
    for number, ((kind, text), moment) in enumerate(zip(texts, moments(texts), strict=True)):
        y = BAR + MARGIN + LINE * (number + 0.75)
        share = 100 * moment / SECONDS
        rows.append(
            f'<text x="{MARGIN}" y="{y:.1f}" class="{kind}" style="animation-name:l{number}" '
            f'xml:space="preserve">{html.escape(text)}</text>'
            f"<style>@keyframes l{number}{{0%,{share:.2f}%{{opacity:0}}"
            f"{share + 0.4:.2f}%,100%{{opacity:1}}}}</style>"
        )
    style = (
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        f"fill:#d5dae1;animation:{SECONDS:g}s linear infinite}}"
        ".typed{fill:#7ee0b8;font-weight:600}.cut{fill:#8b949e}"
        "@media (prefers-reduced-motion: reduce){text{animation:none}}"
    )
    dots = "".join(
        f'<circle cx="{MARGIN + 18 * place}" cy="{BAR / 2 + 3}" r="5.5" fill="{colour}"/>'
        for place, colour in enumerate(("#ff6b60", "#f5c04e", "#5dc466"))
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'aria-label="Commands in a terminal, and what they print">',
            f"<style>{style}</style>",
            f'<rect width="{width}" height="{height}" rx="10" fill="#15181d"/>{dots}',
            *rows,
            "</svg>\n",
        ]
    )


def record() -> list[tuple[str, str]]:
    """Return (class, line) of all that is shown, by running the commands in an empty folder."""
    texts: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for command, most in COMMANDS:
            lines = run(command)
            texts.append(("typed", f"$ {command}"))
            texts += [("printed", line) for line in lines[:most]]
            if len(lines) > most:
                texts.append(("cut", f"... {len(lines) - most} lines more"))
            texts.append(("printed", ""))
        os.chdir(ROOT)
    return texts[:-1]


if __name__ == "__main__":
    PICTURE.write_text(draw(record()), encoding="utf-8")
