"""The functions `evaluate` and `compare`: what the commands of these names do, from Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.transformers_api.remote_code import takes_remote_code
from rope_patch.utils.errors import Refused, did_you_mean, text_html

if TYPE_CHECKING:
    from rope_patch.evaluation.request import EvalRequest
    from rope_patch.evaluation.results_schema import RunRecord
    from rope_patch.statistics import UsableLength

_SEQUENCES = ("methods", "lengths", "tasks", "depths", "texts", "haystacks", "include_paths")


@dataclass(frozen=True, repr=False)
class Evaluation:
    """What an evaluation measured; print it to read the verdict and the first table.

    Attributes:
        results: All results, as in `report.json` (`rope_patch.evaluation.results_schema`).
        folder: The folder of the report.
        overview: The verdict, the first table and cautions as text; empty in other processes than
            the main one.
    """

    results: RunRecord
    folder: Path
    overview: str

    @property
    def verdict(self) -> str:
        """Return the sentence at the top of the report."""
        from rope_patch.evaluation.report.conclusions import Ranking, conclude
        from rope_patch.evaluation.report.results.run_statistics import RunStatistics

        stats = RunStatistics(self.results)
        return conclude(stats, Ranking(stats)).headline

    @property
    def usable(self) -> dict[str, UsableLength | None]:
        """Return each method's usable length; None where there is nothing to compare with."""
        from rope_patch.evaluation.report.results.run_statistics import RunStatistics

        stats = RunStatistics(self.results)
        return {label: stats.usable_length(label) for label in stats.labels}

    @property
    def report(self) -> Path:
        """Return the path of the report, a page that needs no other file."""
        return self.folder / "report.html"

    @property
    def figures(self) -> dict[str, Path]:
        """Return the report's pictures by name, `.png` files."""
        return {path.stem: path for path in sorted((self.folder / "figures").glob("*.png"))}

    def __repr__(self) -> str:
        """Return three lines: what was evaluated, the verdict, and where the report is."""
        methods = ", ".join(method["label"] for method in self.results["methods"])
        subject = f"Evaluation of {self.results['run']['model']}: {methods}"
        return "\n".join((subject, self.verdict, str(self.report)))

    def __str__(self) -> str:
        return self.overview

    def _repr_html_(self) -> str:
        return text_html(self.overview)


@takes_remote_code
def evaluate(
    model: str | os.PathLike[str],
    methods: Sequence[str] = ("none",),
    *,
    out: str | os.PathLike[str] = "out",
    show: Callable[[str], object] | None = None,
    **options: Any,
) -> Evaluation:
    """Measure methods on a checkpoint and write a report, as `rope-patch eval` does.

    The folder keeps everything that is measured: the same call continues an earlier one.

    Args:
        model: A folder, a name on the Hub, or `demo`.
        methods: Names of methods; `none` is the model as it is.
        out: The folder of the report and of everything measured.
        show: Called with the verdict, the first table and cautions as text, such as `print`.
        **options: Fields of `rope_patch.evaluation.request.EvalRequest`: `factor`, `length`,
            `lengths`, `tasks`, `samples`, `trust_remote_code`, ...

    Returns:
        What was measured.

    Raises:
        ValueError: The request is invalid, found out before weights are read; or not one sample
            could be answered.
        TypeError: The model is no path or name, or an option is unknown.
        OSError: The folder cannot be written to.
    """
    from rope_patch.evaluation.request import EvalRequest

    _refuse_address(model)
    return _run(EvalRequest(**request_fields(model, methods, out, options)), show)


@takes_remote_code
def compare(
    model: str | os.PathLike[str],
    methods: Sequence[str] | None = None,
    *,
    profile: str | None = None,
    out: str | os.PathLike[str] = "out",
    show: Callable[[str], object] | None = None,
    **options: Any,
) -> Evaluation:
    """Compare what methods gain at length and cost at short, as `rope-patch compare` does.

    Args:
        model: A folder, a name on the Hub, or `demo`.
        methods: Names of methods; linear, ntk, yarn and dynamic-yarn unless given. The plain model
            is always with them.
        profile: `quick`, `standard` or `paper`; by the machine unless given.
        out: The folder of the report and of everything measured.
        show: Called with the verdict, the first table and cautions as text, such as `print`.
        **options: As for `evaluate`; what is left out comes from the profile.

    Returns:
        What was measured.

    Raises:
        ValueError: See `evaluate`.
        TypeError: See `evaluate`.
        OSError: See `evaluate`.
    """
    from rope_patch.evaluation.profiles import DEFAULT_METHODS, comparison_request

    _refuse_address(model)
    methods = DEFAULT_METHODS if methods is None else methods
    request = comparison_request(profile=profile, **request_fields(model, methods, out, options))
    return _run(request, show)


def is_address(model: object) -> bool:
    """Return whether a model is named by a server's address."""
    return isinstance(model, str) and model.lower().startswith(("http://", "https://"))


def _refuse_address(model: object) -> None:
    if is_address(model):
        raise Refused(
            "expected a checkpoint's folder, its name on the Hub or `demo`, got the address "
            f"{model!r}: call rope_patch.evaluate_server or compare_servers"
        )


def request_fields(
    model: Any, methods: Sequence[str], out: str | os.PathLike[str], options: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of a request, with its sequences as tuples.

    Args:
        model: See `evaluate`, or a server's address.
        methods: See `evaluate`.
        out: See `evaluate`.
        options: The other fields of `EvalRequest`.

    Raises:
        ValueError: A text where a list is expected.
        TypeError: See `evaluate`.
    """
    from rope_patch.evaluation.request import EvalRequest

    if not isinstance(model, str | os.PathLike):
        raise TypeError(
            f"expected a checkpoint's folder, its name on the Hub or `demo`, got a "
            f"{type(model).__name__}: write a live model with rope_patch.save first"
        )
    names = {each.name for each in fields(EvalRequest)} - {"model", "methods", "folder"}
    for name in options:
        if name not in names:
            raise TypeError(
                f"unknown option {name!r}{did_you_mean(name, names, 0.5)}; the options are: "
                f"{', '.join(sorted(names))}"
            )
    values = {"model": os.fspath(model), "methods": methods, "folder": Path(out), **options}
    for name in _SEQUENCES:
        if isinstance(values.get(name), str):
            raise Refused(f"{name} must be a list, got {values[name]!r}: write [{values[name]!r}]")
        if name in values:
            values[name] = tuple(values[name])
    return values


def _run(request: EvalRequest, show: Callable[[str], object] | None) -> Evaluation:
    from rope_patch.evaluation import pipeline

    overview: list[str] = []
    results = pipeline.evaluate(request, overview.append)
    if show is not None and overview:
        show(*overview)
    return Evaluation(results, request.folder, "".join(overview))
