"""Bayesian optimisation of a few numbers in a trust region around the best point so far.

A Gaussian process (optuna's GPSampler: Matern kernel, expected improvement) chooses each point, but
only near the best one: over the whole space, the few evaluations of a search would mostly go to far
corners. The region is a box that grows after an improvement and shrinks after a few failures, as in
TuRBO (Eriksson et al. 2019, arXiv:1910.01496).

Each point comes from a sampler of its own, seeded by the point's number. So the same fitnesses lead
to the same points, however often a search was interrupted.
"""

from __future__ import annotations

import contextlib
import math
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from rope_patch.utils.installation import install_hint

MAX_SIDE, MIN_SIDE = 0.8, 0.05  # side of the box / range of the bounds
GROWTH, SHRINKAGE = 1.3, 0.6
MAX_FAILURES = 3  # failures in a row until the box shrinks
LOG_FLOOR = 1e-3  # nats; much smaller differences are noise

P = TypeVar("P")  # a dataclass whose fields are the numbers


def require_optuna() -> None:
    """Raise unless optuna is installed.

    Raises:
        ImportError: It is not.
    """
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{error.name} is not installed, which the curve search needs: "
            f"{install_hint('search')}",
            name=error.name,
        ) from error


class TrustRegion(Generic[P]):
    """Points with their fitnesses, and the box in which to ask for the next one.

    Args:
        bounds: Lower and upper bound of each number, by the names of the points' fields.

    Raises:
        ImportError: optuna is not installed.
    """

    def __init__(self, bounds: Mapping[str, tuple[float, float]]) -> None:
        require_optuna()
        self._bounds = dict(bounds)
        self._points: list[dict[str, float]] = []
        self._fitnesses: list[float] = []
        self._point_class: type[P] | None = None
        self._side, self._failures = MAX_SIDE, 0

    def add(self, point: P, fitness: float) -> None:
        """Add a point that `ask` did not return; numbers beyond the bounds are clamped."""
        self._point_class = type(point)
        numbers = asdict(point)  # type: ignore[call-overload]
        clamped_numbers = {
            name: min(max(float(numbers[name]), low), high)
            for name, (low, high) in self._bounds.items()
        }
        self._points.append(clamped_numbers)
        self._fitnesses.append(fitness)

    def tell(self, point: P, fitness: float) -> None:
        """Add a point that `ask` returned with its fitness, and grow or shrink the box."""
        better = fitness < min(self._fitnesses)
        self.add(point, fitness)
        if better:
            self._side, self._failures = min(MAX_SIDE, self._side * GROWTH), 0
        else:
            self.record_failure()

    def record_failure(self) -> None:
        """Count a point without an improvement, and shrink the box after a few."""
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            self._side, self._failures = max(MIN_SIDE, self._side * SHRINKAGE), 0

    def ask(self, seed: object) -> P:
        """Return the next point; at least one must have been added."""
        import optuna

        assert self._point_class is not None
        box = self._box()
        distributions: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.FloatDistribution(*limits) for name, limits in box.items()
        }
        with _silence_optuna():
            sampler = optuna.samplers.GPSampler(
                seed=random.Random(repr(seed)).getrandbits(31), n_startup_trials=0
            )
            study = optuna.create_study(sampler=sampler)
            for point, value in zip(self._points, self._log_fitnesses(), strict=True):
                if all(low <= point[name] <= high for name, (low, high) in box.items()):
                    trial = optuna.trial.create_trial(
                        params=dict(point), distributions=distributions, value=value
                    )
                    study.add_trial(trial)
            trial_to_measure = study.ask()
            return self._point_class(
                **{
                    name: trial_to_measure.suggest_float(name, *limits)
                    for name, limits in box.items()
                }
            )

    def _box(self) -> dict[str, tuple[float, float]]:
        """Return the box: the bounds, narrowed around the best point so far."""
        best = self._points[min(range(len(self._points)), key=self._fitnesses.__getitem__)]
        box = {}
        for name, (low, high) in self._bounds.items():
            half = (high - low) * self._side / 2
            box[name] = (max(low, best[name] - half), min(high, best[name] + half))
        return box

    def _log_fitnesses(self) -> list[float]:
        """Return log fitnesses, with failed points as bad as the worst."""
        # Bad points are worse by powers of ten, which a Gaussian process cannot fit.
        logs = [
            math.log(max(fitness, 0.0) + LOG_FLOOR) if math.isfinite(fitness) else None
            for fitness in self._fitnesses
        ]
        worst = max((log for log in logs if log is not None), default=0.0)
        return [worst if log is None else log for log in logs]


@contextlib.contextmanager
def _silence_optuna() -> Iterator[Any]:
    """Silence optuna's message for each trial; restore its settings afterwards."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
