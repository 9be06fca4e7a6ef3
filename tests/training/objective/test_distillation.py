"""Test the divergence from the original model against all logits, in float64."""

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_models import make_model
from torch.nn import functional
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM

import rope_patch
from rope_patch.training import Distillation, Objective, Teacher, ZLoss, divergence, install_loss

LENGTH, SHORT = 50, 20
WEIGHT, TEMPERATURE = 0.7, 2.0
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make(name):
    """Return a model of a family, in float64: one that caps or scales its logits, or none."""
    torch.manual_seed(0)
    if name == "cohere":
        model = CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25))
    elif name == "granite":
        model = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0))
    elif name == "gemma2":
        model = make_model(name, final_logit_softcapping=1.5)
    elif name == "tied llama":
        model = make_model("llama", tie_word_embeddings=True)
    else:
        model = make_model(name)
    return model.double().train()


class OneProcess:
    """accelerate's Accelerator, as far as distillation uses it."""

    device = torch.device("cpu")

    def autocast(self):
        return torch.autocast("cpu", enabled=False)

    def reduce(self, tensor, reduction):
        return tensor


def distilling(original, weight=WEIGHT, temperature=TEMPERATURE):
    distillation = Distillation(Teacher(original), weight, temperature)
    distillation.to_device(OneProcess())
    return distillation


def batch(distilled=(False, True, True)):
    """Return rows of which the distilled ones hold documents of 20, 20 and 10 tokens."""
    rows = len(distilled)
    ids = torch.randint(3, 100, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    labels, positions = ids.clone(), torch.arange(LENGTH).repeat(rows, 1)
    for row in (row for row, is_short in enumerate(distilled) if is_short):
        positions[row] %= SHORT
        labels[row, positions[row] == 0] = -100
    labels[:, 0] = -100
    labels[-1, 30:40] = -100  # such as padding
    inputs = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return inputs | {"distilled": torch.tensor(distilled)}


def reference_loss(student, original, inputs, count, z_loss=0.0):
    """Return the loss from all logits: cross-entropy, and in distilled rows the divergence."""
    reads = {name: inputs[name] for name in ("input_ids", "position_ids")}
    logits = student(**reads, use_cache=False).logits[:, :-1]
    with torch.no_grad():
        original_logits = original(**reads, use_cache=False).logits[:, :-1]
    targets, total = inputs["labels"][:, 1:], 0
    language, distilled = [], []
    for row, is_distilled in enumerate(inputs["distilled"]):
        for token in (targets[row] != -100).nonzero().flatten():
            total = total + z_loss * logits[row, token].logsumexp(0) ** 2
            if is_distilled:
                p = functional.softmax(original_logits[row, token] / TEMPERATURE, dim=0)
                q = functional.softmax(logits[row, token] / TEMPERATURE, dim=0)
                distilled.append((p * (p.log() - q.log())).sum() * TEMPERATURE**2)
            else:
                language.append(-logits[row, token].log_softmax(0)[targets[row, token]])
    total = total + sum(language) + WEIGHT * sum(distilled)
    return total / count, language, distilled


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("loss", ["full", "torch"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "tied llama", "gemma2", "cohere", "granite"])
def test_losses_and_gradients_equal_those_of_all_logits(name, loss, z_loss):
    changes_logits = name in ("gemma2", "cohere", "granite")
    if loss == "torch" and (changes_logits or not hasattr(functional, "linear_cross_entropy")):
        pytest.skip("logits are changed behind the head, or this torch has no loss in chunks")
    original = make(name).eval()
    student = copy.deepcopy(original).train()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    expected_student, inputs = copy.deepcopy(student), batch()
    expected, language, distilled = reference_loss(expected_student, original, inputs, 123, z_loss)
    expected.backward()

    distillation = distilling(copy.deepcopy(original))
    objective = Objective([ZLoss(z_loss)] if z_loss else [], distillation)
    assert install_loss(student, loss, objective)[0] == loss
    with distillation.teacher_forward(inputs):
        got = student(**inputs, num_items_in_batch=123, use_cache=False).loss
    got.backward()
    torch.testing.assert_close(got, expected)
    for (parameter_name, parameter), other in zip(
        student.named_parameters(), expected_student.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter.grad, other.grad, msg=parameter_name)
    metrics = distillation.step_metrics()
    assert metrics["distillation_tokens"] == len(distilled) == 2 * (49 - 2) - 10
    means = [float(sum(losses).detach()) / len(losses) for losses in (language, distilled)]
    got_means = [metrics["language_loss"], metrics["distillation_loss"]]
    assert got_means == pytest.approx(means, rel=1e-5)  # summed in float32
    assert distillation.step_metrics() == {"distillation_tokens": 0}


@pytest.mark.parametrize("distilled", [(False, False), (True, True)])
def test_batches_of_one_kind_of_rows(distilled):
    original, inputs = make("llama").eval(), batch(distilled)
    student = copy.deepcopy(original).train()
    distillation = distilling(copy.deepcopy(original))
    install_loss(student, "full", Objective([], distillation))
    expected, *_ = reference_loss(copy.deepcopy(original), original, inputs, 50)
    with distillation.teacher_forward(inputs):
        got = student(**inputs, num_items_in_batch=50, use_cache=False).loss
    torch.testing.assert_close(got, expected)
    assert (got == 0) == all(distilled)
    assert set(distillation.step_metrics()) == (
        {"distillation_loss", "distillation_tokens"}
        if all(distilled)
        else {"language_loss", "distillation_tokens"}
    )


def test_a_patched_model_is_distilled_from_the_rotation_it_had():
    original = make("llama").eval()
    student = copy.deepcopy(original).train()
    rope_patch.patch(student, "yarn", factor=4)
    distillation = distilling(copy.deepcopy(original))
    install_loss(student, "full", Objective([], distillation))
    inputs = batch((True, True))
    with distillation.teacher_forward(inputs):
        loss = student(**inputs, num_items_in_batch=1, use_cache=False).loss
    assert loss > 0.1


def test_the_original_model_reads_each_document_alone():
    original, inputs = make("llama").eval(), batch((True,))
    ids, positions = inputs["input_ids"], inputs["position_ids"]
    alone = [
        original.model(ids[:, start : start + SHORT], use_cache=False).last_hidden_state
        for start in range(0, LENGTH, SHORT)
    ]
    teacher = Teacher(original)
    teacher.to_device(OneProcess())
    got = teacher.read(ids, positions)
    torch.testing.assert_close(got, torch.cat(alone, dim=1))
    assert not got.requires_grad
    assert not any(p.requires_grad for p in teacher.model.parameters())


def test_the_divergence_is_0_for_equal_logits_and_that_of_torch_for_others():
    one, other = torch.randn(2, 7, 11, generator=torch.Generator().manual_seed(0)).double()
    assert not divergence(one, one).any()
    p, q = (torch.distributions.Categorical(logits=x / TEMPERATURE) for x in (other, one))
    expected = torch.distributions.kl_divergence(p, q).sum() * TEMPERATURE**2
    torch.testing.assert_close(divergence(one, other, TEMPERATURE).sum(), expected)


def test_in_bfloat16_the_divergence_is_computed_in_float32():
    original = make("llama").float().eval()
    student = copy.deepcopy(original).train()
    rope_patch.patch(student, "yarn", factor=4)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        distillation = distilling(copy.deepcopy(original).to(dtype))
        model, inputs = copy.deepcopy(student), batch((True, True))
        install_loss(model, "full", Objective([], distillation))
        enabled = dtype == torch.bfloat16
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=enabled),
            distillation.teacher_forward(inputs),
        ):
            loss = model(**inputs, num_items_in_batch=1, use_cache=False).loss
        assert loss.dtype == torch.float32
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_a_model_that_does_something_else_with_its_logits_is_refused():
    model = make("llama")
    plain = model.forward

    def forward(*args, labels=None, **kwargs):
        outputs = plain(*args, **kwargs)
        outputs.loss = model.loss_function(outputs.logits.sin(), labels, 128)
        return outputs

    model.forward = forward
    with pytest.raises(rope_patch.Refused, match="leave distillation_weight out"):
        install_loss(model, "full", Objective([], distilling(make("llama"))))
    assert "forward" not in vars(model.get_output_embeddings())


def test_other_processes_rows_are_read_with_shards_of_this_one():
    rows_of_others, reads = [0, 1], []

    class TwoProcesses(OneProcess):
        def reduce(self, tensor, reduction):
            return tensor + rows_of_others.pop(0)

    distillation = distilling(make("llama"))
    distillation._accelerator = TwoProcesses()
    distillation.teacher = SimpleNamespace(
        is_sharded=True, read=lambda ids, positions: reads.append(ids.shape)
    )
    for expected in ([], [(1, 1)]):
        with distillation.teacher_forward(batch((False, False))):
            assert reads == expected
