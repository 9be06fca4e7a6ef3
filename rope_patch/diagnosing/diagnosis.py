"""Result of `diagnose`: findings, a recommendation, a table, a plot."""

from __future__ import annotations

import math
import os
import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rope_patch.diagnosing.advice import Advice
from rope_patch.diagnosing.finding import SEVERITIES, Finding, json_safe
from rope_patch.diagnosing.pairs import PairTable
from rope_patch.utils.notebook import text_html

if TYPE_CHECKING:
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
        from rope_patch.diagnosing.plot import write_plot

        write_plot(self, path)

    def figure(self) -> Figure:
        """Return the plot of `plot` as a matplotlib figure, for notebooks and other formats.

        Raises:
            ValueError: matplotlib is not installed.
        """
        from rope_patch.diagnosing.plot import make_figure

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
