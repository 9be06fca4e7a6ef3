"""What a search found: arguments for `patch`, and everything that was measured on the way."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rope_patch.geometry import Geometry
from rope_patch.methods.base import NO_ROTATION
from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.utils import atomic_files
from rope_patch.utils.checksums import json_digest, json_safe
from rope_patch.utils.errors import parse_json


def summary_text(found: SearchResult) -> str:
    """A few lines for a terminal: what was found, how it compares, how to use it."""
    stretch = found.long_factor
    kept = sum(s < 1.005 for s in stretch)
    lines = [
        f"{found.model}, from {found.trained_length:,} to {found.length:,} tokens "
        f"(×{found.factor:g}): {_search_line(found)}",
        f"found: {found.candidate.origin} ({found.candidate.method}); {kept} of {len(stretch)} "
        f"pairs as they were, the last ×{stretch[-1]:.4g}; attention factor "
        f"{found.attention_factor:.4g}"
        + (f"; {found.start_tokens} start tokens kept" if found.start_tokens else ""),
    ]
    rows = [
        (label, value)
        for label, value in found.held_out.items()
        if isinstance(value, dict) and not label.startswith("against ")
    ]
    if rows:
        lines += ["", "on other samples than the search's (nats a token, smaller is better):"]
        width = max(len(label) for label, _ in rows)
        lines += [f"  {label:<{width}}  {_format_measurement(value)}" for label, value in rows]
    pairs = [(k, v) for k, v in found.held_out.items() if k.startswith("against ")]
    if pairs:
        lines += ["", "found less the other, on the same samples:"]
        width = max(len(label) for label, _ in pairs)
        lines += [f"  {label:<{width}}  {_format_difference(value)}" for label, value in pairs]
    return "\n".join(lines)


def _search_line(found: SearchResult) -> str:
    stopped = sum(not entry.get("complete", True) for entry in found.history)
    failed = sum(not math.isfinite(float(entry["fitness"])) for entry in found.history)
    said = [f"{found.strategy}, {len(found.history)} evaluations"]
    said += [f"{stopped} of them stopped early"] if stopped else []
    said += [f"{failed} failed"] if failed else []
    said += [f"{found.evaluations_per_minute:.3g} a minute"] if found.evaluations_per_minute else []
    return ", ".join([*said, f"seed {found.seed}"])


def _format_measurement(value: dict[str, Any]) -> str:
    if "nll" not in value:
        return f"failed: {value.get('error')}"
    said = f"{float(value['nll']):.4f}"
    if interval := value.get("interval"):
        said += f" ({float(interval[0]):.4f} to {float(interval[1]):.4f})"
    if value.get("accuracy") is not None:
        said += f", {float(value['accuracy']):.1%} of answers right"
    return said


def _format_difference(value: Any) -> str:
    """The found one less another; intervals are of 95%."""
    if not isinstance(value, dict) or "nll" not in value:
        return str(value)
    said = f"{_format_signed(value['nll'])} nats"
    if interval := value.get("interval"):
        said += f" ({_format_signed(interval[0])} to {_format_signed(interval[1])})"
    if value.get("accuracy") is not None:
        said += f", {float(value['accuracy']):+.1%} of answers"
        if interval := value.get("accuracy interval"):
            said += f" ({float(interval[0]):+.1%} to {float(interval[1]):+.1%})"
        if value.get("p") is not None:
            said += f", p = {float(value['p']):.2g}"
    return said


def _format_signed(value: Any) -> str:
    return f"{float(value):+.4f}"


RESULT_FORMAT = "rope_patch.search/1"
RESULT_FILE = "found.json"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SearchResult(Mapping[str, Any]):
    """The best rotation of a search, as arguments: `patch(model, "longrope", **found)`.

    Sequences up to the trained length keep the frequencies that the model has; longer ones get the
    stretches that were found. The attention factor is for both, as in LongRoPE, because configs
    name one; what it costs short sequences is to be measured.

    Attributes:
        model: The model's name or folder.
        weights: The fingerprint of its weights (`rope_patch.utils.provenance.fingerprint`).
        strategy: What searched, one of `STRATEGIES`.
        seed: What the search and its samples were made with.
        factor: Target length / trained length.
        geometry: The rotation that the stretches are of, as it was before.
        candidate: The best one, as it was proposed.
        history: An entry an evaluation, in order: `number`, `origin`, `method`, `options`,
            `fitness` (nats, smaller is better, infinite where it failed), `complete` (False where
            it was stopped early), `best` (so far) and `seconds`.
        held_out: By label ("result", "yarn", ..., "none" for the model as it was): what other
            samples than the search's gave, `nll` and more; and under "against yarn" how "result"
            compares with it.
        asked: Arguments of `patch` that the search was given and the result needs again:
            `trained_length`, `layer_types` or `start`.
        evaluations_per_minute: How fast candidates were measured.
        versions: Of the packages that the result depends on.
        command: What was run, for doing it again.
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
        """What was searched."""
        return SearchSpace(self.geometry, self.factor)

    @property
    def length(self) -> int:
        """Target length in tokens."""
        return self.space.length

    @property
    def trained_length(self) -> int:
        """Tokens up to which sequences keep their frequencies."""
        return self.geometry.trained_length

    @property
    def layer_type(self) -> str | None:
        """The kind of layer that the stretches are for, where a model has several."""
        return self.geometry.layer_type

    @property
    def long_factor(self) -> list[float]:
        """By how much each pair is slowed down beyond the trained length, `[R / 2]`."""
        # A pair that no longer turns has no finite stretch.
        return [min(stretch, NO_ROTATION) for stretch in self.candidate.stretch(self.space)]

    @property
    def short_factor(self) -> list[float]:
        """The same up to the trained length: nothing is."""
        return [1.0] * self.space.pairs

    @property
    def attention_factor(self) -> float:
        """The multiplier of cos and sin."""
        return self.candidate.attention_factor(self.space)

    @property
    def start_tokens(self) -> int:
        """Tokens at the start that keep their rotation at any length."""
        return int(self.candidate.options.get("start_tokens", 0))

    @property
    def fitness(self) -> float:
        """The best candidate's, in nats."""
        return min((float(each["best"]) for each in self.history), default=math.nan)

    def arguments(self) -> dict[str, Any]:
        """What `patch(model, "longrope", ...)` needs; the same as the mapping holds."""
        found = {
            "factor": float(self.factor),
            "long_factor": self.long_factor,
            "short_factor": self.short_factor,
            "attention_factor": self.attention_factor,
        }
        if self.start_tokens:
            found["start_tokens"] = self.start_tokens
        return {**found, **self.asked}

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
        """What was found, in a few lines."""
        return summary_text(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws stretches and history into an .svg or .png file; needs matplotlib.

        Raises:
            ValueError: Another kind of file, or matplotlib is not installed.
        """
        from rope_patch.searching.result.plot import draw

        draw(
            path,
            self.space,
            self.history,
            candidate=self.candidate,
            title=f"{self.model}: found by {self.strategy}",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, strict JSON, with a digest of the rest."""
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
        """Writes `found.json`, the model's config with the result, and what other engines need.

        `config.json` is the model's own with the stretches in it, for plain transformers;
        `exports.json` has what each engine is to be given, or why it cannot; `picture.svg` is left
        out where matplotlib is not installed. Each file is the old one or the new one, never half.

        Args:
            folder: Where to; made if missing.

        Returns:
            The path of `found.json`, which is written last.

        Raises:
            ValueError: The folder is a file, or holds a model, whose config would be overwritten.
        """
        from rope_patch.searching.result.artifacts import write_artifacts

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
        """Reads what `save` wrote.

        Args:
            path: The folder, or its `found.json`.

        Raises:
            ValueError: There is none; it is something else, of another version, or was changed
                after it was written.
        """
        path = Path(path)
        path = path / RESULT_FILE if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"there is no {path}: expected what a search saved, {RESULT_FILE}")
        said = _load_verified(path)
        known = {each.name for each in fields(cls)}
        try:
            found = cls(
                **{
                    **{name: value for name, value in said.items() if name in known},
                    "geometry": _parse_geometry(said["geometry"]),
                    "candidate": Candidate(**said["candidate"]),
                    "history": _restore_infinities(said["history"]),
                    "held_out": _restore_infinities(said["held_out"]),
                }
            )
            agrees = _nearly_equal(found.arguments(), said["patch"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}: {error}): restore it, or search again"
            ) from error
        if not agrees:
            raise ValueError(
                f"{path}: its candidate gives other stretches with this version of rope-patch than "
                "are written there; patch with the numbers under `patch`, or search again"
            )
        return found


def _load_verified(path: Path) -> dict[str, Any]:
    try:
        said = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); expected a search's {RESULT_FILE}"
        ) from error
    named = said.get("format") if isinstance(said, dict) else type(said).__name__
    if named != RESULT_FORMAT:
        ours = str(named).startswith(RESULT_FORMAT.split("/")[0] + "/")
        raise ValueError(
            f"{path} has the format {named!r}, expected {RESULT_FORMAT!r}: read it with the version of "
            "rope-patch that wrote it, or search again"
            if ours
            else f"{path} is not the result of rope-patch search: expected format {RESULT_FORMAT!r}, got "
            f"{named!r}"
        )
    body = {key: value for key, value in said.items() if key != "digest"}
    expected = json_digest(body)
    if said.get("digest") != expected:
        raise ValueError(
            f"{path} was changed after it was written: its contents have the digest {expected}, it "
            f"says {said.get('digest')!r}; restore the file, or search again"
        )
    return body


def _parse_geometry(said: dict[str, Any]) -> Geometry:
    return Geometry(**{**said, "base": tuple(said["base"])})


def _restore_infinities(value: Any) -> Any:
    """With the infinities that JSON has as strings."""
    if isinstance(value, dict):
        return {name: _restore_infinities(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_restore_infinities(each) for each in value]
    return float(value) if value in ("Infinity", "-Infinity", "NaN") else value


def _nearly_equal(mine: Any, other: Any) -> bool:
    """Whether arguments agree, but for what another machine's rounding may change."""
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(
            _nearly_equal(mine[key], other[key]) for key in mine
        )
    if isinstance(mine, list):
        return len(mine) == len(other) and all(map(_nearly_equal, mine, other))
    return math.isclose(mine, other, rel_tol=1e-9) if isinstance(mine, float) else mine == other
