"""The result of a search: arguments for `patch`, and all measurements behind them."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.geometry import Geometry
from rope_patch.inference.samples import Sample
from rope_patch.methods.base import NO_ROTATION
from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.fitness import Evaluation
from rope_patch.transformers_api.remote_code import config_from_fields
from rope_patch.utils import atomic_files
from rope_patch.utils.checksums import json_digest, json_safe, require_digest
from rope_patch.utils.errors import Refused, parse_json, text_html
from rope_patch.utils.terminal import SignedFormat, align

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rope_patch.exporting import Export

CONFIG_FILE, EXPORTS_FILE, PICTURE_FILE = "config.json", "exports.json", "picture.svg"
RESULT_FORMAT = "rope_patch.search/1"
RESULT_FILE = "found.json"
_REFERENCE_ENGINE = "transformers"  # the one engine with both sets of stretches
FOUND, PLAIN = "found", "none"
REFERENCES = ("yarn", "ntk", "linear")
_NATS, _PERCENT = SignedFormat(4), SignedFormat(1, unit="%")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SearchResult(Mapping[str, Any]):
    """The best rotation of a search, as arguments: `patch(model, "longrope", **found)`.

    Sequences up to the trained length keep the model's frequencies; longer ones get the searched
    stretches. The attention factor applies to both, as in LongRoPE, because configs have one for
    all lengths. Measure what it costs short sequences.

    Attributes:
        model: The model's name or folder.
        weights: The fingerprint of its weights (`rope_patch.utils.provenance.fingerprint`).
        strategy: The strategy, one of `STRATEGIES`.
        seed: The seed of the search and its samples.
        factor: Target length / trained length.
        geometry: The unpatched rotation, to which the stretches apply.
        candidate: The best candidate, as it was proposed.
        history: One entry an evaluation, in order: `number`, `origin`, `method`, `options`,
            `fitness` (nats, smaller is better, infinite if it failed), `complete` (False if it was
            stopped early), `best` (so far) and `seconds`.
        held_out: By label ("found", "yarn", ..., "none" for the unpatched model) the measurements
            on held-out samples, `nll` and more; under "against yarn" the comparison of "found"
            with YaRN.
        asked: Arguments of `patch` that the search was given and the result needs again:
            `trained_length`, `layer_types` or `start`.
        evaluations_per_minute: The rate of the search.
        versions: Versions of the packages that the result depends on.
        command: The command line, to run the search again.
        config: The model's config as plain data, without the patch, for `save`.
    """

    model: str
    weights: str
    strategy: str
    seed: int
    factor: float
    geometry: Geometry
    candidate: Candidate
    history: list[dict[str, Any]] = field(default_factory=list)
    held_out: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)
    evaluations_per_minute: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def space(self) -> SearchSpace:
        """Return the space that was searched."""
        return SearchSpace(self.geometry, self.factor)

    @property
    def length(self) -> int:
        """Return the target length in tokens."""
        return self.space.length

    @property
    def trained_length(self) -> int:
        """Return the length in tokens up to which sequences keep their frequencies."""
        return self.geometry.trained_length

    @property
    def layer_type(self) -> str | None:
        """Return the layer type of the stretches, or None if the model has one for all layers."""
        return self.geometry.layer_type

    @property
    def long_factor(self) -> list[float]:
        """Return old / new frequency of each pair beyond the trained length, `[R / 2]`."""
        # A stopped pair has no finite stretch.
        return [min(stretch, NO_ROTATION) for stretch in self.candidate.stretch(self.space)]

    @property
    def short_factor(self) -> list[float]:
        """Return old / new frequency of each pair up to the trained length: all 1."""
        return [1.0] * self.space.pairs

    @property
    def attention_factor(self) -> float:
        """Return the multiplier of cos and sin."""
        return self.candidate.attention_factor(self.space)

    @property
    def start_tokens(self) -> int:
        """Return how many tokens at the start keep their rotation at any length."""
        return int(self.candidate.options.get("start_tokens", 0))

    @property
    def fitness(self) -> float:
        """Return the best candidate's fitness in nats."""
        return min((float(each["best"]) for each in self.history), default=math.nan)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `patch(model, "longrope", ...)`, as in the mapping."""
        arguments: dict[str, Any] = {
            "factor": float(self.factor),
            "long_factor": self.long_factor,
            "short_factor": self.short_factor,
            "attention_factor": self.attention_factor,
        }
        if self.start_tokens:
            arguments["start_tokens"] = self.start_tokens
        return {**arguments, **self.asked}

    def __getitem__(self, key: str) -> Any:
        return self.arguments()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arguments())

    def __len__(self) -> int:
        return len(self.arguments())

    def __repr__(self) -> str:
        return (
            f"<SearchResult by {self.strategy} ×{self.factor:g}: {len(self.history)} evaluations>"
        )

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Return the result in a few lines."""
        return summary_text(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw stretches and history into an .svg or .png file; needs matplotlib.

        Raises:
            ValueError: Another kind of file, or matplotlib is not installed.
        """
        from rope_patch.searching.plot import draw_search

        draw_search(
            path,
            self.space,
            self.history,
            candidate=self.candidate,
            title=f"{self.model}: found by {self.strategy}",
        )

    def figure(self) -> Figure:
        """Return what `plot` draws as a matplotlib figure, for notebooks and other formats.

        Raises:
            ValueError: matplotlib is not installed.
        """
        from rope_patch.searching.plot import make_figure

        return make_figure(
            self.space,
            self.history,
            candidate=self.candidate,
            title=f"{self.model}: found by {self.strategy}",
        )

    def _repr_html_(self) -> str:
        return text_html(self.summary())

    def to_dict(self) -> dict[str, Any]:
        """Return the result as strict JSON data, with a digest of the rest."""
        body = json_safe(
            {
                "format": RESULT_FORMAT,
                **{each.name: getattr(self, each.name) for each in fields(self)},
                "geometry": vars(self.geometry),
                "candidate": vars(self.candidate),
                "patch": self.arguments(),
            }
        )
        return {**body, "digest": json_digest(body)}

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write `found.json`, `config.json`, `exports.json` and `picture.svg`.

        `config.json` is the model's own with the stretches in it, for plain transformers.
        `exports.json` has each engine's config and arguments, or why it cannot express the
        rotation.
        `picture.svg` needs matplotlib. Each file is replaced atomically.

        Args:
            folder: The folder to write to; created if missing.

        Returns:
            The path of `found.json`, which is written last.

        Raises:
            ValueError: The folder is a file, or holds a model, whose config would be overwritten.
        """
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file: expected a folder to save into")
        if list(folder.glob("*.safetensors")):
            raise ValueError(
                f"{folder} holds a model, whose config.json would be overwritten: save the result "
                "in a folder of its own"
            )
        write_artifacts(self, folder)
        path = folder / RESULT_FILE
        atomic_files.atomic_write(path, json.dumps(self.to_dict(), indent=1) + "\n")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SearchResult:
        """Read a result that `save` wrote.

        Args:
            path: The folder, or its `found.json`.

        Raises:
            ValueError: There is no such file; or it is no result, of another version, damaged, or
                was changed after it was written.
        """
        path = Path(path)
        path = path / RESULT_FILE if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"there is no {path}: expected what a search saved, {RESULT_FILE}")
        data = _load_verified(path)
        names = {each.name for each in fields(cls)}
        try:
            result = cls(
                **{
                    **{name: value for name, value in data.items() if name in names},
                    "geometry": _parse_geometry(data["geometry"]),
                    "candidate": Candidate(**data["candidate"]),
                    "history": _restore_infinities(data["history"]),
                    "held_out": _restore_infinities(data["held_out"]),
                }
            )
            agrees = _nearly_equal(result.arguments(), data["patch"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}: {error}): restore it, or search again"
            ) from error
        if not agrees:
            raise ValueError(
                f"{path}: its candidate gives other stretches with this version of rope-patch than "
                "are written there; patch with the numbers under `patch`, or search again"
            )
        return result


def _load_verified(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); expected a search's {RESULT_FILE}"
        ) from error
    file_format = data.get("format") if isinstance(data, dict) else type(data).__name__
    if file_format != RESULT_FORMAT:
        is_search_result = str(file_format).startswith(RESULT_FORMAT.split("/")[0] + "/")
        raise ValueError(
            f"{path} has the format {file_format!r}, expected {RESULT_FORMAT!r}: read it with the "
            "version of rope-patch that wrote it, or search again"
            if is_search_result
            else f"{path} is not the result of rope-patch search: expected format "
            f"{RESULT_FORMAT!r}, got {file_format!r}"
        )
    return require_digest(data, path, "restore the file, or search again")


def _parse_geometry(data: dict[str, Any]) -> Geometry:
    return Geometry(**{**data, "base": tuple(data["base"])})


def _restore_infinities(value: Any) -> Any:
    """Return data with the infinities and NaNs that strict JSON has as strings."""
    if isinstance(value, dict):
        return {name: _restore_infinities(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_restore_infinities(each) for each in value]
    return float(value) if value in ("Infinity", "-Infinity", "NaN") else value


def _nearly_equal(first: Any, second: Any) -> bool:
    """Return whether arguments agree up to another machine's rounding."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            _nearly_equal(first[key], second[key]) for key in first
        )
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_nearly_equal, first, second))
    return (
        math.isclose(first, second, rel_tol=1e-9) if isinstance(first, float) else first == second
    )


def summary_text(result: SearchResult) -> str:
    """Return a few lines for a terminal: the rotation and how it compares with known methods."""
    stretch = result.long_factor
    unchanged = sum(s < 1.005 for s in stretch)
    lines = [
        f"{result.model}, from {result.trained_length:,} to {result.length:,} tokens "
        f"(×{result.factor:g}): {_search_line(result)}",
        f"found: {result.candidate.origin} ({result.candidate.method}); {unchanged} of "
        f"{len(stretch)} pairs as they were, the last ×{stretch[-1]:.4g}; attention factor "
        f"{result.attention_factor:.4g}"
        + (f"; {result.start_tokens} start tokens kept" if result.start_tokens else ""),
    ]
    rows = [
        (label, value)
        for label, value in result.held_out.items()
        if isinstance(value, dict) and not label.startswith("against ")
    ]
    if rows:
        lines += ["", "on other samples than the search's (nats a token, smaller is better):"]
        table = align([(label, _format_measurement(value)) for label, value in rows])
        lines += [f"  {line}" for line in table]
    pairs = [(k, v) for k, v in result.held_out.items() if k.startswith("against ")]
    if pairs:
        lines += ["", "found less the other, on the same samples:"]
        table = align([(label, _format_difference(value)) for label, value in pairs])
        lines += [f"  {line}" for line in table]
    return "\n".join(lines)


def _search_line(result: SearchResult) -> str:
    stopped_count = sum(not entry.get("complete", True) for entry in result.history)
    failed = sum(not math.isfinite(float(entry["fitness"])) for entry in result.history)
    parts = [f"{result.strategy}, {len(result.history)} evaluations"]
    parts += [f"{stopped_count} of them stopped early"] if stopped_count else []
    parts += [f"{failed} failed"] if failed else []
    parts += (
        [f"{result.evaluations_per_minute:.3g} a minute"] if result.evaluations_per_minute else []
    )
    return ", ".join([*parts, f"seed {result.seed}"])


def _format_measurement(value: dict[str, Any]) -> str:
    if "nll" not in value:
        return f"failed: {value.get('error')}"
    text = f"{float(value['nll']):.4f}"
    if interval := value.get("interval"):
        text += f" ({float(interval[0]):.4f} to {float(interval[1]):.4f})"
    if value.get("accuracy") is not None:
        text += f", {float(value['accuracy']):.1%} of answers right"
    return text


def _format_difference(value: Any) -> str:
    """Return the result's difference from another method, with 95% intervals, as text."""
    if not isinstance(value, dict) or "nll" not in value:
        return str(value)
    nats = float(value["nll"])
    interval = value.get("interval")
    text = (
        _NATS.with_interval(nats, [float(bound) for bound in interval], unit=" nats")
        if interval
        else f"{_NATS.number(nats)} nats"
    )
    if value.get("accuracy") is not None:
        text += f", {_PERCENT.number(100 * float(value['accuracy']))} of answers"
        if interval := value.get("accuracy interval"):
            text += f" ({_PERCENT.range(*(100 * float(bound) for bound in interval))})"
        if value.get("p") is not None:
            text += f", p = {float(value['p']):.2g}"
    return text


def write_artifacts(result: SearchResult, folder: Path) -> None:
    """Write the files that the result and the installed packages allow; see `SearchResult.save`."""
    from rope_patch.exporting.folder import merge_config

    exports = all_exports(result)
    if exports:
        reference = exports.get(_REFERENCE_ENGINE, {})
        if "refused" not in reference:
            config = merge_config(result.config, reference["config"])
            atomic_files.atomic_write(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        else:
            (folder / CONFIG_FILE).unlink(missing_ok=True)  # the file of an earlier result
        atomic_files.write_json(folder / EXPORTS_FILE, exports)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return
    result.plot(folder / PICTURE_FILE)


def all_exports(result: SearchResult) -> dict[str, Any]:
    """Return each engine's config and arguments, or under `refused` why it has no such rotation.

    transformers gets both sets of stretches. The other engines rotate sequences of all lengths
    alike: they get the candidate's method if they have it, else its stretches pair by pair.
    """
    from rope_patch.exporting import ENGINES

    if not result.config:
        return {}
    exports: dict[str, Any] = {}
    for engine in ENGINES:
        try:
            exports[engine] = export_for(result, engine).to_dict()
        except Refused as error:
            exports[engine] = {"engine": engine, "refused": str(error)}
    return exports


def export_for(result: SearchResult, engine: str, config: Any = None) -> Export:
    """Return the export for one engine; see `all_exports`.

    Args:
        result: The search's result.
        engine: One of `rope_patch.exporting.ENGINES`.
        config: The unpatched config of the checkpoint to serve; that of the search unless given.

    Raises:
        ValueError: The engine cannot express the rotation, or the result is not for this model.
    """
    from rope_patch.exporting import export

    config = base_config(result) if config is None else config
    arguments = result.arguments()
    if engine.startswith(_REFERENCE_ENGINE):
        return export(_patched_empty_model(result, config, "longrope", arguments), engine)
    arguments["short_factor"] = arguments["long_factor"]
    candidate = result.candidate
    exported = None
    if candidate.method != "longrope":  # a form that more engines know
        own_arguments = {"factor": result.factor, **candidate.options, **result.asked}
        with contextlib.suppress(ValueError):
            exported = export(
                _patched_empty_model(result, config, candidate.method, own_arguments), engine
            )
    if exported is None:
        exported = export(_patched_empty_model(result, config, "longrope", arguments), engine)
    exported.notes.append(
        "rotates sequences up to the trained length by the found stretches, too; rope_patch and "
        "transformers leave their frequencies as they were"
    )
    return exported


def _patched_empty_model(
    result: SearchResult, config: Any, method: str, arguments: dict[str, Any]
) -> Any:
    """Return the result's model without weights, patched; raise if it is of another model."""
    from rope_patch.entry_points import patch_rotation
    from rope_patch.pretrained.loading import empty_model

    model = empty_model(result.model, copy.deepcopy(config))
    handle = patch_rotation(model, method, kernels="hf", **arguments)
    geometry = handle.geometries.get(result.layer_type)
    shapes = [(g.theta, g.rotary_dim, g.trained_length) for g in (geometry, result.geometry) if g]
    if shapes[0] != shapes[-1] or geometry is None:
        raise Refused(
            f"what was found for {result.model} is not for this model: expected theta, rotating "
            f"dimensions and trained length {shapes[-1]}, got "
            f"{shapes[0] if geometry else 'no such layer'}"
        )
    return model


def base_config(result: SearchResult) -> Any:
    """Return the unpatched config of the model that was searched.

    Raises:
        ValueError: transformers does not know the model type.
    """
    try:
        return config_from_fields(result.model, copy.deepcopy(result.config))
    except KeyError as error:
        raise Refused(f"the config of {result.model} names no model_type") from error


def compare_on_held_out(
    evaluations: Mapping[str, Evaluation], samples: Sequence[Sample]
) -> dict[str, dict[str, Any]]:
    """Return intervals of each method, and of the differences between the result and the others.

    Args:
        evaluations: By label, all on the same samples; `FOUND` is one of the labels.
        samples: The samples, in the evaluations' order.

    Returns:
        By label: `nll` (nats for a scored token, mean of the samples) with its 95% `interval` over
        groups; `hits`, `answers` and `accuracy` if there are answers; `error` if it failed.
        Under "against yarn", ...: `nll` and `interval` of the difference (found - yarn), and of the
        accuracies' difference `accuracy`, `accuracy interval` and `p` (McNemar's, by groups if
        samples share texts). With answers and prose, both have equal weight in all losses.
    """
    table = {
        label: _summarize_evaluation(evaluation, samples)
        for label, evaluation in evaluations.items()
    }
    best = evaluations[FOUND]
    for label, evaluation in evaluations.items():
        if label != FOUND and best.complete and evaluation.complete:
            table[f"against {label}"] = _paired_difference(best, evaluation, samples)
    return table


def _summarize_evaluation(evaluation: Evaluation, samples: Sequence[Sample]) -> dict[str, Any]:
    if not evaluation.complete:
        return {"error": evaluation.error}
    interval = _bootstrap_interval([float(nll or 0) for nll in evaluation.nll], samples)
    summary: dict[str, Any] = {
        "nll": evaluation.fitness,
        "interval": interval,
        "samples": len(samples),
    }
    if answers := [hit for hits in evaluation.hits for hit in hits]:
        summary |= {"hits": sum(answers), "answers": len(answers)}
        summary["accuracy"] = sum(answers) / len(answers)
    return summary


def _paired_difference(
    ours: Evaluation, other: Evaluation, samples: Sequence[Sample]
) -> dict[str, Any]:
    from rope_patch import statistics

    differences = [float(a or 0) - float(b or 0) for a, b in zip(ours.nll, other.nll, strict=True)]
    texts, kinds = [sample.group for sample in samples], [sample.prose for sample in samples]
    interval = statistics.mean_test(differences, texts, kinds).mean
    comparison: dict[str, Any] = {
        "nll": ours.fitness - other.fitness,
        "interval": [interval.low, interval.high],
    }
    pairs = [
        (float(a), float(b), sample.group)
        for sample, own_hits, other_hits in zip(samples, ours.hits, other.hits, strict=True)
        for a, b in zip(own_hits, other_hits, strict=True)
    ]
    if pairs:
        own_hits, other_hits, groups = (list(column) for column in zip(*pairs, strict=True))
        test = statistics.mcnemar(own_hits, other_hits, groups)
        difference = test.difference
        comparison |= {
            "accuracy": difference.estimate,
            "accuracy interval": [difference.low, difference.high],
            "p": test.p_value,
        }
    return comparison


def _bootstrap_interval(values: Sequence[float], samples: Sequence[Sample]) -> list[float]:
    """Return the 95% interval of the weighted mean, resampling whole groups."""
    from rope_patch import statistics

    prose = sum(sample.prose for sample in samples)
    share = {True: prose, False: len(samples) - prose}
    groups: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(i)
    interval = statistics.bootstrap_mean(
        [[values[i] for i in group] for group in groups.values()],
        [[1 / share[samples[i].prose] for i in group] for group in groups.values()],
    )
    return [interval.low, interval.high]
