"""Draw pictures by which people understand positional encodings, computed by the package itself.

`attention`, `biases`, `rotations` and `tables` register their pictures by name (`picture`), each a
function from options to panels of plain numbers, which `renderer` draws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rope_patch.pictures import (  # noqa: F401 (they register pictures)
    attention,
    biases,
    rotations,
    tables,
)
from rope_patch.pictures.picture import PICTURES, PictureOptions, make_picture
from rope_patch.utils.lazy_exports import export_lazily

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PICTURES", "PictureOptions", "make_picture", "picture"]

export_lazily(
    __name__,
    {
        "attention": "dog_outputs",
        "biases": "BIASES",
        "renderer": "Curves Dials HeatMap",
        "tables": "ENCODINGS",
    },
)


def picture(name: str, **options: Any) -> Figure:
    """Return a picture of positional encodings as a matplotlib figure.

    Args:
        name: One of `rope-patch picture`, such as "clock".
        **options: What it shows; see `PictureOptions`. A picture takes those that
            `rope-patch picture` lists beside it.

    Raises:
        ValueError: There is no such picture, it cannot show that, or matplotlib is missing.
        TypeError: An option is unknown.
    """
    from rope_patch.pictures.renderer import draw

    return draw(make_picture(name, **options))
