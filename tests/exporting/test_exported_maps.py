"""Test that no engine is told a part of a position map."""

import pytest
from helpers.method_names import position_maps
from helpers.tiny_models import make_model

import rope_patch
from rope_patch.exporting import ENGINES

OPTIONS = {"dpe": {"groups": [2, 4]}, "string": {"on": "yarn:4"}}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", position_maps())
def test_export_refuses_maps(name, engine):
    model = make_model()
    rope_patch.patch(model, name, **OPTIONS.get(name, {}))
    with pytest.raises(ValueError, match=f"{engine} cannot run {name}.*mapped positions"):
        rope_patch.export(model, engine)


@pytest.mark.parametrize(
    ("engine", "name", "phrase"),
    [
        ("llama.cpp", "self-extend", "--grp-attn-n GROUP --grp-attn-w WINDOW"),
        ("sglang", "dca", "dual_chunk_attention_config"),
        ("vllm", "dca", "up to 0.10"),
    ],
)
def test_refusals_name_what_the_engine_has_of_its_own(engine, name, phrase):
    model = make_model()
    rope_patch.patch(model, name)
    with pytest.raises(ValueError, match=phrase):
        rope_patch.export(model, engine)
