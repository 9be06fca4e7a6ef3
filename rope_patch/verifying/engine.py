"""What a client of an engine offers, and the errors of engines."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rope_patch.utils.errors import Refused, describe_error
from rope_patch.verifying.probe_prompts import ProbePrompt


class CannotVerify(Refused):
    """The engine cannot be compared with the model, for the reason in the message."""


@dataclass(frozen=True)
class Observation:
    """What an engine says about a prompt.

    Attributes:
        prompt: The prompt, with the scored tokens that the engine answered for.
        log_probs: A log-probability for each scored token, in nats.
    """

    prompt: ProbePrompt
    log_probs: tuple[float, ...]

    def __post_init__(self) -> None:
        if broken := sum(map(math.isnan, self.log_probs)):
            raise CannotVerify(
                f"the engine answers NaN for {broken} of {len(self.log_probs)} tokens, expected "
                "log-probabilities: its numbers overflow; serve in another dtype"
            )

    @classmethod
    def of(cls, prompt: ProbePrompt, log_probs: dict[int, float]) -> Observation:
        """Return the observation of those scored tokens that have a log-probability."""
        scored = tuple(p for p in prompt.scored if log_probs.get(p) is not None)
        return cls(replace(prompt, scored=scored), tuple(log_probs[p] for p in scored))


class Engine(ABC):
    """A running engine, asked for log-probabilities of tokens.

    Attributes:
        name: What it is, for messages.
        max_length: Tokens that it accepts; None if it does not say.
        vocab_size: Size of its vocabulary; None if it does not say.
        is_slow: Whether each scored token is a request of its own, so that few should be scored.
    """

    name: str = "engine"
    max_length: int | None = None
    vocab_size: int | None = None
    is_slow: bool = False

    def observe(self, prompt: ProbePrompt) -> Observation:
        """Return the log-probabilities of a prompt's scored tokens.

        Raises:
            CannotVerify: The engine does not answer, or not with log-probabilities.
        """
        with self._explained():
            return self._observe(prompt)

    def write(self, ids: tuple[int, ...], count: int) -> Observation | None:
        """Return what the engine writes after a prompt, token by token, greedily.

        Args:
            ids: The prompt.
            count: Tokens to write.

        Returns:
            Prompt and written tokens; None if the engine does not say which ids it wrote.

        Raises:
            CannotVerify: The engine does not answer, or in an unknown form.
        """
        with self._explained():
            return self._write(ids, count)

    @abstractmethod
    def _observe(self, prompt: ProbePrompt) -> Observation: ...

    @abstractmethod
    def _write(self, ids: tuple[int, ...], count: int) -> Observation | None: ...

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say which engine answers in a form that its client cannot read."""
        try:
            yield
        except Refused:
            raise
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise CannotVerify(
                f"{self.name} answers in an unknown form ({describe_error(error)}), expected "
                "log-probabilities as its API documents them: choose the API by --engine"
            ) from error
