"""Test the plugin for axolotl with axolotl's own plugin manager, where it is installed."""

import pytest
import transformers
from trainer_runs import METHOD, TARGET, TINY, read_model, settings, tokenized_rows

import rope_patch

pytest.importorskip("axolotl")

from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault

from rope_patch.exporting.axolotl import PLUGIN


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.setattr(PluginManager, "_instance", None)
    manager = PluginManager.get_instance()
    manager.plugins.clear()
    manager.register(PLUGIN)
    return manager


def test_keys_are_named_by_the_plugin(manager):
    (name,) = manager.get_input_args()
    module, kind = name.rsplit(".", 1)
    arguments = getattr(__import__(module, fromlist=[kind]), kind)
    assert arguments(rope_patch=METHOD).rope_patch == METHOD


def test_plugin_patches_the_model_and_adds_the_callback(manager, tmp_path):
    cfg = DictDefault({"rope_patch": METHOD})
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
    manager.post_model_build(DictDefault(exported), model)
    assert rope_patch.current(model).extension == rope_patch.current(patched).extension


def test_wrong_keys_are_refused(manager):
    with pytest.raises(rope_patch.Refused, match="expected a mapping with a method"):
        manager.post_model_build(DictDefault({"rope_patch": {"factor": 4}}), read_model())


def test_exported_override_makes_axolotls_config_rotate_so(tmp_path):
    loaders = pytest.importorskip("axolotl.loaders.utils")
    patched = read_model()
    rope_patch.patch(patched, **METHOD)
    exported = rope_patch.export(patched, "axolotl").yaml
    config = loaders.load_model_config(DictDefault({**exported, "base_model": str(TINY)}))
    model = transformers.LlamaForCausalLM(config)
    ours = patched.model.rotary_emb.inv_freq
    assert (model.model.rotary_emb.inv_freq - ours).abs().max() < 1e-6
    assert model.config.max_position_embeddings == TARGET
