"""Test exports, as each engine reads them, against the patched model's rotation."""

import pytest
from checkpoints import CHECKPOINTS, METHODS, make_checkpoint_model, make_patched
from roundtrip import assert_same_rotation

import rope_patch
from rope_patch.exporting import ENGINES

_ANY_STRETCH = {"ntk-by-parts-2023-06", "longrope", "proportional", "nope"}
_ANY_STRETCH |= {"clipped", "clipped-yarn"}

# Methods that an engine has no form for; all others must be exported.
REFUSED = {
    "transformers": {},
    "transformers4": {"Phi-3-4k": {"yarn-cooler"}},
    "vllm": {"gpt-oss": set(METHODS) - {"ntk", "abf", "yarn", "yarn-betas", "yarn-untruncated"}},
    "sglang": {},
    "mlx": {
        "Llama-3.1": {"yarn-cooler"},
        "Phi-3-4k": {"yarn-cooler"},
        "gpt-oss": {"yarn-untruncated"} | _ANY_STRETCH - {"proportional"},
    },
    "llama.cpp": {
        "Qwen2.5": {"yarn-untruncated", "llama3"} | _ANY_STRETCH,
        "Qwen3": {"yarn-untruncated", "llama3"} | _ANY_STRETCH,
        "gpt-oss": {"yarn-untruncated", "llama3"} | _ANY_STRETCH,
        "Gemma-3-1B": set(METHODS) - {"linear", "ntk", "abf", "yarn", "yarn-betas"},
    },
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_engines_have_the_patched_rotation_or_are_refused(name, method):
    patched_model, handle = make_patched(name, method)
    for engine in ENGINES:
        if method in REFUSED[engine].get(name, ()):
            with pytest.raises(ValueError, match=f"{engine} cannot run .*: .*(use|leave)"):
                rope_patch.export(patched_model, engine)
            continue
        export = rope_patch.export(patched_model, engine)
        assert export.engine == engine
        # Extensions of the config's scaling start from float32 frequencies.
        assert_same_rotation(
            CHECKPOINTS[name], patched_model, handle, export, loose=name == "Llama-3.1"
        )


def test_every_method_changes_the_exported_config():
    for name in CHECKPOINTS:
        plain = rope_patch.export(make_checkpoint_model(name), "transformers").config
        for method in METHODS:
            patched_model, _ = make_patched(name, method)
            assert rope_patch.export(patched_model, "transformers").config != plain
