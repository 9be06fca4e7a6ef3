"""Test that up to the trained length nothing differs from a server without the plugin."""

import pytest

pytest.importorskip("vllm")
import torch
from engine import (
    TRAINED,
    engine,
    generate,
    greedy,
    rope_parameters,
    text,
    token_log_probabilities,
)

pytestmark = pytest.mark.engines

REQUESTS = [(30, 6), (100, 20), (200, 56), (250, 6), (256 - 3, 3)]


def results(llm, seed):
    prompts = [text(length, seed) for length, _ in REQUESTS]
    outputs = generate(llm, prompts, [greedy(new) for _, new in REQUESTS])
    return [
        (list(each.outputs[0].token_ids), token_log_probabilities(each, each.outputs[0]))
        for each in outputs
    ]


def test_short_requests_have_the_plain_servers_numbers_bit_for_bit():
    with engine(longest=TRAINED) as llm:
        plain = results(llm, seed=3)
    with engine(rope=rope_parameters("llama")) as llm:
        # Long requests before and between must leave no trace.
        generate(llm, [text(900, seed=4), text(400, seed=5)], greedy())
        served = results(llm, seed=3)
    for (tokens, numbers), (plain_tokens, plain_numbers) in zip(served, plain, strict=True):
        assert tokens == plain_tokens
        assert torch.equal(numbers, plain_numbers)
