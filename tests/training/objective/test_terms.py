"""Test the terms of the loss against float64 autograd over whole logits."""

import copy

import pytest
import torch
from helpers.tiny_models import make_model
from test_chunked_loss import batch, make, step
from torch.nn import functional

from rope_patch.training.objective import chunk_sums, chunked_loss
from rope_patch.training.objective.terms import IGNORED, Objective, Term
from rope_patch.training.objective.z_loss import ZLoss

COEFFICIENT = 0.02


class OneProcess:
    """As accelerate's Accelerator on one process."""

    def reduce(self, tensor, reduction):
        assert reduction in ("sum", "mean")
        return tensor


class Favourite(Term):
    """Reward the logit of one token, by a weight for each of the batch's tokens."""

    name = "favourite"

    def __init__(self, weights):
        self.weights = weights

    def total(self, chunk):
        return chunk.sum_counted(chunk.logits[:, 7] * self.weights[chunk.rows])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunk_sums, "MIN_CHUNK", 9)


def expected_step(model, coefficient, count=None, **inputs):
    """Return loss, z-loss and gradients of whole logits, by autograd in float64."""
    model = copy.deepcopy(model).double()
    model.zero_grad()
    labels = inputs.pop("labels")
    logits = model(**inputs).logits[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten()
    counted = targets != IGNORED
    count = counted.sum() if count is None else count
    z_loss = coefficient * (logits.exp().sum(-1).log()[counted] ** 2).sum() / count
    loss = functional.cross_entropy(logits[counted], targets[counted], reduction="sum") / count
    (loss + z_loss).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return (loss + z_loss).detach(), z_loss.item(), gradients


@pytest.mark.parametrize("loss", ["torch", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "tied", "gemma2"])
def test_loss_and_gradients_with_z_loss_equal_those_of_whole_logits(family, loss):
    if family == "gemma2":
        model = make_model("gemma2").train()
        model.config.final_logit_softcapping = 0.5
        loss = "full" if loss == "full" else "auto"  # which is full for capped logits
    else:
        model = make("llama" if family == "tied" else family)
    if family == "tied":
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    # float64 shows wrong gradients of any size.
    model, inputs = model.double(), batch()
    expected, expected_z, expected_grads = expected_step(model, COEFFICIENT, **inputs)
    objective = Objective([ZLoss(COEFFICIENT)])
    chosen, swaps = chunked_loss.install_loss(model, loss, objective)
    assert chosen == ("full" if family == "gemma2" else loss)
    got, grads = step(model, **inputs)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    assert objective.read(OneProcess()) == {"z_loss": pytest.approx(expected_z, rel=1e-10)}
    assert expected_z > 0.01
    assert grads.keys() == expected_grads.keys()
    for name, gradient in expected_grads.items():
        torch.testing.assert_close(grads[name], gradient, rtol=1e-8, atol=1e-10, msg=name)
    swaps.undo()
    assert model(**inputs).logits.shape[-1] == model.config.vocab_size
    assert model(**inputs).loss < got


def test_parts_of_a_batch_add_up_to_the_whole():
    """As with gradient accumulation, and processes that hold parts of a row."""
    model, inputs = make("llama").double(), batch()
    shifted = functional.pad(inputs["labels"], (0, 1), value=IGNORED)[:, 1:].contiguous()
    count = (shifted != IGNORED).sum()
    expected, expected_z, expected_grads = expected_step(model, COEFFICIENT, **inputs)
    objective = Objective([ZLoss(COEFFICIENT)])
    chunked_loss.install_loss(model, "torch", objective)
    model.zero_grad()
    total = 0
    for row in range(2):
        part = {key: inputs[key][row, None] for key in ("input_ids", "labels")}
        loss = model(**part, shift_labels=shifted[row, None], num_items_in_batch=count).loss
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected.item(), rel=1e-10)
    assert objective.read(OneProcess()) == {"z_loss": pytest.approx(expected_z, rel=1e-10)}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_grads[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("loss", ["torch", "full"])
def test_in_bfloat16_gradients_are_near_those_of_float64(loss):
    model, inputs = make("llama"), batch()
    expected, expected_z, expected_grads = expected_step(model, COEFFICIENT, **inputs)
    objective = Objective([ZLoss(COEFFICIENT)])
    chunked_loss.install_loss(model, loss, objective)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        got = model(**inputs).loss
    got.backward()
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(expected.item(), rel=2e-3)
    assert objective.read(OneProcess())["z_loss"] == pytest.approx(expected_z, rel=1e-2)
    got_grad, expected_grad = model.lm_head.weight.grad, expected_grads["lm_head.weight"].float()
    assert (got_grad - expected_grad).norm() < 0.02 * expected_grad.norm()


def test_no_chunk_has_more_than_its_share_of_logits():
    shapes = []

    class Watch(Term):
        name = "watch"

        def total(self, chunk):
            shapes.append(tuple(chunk.logits.shape))
            return chunk.logits.new_zeros(())

    model = make("llama")
    chunked_loss.install_loss(model, "torch", Objective([Watch()]))
    assert model(**batch()).logits.shape[-1] == model.config.hidden_size  # the head's input
    vocab = model.config.vocab_size
    assert shapes == [(9, vocab)] * 11 + [(1, vocab)]  # of 100 tokens


def test_a_term_sees_where_its_chunk_lies_in_the_batch():
    model, inputs = make("llama").double(), batch()
    weights = torch.linspace(-1, 1, 100, dtype=torch.float64)
    logits = model(**inputs).logits.flatten(0, 1)
    targets = functional.pad(inputs["labels"], (0, 1), value=IGNORED)[:, 1:].flatten()
    expected = (logits[:, 7] * weights)[targets != IGNORED].sum() / (targets != IGNORED).sum()
    plain = model(**inputs).loss
    objective = Objective([Favourite(weights), ZLoss(0.0)])
    chunked_loss.install_loss(model, "torch", objective)
    torch.testing.assert_close(model(**inputs).loss, plain + expected, rtol=1e-6, atol=1e-6)
    shares = objective.read(OneProcess())
    assert shares == {"favourite": pytest.approx(expected.item()), "z_loss": 0}


def test_frozen_heads_get_no_gradient_and_second_passes_are_refused():
    model, inputs = make("llama"), batch()
    model.lm_head.weight.requires_grad_(False)
    chunked_loss.install_loss(model, "torch", Objective([ZLoss(COEFFICIENT)]))
    loss = model(**inputs).loss
    loss.backward(retain_graph=True)
    assert model.lm_head.weight.grad is None
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


def test_biases_of_heads_get_gradients():
    generator = torch.Generator().manual_seed(3)
    rows, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((20, 6), (11, 6), (11,))
    )
    targets = torch.randint(0, 11, (20,), generator=generator)
    targets[3] = IGNORED

    leaves = (rows, weight, bias)
    counted = targets != IGNORED
    logits = (rows @ weight.T + bias)[counted]
    log_z = logits.logsumexp(-1)
    expected = functional.cross_entropy(logits, targets[counted], reduction="sum")
    expected = expected + COEFFICIENT * (log_z**2).sum()
    expected_grads = torch.autograd.grad(3 * expected, leaves)
    got, _ = chunk_sums.chunk_sums(rows, weight, bias, targets, [ZLoss(COEFFICIENT)])
    torch.testing.assert_close(got, expected)
    grads = torch.autograd.grad(3 * got, leaves)
    for gradient, expected_gradient in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)


def test_evaluation_has_no_terms():
    plain = make("llama").eval()
    for loss in ("torch", "full"):
        model = copy.deepcopy(plain)
        objective = Objective([ZLoss(COEFFICIENT)])
        chunked_loss.install_loss(model, loss, objective)
        with torch.no_grad():
            torch.testing.assert_close(model(**batch()).loss, plain(**batch()).loss)
            assert torch.equal(model(**batch()).logits, plain(**batch()).logits)


def test_losses_that_cannot_have_terms_are_refused():
    objective = Objective([ZLoss(COEFFICIENT)])
    with pytest.raises(ValueError, match=r"loss: liger cannot be had: .*no z_loss"):
        chunked_loss.install_loss(make("llama"), "liger", objective)
    model = make("llama")
    forward = model.forward

    def own_loss(*args, labels=None, **kwargs):
        return forward(*args, **kwargs)

    model.forward = own_loss
    with pytest.raises(ValueError, match=r"z_loss cannot be added: .*a loss of its own"):
        chunked_loss.install_loss(model, "full", objective)
    assert "_loss_function" not in vars(model)
