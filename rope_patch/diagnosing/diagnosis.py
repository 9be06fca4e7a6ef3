"""Result of `diagnose`: findings, a recommendation, a table, a plot."""

from __future__ import annotations

import math
import os
import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rope_patch.diagnosing.advice import Advice, PairTable
from rope_patch.diagnosing.facts import SEVERITIES, Finding, json_safe
from rope_patch.utils import atomic_files
from rope_patch.utils.errors import text_html
from rope_patch.utils.figures import (
    PAPER,
    canvas,
    legend_label,
    mark_critical_dimension,
    require_plot_path,
    write_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


HEALTHY = "transformers does what the config says"
_WIDTH = 100


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`; print it for a summary and a table.

    Attributes:
        model_type: The architecture.
        method: The diagnosed method with its factor.
        length: Target length in tokens.
        rotations: Tables of pairs by layer type; a single one under None.
        findings: Findings, the worst first.
        advice: Recommendation for the length.
        patched: The model's active patch, or None.
    """

    model_type: str
    method: str
    length: int
    rotations: dict[str | None, PairTable]
    findings: tuple[Finding, ...]
    advice: Advice
    patched: str | None = None

    @property
    def healthy(self) -> bool:
        """Whether transformers does what the config says: no finding is worse than a note."""
        return all(found.severity == "note" for found in self.findings)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot the wavelength of every pair against the lengths, before and after.

        Args:
            path: An `.svg` or `.png` file in an existing folder.

        Raises:
            ValueError: The file has another suffix, the folder is missing, or matplotlib is not
                installed.
            OSError: The file could not be written.
        """
        write_plot(self, path)

    def figure(self) -> Figure:
        """Return the plot of `plot` as a matplotlib figure, for notebooks and other formats.

        Raises:
            ValueError: matplotlib is not installed.
        """
        return make_figure(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; infinite numbers (of stopped pairs) become None."""
        data = asdict(self)
        for layer_type, rotation in self.rotations.items():
            for row, pair in zip(
                data["rotations"][layer_type]["pairs"], rotation.pairs, strict=True
            ):
                row["extrapolates"] = pair.extrapolates
        return json_safe({**data, "healthy": self.healthy})

    def __str__(self) -> str:
        parts = ["\n".join(self._summary())]
        parts += [
            self._table(layer_type, rotation) for layer_type, rotation in self.rotations.items()
        ]
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        return text_html(str(self))

    def _summary(self) -> list[str]:
        lines = [HEALTHY] if self.healthy else []
        if self.patched:
            lines.append(f"patched by rope_patch: {self.patched}; told as it was before")
        for severity in SEVERITIES:
            for finding in self.findings:
                if finding.severity != severity:
                    continue
                where = f" ({finding.layer_type})" if finding.layer_type else ""
                lines += _wrap(f"{severity}{where}: {finding.what}", "")
                lines += _wrap(finding.evidence, "  ")
                lines += _wrap(f"→ {finding.fix}", "  ") if finding.fix else []
        lines += [*([""] if lines else []), f"for {self.length:,} tokens: {self.advice.summary}"]
        for reason in self.advice.reasons:
            source = f" ({reason.source})" if reason.source else ""
            lines += _wrap(f"- {reason.text}{source}", "  ", hanging="    ")
        lines += [f"  {line}" for line in (self.advice.python, self.advice.shell) if line]
        return lines

    def _table(self, layer_type: str | None, rotation: PairTable) -> str:
        geometry, pairs = rotation.geometry, rotation.pairs
        critical = rotation.critical_dimension
        beyond = [pair.pair for pair in pairs if pair.extrapolates]
        scaled = (
            "" if rotation.rope_type == "default" else f", config asks for {rotation.rope_type}"
        )
        lines = [
            f"{self.model_type}{f', {layer_type}' if layer_type else ''}: head_dim "
            f"{geometry.head_dim}, rotary_dim "
            f"{geometry.rotary_dim}, theta {geometry.theta:g}, trained on "
            f"{geometry.trained_length:,} tokens{scaled}",
            *([rotation.own_yarn] if rotation.own_yarn else []),
            f"{self.method} to {self.length:,} tokens, attention factor "
            f"{rotation.attention_factor:.6g} (YaRN's law: {rotation.yarn_attention_factor:.6g})",
            f"critical dimension: pair {critical} of {len(pairs)}; "
            + (
                f"pairs {critical} to {len(pairs) - 1} never completed a turn in training"
                if critical < len(pairs)
                else "every pair completed at least one turn in training"
            ),
            f"at {self.length:,} tokens {len(beyond)} of them "
            + ("meets" if len(beyond) == 1 else "meet")
            + " angles that training never showed"
            + (f": pairs {beyond[0]} to {beyond[-1]}" if beyond else ""),
            f"base for {self.length:,} tokens: {_format_base(rotation.base_bound)} or more "
            f"(arXiv:2405.14591), critical base {_format_base(rotation.critical_base)} "
            "(arXiv:2310.05209)",
            "",
            "pair  wavelength (tokens)  turns trained   stretch  turns at length",
        ]
        for p in pairs:
            mark = "  !" if p.extrapolates else ("  <- critical" if p.pair == critical else "")
            stretch = f"×{p.stretch:.4f}" if math.isfinite(p.stretch) else "stopped"
            wavelength = f"{p.wavelength:,.1f}" if math.isfinite(p.wavelength) else "stands"
            lines.append(
                f"{p.pair:4d}  {wavelength:>19}  {p.turns:13,.3f}  {stretch:>8}  "
                f"{p.turns_at_length:15,.3f}{mark}"
            )
        if beyond:
            lines.append("!  beyond the angles of training")
        return "\n".join(lines)


def _format_base(value: float | None) -> str:
    return "unknown" if value is None else f"{float(f'{value:.3g}'):,.0f}"


def _wrap(text: str, indent: str, hanging: str | None = None) -> list[str]:
    """Wrap text to a readable width, without breaking words such as code."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  " if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


_FIGURE_WIDTH, _PANEL_HEIGHT = 912, 430  # CSS pixels per panel


def write_plot(diagnosis: Diagnosis, path: str | os.PathLike[str]) -> None:
    """Write a plot with a panel per layer type; see `Diagnosis.plot`."""
    require_plot_path(path)
    atomic_files.require_writable_file(path, "the picture", folder_exists=True)
    write_figure(make_figure(diagnosis), path)


def make_figure(diagnosis: Diagnosis) -> Figure:
    """Return the plot as a figure; see `Diagnosis.figure`."""
    rotations = list(diagnosis.rotations.items())
    with canvas(_FIGURE_WIDTH, _PANEL_HEIGHT * len(rotations)) as page:
        for i, (kind, rotation) in enumerate(rotations):
            axes = page.add_axes(
                104, _PANEL_HEIGHT * i + 38, _FIGURE_WIDTH - 122, _PANEL_HEIGHT - 92
            )
            _draw_panel(axes, diagnosis, kind, rotation)
    return page.figure


def _draw_panel(
    axes: Axes, diagnosis: Diagnosis, layer_type: str | None, rotation: PairTable
) -> None:
    trained, target = rotation.geometry.trained_length, diagnosis.length
    pairs = [pair for pair in rotation.pairs if math.isfinite(pair.wavelength)]
    before = [(pair.pair, pair.wavelength) for pair in pairs]
    after = [(pair.pair, pair.wavelength * pair.stretch) for pair in pairs]
    finite = [y for _, y in before + after if math.isfinite(y)]
    changed = before != after
    axes.set_yscale("log")
    low, high = min(finite) / 1.6, max(*finite, target, trained) * 3
    axes.set_ylim(low, high)
    axes.set_xlim(-0.6, len(rotation.pairs) - 0.4)
    _draw_wavelengths(axes, before, "plain", "o", "before" if changed else "as it is")
    if changed:
        _draw_wavelengths(axes, after, "m0", "s", f"{diagnosis.method}")
        stopped = [x for x, y in after if not math.isfinite(y)]
        if stopped:
            style: Any = {"color": PAPER["m0"], "markersize": 8}
            axes.plot(stopped, [high / 1.25] * len(stopped), "^", label=" no longer turns", **style)
    beyond = [pair.pair for pair in pairs if pair.extrapolates]
    if beyond:
        place = dict(after if changed else before)
        rings: Any = {"mfc": "none", "mec": PAPER["m1"], "mew": 2.2, "markersize": 11}
        ends = [min(place[pair], high / 1.25) for pair in beyond]
        axes.plot(beyond, ends, "o", label=" beyond the angles of training", **rings)
    _draw_lengths(axes, trained, target, low)
    critical = rotation.critical_dimension
    if critical < len(rotation.pairs):
        on_left = critical > len(rotation.pairs) / 2
        mark_critical_dimension(axes, critical, on_left=on_left, at_top=True)
    name = diagnosis.model_type + (f", {layer_type.replace('_', ' ')}" if layer_type else "")
    title = f"{name}: {diagnosis.method}, at {target:,} tokens" + (
        f", attention factor {rotation.attention_factor:.4g}" if changed else ""
    )
    axes.set_title(title, loc="left", fontsize="medium", pad=10)
    axes.set_xlabel("pair, from the fastest")
    axes.set_ylabel("wavelength (tokens per turn)")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="lower right")


def _draw_wavelengths(
    axes: Axes, points: list[tuple[int, float]], key: str, marker: str, label: str
) -> None:
    x = [x for x, _ in points]
    y = [y if math.isfinite(y) else math.nan for _, y in points]
    style: Any = {"color": PAPER[key], "lw": 1.5, "markersize": 4.5, "zorder": 3}
    axes.plot(x, y, marker=marker, label=legend_label(label), **style)


def _draw_lengths(axes: Axes, trained: int, target: int, low: float) -> None:
    """Draw the lengths; pairs with wavelengths below the trained one completed a rotation."""
    axes.axhspan(low, trained, color=PAPER["shade"], lw=0, zorder=0)
    lines: list[tuple[int, str, str, Any]] = [
        (trained, f"trained on {trained:,} tokens", "muted", "-")
    ]
    if target > trained:
        lines.append((target, f"target {target:,} tokens", "m1", (0, (1, 1.5))))
    for at, text, key, dash in lines:
        axes.axhline(at, color=PAPER[key], lw=1.4, ls=dash, zorder=2)
        above = at == max(trained, target)
        axes.annotate(
            text,
            (0, at),
            (6, 4 if above else -4),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            color=PAPER[key],
            ha="left",
            va="bottom" if above else "top",
        )
