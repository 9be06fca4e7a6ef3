"""What extension methods do to a model that really recalls: the literature in one small file."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.recipes.train_tiny import recall_accuracy

TINY = Path(__file__).parent / "assets" / "tiny-llama"
TRAINED = 256


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY)


def test_plain_recall_holds_within_the_trained_length_and_collapses_at_four_times(model):
    assert recall_accuracy(model, TRAINED) >= 0.95
    assert recall_accuracy(model, 4 * TRAINED) <= 0.5


def test_yarn_keeps_recall_at_four_times_the_trained_length(model):
    with rope_patch.patch(model, "yarn", factor=4):
        assert recall_accuracy(model, 4 * TRAINED) >= 0.9


def test_linear_pays_at_short_length(model):
    plain = recall_accuracy(model, TRAINED // 2)
    with rope_patch.patch(model, "linear", factor=4):
        assert recall_accuracy(model, TRAINED // 2) <= plain - 0.1


def test_undo_restores_the_trained_model_bit_for_bit(model):
    ids = torch.arange(300)[None] % 512
    with torch.no_grad():
        before = model(ids).logits
        with rope_patch.patch(model, "yarn", factor=4):
            assert not torch.equal(model(ids).logits, before)
        assert torch.equal(model(ids).logits, before)
