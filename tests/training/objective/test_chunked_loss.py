"""Test that the chunked loss and its gradients equal those of the full loss."""

import copy

import pytest
import torch
from helpers.tiny_models import make_model
from torch.nn import functional

from rope_patch.training.objective import chunked_loss
from rope_patch.training.objective.chunk_sums import chunk_sums

pytestmark = pytest.mark.skipif(
    not hasattr(functional, "linear_cross_entropy"), reason="this torch has none"
)
FAMILIES = ["llama", "qwen3", "gemma3"]


def make(family):
    torch.manual_seed(0)
    return make_model(family).train()


def batch(masked=True):
    ids = torch.randint(1, 100, (2, 50), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    if masked:
        labels[0, :20] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def step(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "extra",
    [{}, {"num_items_in_batch": 40}, {"num_items_in_batch": torch.tensor(40)}, {"shifted": True}],
    ids=["mean", "count", "counted", "shifted"],
)
def test_loss_and_gradients_equal_those_of_all_logits(family, extra):
    # In float64: the order in which threads add an embedding's gradients shows in float32.
    plain, inputs = make(family).double(), batch()
    if extra.pop("shifted", False):
        shifted = functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
        inputs["shift_labels"] = shifted.contiguous()
        extra = {"num_items_in_batch": 7}
    chunked = copy.deepcopy(plain)
    assert chunked_loss.install_loss(chunked, "torch")[0] == "torch"
    expected, expected_grads = step(plain, **inputs, **extra)
    got, grads = step(chunked, **inputs, **extra)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert grads.keys() == expected_grads.keys()
    for name in expected_grads:
        torch.testing.assert_close(
            grads[name], expected_grads[name], rtol=1e-4, atol=1e-6, msg=name
        )


def test_training_computes_no_logits():
    model = make("llama")
    chunked_loss.install_loss(model, "torch")
    hidden = model.config.hidden_size
    assert model(**batch()).logits.shape == (2, 50, hidden)  # the head's input


def test_evaluation_is_unchanged():
    plain = make("llama").eval()
    chunked = copy.deepcopy(plain)
    chunked_loss.install_loss(chunked, "torch")
    with torch.no_grad():
        expected, got = plain(**batch()), chunked(**batch())
    assert torch.equal(got.logits, expected.logits)
    torch.testing.assert_close(got.loss, expected.loss)


def test_undo_restores_the_model():
    plain = make("llama")
    model = copy.deepcopy(plain)
    _, swaps = chunked_loss.install_loss(model, "torch")
    swaps.undo()
    assert torch.equal(model(**batch()).logits, plain(**batch()).logits)
    assert torch.equal(model(**batch()).loss, plain(**batch()).loss)


def test_in_bfloat16_the_mean_is_not_rounded_to_bfloat16():
    """torch's own sum would be rounded: the loss would move in steps of 0.03."""
    plain = make("llama")
    chunked = copy.deepcopy(plain)
    chunked_loss.install_loss(chunked, "torch")
    exact = copy.deepcopy(plain).double()
    expected = exact(**batch()).loss.item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked(**batch()).loss
        reference = plain(**batch()).loss.item()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=2e-3)
    assert reference == pytest.approx(expected, rel=2e-3)


def test_a_model_that_caps_its_logits_keeps_the_full_loss():
    model = make("gemma2")  # final_logit_softcapping
    model.config.final_logit_softcapping = 0.5
    loss_name, _ = chunked_loss.install_loss(model, "auto")
    assert loss_name == "full"
    assert model(**batch()).logits.shape[-1] == model.config.vocab_size
    with pytest.raises(ValueError, match=r"such as capping them.*loss: full"):
        chunked_loss.install_loss(model, "torch")


def test_the_full_loss_leaves_the_model_unchanged():
    model = make("llama")
    assert chunked_loss.install_loss(model, "full")[0] == "full"
    assert model(**batch()).logits.shape[-1] == model.config.vocab_size


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_liger_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match=r"loss: liger cannot be had: .*GPU"):
        chunked_loss.install_loss(make("llama"), "liger")


def test_second_derivatives_are_refused():
    """The loss's own gradient is 1, so torch's once_differentiable would drop them in silence."""
    rows = torch.randn(8, 4, requires_grad=True)
    weight = torch.randn(6, 4)
    loss, _ = chunk_sums(rows, weight, None, torch.arange(8) % 6, [])
    with pytest.raises(RuntimeError, match="first derivatives alone"):
        torch.autograd.grad(loss, rows, create_graph=True)
