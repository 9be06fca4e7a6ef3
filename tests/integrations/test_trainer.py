"""Test transformers' Trainer on a patched model against a training loop written here."""

import math

import pytest
import torch
import transformers
from helpers.tiny_models import (
    LONG,
    SHORT,
    assert_close,
    assert_differs,
    logits,
    make_model,
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
    "changes",
    [{}, {"gradient_checkpointing": True}],
    ids=["plain", "checkpointing"],
)
@pytest.mark.parametrize("method", METHODS)
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
