"""Pictures by which people understand positional encodings, computed by the package's functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rope_patch.pictures import distances, rotations, tables  # noqa: F401 (they register pictures)
from rope_patch.pictures.picture import PICTURES, PictureOptions, get_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PICTURES", "PictureOptions", "picture"]


def picture(name: str, **options: Any) -> Figure:
    """Return a picture of positional encodings as a matplotlib figure.

    Args:
        name: One of `rope-patch picture`, such as "clock".
        **options: What it shows; see `PictureOptions`.

    Raises:
        ValueError: There is no such picture, it cannot show that, or matplotlib is missing.
        TypeError: An option is unknown.
    """
    from rope_patch.pictures.renderer import draw

    return draw(get_picture(name)(PictureOptions(**options)))
