"""What `verify` is asked: how long prompts are, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass

from rope_patch.methods.base import require_number, require_tokens
from rope_patch.utils.errors import Refused

_LONGEST = 4096  # tokens, unless given
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
