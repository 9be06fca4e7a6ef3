"""Test which parameters decay, against lists by hand, in both loops."""

from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_models import make_model
from torch import nn
from training_runs import ASSETS, arguments
from transformers import Trainer

from rope_patch.training import loop, trainer
from rope_patch.training.model_setup import prepare
from rope_patch.training.parameter_groups import decayed_names, require_undecayed_embeddings
from rope_patch.training.settings import parse

MATRICES = {
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
    "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
}  # fmt: skip
NORMS = {
    "tiny-llama": {"input_layernorm.weight", "post_attention_layernorm.weight"},
    "tiny-qwen3": {
        "input_layernorm.weight", "post_attention_layernorm.weight",
        "self_attn.q_norm.weight", "self_attn.k_norm.weight",
    },
    "tiny-gemma3": {
        "input_layernorm.weight", "post_attention_layernorm.weight",
        "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight",
        "self_attn.q_norm.weight", "self_attn.k_norm.weight",
    },
}  # fmt: skip
EMBEDDINGS, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Stop(Exception):
    """Ends a run once its optimizer exists."""


def optimizer_names(recipe, folder, monkeypatch, **changes):
    """Return the names in a run's two groups, and the groups' weight decay."""
    settings = parse(arguments(folder, weight_decay=0.1, **changes))[0]
    module = {"finetune": trainer, "loop": loop}[recipe]
    seen, init = [], torch.optim.AdamW.__init__
    models = []

    def record(self, params, *args, **kwargs):
        seen.extend(params)
        raise Stop

    def prepare_and_keep(settings):
        models.append(prepare(settings))
        return models[-1]

    monkeypatch.setattr(torch.optim.AdamW, "__init__", record)
    monkeypatch.setattr(module, "prepare", prepare_and_keep)
    with pytest.raises(Stop):
        getattr(module, recipe)(settings)
    monkeypatch.setattr(torch.optim.AdamW, "__init__", init)
    names = {id(p): name for name, p in models[0].model.named_parameters()}
    assert [group["weight_decay"] for group in seen] == [0.1, 0.0]
    return [[names[id(p)] for p in group["params"]] for group in seen]


def expected_names(model, decay_embeddings, layers, tied):
    decayed = {f"model.layers.{i}.{name}" for i in range(layers) for name in MATRICES}
    undecayed = {f"model.layers.{i}.{name}" for i in range(layers) for name in NORMS[model]}
    undecayed.add(FINAL_NORM)
    (decayed if decay_embeddings else undecayed).add(EMBEDDINGS)
    if not tied:
        decayed.add(HEAD)
    return decayed, undecayed


@pytest.mark.parametrize("model", NORMS)
@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_both_loops_have_the_groups_listed_by_hand(model, decay_embeddings, tmp_path, monkeypatch):
    changes = {"model": ASSETS / model, "decay_embeddings": decay_embeddings}
    groups = [
        optimizer_names(recipe, tmp_path / recipe, monkeypatch, **changes)
        for recipe in ("finetune", "loop")
    ]
    assert groups[0] == groups[1]
    config = prepare(parse(arguments(tmp_path / "own", **changes))[0]).model.config
    expected = expected_names(
        model, decay_embeddings, config.num_hidden_layers, config.tie_word_embeddings
    )
    assert tuple(map(set, groups[0])) == expected
    assert sum(map(len, groups[0])) == sum(map(len, expected))


@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_copies_of_embeddings_trained_beside_lora(decay_embeddings, tmp_path, monkeypatch):
    changes = {"lora_rank": 4, "decay_embeddings": decay_embeddings}
    groups = [
        optimizer_names(recipe, tmp_path / recipe, monkeypatch, **changes)
        for recipe in ("finetune", "loop")
    ]
    assert groups[0] == groups[1]
    decayed, undecayed = groups[0]
    embeddings = "base_model.model.model.embed_tokens.modules_to_save.default.weight"
    assert (embeddings in decayed) == decay_embeddings
    assert (embeddings in undecayed) != decay_embeddings
    for name in decayed:
        assert name == embeddings or ".lora_A." in name or ".lora_B." in name
    for name in undecayed:
        assert name == embeddings or "norm" in name


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma2", "phi3"])
def test_the_default_is_what_the_trainer_of_transformers_does(family):
    model = make_model(family)
    theirs = set(Trainer.get_decay_parameter_names(SimpleNamespace(), model))
    ours = set(decayed_names(model, decay_embeddings=True))
    assert ours == theirs & dict(model.named_parameters()).keys()


class Odd(nn.Module):
    """A tied head before its embeddings, biases of experts, and sinks."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 9, bias=False)  # the name that named_parameters has first
        self.tokens = nn.Embedding(9, 4)
        self.tokens.weight = self.head.weight
        self.up_proj_bias = nn.Parameter(torch.zeros(2, 4))
        self.sinks = nn.Parameter(torch.zeros(4))
        self.ln_f = nn.LayerNorm(4)


def test_a_tied_head_is_an_embedding_under_any_name_and_wrapper():
    model = nn.ModuleDict({"module": Odd()})
    assert decayed_names(model, decay_embeddings=False) == ["module.sinks"]
    assert set(decayed_names(model, decay_embeddings=True)) == {
        "module.sinks",
        "module.head.weight",
    }
    theirs = set(Trainer.get_decay_parameter_names(SimpleNamespace(), model))
    assert theirs == {"module.sinks", "module.head.weight", "module.tokens.weight"}


def test_an_optimizer_with_groups_of_its_own_is_refused():
    model = make_model("llama")
    plain = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match=r"not followed by SGD.*decay_embeddings: true"):
        require_undecayed_embeddings(model, plain)
    require_undecayed_embeddings(model, torch.optim.SGD(model.parameters(), lr=0.1))
