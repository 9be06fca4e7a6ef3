"""Test that vLLM gives a trained, saved policy the log-probabilities that its trainer computes."""

import pytest

pytest.importorskip("vllm")
import torch
import transformers
from engine import ASSETS, FACTOR, LONGEST, engine, generate, greedy, require_equal, text

import rope_patch

pytestmark = pytest.mark.engines

NEW = 6  # tokens of a completion


class Live:
    """The policy in the trainer, as a reference for `require_equal`."""

    def __init__(self, model):
        self.model = model.eval()

    @torch.no_grad()
    def log_probabilities(self, prompt, output, max_tokens):
        ids = torch.tensor([[*prompt, *output]])
        return self.model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)


def test_rollouts_have_the_log_probabilities_of_the_trained_policy(tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        ASSETS / "tiny-llama", dtype=torch.float32
    )
    rows = [{"input_ids": text(600, seed), "labels": text(600, seed)} for seed in range(4)]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "run"),
        max_steps=2,
        learning_rate=1e-3,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    callback = rope_patch.RopePatchCallback("yarn", factor=FACTOR)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    trainer.save_model(tmp_path / "policy")
    prompts = [text(length, seed=9) for length in (100, 500, LONGEST - NEW)]
    with engine(tmp_path / "policy", hf_overrides={}) as llm:  # its config.json says it all
        outputs = generate(llm, prompts, greedy(NEW))
    for output in outputs:
        require_equal(output, Live(trainer.model), NEW)
