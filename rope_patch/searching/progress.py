"""The progress of a running search: a bar, and a picture that is redrawn."""

from __future__ import annotations

import logging
import os
import time
from typing import Any, Protocol

from rope_patch.searching.candidates import SearchSpace
from rope_patch.utils.progress import progress_bar

logger = logging.getLogger("rope_patch")

_PLOT_TIME_SHARE = 0.05  # at most this share of the time goes into pictures


class Progress(Protocol):
    """What a search loop updates after each evaluation."""

    def update(self, history: list[dict[str, Any]], reference: float, rate: float) -> None:
        """Show the state after an evaluation; see `SearchProgress.update`."""


class SearchProgress:
    """Shows evaluations, the best fitness so far, YaRN's, and the rate.

    Args:
        space: The space that is searched.
        budget: Evaluations at most.
        title: The picture's title.
        picture: An .svg or .png file that is redrawn while the search runs; None draws none.
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
            from rope_patch.utils.plot_style import require_plot_path

            require_plot_path(picture)
        self._space, self._title, self._picture = space, title, picture
        self._bar = progress_bar(
            total=budget, desc="searching", unit="evaluation", disable=not progress
        )
        self._next_plot_time = 0.0

    def update(self, history: list[dict[str, Any]], reference: float, rate: float) -> None:
        """Show the state after an evaluation.

        Args:
            history: All evaluations so far, as in `SearchResult.history`.
            reference: YaRN's fitness, nats.
            rate: Evaluations per minute.
        """
        best = history[-1]["best"]
        self._bar.set_postfix_str(f"best {best:.4f}, yarn {reference:.4f}, {rate:.3g}/min", False)
        self._bar.update(history[-1]["number"] - self._bar.n)
        if time.monotonic() >= self._next_plot_time:
            self.draw(history)

    def draw(self, history: list[dict[str, Any]]) -> None:
        """Draw the picture; if it cannot be written, warn and go on."""
        if self._picture is None or not history:
            return
        from rope_patch.searching.result.plot import draw_search

        started = time.monotonic()
        try:
            draw_search(self._picture, self._space, history, title=self._title)
        except (OSError, ValueError) as error:
            logger.warning("the picture of the search could not be drawn: %s", error)
        ended = time.monotonic()
        self._next_plot_time = ended + (ended - started) / _PLOT_TIME_SHARE

    def close(self) -> None:
        """End the bar."""
        self._bar.close()
