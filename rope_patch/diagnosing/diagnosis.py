"""What `diagnose` returns: findings, a recommendation, a table, a picture."""

from __future__ import annotations

import math
import os
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from rope_patch.diagnosing.advice import Advice
from rope_patch.diagnosing.finding import SEVERITIES, Finding, json_safe
from rope_patch.diagnosing.pairs import PairTable

HEALTHY = "transformers does what the config says"
_WIDTH = 100


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; print it for a summary and a table.

    Attributes:
        model_type: The architecture.
        method: The method that was asked about, with its factor.
        length: The target length in tokens.
        rotations: One a layer type, or a single one under None.
        findings: What is the matter, the worst first.
        advice: What to do for the length.
        patched: The patch that stands on the model, or None.
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
        """Whether transformers does what the config says, as far as can be seen."""
        return all(found.severity == "note" for found in self.findings)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the wavelength of every pair against the lengths, before and after.

        Args:
            path: An `.svg` or `.png` file, in a folder that exists.

        Raises:
            ValueError: Another kind of file, no such folder, or matplotlib is not installed.
            OSError: It could not be written.
        """
        from rope_patch.diagnosing.plot import write_plot

        write_plot(self, path)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; what is infinite (a pair that does not rotate) is None."""
        data = asdict(self)
        for kind, rotation in self.rotations.items():
            for row, pair in zip(data["rotations"][kind]["pairs"], rotation.pairs, strict=True):
                row["extrapolates"] = pair.extrapolates
        return json_safe({**data, "healthy": self.healthy})

    def __str__(self) -> str:
        parts = ["\n".join(self._summary())]
        parts += [self._table(kind, rotation) for kind, rotation in self.rotations.items()]
        return "\n\n".join(parts)

    def _summary(self) -> list[str]:
        lines = [HEALTHY] if self.healthy else []
        if self.patched:
            lines.append(f"patched by rope_patch: {self.patched}; told as it was before")
        for severity in SEVERITIES:
            for found in self.findings:
                if found.severity != severity:
                    continue
                where = f" ({found.layer_type})" if found.layer_type else ""
                lines += _wrap(f"{severity}{where}: {found.what}", "")
                lines += _wrap(found.evidence, "  ")
                lines += _wrap(f"→ {found.fix}", "  ") if found.fix else []
        lines += [*([""] if lines else []), f"for {self.length:,} tokens: {self.advice.summary}"]
        for reason in self.advice.reasons:
            source = f" ({reason.source})" if reason.source else ""
            lines += _wrap(f"- {reason.text}{source}", "  ", hanging="    ")
        lines += [f"  {line}" for line in (self.advice.python, self.advice.shell) if line]
        return lines

    def _table(self, kind: str | None, rotation: PairTable) -> str:
        g, pairs = rotation.geometry, rotation.pairs
        critical = rotation.critical_dimension
        beyond = [pair.pair for pair in pairs if pair.extrapolates]
        scaled = (
            "" if rotation.rope_type == "default" else f", config asks for {rotation.rope_type}"
        )
        lines = [
            f"{self.model_type}{f', {kind}' if kind else ''}: head_dim {g.head_dim}, rotary_dim "
            f"{g.rotary_dim}, theta {g.theta:g}, trained on {g.trained_length:,} tokens{scaled}",
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
            f"(arXiv:2405.14591), critical base {_format_base(rotation.critical_base)} (arXiv:2310.05209)",
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
    """Lines of a readable width; words such as lines of code are never broken."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  " if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
