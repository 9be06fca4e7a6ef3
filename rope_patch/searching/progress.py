"""A search as it runs: a progress bar, and a picture that is drawn again and again."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from rope_patch.searching.candidates import SearchSpace
from rope_patch.utils.progress import progress_bar

logger = logging.getLogger("rope_patch")

_PLOT_TIME_SHARE = 0.05  # of the time, at most, that goes into pictures


class SearchProgress:
    """Tells how far a search is: evaluations, the best so far against YaRN, how fast.

    Args:
        space: What is searched.
        budget: Evaluations at most.
        title: For the picture.
        picture: An .svg or .png file that is drawn as the search goes on; None draws none.
        progress: Whether to show a bar on stderr.

    Raises:
        ValueError: Another kind of picture, or matplotlib is not installed.
    """

    def __init__(
        self,
        space: SearchSpace,
        budget: int,
        *,
        title: str = "",
        picture: str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> None:
        if picture is not None:
            from rope_patch.diagnosing.plot import require_plot_path

            require_plot_path(picture)
        self._space, self._title, self._picture = space, title, picture
        self._bar = progress_bar(
            total=budget, desc="searching", unit="evaluation", disable=not progress
        )
        self._next_plot_time = 0.0

    def update(self, history: list[dict[str, Any]], reference: float, rate: float) -> None:
        """After each evaluation.

        Args:
            history: All so far, as in `SearchResult.history`.
            reference: YaRN's fitness, nats.
            rate: Evaluations per minute.
        """
        best = history[-1]["best"]
        self._bar.set_postfix_str(f"best {best:.4f}, yarn {reference:.4f}, {rate:.3g}/min", False)
        self._bar.update(history[-1]["number"] - self._bar.n)
        if time.monotonic() >= self._next_plot_time:
            self.draw(history)

    def draw(self, history: list[dict[str, Any]]) -> None:
        """Draws the picture; one that cannot be written costs a warning, not the search."""
        if self._picture is None or not history:
            return
        from rope_patch.searching.result.plot import draw

        started = time.monotonic()
        try:
            draw(self._picture, self._space, history, title=self._title)
        except (OSError, ValueError) as error:
            logger.warning("the picture of the search could not be drawn: %s", error)
        ended = time.monotonic()
        self._next_plot_time = ended + (ended - started) / _PLOT_TIME_SHARE

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()
