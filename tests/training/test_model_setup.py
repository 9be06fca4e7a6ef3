"""Test which models a recipe trains on packed documents."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers.commands import run_in_this_process
from helpers.vision_models import SAMPLE, text_tokens, vision_model
from training.training_runs import arguments

TOKENIZER = Path(__file__).parents[1] / "assets" / "tiny-llama"


def saved_model(folder):
    model = vision_model(SAMPLE[0], vocab_size=512, max_position_embeddings=256)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return model


@pytest.mark.parametrize("packing", ["single", "masked"])
def test_models_with_three_positions_train_on_single_documents(packing, tmp_path):
    saved_model(tmp_path / "model")
    changes = {"model": tmp_path / "model", "packing": packing, "max_steps": 1}
    result = run_in_this_process("finetune", *arguments(tmp_path / "out", **changes))
    if packing == "single":
        assert result.returncode == 0, result.stderr
        return
    assert result.returncode == 1
    assert "documents packed in a row may see each other" in result.stderr


@torch.no_grad()
@pytest.mark.skipif(SAMPLE[0] != "qwen2_vl", reason="is another model")
def test_packed_documents_see_each_other_in_qwen2_vl():
    """The reason of the refusal: transformers makes no mask from its position_ids."""
    model = vision_model("qwen2_vl")
    first, second = text_tokens(10, seed=3), text_tokens(10, seed=4)
    packed = torch.cat([first, second], dim=1)
    positions = torch.arange(10).repeat(2)[None]
    logits = model(input_ids=packed, position_ids=positions, use_cache=False).logits
    alone = model(input_ids=second, use_cache=False).logits
    assert (logits[:, 10:] - alone).abs().max() > 0.1
