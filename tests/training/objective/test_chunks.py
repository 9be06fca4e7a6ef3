"""Test sums over chunks of tokens against autograd of all logits, in float64."""

import pytest
import torch
from torch.nn import functional

from rope_patch.training.objective.chunks import CHUNK_NUMBERS, chunked_sum

TOKENS, HIDDEN, VOCAB = 23, 8, 31


def tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden": (TOKENS, HIDDEN), "weight": (VOCAB, HIDDEN), "bias": (VOCAB,)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for name, shape in shapes.items()
    }


targets = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1))


def cross_entropy(logits, tokens):
    return functional.cross_entropy(logits, targets[tokens], reduction="sum")


@pytest.mark.parametrize("size", [1, 5, TOKENS, 100, None])
@pytest.mark.parametrize("frozen", [None, "hidden", "weight", "bias"])
def test_sums_and_gradients_equal_those_of_all_logits(size, frozen):
    given, expected = tensors(), tensors()
    if frozen is not None:
        given[frozen].requires_grad_(False)
    total = chunked_sum(cross_entropy, *given.values(), size=size)
    logits = functional.linear(expected["hidden"], expected["weight"], expected["bias"])
    expected_total = cross_entropy(logits, slice(None))
    torch.testing.assert_close(total, expected_total)
    (total / 7).backward()
    (expected_total / 7).backward()
    for name, tensor in given.items():
        if name == frozen:
            assert tensor.grad is None
        else:
            torch.testing.assert_close(tensor.grad, expected[name].grad)


def test_no_chunk_has_more_tokens_than_asked_for():
    seen = []

    def term(logits, tokens):
        seen.append((tokens.start, len(logits)))
        return logits.sum()

    chunked_sum(term, *tensors().values(), size=10)
    assert seen == [(0, 10), (10, 10), (20, 3)]
    assert CHUNK_NUMBERS // 128_256 == 523  # tokens of Llama 3's vocabulary


def test_logits_of_16_bits_are_widened_and_their_sums_are_float32():
    def term(logits, tokens):
        assert logits.dtype == torch.float32
        return cross_entropy(logits, tokens)

    given, expected = tensors(torch.bfloat16), tensors()
    total = chunked_sum(term, *given.values(), size=5)
    assert total.dtype == torch.float32
    reference = chunked_sum(cross_entropy, *expected.values())
    torch.testing.assert_close(total.double(), reference, rtol=1e-2, atol=0)
    total.backward()
    reference.backward()
    for name, tensor in given.items():
        assert tensor.grad.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.grad.double(), expected[name].grad, rtol=0.05, atol=0.05)


def test_no_tokens_have_the_sum_0():
    given = tensors()
    total = chunked_sum(cross_entropy, given["hidden"][:0], given["weight"])
    total.backward()
    assert total == 0
    assert not given["weight"].grad.any()


def test_a_forward_pass_without_gradients_computes_none():
    with torch.no_grad():
        total = chunked_sum(cross_entropy, *tensors().values(), size=5)
    assert not total.requires_grad
