"""Test exports of checkpoints that were trained under the YaRN of their config."""

import copy

import pytest
from helpers.published_yarn import PUBLISHED, make_config, make_model
from helpers.tiny_models import OLD_TRANSFORMERS
from roundtrip import assert_same_rotation

import rope_patch
from rope_patch.exporting import ENGINES

pytestmark = pytest.mark.skipif(OLD_TRANSFORMERS, reason="needs nested YaRN and new model types")
_LAYER_TYPES = {"transformers4", "sglang", "mlx", "llama.cpp"}
REFUSED = {
    "gpt-oss": {"mlx", "llama.cpp"},  # they always truncate
    "Olmo 3": _LAYER_TYPES,
    "Ministral 3": {"mlx", "llama.cpp", "transformers4"},  # architectures that are unknown there
    "DeepSeek-V3": {"mlx", "llama.cpp"},
    "Laguna": _LAYER_TYPES,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_engines_rotate_as_the_continued_yarn_or_refuse(name, engine):
    model, original = make_model(name), make_config(name)
    handle = rope_patch.patch(model, "yarn", factor=4, kernels="hf")
    if engine in REFUSED[name]:
        with pytest.raises(ValueError, match=f"{engine} cannot run .*continuing the config's own"):
            rope_patch.export(model, engine)
        return
    export = rope_patch.export(model, engine)
    assert any("trained in" in note for note in export.notes)
    if name == "DeepSeek-V3" and engine == "vllm":  # has a YaRN of its own for latent attention
        published = PUBLISHED[name][2]
        fields = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
        fields |= export.config["rope_parameters"]
        assert fields == {"rope_type": "yarn", **published, "factor": 4 * published["factor"]}
    else:
        assert_same_rotation(copy.deepcopy(original), model, handle, export, loose=True)
    handle.undo()
    assert model.config.to_dict() == make_model(name).config.to_dict()


@pytest.mark.parametrize("method", ["yarn", "ntk"])
@pytest.mark.parametrize("engine", ["transformers", "vllm", "sglang"])
def test_temperature_of_positions_starts_where_it_did(engine, method):
    """Ministral 3's queries grow beyond original_max_position_embeddings."""
    model = make_model("Ministral 3")
    rope_patch.patch(model, method, factor=4, kernels="hf")
    if (engine, method) == ("sglang", "ntk"):
        with pytest.raises(ValueError, match=r"temperature begins; use yarn"):
            rope_patch.export(model, engine)
        return
    config = rope_patch.export(model, engine).config
    parameters = config["rope_parameters"]
    assert parameters["llama_4_scaling_beta"] == 0.1
    assert parameters["original_max_position_embeddings"] == 16384


@pytest.mark.parametrize("name", PUBLISHED)
def test_exports_of_the_checkpoint_itself_say_that_it_was_trained(name):
    export = rope_patch.export(make_config(name), "vllm")
    assert any("trained in" in note for note in export.notes)
