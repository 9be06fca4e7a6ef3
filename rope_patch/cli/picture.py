"""The command `picture`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.cli import options
from rope_patch.cli.options import argument, option
from rope_patch.cli.runtime import show


@dataclass(frozen=True)
class _DrawnOptions(options.OptionGroup):
    """What pictures show; none takes all of these options."""

    encoding: str | None = option(
        None,
        "Of positions: integer, normalised, binary, base4, base8, base16, sinusoidal, "
        "sinusoidal-halves, tensor2tensor, rope or learned. Of biases: alibi, t5, kerple, fire or "
        "sandwich.",
    )
    model: str | None = option(
        None, "A folder, a name on the Hub, or `demo`, whose own numbers are shown."
    )
    method: str | None = option(None, "What extends; for angles and bias.")
    length: int | None = option(None, "Positions shown, in tokens.", written=True)
    trained: int | None = option(None, "Trained length, in tokens.", written=True)
    width: int | None = option(None, "Components of an encoding, or of a head.")
    heads: int | None = option(None, "Attention heads.")
    base: float | None = option(None, "Theta of sinusoids and rotations.")
    factor: float | None = option(
        None, "Target length / trained length.", metavar=options.FACTOR, written=True
    )
    position: int | None = option(None, "A position, in tokens.", written=True)


def picture(
    *,
    name: str | None = argument(None, "Which picture; without one, all are listed."),
    out: Path | None = option(None, "An .svg or .png file to write.  [default: NAME.svg]"),
    drawn: _DrawnOptions,
    as_json: options.Json = False,
) -> None:
    """Draw what a positional encoding does, by the functions that the package computes with.

    Prints the file and a caption that says what to see. Without NAME, lists all pictures, and the
    options that each of them takes with their defaults. An option that a picture does not take is
    an error.

    \b
    Examples:
      rope-patch picture
      rope-patch picture clock --position 1000 --trained 512
      rope-patch picture table --encoding binary --length 16 --width 8 --out binary.png
      rope-patch picture angles --model demo --method ntk --factor 8
      rope-patch picture bias --encoding t5 --factor 8
    """
    from rope_patch.pictures import PICTURES, make_picture

    if name is None:
        if as_json:
            kinds = {
                key: {"about": kind.about, "options": kind.options}
                for key, kind in PICTURES.items()
            }
            print(json.dumps(kinds, indent=1))
            return
        column = max(map(len, PICTURES))
        for key, kind in PICTURES.items():
            print(f"{key:<{column}}  {kind.about}")
            words = [f"--{option}{_default(value)}" for option, value in kind.options.items()]
            print(f"{'':<{column}}  {' '.join(words)}")
        print("\n`rope-patch picture NAME --out FILE` draws one.")
        return
    from rope_patch.pictures.renderer import draw
    from rope_patch.utils import atomic_files
    from rope_patch.utils.figures import require_plot_path, write_figure

    drawing = make_picture(name, **{k: v for k, v in vars(drawn).items() if v is not None})
    path = Path(f"{name}.svg") if out is None else out
    require_plot_path(path)
    atomic_files.require_writable_file(path, "the picture", folder_exists=True)
    write_figure(draw(drawing), path)
    if as_json:
        print(json.dumps({"file": str(path), "caption": drawing.caption}))
        return
    show(f"wrote {path}\n{drawing.caption}")


def _default(value: Any) -> str:
    """Return an option's default as it is written after its name."""
    return "" if value is None else f" {value:g}" if isinstance(value, float) else f" {value}"
