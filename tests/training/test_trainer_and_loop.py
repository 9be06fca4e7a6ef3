"""Test the trainer and the loop: equal steps, saved models, cards, trackers, decayed weights."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import Accelerator
from helpers.commands import run_in_this_process
from helpers.tiny_models import make_model
from safetensors.torch import load_file
from torch import nn
from training_runs import (
    ASSETS,
    LENGTH,
    RECIPES,
    TINY,
    documents,
    run,
    settings_of,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

import rope_patch
from rope_patch.training import (
    TrainingRun,
    decayed_names,
    finetune,
    liger_kernels_without_conflicts,
    prepare_model,
    read_log,
    require_undecayed_embeddings,
)

QUICK = {"max_steps": 2, "save_strategy": "no"}
# Case -> changes of TINY.
CASES = {
    "yarn": {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 1},
    "lora": {"lora_rank": 4, "z_loss": 0.01, "loss": "torch"},
    "mixed": {
        "method": "mixed-yarn",
        "train_length": 320,
        "per_device_train_batch_size": 1,
        "short_share": 0.5,
        "distillation_weight": 1.0,
    },
    "best_fit": {
        "packing": "best_fit",
        "packing_window": 3,
        "data": "short",
        "train_length": 128,
    },
    "woven": {
        "data": "novel",
        "train_length": 768,
        "per_device_train_batch_size": 1,
        "compression_ratio": [0.2, 0.9],
        "aggregation_share": 1.0,
    },
    "nope": {"method": "nope", "factor": None},
    "qwen3": {"model": ASSETS / "tiny-qwen3", "kernels": "reference", "positions": "skip"},
    "gemma3": {"model": ASSETS / "tiny-gemma3", "offload_activations": True},
    "leaky": {"method": "none", "positions": "leaky", "loss": "full"},
    "map": {
        "method": "self-extend",
        "factor": None,
        "train_length": 320,
        "per_device_train_batch_size": 1,
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run a case with the trainer and the loop, once; return the two folders."""
    folders = {}

    def run_once(case):
        if case not in folders:
            place, changes = tmp_path_factory.mktemp(case), dict(CASES[case])
            if changes.get("data") == "short":
                changes["data"] = short_documents(place)
            folders[case] = {recipe: place / recipe for recipe in RECIPES}
            for recipe, folder in folders[case].items():
                run(recipe, folder, **QUICK | changes)
        return folders[case]

    return run_once


def short_documents(folder):
    path, text = folder / "short.jsonl", "It is a truth universally acknowledged, number {}. "
    records = [{"text": text.format(number) * (1 + number % 3)} for number in range(60)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def curve(folder):
    return [(line["loss"], line["grad_norm"], line["learning_rate"]) for line in read_log(folder)]


@pytest.mark.parametrize("case", CASES)
def test_trainer_and_loop_take_the_same_steps(case, runs):
    folders = runs(case)
    expected = curve(folders["finetune"])
    assert len(expected) == 2
    assert expected[0][0] != expected[1][0]
    assert curve(folders["loop"]) == expected  # to the bit
    weights = [load_file(folder / "model" / "model.safetensors") for folder in folders.values()]
    for key, tensor in weights[0].items():
        assert torch.equal(weights[1][key], tensor), key


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_the_saved_model_has_the_logits_of_the_patched_one(case, runs):
    folder = runs(case)["loop"] / "model"
    sidecar = folder / "rope_patch.json"
    has_native_form = not sidecar.is_file() or json.loads(sidecar.read_text())["native"]
    assert has_native_form == (case not in ("mixed", "map"))
    model = (
        AutoModelForCausalLM.from_pretrained(folder) if has_native_form else rope_patch.load(folder)
    )
    ids = AutoTokenizer.from_pretrained(folder)("It is a truth " * 60, return_tensors="pt")
    base = AutoModelForCausalLM.from_pretrained(CASES[case].get("model", TINY["model"]))
    if case != "leaky":
        method = CASES[case].get("method", "yarn")
        rope_patch.patch(base, method, **({} if case in ("nope", "map") else {"factor": 2}))
    base.load_state_dict(model.state_dict())
    assert ids.input_ids.shape[1] > 256
    torch.testing.assert_close(model(**ids).logits, base(**ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_card_states_method_lengths_and_tokens(case, runs):
    card = (runs(case)["finetune"] / "model" / "README.md").read_text()
    changes = CASES[case]
    rows = 2 * changes.get("per_device_train_batch_size", 2)
    tokens = 2 * rows * changes.get("train_length", LENGTH)
    assert f"{tokens:,} tokens: 2 steps" in card
    assert "| trained length before | 256 tokens |" in card
    if case not in ("nope", "map"):
        assert "512 tokens" in card
    packed = re.search(r"\| rows \| (\d+) of (\d+) documents? cut, ([\d.]+)% padding \|", card)
    cut, found, padding = map(float, packed.groups())
    if case == "woven":
        assert (
            "| filter | compression ratio 0.2 to 0.9: 0 documents left out below, 0 above" in card
        )
        questions = re.search(r"\| aggregation tasks \| (\d+) questions \(common\\_words, ", card)
        assert 2 <= int(questions[1]) <= 4
    if case == "best_fit":
        assert found > 8
        assert (cut, 0 < padding < 20) == (0, True)
    else:
        assert padding == 0
    expected = "rope_patch.load" if case in ("mixed", "map") else "rope_patch is not needed"
    assert expected in card
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "transformers"
    if case == "lora":
        assert "z-loss, 0.01" in card


def test_the_z_loss_of_a_step_is_that_of_its_rows(tmp_path):
    changes = {"max_steps": 1, "save_strategy": "no", "learning_rate": 1e-12}
    run("loop", tmp_path / "run", z_loss=0.01, **changes)
    run("loop", tmp_path / "plain", **changes)
    (plain,), (line,) = read_log(tmp_path / "plain"), read_log(tmp_path / "run")
    assert "z_loss" not in plain
    assert line["loss"] - line["z_loss"] == pytest.approx(plain["loss"], rel=1e-5)
    # log Z of each token, by a model of its own in float64.
    settings = settings_of(tmp_path / "own", z_loss=0.01, **changes)
    prepared = prepare_model(settings)
    prepared.swaps.undo()
    own = TrainingRun(settings, prepared, Accelerator(cpu=True), None, entry_point="loop")
    batches = iter(own.loader())
    squares = []
    for _ in range(2):
        batch = next(batches)
        logits = prepared.model.double()(input_ids=batch["input_ids"], use_cache=False).logits
        squares.append(logits[:, :-1].exp().sum(-1).log() ** 2)
    expected = 0.01 * torch.cat(squares).mean().item()
    assert line["z_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        ("finetune", {"z_loss": -0.5}, "z_loss .* -0.5"),
        ("finetune", {"z_loss": "nan"}, "z_loss .* nan"),
        ("finetune", {"z_loss": 1e-5, "label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ("loop", {"optim": "adafactor"}, "optim: adafactor .*plain loop"),
        ("loop", {"torch_compile": True}, "torch_compile: .*plain loop"),
        ("loop", {"lora_rank": 4, "lora_targets": ["c_attn"]}, "'c_attn'; it has .*q_proj"),
    ],
)
def test_settings_that_do_not_fit_are_refused(recipe, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(recipe, tmp_path / "run", **changes)


def test_lora_changes_only_the_weights_that_it_trains(tmp_path):
    trained = {"lora_rank": 4, "lora_trains": ["norms"], "lora_targets": ["q_proj"]}
    run("finetune", tmp_path / "out", **QUICK, **trained)
    before = load_file(ASSETS / "tiny-llama" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model" / "model.safetensors")
    changed = {key.split(".")[-2] for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"q_proj", "norm", "input_layernorm", "post_attention_layernorm"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_retrieval_is_measured_and_tracked_beside_equal_steps(recipe, runs, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    needles = {"retrieval_steps": 1, "retrieval_length": 400, "retrieval_samples": 3}
    run(recipe, tmp_path, **QUICK, **CASES["yarn"], **needles, report_to=["tensorboard"])
    assert curve(tmp_path) == curve(runs("yarn")["finetune"])
    lines = [json.loads(line) for line in (tmp_path / "retrieval.jsonl").open()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert (line["length"], line["samples"]) == (400, 3)
        assert 0 < line["retrieval_probability"] < 1
    # The scores change, so they are those of the model in training.
    assert lines[0]["retrieval_probability"] != lines[2]["retrieval_probability"]
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"| 2 | {lines[2]['retrieval_hits']:.2f} |" in card

    events, *_ = tmp_path.rglob("events.out.tfevents*")
    board = EventAccumulator(str(events.parent)).Reload()
    tags = {tag.split("/")[-1]: tag for tag in board.Tags()["scalars"]}
    for name in ("loss", "tokens_per_second", "memory_gb", "tokens"):
        assert [event.step for event in board.Scalars(tags[name])] == [1, 2], name
    values = [event.value for event in board.Scalars(tags["loss"])]
    assert values == pytest.approx([line["loss"] for line in read_log(tmp_path)])


def test_the_loop_runs_the_resolved_recipe_of_the_trainer(runs, tmp_path):
    trainer = runs("yarn")["finetune"]
    run("loop", tmp_path / "loop", config=trainer / "recipe.yaml")
    assert curve(tmp_path / "loop") == curve(trainer)


def test_bfloat16_and_checkpointing_give_the_same_losses_within_rounding(runs, tmp_path):
    run("loop", tmp_path / "kept", **QUICK, **CASES["yarn"], gradient_checkpointing=False)
    run("loop", tmp_path / "bf16", **QUICK, **CASES["yarn"], bf16=True)
    expected = curve(runs("yarn")["loop"])
    assert curve(tmp_path / "kept") == expected
    for (loss, *_), (expected_loss, *_) in zip(curve(tmp_path / "bf16"), expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=0.01)
        assert loss != expected_loss


def test_tokens_determine_the_number_of_steps(tmp_path):
    run("loop", tmp_path / "run", max_steps=-1, save_strategy="no", tokens=500)
    assert len(read_log(tmp_path / "run")) == 2  # of 256 each


def test_the_command_line_overrides_a_recipe_file(tmp_path):
    path, folder = tmp_path / "recipe.yaml", tmp_path / "out"
    keys = TINY | {"model": str(TINY["model"]), "data": str(documents(tmp_path))}
    path.write_text(yaml.safe_dump({**keys, **QUICK, "output_dir": str(folder)}))
    result = run_in_this_process("finetune", "--config", path, "--max-steps", "1")
    assert result.returncode == 0
    assert len(read_log(folder)) == 1
    resolved = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert (resolved["max_steps"], resolved["learning_rate"]) == (1, 1e-3)
    assert resolved["adam_beta2"] == 0.95


def test_the_rotation_kernel_of_liger_stays_off_with_a_message(caplog):
    with caplog.at_level("WARNING", logger="rope_patch"):
        config = liger_kernels_without_conflicts({"rope": True, "rms_norm": True})
    off = ("rope", "cross_entropy", "fused_linear_cross_entropy")
    assert config == {"rms_norm": True} | dict.fromkeys(off, False)
    assert "rotation stays off" in caplog.text


@pytest.mark.slow
def test_the_smoke_recipe_runs_on_real_weights(tmp_path):
    folder = finetune(settings_of(tmp_path / "run", config="smoke_cpu"))
    log = read_log(tmp_path / "run")
    assert len(log) == 6
    assert log[-1]["loss"] < log[0]["loss"] + 0.5
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert model.config.max_position_embeddings == 2 * 8192


# Which parameters decay, against lists by hand.

MATRICES = {
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
    "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
}  # fmt: skip
BOTH_NORMS = {"input_layernorm.weight", "post_attention_layernorm.weight"}
HEAD_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
NORMS = {
    "tiny-llama": BOTH_NORMS,
    "tiny-qwen3": BOTH_NORMS | HEAD_NORMS,
    "tiny-gemma3": BOTH_NORMS
    | HEAD_NORMS
    | {"pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"},
}


class Stop(Exception):
    """Ends a run once its optimizer exists."""


def optimizer_names(recipe, folder, monkeypatch, **changes):
    """Return the names of the parameters in a run's two groups, decayed first; and its config."""
    seen, models = [], []

    def record(self, params, *args, **kwargs):
        seen.extend(params)
        raise Stop

    def prepare_and_keep(settings):
        models.append(prepare_model(settings))
        return models[-1]

    with monkeypatch.context() as patches:
        patches.setattr(torch.optim.AdamW, "__init__", record)
        patches.setattr(f"{RECIPES[recipe]}.prepare_model", prepare_and_keep)
        with pytest.raises(Stop):
            run(recipe, folder, weight_decay=0.1, **changes)
    model = models[0].model
    names = {id(p): name for name, p in model.named_parameters()}
    assert [group["weight_decay"] for group in seen] == [0.1, 0.0]
    return [[names[id(p)] for p in group["params"]] for group in seen], model.config


def expected_names(model, config, decay_embeddings):
    layers = [f"model.layers.{number}." for number in range(config.num_hidden_layers)]
    decayed = {layer + name for layer in layers for name in MATRICES}
    undecayed = {layer + name for layer in layers for name in NORMS[model]} | {"model.norm.weight"}
    (decayed if decay_embeddings else undecayed).add("model.embed_tokens.weight")
    return decayed | (set() if config.tie_word_embeddings else {"lm_head.weight"}), undecayed


@pytest.mark.parametrize(
    ("model", "decay_embeddings"),
    [("tiny-llama", False), ("tiny-qwen3", True), ("tiny-gemma3", False)],
)
def test_both_loops_have_the_groups_listed_by_hand(model, decay_embeddings, tmp_path, monkeypatch):
    changes = {"model": ASSETS / model, "decay_embeddings": decay_embeddings}
    groups, config = optimizer_names("finetune", tmp_path / "run", monkeypatch, **changes)
    assert optimizer_names("loop", tmp_path / "loop", monkeypatch, **changes)[0] == groups
    expected = expected_names(model, config, decay_embeddings)
    assert tuple(map(set, groups)) == expected
    assert sum(map(len, groups)) == sum(map(len, expected))


@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_copies_of_embeddings_trained_beside_lora(decay_embeddings, tmp_path, monkeypatch):
    changes = {"lora_rank": 4, "decay_embeddings": decay_embeddings}
    groups, _ = optimizer_names("finetune", tmp_path / "run", monkeypatch, **changes)
    assert optimizer_names("loop", tmp_path / "loop", monkeypatch, **changes)[0] == groups
    decayed, undecayed = groups
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
    with_head = {"module.sinks", "module.head.weight"}
    assert set(decayed_names(model, decay_embeddings=True)) == with_head
    theirs = set(Trainer.get_decay_parameter_names(SimpleNamespace(), model))
    assert theirs == with_head | {"module.tokens.weight"}


def test_an_optimizer_with_groups_of_its_own_is_refused():
    model = make_model("llama")
    plain = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match=r"SGD.*decay_embeddings: true"):
        require_undecayed_embeddings(model, plain)
    require_undecayed_embeddings(model, torch.optim.SGD(model.parameters(), lr=0.1))
