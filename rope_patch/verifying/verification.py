"""What `verify` is asked, and its result: the verdict and the numbers behind it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from rope_patch.methods.base import require_number, require_tokens
from rope_patch.utils.errors import Refused, printable, text_html
from rope_patch.verifying.hypotheses import AS_ASKED, Hypothesis
from rope_patch.verifying.verdict import (
    CANNOT_TELL,
    EXIT_CODES,
    ROTATES_AS_ASKED,
    ROTATES_OTHERWISE,
    Verdict,
)

_FEW = 12  # hypotheses that the text lists


@dataclass(frozen=True)
class Verification:
    """The result of `verify`; print it for the verdict and a table.

    Attributes:
        engine: The engine.
        asked: The rotation asked for.
        verdict: What the evidence says.
        hypotheses: All hypotheses that were compared.
        untested: Hypotheses that were not, and why.
        prompts: Prompts, and `tokens` in them that were compared; the longest has `longest`.
        tokens: See `prompts`.
        longest: See `prompts`.
        readings: Prompts that were read under a hypothesis, counted for each.
        seconds: How long it took.
    """

    engine: str
    asked: str
    verdict: Verdict
    hypotheses: tuple[Hypothesis, ...]
    untested: dict[str, str]
    prompts: int
    tokens: int
    longest: int
    readings: int
    seconds: float

    @property
    def status(self) -> str:
        """Return "as-asked", "another" or "cannot-tell"."""
        return self.verdict.status

    @property
    def exit_code(self) -> int:
        """Return the command's exit code: 0, 1 or 3, by `status`."""
        return EXIT_CODES[self.status]

    def __bool__(self) -> bool:
        """Return whether the engine rotates as asked."""
        return self.status == ROTATES_AS_ASKED

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "engine": self.engine,
            "asked": self.asked,
            **self.verdict.to_dict(),
            "hypotheses": [each.to_dict() | self._numbers(each.name) for each in self.hypotheses],
            "untested": self.untested,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "longest_prompt": self.longest,
            "readings": self.readings,
            "seconds": round(self.seconds, 1),
        }

    def to_junit(self) -> str:
        """Return the verdict as a JUnit XML document of one test case, for build servers.

        Another rotation is a failure, and what cannot be told is an error.
        """
        kind = {ROTATES_OTHERWISE: "failure", CANNOT_TELL: "error"}.get(self.status)
        seconds = f"{self.seconds:.1f}"
        suite = ElementTree.Element(
            "testsuite",
            name="rope-patch verify",
            tests="1",
            failures=str(int(kind == "failure")),
            errors=str(int(kind == "error")),
            time=seconds,
        )
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=printable(self.engine),
            name=printable(f"rotates as asked ({self.asked})"),
            time=seconds,
        )
        if kind is not None:
            ElementTree.SubElement(
                case, kind, type=self.status, message=printable(self._headline())
            )
        ElementTree.SubElement(case, "system-out").text = printable(self)
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"

    def _numbers(self, name: str) -> dict[str, Any]:
        rival = self.verdict.rivals[name]
        return {
            "nats_a_token": rival.distance,
            "margin_nats": rival.margin,
            "tokens": rival.tokens,
            "explains": name in self.verdict.explains,
        }

    def __str__(self) -> str:
        verdict = self.verdict
        lines = [f"{self.engine}: {self._headline()}"]
        if verdict.runner_up is not None:
            lines.append(
                f"  margin: {verdict.margin:,.0f} nats over {verdict.runner_up}; noise floor: "
                f"{verdict.rest:.2g} nats a token ({verdict.noise:.2g} without rotation)"
            )
        lines.append(
            f"  prompts: {self.prompts} of up to {self.longest:,} tokens; {self.tokens:,} tokens "
            f"compared by {self.readings} readings in {self.seconds:.0f} s"
        )
        lines += self._table()
        lines += [f"  not tested: {name}: {why}" for name, why in self.untested.items()]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        """Return the hypotheses, nearest first; those that were ruled out early follow."""
        rivals = self.verdict.rivals
        rows = sorted(
            self.hypotheses,
            key=lambda each: (-rivals[each.name].tokens, rivals[each.name].distance),
        )
        lines = []
        for tokens, group in itertools.groupby(rows[:_FEW], lambda each: rivals[each.name].tokens):
            where = "from the engine"
            if tokens < self.tokens:
                where = f"in the first {tokens:,} tokens, which ruled it out"
            lines.append(f"  nats a token {where}, if it ...")
            for each in group:
                mark = "→" if each.name in self.verdict.explains else " "
                lines.append(f"  {mark} {rivals[each.name].distance:8.4f}  {each.says}")
        if len(rows) > _FEW:
            lines.append(f"    and {len(rows) - _FEW} more, further away")
        return lines

    def _headline(self) -> str:
        verdict = self.verdict
        if self.status == CANNOT_TELL:
            return f"cannot tell. {verdict.reason}"
        says = {each.name: each.says for each in self.hypotheses}
        for each in self.hypotheses:
            if each.aliases and each.name != AS_ASKED:
                says[each.name] += f" (here the same: {', '.join(each.aliases)})"
        if self.status == ROTATES_AS_ASKED:
            return says[verdict.explains[0]]
        deviation = "; or it ".join(says[name] for name in verdict.explains)
        several = len(verdict.explains) > 1
        return f"does not rotate as asked ({self.asked}): it {deviation}" + (
            " (these cannot be told apart)" if several else ""
        )

    def _repr_html_(self) -> str:
        return text_html(str(self))


_LONGEST = 4096  # tokens of the longest prompt unless given
_SHORTEST = 64


@dataclass(frozen=True)
class VerifyRequest:
    """The settings of one verification.

    Attributes:
        tokens: Longest prompt; None for what lies a little beyond the trained length, at most
            4,096 tokens.
        seconds: Time budget for prompts.
        rounds: Most rounds of prompts.
        seed: Another seed makes other prompts.
        progress: Whether to show a progress bar.
    """

    tokens: int | None = None
    seconds: float = 600.0
    rounds: int = 5
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        require_number("seconds", self.seconds)
        if self.seconds <= 0:
            raise Refused(f"seconds must be above 0, got {self.seconds}")
        if self.tokens is not None:
            require_tokens("tokens", self.tokens)
            if self.tokens < _SHORTEST:
                raise Refused(f"tokens must be at least {_SHORTEST}, got {self.tokens}")

    def longest(self, trained_length: int, target_length: int, engine_limit: int | None) -> int:
        """Return the tokens of the longest prompt.

        Args:
            trained_length: Tokens of pretraining.
            target_length: Tokens that the engine should read.
            engine_limit: Tokens that the engine accepts, one to write included; None if unknown.
        """
        if (tokens := self.tokens) is None:
            beyond = max(trained_length * 3 // 2, trained_length + 256)
            tokens = max(_SHORTEST, min(beyond, target_length, _LONGEST))
        return tokens if engine_limit is None else min(tokens, engine_limit - 1)
