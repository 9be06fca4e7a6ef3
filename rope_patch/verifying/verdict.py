"""The verdict: which hypotheses explain an engine, and which are ruled out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rope_patch.verifying.evidence import Evidence, Rival
from rope_patch.verifying.hypothesis import AS_ASKED

ROTATES_AS_ASKED, ROTATES_OTHERWISE, CANNOT_TELL = "as-asked", "another", "cannot-tell"
EXIT_CODES = {ROTATES_AS_ASKED: 0, ROTATES_OTHERWISE: 1, CANNOT_TELL: 2}

# Float32 tables of two libraries differ by up to 6e-4 nats in a token.
_SAME = 2e-3  # nats; predictions closer than this are one
_LEAST_MARGIN = 10.0  # nats
_ERRORS = 4.0  # standard errors
_QUIET = 5e-3  # nats a token that need no explanation
_NOISE = 4.0  # times the noise without rotation that noise with rotation may be
_SHARE = 0.1  # of the way to the next hypothesis that the rest may be
_LEAN = 0.25  # of the way that the engine may lean towards a ruled-out hypothesis


@dataclass(frozen=True)
class Verdict:
    """What the evidence says.

    Attributes:
        status: "as-asked", "another" or "cannot-tell".
        explains: The hypotheses that explain the engine; several cannot be told apart.
        ruled_out: Those that are ruled out.
        rivals: Comparison of each hypothesis with the closest one.
        closest: The closest hypothesis.
        rest: Mean difference between engine and closest hypothesis, in nats a token.
        noise: The same where rotation has no influence.
        reason: Why nothing can be told; empty otherwise.
    """

    status: str
    explains: tuple[str, ...]
    ruled_out: tuple[str, ...]
    rivals: dict[str, Rival]
    closest: str
    rest: float
    noise: float
    reason: str = ""

    @property
    def margin(self) -> float:
        """Return the log-likelihood over the next hypothesis that is ruled out, in nats."""
        return min((self.rivals[name].margin for name in self.ruled_out), default=math.nan)

    @property
    def runner_up(self) -> str | None:
        """Return the ruled-out hypothesis that is closest to the engine."""
        return min(self.ruled_out, key=lambda name: self.rivals[name].margin, default=None)

    @property
    def is_final(self) -> bool:
        """Return whether more prompts would change nothing."""
        return self.status != CANNOT_TELL and len(self.explains) == 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "status": self.status,
            "explains": list(self.explains),
            "ruled_out": list(self.ruled_out),
            "runner_up": self.runner_up,
            "margin_nats": None if math.isnan(self.margin) else self.margin,
            "noise_floor_nats": self.rest,
            "noise_without_rotation_nats": self.noise,
            "reason": self.reason,
        }


def judge(evidence: Evidence, noise: float) -> Verdict:
    """Return the verdict.

    Args:
        evidence: Predictions and observations.
        noise: Mean difference between engine and reference where rotation has no influence, in
            nats a token.
    """
    closest = evidence.closest()
    rest = evidence.distance(closest)
    rivals = {name: evidence.compare(name, closest) for name in evidence.predicted}
    explains = tuple(
        name for name, rival in rivals.items() if name == closest or not _is_ruled_out(rival)
    )
    ruled_out = tuple(name for name in rivals if name not in explains)
    status, reason = ROTATES_OTHERWISE, ""
    if not _is_explained(rest, noise, rivals, closest):
        status = CANNOT_TELL
        reason = (
            f"no hypothesis explains the engine: {closest} is closest and {rest:.2g} nats a token "
            f"away, where {noise:.2g} are noise; its rotation is another one, or its weights, its "
            "attention window or its numerics differ"
        )
        explains, ruled_out = (), ()
    elif AS_ASKED in explains and len(explains) > 1:
        status = CANNOT_TELL
        reason = (
            f"{', '.join(explains)} cannot be told apart: on these prompts they differ by "
            f"{max(rivals[name].apart for name in explains):.2g} nats a token, and the noise floor "
            f"is {rest:.2g}"
        )
    elif AS_ASKED in explains:
        status = ROTATES_AS_ASKED
    return Verdict(status, explains, ruled_out, rivals, closest, rest, noise, reason)


def _is_ruled_out(rival: Rival) -> bool:
    return (
        rival.apart >= _SAME
        and rival.margin >= _LEAST_MARGIN
        and rival.place + _ERRORS * rival.uncertainty < 0.5
    )


def _is_explained(rest: float, noise: float, rivals: dict[str, Rival], closest: str) -> bool:
    """Return whether what is left is noise, and leans towards no other hypothesis."""
    others = [rival for name, rival in rivals.items() if name != closest and rival.apart >= _SAME]
    nearest = min((rival.apart for rival in others), default=0.0)
    if rest > max(_QUIET, _NOISE * noise, _SHARE * nearest):
        return False
    return all(abs(each.place) - _ERRORS * each.uncertainty <= _LEAN for each in others)
