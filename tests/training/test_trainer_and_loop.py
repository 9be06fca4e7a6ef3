"""Test the trainer and the loop: equal losses, saved models, model cards and trackers."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.cli import main
from rope_patch.training import model_setup
from rope_patch.training.loop import loop
from rope_patch.training.monitor import read_log
from rope_patch.training.run import TrainingRun
from rope_patch.training.settings import parse
from rope_patch.training.trainer import finetune

ASSETS = Path(__file__).parents[1] / "assets"
RUNNERS = {"finetune": finetune, "loop": loop}
RECIPE = {
    "model": ASSETS / "tiny-llama",
    "method": "yarn",
    "factor": 2,
    "train_length": 256,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "save_strategy": "no",
    "use_cpu": True,
}


@pytest.fixture(scope="module", autouse=True)
def documents(tmp_path_factory):
    """Write documents of 35 to 1,200 tokens; a run needs three seconds to tokenize a novel."""
    folder = tmp_path_factory.mktemp("documents")
    text = "It is a truth universally acknowledged, number {}. "
    for name, count, least in (("short", 400, 1), ("long", 40, 30)):
        records = ({"text": text.format(n) * (least + n % 5)} for n in range(count))
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    RECIPE["data"] = folder / "long.jsonl"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(recipe, folder, **changes):
    options = {**RECIPE, "output_dir": folder, **changes}
    words = [
        word
        for key, value in options.items()
        for word in (f"--{key}", *(map(str, value) if isinstance(value, list) else [str(value)]))
    ]
    return RUNNERS[recipe](parse(words)[0])


def curve(folder):
    return [(line["loss"], line["grad_norm"], line["learning_rate"]) for line in read_log(folder)]


CASES = {
    "yarn": {},
    "decay": {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2},
    "lora": {"lora_rank": 4},
    "mixed": {"method": "mixed-yarn", "train_length": 512, "short_share": 0.5},
    "masked": {"packing": "masked", "data": "short.jsonl"},
    "best_fit": {"packing": "best_fit", "packing_window": 3, "data": "short.jsonl"},
    "woven": {
        "data": "novels:emma",
        "train_length": 768,
        "per_device_train_batch_size": 1,
        "compression_ratio": [0.2, 0.9],
        "aggregation_share": 1.0,
    },
    "nope": {"method": "nope", "factor": None, "train_length": 256},
    "qwen3": {"model": ASSETS / "tiny-qwen3", "kernels": "reference"},
    "gemma3": {"model": ASSETS / "tiny-gemma3", "offload_activations": True},
    "control": {"method": "none", "factor": None, "loss": "full"},
    "skip": {"train_length": 128, "positions": "skip"},
    "leaky": {"method": "none", "positions": "leaky"},
    "distilled": {"short_share": 0.5, "distillation_weight": 1.0},
    "map": {"method": "self-extend", "factor": None, "train_length": 384},
    "z-loss": {"z_loss": 0.01, "loss": "torch"},
}


SLOW = ("decay", "control")  # other cases run the same code


@pytest.fixture(
    scope="module",
    params=[pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES],
)
def runs(request, tmp_path_factory):
    """Run a case with the trainer and the loop; return its name and the two folders."""
    changes = {k: v for k, v in CASES[request.param].items() if v is not None}
    if changes.get("data") == "short.jsonl":
        changes["data"] = RECIPE["data"].with_name("short.jsonl")
    removed_keys = [k for k, v in CASES[request.param].items() if v is None]
    folders = {}
    removed_options = {key: RECIPE.pop(key) for key in removed_keys}
    try:
        for recipe in RUNNERS:
            folders[recipe] = tmp_path_factory.mktemp(f"{request.param}-{recipe}") / "out"
            run(recipe, folders[recipe], **changes)
    finally:
        RECIPE.update(removed_options)
    return request.param, folders


def test_trainer_and_loop_take_the_same_steps(runs):
    _, folders = runs
    expected = curve(folders["finetune"])
    assert len(expected) == 3
    assert expected[0][0] != expected[-1][0]
    assert curve(folders["loop"]) == expected  # to the bit
    weights = [load_file(folder / "model" / "model.safetensors") for folder in folders.values()]
    for key, tensor in weights[0].items():
        assert torch.equal(weights[1][key], tensor), key


@torch.no_grad()
def test_the_saved_model_has_the_logits_of_the_patched_one(runs):
    name, folders = runs
    folder = folders["loop"] / "model"
    sidecar = folder / "rope_patch.json"
    has_native_form = not sidecar.is_file() or json.loads(sidecar.read_text())["native"]
    assert has_native_form == (name not in ("mixed", "map"))
    model = (
        AutoModelForCausalLM.from_pretrained(folder) if has_native_form else rope_patch.load(folder)
    )
    ids = AutoTokenizer.from_pretrained(folder)("It is a truth " * 60, return_tensors="pt")
    base = AutoModelForCausalLM.from_pretrained(CASES[name].get("model", RECIPE["model"]))
    if name not in ("control", "leaky"):
        method = CASES[name].get("method", "yarn")
        rope_patch.patch(base, method, **({} if name in ("nope", "map") else {"factor": 2}))
    base.load_state_dict(model.state_dict())
    assert ids.input_ids.shape[1] > 256
    torch.testing.assert_close(model(**ids).logits, base(**ids).logits, atol=1e-4, rtol=1e-4)


def test_the_card_states_method_lengths_and_tokens(runs):
    name, folders = runs
    card = (folders["finetune"] / "model" / "README.md").read_text()
    rows = 2 * int(CASES[name].get("per_device_train_batch_size", 2))
    tokens = 3 * rows * int(CASES[name].get("train_length", 256))
    assert f"{tokens:,} tokens: 3 steps" in card
    assert "| trained length before | 256 tokens |" in card
    if name not in ("control", "nope", "map"):
        assert "512 tokens" in card
    packed = re.search(r"\| rows \| ([\d.]+)% of (\d+) documents cut, ([\d.]+)% padding \|", card)
    cut, documents, padding = map(float, packed.groups())
    if name == "woven":
        assert (
            "| filter | compression ratio 0.2 to 0.9: 0 documents left out below, 0 above" in card
        )
        questions = re.search(r"\| aggregation tasks \| (\d+) questions \(common\\_words, ", card)
        assert 3 <= int(questions[1]) <= 6
    if name == "best_fit":
        assert documents > 10
        assert (cut, 0 < padding < 20) == (0, True)
    else:
        assert padding == 0
    expected = "rope_patch.load" if name in ("mixed", "map") else "rope_patch is not needed"
    assert expected in card
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "transformers"


@pytest.mark.parametrize("loss", ["torch", "full"])
def test_the_z_loss_of_a_step_is_that_of_its_rows(loss, tmp_path):
    changes = {"loss": loss, "max_steps": 1, "learning_rate": 1e-12}
    for recipe in RUNNERS:
        run(recipe, tmp_path / recipe, z_loss=0.01, **changes)
    run("loop", tmp_path / "plain", **changes)
    (plain,) = read_log(tmp_path / "plain")
    assert "z_loss" not in plain
    lines = [read_log(tmp_path / recipe)[0] for recipe in RUNNERS]
    assert lines[0]["z_loss"] == lines[1]["z_loss"]
    assert lines[0]["loss"] - lines[0]["z_loss"] == pytest.approx(plain["loss"], rel=1e-5)
    # log Z of each token, by a model of its own in float64.
    settings = parse(
        ["--config", str(tmp_path / "loop" / "recipe.yaml"), "--output_dir", str(tmp_path / "own")]
    )[0]
    prepared = model_setup.prepare(settings)
    prepared.swaps.undo()
    accelerator = Accelerator(cpu=True)
    own = TrainingRun(settings, prepared, accelerator, None, entry_point="loop")
    batches = iter(own.loader())
    squares = []
    for _ in range(2):
        batch = next(batches)
        logits = prepared.model.double()(input_ids=batch["input_ids"], use_cache=False).logits
        squares.append(logits[:, :-1].exp().sum(-1).log() ** 2)
    expected = 0.01 * torch.cat(squares).mean().item()
    assert lines[0]["z_loss"] == pytest.approx(expected, rel=1e-5)
    assert "z-loss, 0.01" in (tmp_path / "loop" / "model" / "README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"z_loss": -0.5}, "z_loss must be 0 or above, got -0.5"),
        ({"z_loss": "nan"}, "z_loss must be 0 or above, got nan"),
        ({"z_loss": 1e-5, "label_smoothing_factor": 0.1}, "label_smoothing_factor makes the"),
    ],
)
def test_wrong_weights_of_the_z_loss_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run("finetune", tmp_path, **changes)


def test_lora_changes_only_the_weights_that_it_trains(tmp_path):
    run("finetune", tmp_path / "out", lora_rank=4, lora_trains=["norms"], lora_targets=["q_proj"])
    before = load_file(ASSETS / "tiny-llama" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model" / "model.safetensors")
    changed = {key.split(".")[-2] for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"q_proj", "norm", "input_layernorm", "post_attention_layernorm"}


def test_an_unknown_lora_target_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"no layer 'c_attn'; it has .*q_proj"):
        run("loop", tmp_path, lora_rank=4, lora_targets=["c_attn"])


@pytest.mark.parametrize("recipe", RUNNERS)
def test_retrieval_is_measured_during_training(recipe, tmp_path):
    run(recipe, tmp_path, retrieval_steps=2, retrieval_length=400, retrieval_samples=3)
    lines = [json.loads(x) for x in (tmp_path / "retrieval.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 3]
    for line in lines:
        assert (line["length"], line["samples"]) == (400, 3)
        assert 0 < line["retrieval_probability"] < 1
    # The scores change, so they are those of the model in training.
    assert lines[0]["retrieval_probability"] != lines[2]["retrieval_probability"]
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"| 3 | {lines[2]['retrieval_hits']:.2f} |" in card


def test_measuring_retrieval_leaves_training_unchanged(tmp_path):
    run("finetune", tmp_path / "with", retrieval_steps=1, retrieval_length=400)
    run("finetune", tmp_path / "without")
    assert curve(tmp_path / "with") == curve(tmp_path / "without")


@pytest.mark.parametrize("recipe", RUNNERS)
def test_tensorboard_gets_the_logged_numbers(recipe, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(recipe, tmp_path, report_to=["tensorboard"])
    events, *_ = tmp_path.rglob("events.out.tfevents*")
    board = EventAccumulator(str(events.parent)).Reload()
    tags = {tag.split("/")[-1]: tag for tag in board.Tags()["scalars"]}
    for name in ("loss", "tokens_per_second", "memory_gb", "tokens"):
        assert [event.step for event in board.Scalars(tags[name])] == [1, 2, 3], name
    values = [event.value for event in board.Scalars(tags["loss"])]
    assert values == pytest.approx([line["loss"] for line in read_log(tmp_path)])


@pytest.mark.parametrize(("key", "value"), [("optim", "adafactor"), ("torch_compile", True)])
def test_the_loop_refuses_options_of_the_trainer_alone(tmp_path, key, value):
    with pytest.raises(ValueError, match=f"{key}: .* means nothing to the plain loop"):
        run("loop", tmp_path, **{key: value})


def test_the_loop_runs_the_resolved_recipe_of_the_trainer(tmp_path):
    run("finetune", tmp_path / "trainer")
    words = ["--config", str(tmp_path / "trainer" / "recipe.yaml"), "--output_dir"]
    loop(parse([*words, str(tmp_path / "loop")])[0])
    assert curve(tmp_path / "loop") == curve(tmp_path / "trainer")


def test_tokens_determine_the_number_of_steps(tmp_path):
    options = {**RECIPE, "tokens": 2000, "output_dir": tmp_path}
    del options["max_steps"]
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    loop(parse(words)[0])
    assert len(read_log(tmp_path)) == 2  # of 1,024 each


def test_the_rotation_kernel_of_liger_stays_off_with_a_message(caplog):
    with caplog.at_level("WARNING", logger="rope_patch"):
        config = model_setup.liger_kernels_without_conflicts({"rope": True, "rms_norm": True})
    assert config == {
        "rope": False,
        "rms_norm": True,
        "cross_entropy": False,
        "fused_linear_cross_entropy": False,
    }
    assert "Liger's own rotation stays off" in caplog.text


def test_bfloat16_and_checkpointing_give_the_same_losses_within_rounding(tmp_path):
    run("loop", tmp_path / "plain", gradient_checkpointing=False)
    run("loop", tmp_path / "again", gradient_checkpointing=True)
    run("loop", tmp_path / "bf16", bf16=True)
    plain, checkpointed, bf16 = (curve(tmp_path / name) for name in ("plain", "again", "bf16"))
    assert checkpointed == plain
    for (loss, *_), (expected, *_) in zip(bf16, plain, strict=True):
        assert loss == pytest.approx(expected, rel=0.01)
        assert loss != expected


def test_the_command_line_overrides_a_recipe_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "recipe.yaml"
    options = {k: str(v) if isinstance(v, Path) else v for k, v in RECIPE.items()}
    path.write_text(yaml.safe_dump({**options, "output_dir": str(tmp_path / "out")}))
    command = ["rope-patch", "finetune", "--config", str(path), "--max-steps", "2", "--loop"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert not exit_info.value.code
    assert len(read_log(tmp_path / "out")) == 2
    resolved = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert resolved["max_steps"] == 2
    assert resolved["learning_rate"] == 1e-3
    assert resolved["adam_beta2"] == 0.95


@pytest.mark.slow
def test_the_smoke_recipe_runs_on_real_weights(tmp_path):
    folder = finetune(parse(["--config", "smoke_cpu", "--output_dir", str(tmp_path)])[0])
    log = read_log(tmp_path)
    assert len(log) == 6
    assert log[-1]["loss"] < log[0]["loss"] + 0.5
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert model.config.max_position_embeddings == 2 * 8192
