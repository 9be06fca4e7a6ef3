"""Test that whatever trains a model records so, and that patches of it continue what was trained.

Each trainer takes one step under YaRN ×4 on a model of 256 tokens. The truth is transformers: its
own YaRN with the factor of both.
"""

import json

import pytest
import torch
import transformers
from helpers.commands import run_in_this_process
from training_runs import ASSETS, arguments, run
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_patch
from rope_patch.exporting import export

TINY = ASSETS / "tiny-llama"
BASE, TRAINED, EXTENDED = 256, 1024, 2048
YARN = {"method": "yarn", "factor": 4}
ONE_STEP = {"factor": 4, "max_steps": 1, "save_steps": 1}


def trainer(folder, kind=transformers.Trainer, arguments=transformers.TrainingArguments, **keys):
    """Train a step by the callback, and save; return the trainer."""
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(10, 400, (64,), generator=generator).tolist()}] * 2
    if kind is transformers.Trainer:
        rows = [{**row, "labels": row["input_ids"]} for row in rows]
    else:
        import datasets

        rows = datasets.Dataset.from_list(rows)
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False}
    settings = arguments(
        output_dir=str(folder), max_steps=1, save_steps=1, per_device_train_batch_size=2, **quiet
    )
    model = keys.pop("model", None)
    made = kind(
        model=plain(TINY) if model is None else model,
        args=settings,
        train_dataset=rows,
        callbacks=[rope_patch.RopePatchCallback(**YARN)],
        **keys,
    )
    made.train()
    made.save_model(folder / "final")
    return made


def peft_model():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(plain(TINY), config)


def trl_final(folder):
    trl = pytest.importorskip("trl")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer(folder, trl.SFTTrainer, trl.SFTConfig, processing_class=tokenizer)
    return folder / "final"


def callback_final(folder, **keys):
    trainer(folder, **keys)
    return folder / "final"


def merged(adapter, folder, save):
    """Load an adapter, merge it, and write the model."""
    save(rope_patch.load(adapter).merge_and_unload(), folder)
    return folder


# Name -> function of a new folder and of `folder_of`, which gives what another name trained.
TRAINERS = {
    "finetune": lambda folder, _: run("finetune", folder, **ONE_STEP),
    "finetune's checkpoint": lambda _, folder_of: folder_of("finetune").parent / "checkpoint-1",
    "finetune, LoRA": lambda folder, _: run("finetune", folder, lora_rank=2, **ONE_STEP),
    "loop": lambda folder, _: run("loop", folder, **ONE_STEP),
    "callback": lambda folder, _: callback_final(folder),
    "callback's checkpoint": lambda _, folder_of: folder_of("callback").parent / "checkpoint-1",
    "TRL": lambda folder, _: trl_final(folder),
    "merged, saved by us": lambda folder, folder_of: merged(
        folder_of("adapter"), folder, rope_patch.save
    ),
    "merged, saved by transformers": lambda folder, folder_of: merged(
        folder_of("adapter"), folder, lambda model, target: model.save_pretrained(target)
    ),
}
ADAPTER = {"adapter": lambda folder, _: callback_final(folder, model=peft_model())}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return a function: trainer's name -> folder of what it trained, made once."""
    folders = {}

    def make(name):
        if name not in folders:
            place = tmp_path_factory.mktemp("trained") / "run"
            folders[name] = (TRAINERS | ADAPTER)[name](place, make)
        return folders[name]

    return make


def plain(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model, length=200):
    ids = torch.randint(10, 400, (1, length), generator=torch.Generator().manual_seed(0))
    return model.eval()(input_ids=ids, use_cache=False).logits


def assert_continued(handle, factor):
    """Assert that a patch is transformers' YaRN with the factor of both, from 256 tokens."""
    config = transformers.AutoConfig.from_pretrained(TINY)
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": 4.0 * factor,
        "original_max_position_embeddings": BASE,
    }
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    got = handle.frequencies[None]
    torch.testing.assert_close(got.inv_freq.float(), inv_freq, rtol=1e-5, atol=0)
    assert got.attention_factor == pytest.approx(attention_factor)
    assert (handle.trained_length, handle.length) == (TRAINED, factor * TRAINED)


@pytest.mark.parametrize("name", TRAINERS)
def test_patches_continue_what_was_trained_through_saving_and_loading(name, folder_of, tmp_path):
    """Finetune -> save -> plain load -> patch -> save -> load."""
    model = plain(folder_of(name))
    before = logits(model)
    rope_patch.patch(model, "dynamic-yarn", factor=8)
    assert logits(model).equal(before)
    handle = rope_patch.patch(model, "yarn", factor=2)
    assert_continued(handle, 2)
    handle.undo()
    assert logits(model).equal(before)

    rope_patch.patch(model, "yarn", factor=2)
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path)
    assert_continued(rope_patch.current(loaded), 2)
    assert logits(loaded).equal(logits(model))
    assert_continued(rope_patch.patch(loaded, "yarn", factor=4), 4)
    assert_continued(rope_patch.current(rope_patch.load(tmp_path, "yarn", factor=4)), 4)
    again = plain(tmp_path)
    with pytest.raises(ValueError, match=r"2,048 tokens.* 1,536"):
        rope_patch.patch(again, "yarn", factor=1.5)
    assert_continued(rope_patch.patch(again, "yarn", factor=4), 4)


@pytest.mark.parametrize("name", ["finetune", "callback", "merged, saved by us"])
def test_loaded_model_is_continued_like_the_plain_one(name, folder_of, tmp_path):
    folder = folder_of(name)
    model = rope_patch.load(folder)
    assert (rope_patch.current(model).trained_length, model.config.max_position_embeddings) == (
        BASE,
        TRAINED,
    )
    torch.testing.assert_close(logits(model), logits(plain(folder)), rtol=0, atol=5e-4)
    rope_patch.save(model, tmp_path)
    assert_continued(rope_patch.patch(plain(tmp_path), "yarn", factor=2), 2)
    assert_continued(rope_patch.patch(model, "yarn", factor=2), 2)
    assert_continued(rope_patch.patch(model, "yarn", factor=4), 4)
    rope_patch.unpatch(model)
    assert_continued(rope_patch.patch(model, "yarn", factor=2), 2)
    handle = rope_patch.patch(model, "yarn", factor=8, start="unscaled")
    assert (handle.trained_length, handle.length) == (BASE, EXTENDED)


def test_trainers_model_is_continued_where_it_is(tmp_path):
    model = trainer(tmp_path).model
    assert_continued(rope_patch.patch(model, "yarn", factor=2), 2)


def test_adapter_continues_what_it_was_trained_under(folder_of, tmp_path):
    model = rope_patch.load(folder_of("adapter"))
    assert_continued(rope_patch.patch(model, "yarn", factor=2), 2)
    rope_patch.save(model, tmp_path)  # an adapter that was not trained further
    again = rope_patch.load(tmp_path)
    assert_continued(rope_patch.current(again), 2)
    assert logits(again).equal(logits(model))
    assert_continued(rope_patch.patch(again, "yarn", factor=4), 4)


def patched(model, folder, **changes):
    """Write a patched checkpoint by the command."""
    words = [word for key, value in (YARN | changes).items() for word in (f"--{key}", value)]
    result = run_in_this_process("patch", model, *words, "--to", folder)
    assert result.returncode == 0, result.stderr
    return folder


def test_adapter_of_a_base_whose_config_has_the_rotation_records_it(folder_of, tmp_path):
    base = plain(patched(TINY, tmp_path / "base"))
    model = rope_patch.load_adapter(base, folder_of("adapter"))
    assert rope_patch.current(model) is None
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_continued(rope_patch.patch(plain(tmp_path / "merged"), "yarn", factor=2), 2)


def test_training_without_a_method_keeps_the_saved_rotation(tmp_path):
    base = patched(TINY, tmp_path / "base")
    keys = {"model": base, "method": "none", "max_steps": 1, "save_steps": 1}
    folder = run("finetune", tmp_path / "run", factor=None, **keys)
    assert_continued(rope_patch.patch(plain(folder), "yarn", factor=2), 2)


def test_all_readers_start_from_the_trained_length(folder_of, tmp_path):
    folder = folder_of("finetune")
    subjects = (folder, plain(folder), rope_patch.load(folder))
    for subject in subjects:
        diagnosis = rope_patch.diagnose(subject)
        assert next(iter(diagnosis.rotations.values())).geometry.trained_length == TRAINED
        assert "trained in (rope_patch recorded" in str(diagnosis)
    words = arguments(tmp_path / "run", model=folder, train_length=None)
    plan = run_in_this_process("finetune", *words, "--plan", "--json").stdout
    assert json.loads(plan)["length"] == EXTENDED
    result = run_in_this_process("extend", folder, "--to", TRAINED, "--out", tmp_path / "extended")
    assert f"above the {TRAINED:,} tokens" in result.stderr
    with pytest.raises(ValueError, match=f"{TRAINED:,}"):
        rope_patch.search(str(folder), length=TRAINED // 2)
    again = plain(patched(folder, tmp_path / "patched", factor=2))
    exported = export(again, "vllm")
    assert exported.config["rope_parameters"]["factor"] == 8
    assert "rope_patch" not in exported.config
    assert_continued(rope_patch.patch(again, "yarn", factor=4), 4)


def test_transformers_reads_the_record_without_a_word(folder_of, caplog, recwarn):
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_propagation()
    try:
        config = transformers.AutoConfig.from_pretrained(folder_of("finetune"))
    finally:
        transformers.logging.disable_propagation()
        transformers.logging.set_verbosity_error()
    assert config.rope_patch["trained"]["max_position_embeddings"] == TRAINED
    assert not caplog.records
    assert not recwarn.list
