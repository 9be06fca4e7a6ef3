"""Test that the loss in chunks, its terms and their gradients equal those of whole logits."""

import copy

import pytest
import torch
from helpers.tiny_models import make_model
from torch.nn import functional

from rope_patch.training import Objective, Term, ZLoss, install_loss

COEFFICIENT = 0.02
IGNORED = -100

pytestmark = pytest.mark.skipif(
    not hasattr(functional, "linear_cross_entropy"), reason="this torch has none"
)


def make(family):
    torch.manual_seed(0)
    return make_model(family).train()


def batch(length=50):
    ids = torch.randint(1, 100, (2, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :20] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def step(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("llama", {}),
        ("llama", {"num_items_in_batch": 40}),
        ("llama", {"num_items_in_batch": torch.tensor(40)}),
        ("llama", {"shifted": True}),
        ("qwen3", {}),
        ("gemma3", {}),
    ],
)
def test_loss_and_gradients_equal_those_of_all_logits(family, extra):
    # In float64: the order in which threads add an embedding's gradients shows in float32.
    plain, inputs = make(family).double(), batch()
    if "shifted" in extra:
        shifted = functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
        inputs["shift_labels"] = shifted.contiguous()
        extra = {"num_items_in_batch": 7}
    chunked = copy.deepcopy(plain)
    assert install_loss(chunked, "torch")[0] == "torch"
    expected, expected_grads = step(plain, **inputs, **extra)
    got, grads = step(chunked, **inputs, **extra)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert grads.keys() == expected_grads.keys()
    for name in expected_grads:
        torch.testing.assert_close(
            grads[name], expected_grads[name], rtol=1e-4, atol=1e-6, msg=name
        )


def test_training_computes_no_logits_until_it_is_undone():
    plain = make("llama")
    model = copy.deepcopy(plain)
    _, swaps = install_loss(model, "torch")
    hidden = model.config.hidden_size
    assert model(**batch()).logits.shape == (2, 50, hidden)  # the head's input
    swaps.undo()
    assert torch.equal(model(**batch()).logits, plain(**batch()).logits)
    assert torch.equal(model(**batch()).loss, plain(**batch()).loss)


def test_a_model_that_caps_its_logits_keeps_the_full_loss():
    model = make("gemma2")  # final_logit_softcapping
    model.config.final_logit_softcapping = 0.5
    loss_name, _ = install_loss(model, "auto")
    assert loss_name == "full"
    assert model(**batch()).logits.shape[-1] == model.config.vocab_size
    with pytest.raises(ValueError, match="loss: full"):
        install_loss(model, "torch")


def test_the_full_loss_leaves_the_model_unchanged():
    model = make("llama")
    assert install_loss(model, "full")[0] == "full"
    assert model(**batch()).logits.shape[-1] == model.config.vocab_size


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_liger_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match=r"loss: liger .*GPU"):
        install_loss(make("llama"), "liger")


def test_second_derivatives_are_refused():
    """The loss's own gradient is 1, so torch's once_differentiable would drop them in silence."""
    model = make("llama")
    install_loss(model, "torch", Objective([ZLoss(0.1)]))
    loss = model(**batch()).loss
    with pytest.raises(RuntimeError, match="first derivatives alone"):
        torch.autograd.grad(loss, [*model.parameters()], create_graph=True)


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


def three_chunks():
    return batch(length=150)


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
@pytest.mark.parametrize("family", ["llama", "gemma3", "tied", "biased", "gemma2"])
def test_loss_and_gradients_with_z_loss_equal_those_of_whole_logits(family, loss):
    if family == "gemma2":
        model = make_model("gemma2").train()
        model.config.final_logit_softcapping = 0.5
        loss = "full" if loss == "full" else "auto"  # which is full for capped logits
    else:
        model = make("llama" if family in ("tied", "biased") else family)
    if family == "biased":
        model.lm_head.bias = torch.nn.Parameter(torch.randn(model.config.vocab_size))
    if family == "tied":
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    # float64 shows wrong gradients of any size.
    model, inputs = model.double(), three_chunks()
    expected, expected_z, expected_grads = expected_step(model, COEFFICIENT, **inputs)
    objective = Objective([ZLoss(COEFFICIENT)])
    chosen, swaps = install_loss(model, loss, objective)
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
    model, inputs = make("llama").double(), three_chunks()
    shifted = functional.pad(inputs["labels"], (0, 1), value=IGNORED)[:, 1:].contiguous()
    count = (shifted != IGNORED).sum()
    expected, expected_z, expected_grads = expected_step(model, COEFFICIENT, **inputs)
    objective = Objective([ZLoss(COEFFICIENT)])
    install_loss(model, "torch", objective)
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


@pytest.mark.parametrize(
    ("loss", "coefficient"), [("torch", 0), ("torch", COEFFICIENT), ("full", COEFFICIENT)]
)
def test_in_bfloat16_loss_and_gradients_are_near_those_of_float64(loss, coefficient):
    """torch's own sum would be rounded: the loss would move in steps of 0.03."""
    model, inputs = make("llama"), three_chunks()
    expected, expected_z, expected_grads = expected_step(model, coefficient, **inputs)
    objective = Objective([ZLoss(coefficient)] if coefficient else [])
    install_loss(model, loss, objective)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        got = model(**inputs).loss
    got.backward()
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(expected.item(), rel=2e-3)
    if coefficient:
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
    install_loss(model, "torch", Objective([Watch()]))
    assert model(**three_chunks()).logits.shape[-1] == model.config.hidden_size  # the head's input
    vocab = model.config.vocab_size
    assert shapes == [(128, vocab), (128, vocab), (44, vocab)]


def test_a_term_sees_where_its_chunk_lies_in_the_batch():
    model, inputs = make("llama").double(), three_chunks()
    weights = torch.linspace(-1, 1, 300, dtype=torch.float64)
    logits = model(**inputs).logits.flatten(0, 1)
    targets = functional.pad(inputs["labels"], (0, 1), value=IGNORED)[:, 1:].flatten()
    expected = (logits[:, 7] * weights)[targets != IGNORED].sum() / (targets != IGNORED).sum()
    plain = model(**inputs).loss
    objective = Objective([Favourite(weights), ZLoss(0.0)])
    install_loss(model, "torch", objective)
    torch.testing.assert_close(model(**inputs).loss, plain + expected, rtol=1e-6, atol=1e-6)
    shares = objective.read(OneProcess())
    assert shares == {"favourite": pytest.approx(expected.item()), "z_loss": 0}


def test_frozen_heads_get_no_gradient_and_second_passes_are_refused():
    model, inputs = make("llama"), three_chunks()
    model.lm_head.weight.requires_grad_(False)
    install_loss(model, "torch", Objective([ZLoss(COEFFICIENT)]))
    loss = model(**inputs).loss
    loss.backward(retain_graph=True)
    assert model.lm_head.weight.grad is None
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


@pytest.mark.parametrize(
    ("loss", "terms"), [("torch", []), ("torch", [ZLoss(COEFFICIENT)]), ("full", [ZLoss(1.0)])]
)
def test_evaluation_is_unchanged(loss, terms):
    plain = make("llama").eval()
    model = copy.deepcopy(plain)
    install_loss(model, loss, Objective(terms))
    with torch.no_grad():
        got, expected = model(**batch()), plain(**batch())
    assert torch.equal(got.logits, expected.logits)
    torch.testing.assert_close(got.loss, expected.loss)


def test_losses_that_cannot_have_terms_are_refused():
    objective = Objective([ZLoss(COEFFICIENT)])
    with pytest.raises(ValueError, match=r"loss: liger .*no z_loss"):
        install_loss(make("llama"), "liger", objective)
    model = make("llama")
    forward = model.forward

    def own_loss(*args, labels=None, **kwargs):
        return forward(*args, **kwargs)

    model.forward = own_loss
    with pytest.raises(ValueError, match=r"z_loss .*a loss of its own"):
        install_loss(model, "full", objective)
    assert "_loss_function" not in vars(model)
