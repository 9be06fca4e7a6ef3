"""The command `picture`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rope_patch.cli.options import Json


def picture(
    name: Annotated[
        str | None, typer.Argument(help="Which picture; without one, all are listed.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="An .svg or .png file to write.  [default: NAME.svg]")
    ] = None,
    encoding: Annotated[
        str,
        typer.Option(
            help="For table, waves and difference: integer, normalised, binary, base4, sinusoidal "
            "or sinusoidal-halves."
        ),
    ] = "sinusoidal",
    method: Annotated[str, typer.Option(help="For angles: a method with a factor.")] = "yarn",
    length: Annotated[int, typer.Option(help="Positions shown, in tokens.")] = 128,
    trained: Annotated[int, typer.Option(help="Trained length, in tokens.")] = 64,
    width: Annotated[int, typer.Option(help="Components of an encoding, or of a head.")] = 64,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 8,
    base: Annotated[float, typer.Option(help="Theta of sinusoids and rotations.")] = 10000.0,
    factor: Annotated[float, typer.Option(help="Target length / trained length.")] = 4.0,
    position: Annotated[int, typer.Option(help="For clock and difference: a position.")] = 50,
    as_json: Json = False,
) -> None:
    """Draw what a positional encoding does, by the functions that the package computes with.

    Prints the file and a caption that says what to see.

    \b
    Examples:
      rope-patch picture
      rope-patch picture clock --position 1000 --trained 512
      rope-patch picture table --encoding binary --length 16 --width 8 --out binary.png
      rope-patch picture angles --method ntk --factor 8 --trained 8192 --width 128
    """
    from rope_patch.pictures import PICTURES
    from rope_patch.pictures.picture import PictureOptions, get_picture

    if name is None:
        rows = {key: (draw.__doc__ or "").splitlines()[0] for key, draw in PICTURES.items()}
        if as_json:
            print(json.dumps(rows, indent=1))
            return
        column = max(map(len, rows))
        for key, about in rows.items():
            print(f"{key:<{column}}  {about}")
        print("\n`rope-patch picture NAME --out FILE` draws one.")
        return
    from rope_patch.pictures.renderer import draw
    from rope_patch.utils import atomic_files
    from rope_patch.utils.figure_file import write_figure
    from rope_patch.utils.plot_style import require_plot_path

    options = PictureOptions(
        encoding=encoding,
        method=method,
        length=length,
        trained=trained,
        width=width,
        heads=heads,
        base=base,
        factor=factor,
        position=position,
    )
    drawing = get_picture(name)(options)
    path = Path(f"{name}.svg") if out is None else out
    require_plot_path(path)
    atomic_files.require_writable_file(path, "the picture", folder_exists=True)
    write_figure(draw(drawing), path)
    if as_json:
        print(json.dumps({"file": str(path), "caption": drawing.caption}))
        return
    print(f"wrote {path}\n{drawing.caption}")
