"""Whether an engine serves the model that it is compared with, and the noise of its numbers.

The second token of a text sees one key, so its attention weight is 1 under any rotation: what
engine and reference differ by there is weights, vocabulary and numerics alone.
"""

from __future__ import annotations

import torch

from rope_patch.verifying.engine import CannotVerify, Engine, Observation
from rope_patch.verifying.probe_prompts import PAIR, PromptMaker
from rope_patch.verifying.reference import Reference

_PAIRS = 16
_OTHER_MODEL = 1.5  # nats a token: more than weights of four bits lose


def measure_noise(engine: Engine, reference: Reference, maker: PromptMaker) -> float:
    """Return the mean difference of engine and reference without rotation, in nats a token.

    Raises:
        CannotVerify: The engine has another vocabulary, or serves another model.
    """
    size = reference.asked.config.vocab_size
    # Engines round vocabularies up, and leave out what a checkpoint pads its own with.
    if engine.vocab_size is not None and engine.vocab_size < max(maker.vocabulary) + 1:
        raise CannotVerify(
            f"{engine.name} has a vocabulary of {engine.vocab_size:,} tokens, expected the "
            f"model's {size:,}: give --against the model that it serves"
        )
    prompts = [maker.make(PAIR, 2) for _ in range(_PAIRS)]
    observations: list[Observation] = [engine.observe(prompt) for prompt in prompts]
    observed = torch.tensor([v for each in observations for v in each.log_probs]).double()
    answered = [each.prompt for each in observations if each.prompt.scored]
    if not answered:
        raise CannotVerify(
            f"{engine.name} has no log-probability for any of {_PAIRS} tokens, expected one for "
            "each: turn log-probabilities on"
        )
    expected = reference.plain_log_probs(answered)
    noise = float((observed.clamp(min=-15) - expected.clamp(min=-15)).abs().mean())
    if noise > _OTHER_MODEL:
        raise CannotVerify(
            f"{engine.name} serves another model: expected the model's log-probabilities where no "
            f"rotation has influence, got others, {noise:.2g} nats a token away: give --against "
            "the model that it serves"
        )
    return noise
