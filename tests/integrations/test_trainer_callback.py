"""Test RopePatchCallback in transformers' Trainer, and the plugin that axolotl gets it by."""

import importlib
import json
import logging

import pytest
import torch
import transformers
from trainer_runs import (
    FACTOR,
    METHOD,
    STEPS,
    TARGET,
    TINY,
    TRAINED,
    assert_same_weights,
    callback,
    logits,
    losses,
    read_model,
    read_tokenizer,
    settings,
    tokenized_rows,
)

import rope_patch

SIDECAR = "rope_patch.json"
CLOSE = 5e-4  # logits are about 10, and transformers computes frequencies in float32


def make_trainer(folder, model=None, callbacks=None, rows=None, lora=False, **changes):
    tokenizer = read_tokenizer()
    tokenizer.model_max_length = TRAINED
    model = read_model() if model is None else model
    if lora:
        peft = pytest.importorskip("peft")
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    return transformers.Trainer(
        model=model,
        args=settings(folder, **changes),
        train_dataset=tokenized_rows() if rows is None else rows,
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer),
        callbacks=[callback()] if callbacks is None else callbacks,
    )


@pytest.fixture(scope="module", params=[False, True], ids=["full", "lora"])
def whole_run(request, tmp_path_factory):
    """Return a finished run: its folder, its trainer and whether it trained an adapter."""
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(folder, lora=request.param)
    trainer.train()
    trainer.save_model(folder / "final")
    return folder, trainer, request.param


def test_resumed_run_equals_the_whole_one(whole_run, tmp_path):
    folder, whole, lora = whole_run
    resumed = make_trainer(tmp_path, lora=lora)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    resumed.save_model(tmp_path / "final")
    assert_same_weights(tmp_path / "final", folder / "final")
    assert losses(resumed) == losses(whole)
    assert len(losses(whole)) == STEPS


@pytest.mark.parametrize("name", ["checkpoint-2", "final"])
def test_saved_folders_hold_the_rotation(whole_run, name):
    folder, trainer, lora = whole_run
    loaded = rope_patch.load(folder / name)
    handle = rope_patch.current(loaded)
    assert (handle.trained_length, handle.length) == (TRAINED, TARGET)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / name)
    assert tokenizer.model_max_length == TARGET
    if name == "final":
        assert logits(loaded).equal(logits(trainer.model))
    if lora:
        assert json.loads((folder / name / SIDECAR).read_text())["base_model"] == str(TINY)
        return
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
    assert rope_patch.current(plain) is None
    assert (logits(plain) - logits(loaded)).abs().max() < CLOSE
    handle.undo()
    assert (logits(plain) - logits(loaded)).abs().max() > 100 * CLOSE


def test_training_equals_that_of_a_model_with_a_native_config(whole_run, tmp_path):
    _, trainer, lora = whole_run
    if lora:
        pytest.skip("the full run tells")
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": float(FACTOR)}
    parameters["original_max_position_embeddings"] = TRAINED
    native = transformers.AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float32, rope_parameters=parameters, max_position_embeddings=TARGET
    )
    plain = make_trainer(tmp_path, native, callbacks=[], save_strategy="no")
    plain.train()
    assert losses(plain) == pytest.approx(losses(trainer), rel=1e-4)
    unpatched = make_trainer(tmp_path, callbacks=[], save_strategy="no")
    unpatched.train()
    assert losses(unpatched)[1] != pytest.approx(losses(trainer)[1], rel=3e-3)


def test_model_that_is_patched_already_is_taken(tmp_path):
    model = read_model()
    handle = rope_patch.patch(model, **METHOD)
    own = rope_patch.RopePatchCallback()
    trainer = make_trainer(tmp_path, model, [own], max_steps=1, save_steps=1)
    trainer.train()
    assert own.handle is handle is rope_patch.current(trainer.model)
    assert (tmp_path / "checkpoint-1" / SIDECAR).is_file()
    handle.undo()
    assert "save_pretrained" not in vars(model)  # the hooks end with the patch
    model.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / SIDECAR).exists()


def test_model_of_a_patched_folder_gets_its_patch(tmp_path):
    rope_patch.patch_checkpoint(TINY, tmp_path / "patched", **METHOD)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    own = rope_patch.RopePatchCallback()
    make_trainer(tmp_path, model, [own])
    assert (own.handle.trained_length, own.handle.length) == (TRAINED, TARGET)


def test_dynamic_method_trains_and_is_saved_with_its_sidecar(tmp_path):
    own = rope_patch.RopePatchCallback("dynamic-yarn", trained_length=TRAINED)
    trainer = make_trainer(tmp_path, callbacks=[own], max_steps=1, save_strategy="no")
    trainer.train()
    trainer.save_model(tmp_path / "final")
    loaded = rope_patch.load(tmp_path / "final")
    assert rope_patch.current(loaded).method.name == "dynamic-yarn"
    assert logits(loaded).equal(logits(trainer.model))


def test_model_that_the_trainer_builds_anew_is_patched_again(tmp_path):
    def build(folder, own):
        return transformers.Trainer(
            model_init=read_model,
            args=settings(folder, max_steps=1, save_strategy="no"),
            train_dataset=tokenized_rows([40, 40]),
            callbacks=[own],
        )

    own = callback()
    trainer = build(tmp_path, own)
    first = own.handle
    trainer.train()
    assert own.handle is not first
    assert own.handle is rope_patch.current(trainer.model)

    taken = rope_patch.RopePatchCallback()
    trainer = build(tmp_path, taken)
    rope_patch.patch(trainer.model, **METHOD)
    taken.on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
    with pytest.raises(rope_patch.Refused, match="has lost its patch"):
        trainer.train()


@pytest.mark.parametrize(
    ("prepare", "own", "fact"),
    [
        (lambda model: None, rope_patch.RopePatchCallback, "is not patched.* name the method"),
        (lambda model: rope_patch.patch(model, "linear", factor=2), callback, "yarn ×2.*linear ×2"),
        (
            lambda model: rope_patch.encode(model, "alibi"),
            rope_patch.RopePatchCallback,
            "RopePatchCallback cannot save",
        ),
    ],
    ids=["unpatched", "patched otherwise", "encoded"],
)
def test_models_without_the_requested_rotation_are_refused(tmp_path, prepare, own, fact):
    model = read_model()
    prepare(model)
    with pytest.raises(rope_patch.Refused, match=fact):
        make_trainer(tmp_path, model, [own()]).train()


def test_arguments_without_a_method_are_refused():
    with pytest.raises(rope_patch.Refused, match="factor goes with a method"):
        rope_patch.RopePatchCallback(factor=4)


def lose_module(model):
    old = model.model.rotary_emb
    model.model.rotary_emb = type(old)(old.config)


def lose_frequencies(model):
    model.model.rotary_emb.inv_freq.mul_(1.01)


def lose_config(model):
    model.config = transformers.AutoConfig.from_pretrained(TINY)


LOSSES = {
    "module": (lose_module, "is not patched|has lost its patch"),
    "frequencies": (lose_frequencies, r"inv_freq no longer holds the frequencies"),
    "config": (lose_config, "config was replaced"),
}


class Saboteur(transformers.TrainerCallback):
    """Lose the rotation at the event `when`, after accelerate has wrapped the model."""

    def __init__(self, lose, when):
        setattr(self, when, lambda *_, model, **__: lose(model))


@pytest.mark.parametrize("what", LOSSES)
def test_lost_rotation_is_refused(what, tmp_path):
    lose, message = LOSSES[what]
    model = read_model()
    rope_patch.patch(model, **METHOD)
    callbacks = [Saboteur(lose, "on_train_begin"), rope_patch.RopePatchCallback()]
    with pytest.raises(rope_patch.Refused, match=message):
        make_trainer(tmp_path, model, callbacks).train()


@pytest.mark.parametrize("what", LOSSES)
def test_rotation_that_is_lost_in_training_is_refused_at_the_checkpoint(what, tmp_path):
    lose, message = LOSSES[what]
    trainer = make_trainer(tmp_path, callbacks=[callback(), Saboteur(lose, "on_step_end")])
    with pytest.raises(rope_patch.Refused, match=message):
        trainer.train()
    assert trainer.state.global_step == 2


OTHERS = {"factor": {"factor": 4}, "options": {"beta_fast": 16}, "method": {"method": "linear"}}


@pytest.mark.parametrize("what", OTHERS)
def test_checkpoint_of_another_rotation_is_refused(what, whole_run, tmp_path):
    folder, _, lora = whole_run
    trainer = make_trainer(tmp_path, callbacks=[callback(**OTHERS[what])], lora=lora)
    with pytest.raises(rope_patch.Refused, match=r"step 2.*trained with yarn ×2"):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))


def test_checkpoint_without_a_rotation_is_refused(tmp_path):
    make_trainer(tmp_path, callbacks=[]).train()
    trainer = make_trainer(tmp_path)
    with pytest.raises(rope_patch.Refused, match="step 2 records no rotation"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_callback_that_the_trainer_restores_goes_on(whole_run, tmp_path):
    folder, whole, lora = whole_run
    resumed = make_trainer(tmp_path, lora=lora, restore_callback_states_from_checkpoint=True)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert losses(resumed) == losses(whole)


def test_rows_beyond_the_length_are_refused_before_training(tmp_path):
    trainer = make_trainer(tmp_path, rows=tokenized_rows([100, TARGET + 1]))
    with pytest.raises(rope_patch.Refused, match=r"513 tokens.*512"):
        trainer.train()
    assert trainer.state.global_step == 0


class Stream(torch.utils.data.IterableDataset):
    """Rows whose lengths are known only when they come."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from self.rows


def test_rows_of_a_stream_are_checked_at_each_step(tmp_path):
    rows = Stream(list(tokenized_rows([100, 100, TARGET + 1, 100])))
    trainer = make_trainer(tmp_path, rows=rows, save_strategy="no")
    with pytest.raises(rope_patch.Refused, match="513 tokens"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_rows_that_fit_are_taken_whatever_pads_them(tmp_path):
    rows = Stream(
        [{**row, "position_ids": [*range(300), *range(300)]} for row in tokenized_rows([600] * 2)]
    )
    make_trainer(
        tmp_path, rows=rows, max_steps=1, per_device_train_batch_size=1, save_strategy="no"
    ).train()  # two packed documents
    collator = transformers.DataCollatorForSeq2Seq(read_tokenizer(), pad_to_multiple_of=600)
    trainer = make_trainer(tmp_path, rows=tokenized_rows([400, 500]), max_steps=1)
    trainer.data_collator = collator
    trainer.train()


def test_evaluation_beyond_the_length_is_no_error(tmp_path, caplog):
    trainer = make_trainer(tmp_path, max_steps=1, save_strategy="no")
    trainer.train()
    with caplog.at_level(logging.WARNING, logger="rope_patch"):
        trainer.evaluate(tokenized_rows([TARGET + 1]))
    assert "outgrew the 512" in caplog.text


def test_pushed_folder_gets_the_sidecar(whole_run, tmp_path):
    folder, trainer, _ = whole_run
    own = next(c for c in trainer.callback_handler.callbacks if hasattr(c, "extension"))
    (folder / SIDECAR).unlink(missing_ok=True)
    own.on_push_begin(trainer.args, trainer.state, trainer.control)
    recorded = json.loads((folder / "checkpoint-4" / SIDECAR).read_text())
    assert json.loads((folder / SIDECAR).read_text()) == recorded


def test_push_while_saving_is_warned_of(tmp_path, monkeypatch, caplog):
    model = read_model()
    trainer = make_trainer(tmp_path, model, max_steps=1, save_strategy="no")
    trainer.train()
    hook = vars(model)["save_pretrained"]
    original = hook.original_method
    monkeypatch.setattr(hook, "original_method", lambda folder, **_: original(folder))
    model.save_pretrained(tmp_path / "pushed", push_to_hub=True)
    assert "push afterwards" in caplog.text


def test_merged_adapter_saves_its_rotation(whole_run, tmp_path):
    *_, lora = whole_run
    if not lora:
        pytest.skip("a full run has no adapter")
    trainer = make_trainer(tmp_path, lora=True, max_steps=1, save_strategy="no")
    trainer.train()
    merged = trainer.model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits(plain) - logits(merged)).abs().max() < CLOSE
    assert (tmp_path / "merged" / SIDECAR).is_file()


def test_learned_table_is_patched_before_the_optimizer_is_made(tmp_path):
    config = transformers.GPT2Config(
        vocab_size=512,
        n_positions=64,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    own = rope_patch.RopePatchCallback("linear", factor=2)
    trainer = make_trainer(
        tmp_path, model, [own], tokenized_rows([100, 128]), max_steps=2, save_steps=1
    )
    before = model.transformer.wpe.weight.clone()
    trainer.train()
    assert model.transformer.wpe.weight.shape[0] == 128
    assert not model.transformer.wpe.weight.equal(before)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert logits(loaded, 120).equal(logits(model, 120))

    late = transformers.GPT2LMHeadModel(config)
    trainer = make_trainer(tmp_path, late, [], tokenized_rows([40, 40]))
    trainer.add_callback(rope_patch.RopePatchCallback("linear", factor=2))
    with pytest.raises(rope_patch.Refused, match="must be patched before its optimizer"):
        trainer.train()


# -- axolotl's own plugin manager, where it is installed -------------------------------------------

PLUGIN = "rope_patch.integrations.axolotl_plugin.RopePatchPlugin"


@pytest.fixture
def manager(monkeypatch):
    base = pytest.importorskip("axolotl.integrations.base")
    monkeypatch.setattr(base.PluginManager, "_instance", None)
    manager = base.PluginManager.get_instance()
    manager.plugins.clear()
    manager.register(PLUGIN)
    return manager


def keys(**settings):
    """Return keys of a YAML file as axolotl holds them."""
    return importlib.import_module("axolotl.utils.dict").DictDefault(settings)


def test_keys_are_named_by_the_plugin(manager):
    (name,) = manager.get_input_args()
    module, kind = name.rsplit(".", 1)
    arguments = getattr(importlib.import_module(module), kind)
    assert arguments(rope_patch=METHOD).rope_patch == METHOD


def test_plugin_patches_the_model_and_adds_the_callback(manager, tmp_path):
    cfg = keys(rope_patch=METHOD)
    model = read_model()
    manager.post_model_build(cfg, model)
    assert rope_patch.current(model).length == TARGET
    trainer = transformers.Trainer(
        model=model,
        args=settings(tmp_path, max_steps=1, save_strategy="no"),
        train_dataset=tokenized_rows([40, 40]),
        callbacks=manager.add_callbacks_pre_trainer(cfg, model),
    )
    trainer.train()
    trainer.save_model(tmp_path / "final")
    assert rope_patch.current(rope_patch.load(tmp_path / "final")).length == TARGET


def test_exported_keys_are_what_the_plugin_reads(manager):
    patched = read_model()
    rope_patch.patch(patched, "dynamic-yarn", trained_length=64)
    exported = rope_patch.export(patched, "axolotl").yaml
    assert exported["plugins"] == [PLUGIN]
    model = read_model()
    manager.post_model_build(keys(**exported), model)
    assert rope_patch.current(model).extension == rope_patch.current(patched).extension


def test_wrong_keys_are_refused(manager):
    with pytest.raises(rope_patch.Refused, match="a method"):
        manager.post_model_build(keys(rope_patch={"factor": 4}), read_model())


def test_exported_override_makes_axolotls_config_rotate_so():
    loaders = pytest.importorskip("axolotl.loaders.utils")
    patched = read_model()
    rope_patch.patch(patched, **METHOD)
    exported = rope_patch.export(patched, "axolotl").yaml
    config = loaders.load_model_config(keys(**exported | {"base_model": str(TINY)}))
    model = transformers.LlamaForCausalLM(config)
    ours = patched.model.rotary_emb.inv_freq
    assert (model.model.rotary_emb.inv_freq - ours).abs().max() < 1e-6
    assert model.config.max_position_embeddings == TARGET
