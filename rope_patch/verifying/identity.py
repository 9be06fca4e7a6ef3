"""Whether an engine serves the model that it is compared with, and the noise of its numbers.

The second token of a text sees one key, so its attention weight is 1 under any rotation: what
engine and reference differ by there is weights, vocabulary and numerics alone. Attention sinks
(gpt-oss) share that weight, and the attention factor decides how much of it they get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rope_patch.verifying.engine import CannotVerify, Engine, Observation
from rope_patch.verifying.evidence import LEAST
from rope_patch.verifying.hypothesis import Hypothesis
from rope_patch.verifying.probe_prompts import PAIR, ProbePrompt, PromptMaker
from rope_patch.verifying.reference import Reference

_PAIRS = 16
_OTHER_MODEL = 1.5  # nats a token: more than weights of four bits lose
_QUIET = 1e-3  # nats a token: too little to look for an attention factor in it


def measure_noise(
    engine: Engine, reference: Reference, maker: PromptMaker, hypotheses: Sequence[Hypothesis]
) -> float:
    """Return the mean difference of engine and reference without rotation, in nats a token.

    Args:
        engine: The engine.
        reference: The model to compare with.
        maker: The maker of prompts.
        hypotheses: The rotations that the engine may have. The noise is that of the closest one,
            where attention sinks let attention factors act.

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
    prompts = _possible_pairs(reference, maker)
    observations: list[Observation] = [engine.observe(prompt) for prompt in prompts]
    observed = torch.tensor([v for each in observations for v in each.log_probs]).double()
    answered = [each.prompt for each in observations if each.prompt.scored]
    if not answered:
        raise CannotVerify(
            f"{engine.name} has no log-probability for any of {_PAIRS} tokens, expected one for "
            "each: turn log-probabilities on"
        )
    noise = _difference(observed, reference.plain_log_probs(answered))
    if noise > _QUIET:
        by_factor = {_attention_factors(each): each for each in reversed(hypotheses)}
        noise = min(
            noise,
            *(
                _difference(observed, _log_probs(reference, each, answered))
                for each in by_factor.values()
            ),
        )
    if noise > _OTHER_MODEL:
        raise CannotVerify(
            f"{engine.name} serves another model: expected the model's log-probabilities where no "
            f"rotation has influence, got others, {noise:.2g} nats a token away: give --against "
            "the model that it serves"
        )
    return noise


def _possible_pairs(reference: Reference, maker: PromptMaker) -> list[ProbePrompt]:
    """Return pairs of random tokens, with second ones that the model finds possible.

    Of a large vocabulary, few are (an eighth of SmolLM2's). An engine and a reference that both
    find a token impossible say nothing about noise.
    """
    vocabulary = torch.tensor(maker.vocabulary)
    pairs = []
    for pair in (maker.make(PAIR, 2) for _ in range(_PAIRS)):
        first, second = pair.ids
        log_probs = reference.plain_next_log_probs(first)[vocabulary]
        possible = vocabulary[log_probs > LEAST].tolist() or [int(vocabulary[log_probs.argmax()])]
        if second not in possible:
            second = possible[second % len(possible)]
        pairs.append(replace(pair, ids=(first, second)))
    return pairs


def _difference(observed: torch.Tensor, expected: torch.Tensor) -> float:
    return float((observed.clamp(min=LEAST) - expected.clamp(min=LEAST)).abs().mean())


def _attention_factors(hypothesis: Hypothesis) -> tuple[float, ...]:
    rotation = hypothesis.rotation(2)
    factors = [each.attention_factor for each in rotation.frequencies.values()]
    return (*factors, rotation.softmax_mscale)


def _log_probs(
    reference: Reference, hypothesis: Hypothesis, prompts: Sequence[ProbePrompt]
) -> torch.Tensor:
    return torch.cat([reference.log_probs(hypothesis, prompt) for prompt in prompts])
