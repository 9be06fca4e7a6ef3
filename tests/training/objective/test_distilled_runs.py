"""Test runs that distil short rows: their teacher, their log, and what becomes of short texts."""

import json

import extend_tiny
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from training_runs import ASSETS, BOTH, LENGTH, TINY, curve, run, settings_of
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.training import TrainingRun, prepare_model, read_log

DISTILLED = {"short_share": 0.5, "distillation_weight": 1.0, "save_strategy": "no"}


def parsed(folder, **changes):
    return settings_of(folder / "out", **{**DISTILLED, **changes})


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    """Run two steps with a distilled half, by the trainer; return the run's folder."""
    folder = tmp_path_factory.mktemp("distilled") / "out"
    changes = {"distillation_weight": 0.5, "distillation_temperature": 2, "max_steps": 2}
    run("finetune", folder, **DISTILLED | changes)
    return folder


def test_nothing_is_lost_before_the_first_step_if_nothing_is_patched(distilled, tmp_path):
    run("loop", tmp_path / "plain", **DISTILLED, method="none", factor=None, max_steps=2)
    first, second = read_log(tmp_path / "plain")
    assert first["distillation_loss"] == 0
    assert second["distillation_loss"] > 0
    assert read_log(distilled)[0]["distillation_loss"] > 0.1


def test_the_log_has_the_terms_of_the_loss_and_their_tokens(distilled):
    for line in read_log(distilled):
        tokens = line["distillation_tokens"]
        # Two of four rows, without the first token of each document.
        others = 2 * (LENGTH - 1)
        assert 0.9 * others < tokens <= others
        mean = line["language_loss"] * others + 0.5 * line["distillation_loss"] * tokens
        assert line["loss"] == pytest.approx(mean / (others + tokens), rel=1e-6)


def test_the_card_and_the_identity_say_what_short_rows_were_trained_by(distilled, reference_run):
    card = (distilled / "model" / "README.md").read_text()
    row = next(line for line in card.splitlines() if line.startswith("| short rows |"))
    assert "original model" in row
    assert "weight 0.5, temperature 2" in row
    expected = {distilled: {"weight", "temperature"}, reference_run("finetune"): set()}
    for folder, keys in expected.items():
        identity = json.loads((folder / "identity.json").read_text())["identity"]
        assert {key.partition("_")[2] for key in identity if "distillation" in key} == keys


def test_a_step_without_short_rows_has_no_divergence(tmp_path):
    changes = DISTILLED | {"short_share": 0.25, "max_steps": 4}
    changes |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    run("loop", tmp_path / "out", **changes)
    has_terms = [
        ("language_loss" in line, "distillation_loss" in line, line["distillation_tokens"] > 0)
        for line in read_log(tmp_path / "out")
    ]
    assert has_terms == [(True, False, False)] * 3 + [(False, True, True)]


def test_batches_and_accumulated_gradients_are_averaged_over_tokens(tmp_path):
    curves = []
    for rows, batches in ((4, 1), (1, 4)):
        changes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": batches}
        run("loop", tmp_path / f"{rows}", **DISTILLED, **changes, max_steps=2)
        curves.append(torch.tensor(curve(tmp_path / f"{rows}")))
    torch.testing.assert_close(*curves, rtol=0, atol=1e-4)


def test_with_lora_the_original_model_computes_with_the_same_tensors(tmp_path):
    prepared = prepare_model(parsed(tmp_path, lora_rank=4))
    base = prepared.model.get_base_model()
    teacher = prepared.objective.distillation.teacher.model
    trained = {p.data_ptr() for p in prepared.model.parameters() if p.requires_grad}
    here = {p.data_ptr() for p in base.parameters()}
    assert {p.data_ptr() for p in teacher.parameters()} <= here - trained
    original = AutoModelForCausalLM.from_pretrained(TINY["model"])
    ids = torch.arange(3, 300)[None]
    with torch.no_grad():
        expected = original(ids, use_cache=False, output_hidden_states=True).hidden_states[-1]
        got = teacher(ids, use_cache=False).logits  # its head returns its input
    assert torch.equal(got, expected)


def test_without_lora_the_original_model_has_tensors_of_its_own(tmp_path):
    prepared = prepare_model(parsed(tmp_path))
    teacher = prepared.objective.distillation.teacher.model
    here = {p.data_ptr() for p in prepared.model.parameters()}
    assert here.isdisjoint(p.data_ptr() for p in teacher.parameters())
    assert {p.dtype for p in teacher.parameters()} == {torch.float32}
    teacher = prepare_model(parsed(tmp_path, bf16=True)).objective.distillation.teacher.model
    assert {p.dtype for p in teacher.parameters()} == {torch.bfloat16}


def test_the_original_model_of_a_saved_one_rotates_as_recorded(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(TINY["model"])
    rope_patch.patch(model, "yarn", factor=2)
    rope_patch.save(model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").symlink_to(ASSETS / "tiny-llama" / "tokenizer.json")
    changes = {"model": tmp_path / "model", "factor": 4}
    teacher = prepare_model(parsed(tmp_path, **changes)).objective.distillation.teacher.model
    ids = torch.arange(3, 300)[None]
    with torch.no_grad():
        got = teacher(ids, use_cache=False).logits
        expected = model.model(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_random_numbers_are_those_of_a_run_without_distillation(tmp_path):
    numbers = []
    for weight in (0.0, 1.0):
        model = prepare_model(parsed(tmp_path, lora_rank=4, distillation_weight=weight)).model
        weights = {n: p for n, p in model.named_parameters() if "lora_A" in n}
        numbers.append((weights, torch.rand(3)))
    assert torch.equal(numbers[0][1], numbers[1][1])
    for name, tensor in numbers[0][0].items():
        assert torch.equal(tensor, numbers[1][0][name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_share": 0}, "short_share: .* got short_share 0"),
        ({"distillation_weight": -1}, "distillation_weight .*at least 0"),
        ({"distillation_weight": "nan"}, "distillation_weight .*at least 0"),
        ({"distillation_temperature": 0}, "distillation_temperature .*above 0"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: 0.1"),
        ({"torch_compile": True}, "torch_compile: True"),
        ({"trained_length": 64, "short_length": 100}, "64 tokens.*short_length .* got 100"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        prepare_model(parsed(tmp_path, **changes))


def test_deepspeed_is_refused(tmp_path, monkeypatch):
    settings = parsed(tmp_path)
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(ValueError, match="DeepSpeed"):
        TrainingRun(settings, prepare_model(settings), accelerator, None, entry_point="finetune")


@pytest.mark.parametrize("recipe", BOTH)
def test_a_loss_that_is_mostly_divergence_does_not_stop_the_run(recipe, tmp_path):
    changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    changes |= {"short_share": 0.8, "method": "none", "factor": None, "max_steps": 12}
    run(recipe, tmp_path / "out", **DISTILLED | changes)
    losses = [line["loss"] for line in read_log(tmp_path / "out")]
    assert max(losses) - min(losses) > TINY.get("max_loss_rise", 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_short_texts_stay_as_they_were(seed, tmp_path):
    """The short rows are English, which the model never saw, and ask for nothing it can do."""
    sources = {}
    for name, length, count in (("long", 1024, 82), ("held-out", 256, 32)):
        sources[name] = list(extend_tiny.documents([length] * count, seed + 100 * len(name)))
    data = tmp_path / "long.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in sources["long"]))
    ids, labels = (
        torch.tensor([record[key] for record in sources["held-out"]])
        for key in ("input_ids", "labels")
    )

    @torch.no_grad()
    def loss(folder):
        model = AutoModelForCausalLM.from_pretrained(folder)
        return model(ids, labels=labels, use_cache=False).loss.item()

    changes = DISTILLED | {"factor": 4, "train_length": 1024, "max_steps": 20, "data": data}
    changes |= {"short_data": "novels:emma", "gradient_checkpointing": False, "seed": seed}
    losses = [
        loss(run("loop", tmp_path / str(weight), **changes | {"distillation_weight": weight}))
        for weight in (0.0, 1.0)
    ]
    before = loss(TINY["model"])
    assert before < 0.1
    # 10 times the original's perplexity against 1.2 times.
    assert losses[1] - before < 0.25 * (losses[0] - before)
