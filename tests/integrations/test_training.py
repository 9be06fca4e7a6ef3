"""Test training of a patched model: by transformers' Trainer, with checkpointing, with an adapter.

The references are a loop written here, gradients without checkpoints, and a transformers model of
the patched config.
"""

import math

import pytest
import torch
import transformers
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    SHORT,
    SHORT_FACTOR,
    TRAINED,
    assert_close,
    assert_differs,
    logits,
    make_model,
    padded,
    tokens,
)

import rope_patch

STEPS = 3
RATE = 0.05
METHODS = {"yarn": {"factor": 4}, "dynamic-yarn": {}, "mixed-yarn": {"factor": 4}}
BATCHES = [tokens(length, batch=2, seed=length) for length in (LONG, SHORT, 100)]


class Rows(torch.utils.data.Dataset):
    """The rows of `BATCHES` in order."""

    def __len__(self):
        return sum(len(batch) for batch in BATCHES)

    def __getitem__(self, index):
        row = torch.cat([row[None] for row in BATCHES[index // 2]])[index % 2]
        labels = row.clone()
        labels[0] = -100  # has no prediction, but older transformers count it in the mean
        return {"input_ids": row, "labels": labels}


class SequentialTrainer(transformers.Trainer):
    """A Trainer that reads the rows in order."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(Rows())


def train_with_trainer(model, folder, **changes):
    """Return the trainer, and losses and gradient norms of the steps that it logs."""
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **changes,
    )
    trainer = SequentialTrainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return trainer, [(log["loss"], log["grad_norm"]) for log in logs]


def train_with_loop(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model.train()
    steps = []
    for ids in BATCHES:
        loss = torch.nn.functional.cross_entropy(
            model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return steps


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("yarn", {}),
        ("dynamic-yarn", {"gradient_checkpointing": True}),
        ("mixed-yarn", {}),
    ],
)
def test_trainer_steps_match_the_loop(method, changes, tmp_path):
    trained, expected = make_model(), make_model()
    unpatched = train_with_loop(make_model())
    for model in (trained, expected):
        rope_patch.patch(model, method, **METHODS[method])
    _, steps = train_with_trainer(trained, tmp_path, **changes)
    truth = train_with_loop(expected)
    assert len(steps) == STEPS
    assert all(math.isfinite(number) for step in steps for number in step)
    for got, expected_step in zip(steps, truth, strict=True):
        assert got == pytest.approx(expected_step, rel=1e-4)
    # Without the patch, losses differ.
    assert max(abs(a - b) for (a, _), (b, _) in zip(truth, unpatched, strict=True)) > 5e-3
    for weight, truth_weight in zip(trained.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(weight, truth_weight, rtol=1e-4, atol=1e-5)
    assert rope_patch.current(trained).active


def test_trainer_saves_the_trained_model(tmp_path):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=4)
    trainer, _ = train_with_trainer(model, tmp_path / "runs")
    trainer.save_model(tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert rope_patch.current(loaded) is None
    assert_close(logits(loaded), logits(model.eval()))
    rope_patch.unpatch(model)
    assert_differs(logits(loaded), logits(model))


# -- gradient checkpointing ------------------------------------------------------------------------


def gradients(family, method, options, reentrant):
    """Return the summed gradients of two batches; `reentrant=None` means no checkpoints.

    The first batch has rows below and above the trained length, with different frequencies.
    """
    model = make_model(family).train()
    rope_patch.patch(model, method, **options)
    calls = []
    for layer in model.model.layers:  # checkpoints recompute a layer's submodules
        layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    rows, mask = padded([tokens(SHORT), tokens(LONG, seed=2)], "right")
    for inputs in ({"input_ids": rows, "attention_mask": mask}, {"input_ids": tokens(TRAINED)}):
        labels = inputs["input_ids"]
        model(**inputs, labels=labels, use_cache=False).loss.backward()
    return [parameter.grad for parameter in model.parameters()], len(calls)


@pytest.mark.parametrize(
    ("family", "method", "options"),
    [
        ("llama", "yarn", {"factor": 4}),
        ("llama", "dynamic-yarn", {}),
        ("llama", "mixed-yarn", {"factor": 4}),
        ("llama", "nope", {"temperature": "drope:0.4"}),
        ("gemma3", "dynamic-yarn", {}),
        (
            "gemma3",
            "longrope",
            {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR},
        ),
    ],
)
def test_gradients_equal_those_without_checkpoints(family, method, options):
    expected, once = gradients(family, method, options, None)
    assert max(gradient.abs().max() for gradient in expected) > 1e-3
    for reentrant in (True, False):
        got, calls = gradients(family, method, options, reentrant)
        assert calls == 2 * once  # activations were recomputed
        for gradient, truth in zip(got, expected, strict=True):
            torch.testing.assert_close(gradient, truth, rtol=0, atol=0)
