"""Test exports, as each engine reads them, against the patched model's rotation, or refused."""

import pytest
import torch
import transformers
from checkpoints import CHECKPOINTS, METHODS, make_checkpoint_model, make_patched
from helpers import published_yarn, tiny_models
from helpers.encoded_models import llama
from helpers.encoding_models import LENGTH, encoding_model, token_logits
from helpers.method_names import position_maps
from helpers.plugins import install, write_method
from roundtrip import assert_same_rotation

import rope_patch
from rope_patch.exporting import ENGINES, export

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
    "mlx-vlm": {  # has fields for the attention factor, but for Phi-3
        "Phi-3-4k": {"yarn-cooler"},
        "gpt-oss": {"yarn-untruncated"} | _ANY_STRETCH - {"proportional"},
    },
    "llama.cpp": {
        **dict.fromkeys(
            ("Qwen2.5", "Qwen3", "gpt-oss"), {"yarn-untruncated", "llama3"} | _ANY_STRETCH
        ),
        "Gemma-3-1B": set(METHODS) - {"linear", "ntk", "abf", "yarn", "yarn-betas"},
    },
}
_LAYER_TYPES = {"transformers4", "sglang", "mlx", "mlx-vlm", "llama.cpp"}
# Engines without a form for the YaRN that continues a published one.
NOT_CONTINUED = {
    "gpt-oss": {"mlx", "mlx-vlm", "llama.cpp"},  # they always truncate
    "Olmo 3": _LAYER_TYPES,
    "Ministral 3": {"transformers4"},  # which does not have it
    "DeepSeek-V3": set(),
    "Laguna": _LAYER_TYPES,
}
needs_new_models = pytest.mark.skipif(
    tiny_models.OLD_TRANSFORMERS, reason="needs nested YaRN and new model types"
)


def assert_refused(model, engine, *facts):
    """Assert that an export is refused with the engine's name, or another, and what is named."""
    with pytest.raises(rope_patch.Refused) as error:
        export(model, engine)
    for fact in facts:
        assert fact in str(error.value), error.value


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_engines_have_the_patched_rotation_or_are_refused(name, method):
    model, handle = make_patched(name, method)
    for engine in ENGINES:
        if method in REFUSED[engine].get(name, ()):
            assert_refused(model, engine, f"{engine} cannot run ")
            continue
        exported = export(model, engine)
        assert exported.engine == engine
        # Extensions of the config's scaling start from float32 frequencies.
        assert_same_rotation(CHECKPOINTS[name], model, handle, exported, loose=name == "Llama-3.1")
        if engine == "transformers":
            assert exported.config != export(make_checkpoint_model(name), engine).config


@needs_new_models
@pytest.mark.parametrize("name", published_yarn.PUBLISHED)
def test_engines_rotate_as_the_continued_yarn_or_refuse(name):
    model, original = published_yarn.make_model(name), published_yarn.make_config(name)
    assert any("trained in" in note for note in export(original, "vllm").notes)
    handle = rope_patch.patch(model, "yarn", factor=4, kernels="hf")
    for engine in ENGINES:
        if engine in NOT_CONTINUED[name]:
            assert_refused(model, engine, f"{engine} cannot run ", "continuing the config's own")
            continue
        exported = export(model, engine)
        assert any("trained in" in note for note in exported.notes)
        if name == "DeepSeek-V3" and engine == "vllm":  # has a YaRN of its own for latent attention
            published = published_yarn.PUBLISHED[name][2]
            fields = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
            fields |= exported.config["rope_parameters"]
            assert fields == {"rope_type": "yarn", **published, "factor": 4 * published["factor"]}
        else:
            assert_same_rotation(original, model, handle, exported, loose=True)
    handle.undo()
    assert model.config.to_dict() == published_yarn.make_model(name).config.to_dict()


@needs_new_models
@pytest.mark.parametrize("method", ["yarn", "ntk"])
@pytest.mark.parametrize("engine", ["transformers", "vllm", "sglang"])
def test_temperature_of_positions_starts_where_it_did(engine, method):
    """Ministral 3's queries grow beyond original_max_position_embeddings."""
    model = published_yarn.make_model("Ministral 3")
    rope_patch.patch(model, method, factor=4, kernels="hf")
    if (engine, method) == ("sglang", "ntk"):
        assert_refused(model, engine, "temperature begins; use yarn")
        return
    config = export(model, engine).config
    parameters = config["rope_parameters"]
    assert parameters["llama_4_scaling_beta"] == 0.1
    if engine == "vllm":  # its models/mistral.py reads this field
        own = {"original_max_position_embeddings": 16384, "beta": 0.1}
        assert config["llama_4_scaling"] == own
    assert parameters["original_max_position_embeddings"] == 16384


# -- position maps and other encodings -------------------------------------------------------------


@pytest.mark.parametrize("name", position_maps())
def test_no_engine_is_told_a_part_of_a_position_map(name):
    options = {"dpe": {"groups": [2, 4]}, "string": {"on": "yarn:4"}}
    model = tiny_models.make_model()
    rope_patch.patch(model, name, **options.get(name, {}))
    for engine in ENGINES:
        assert_refused(model, engine, f"{engine} cannot run {name}", "mapped positions")


@pytest.mark.parametrize(
    ("engine", "name", "own"),
    [
        ("llama.cpp", "self-extend", "--grp-attn-n GROUP --grp-attn-w WINDOW"),
        ("sglang", "dca", "dual_chunk_attention_config"),
        ("vllm", "dca", "up to 0.10"),
    ],
)
def test_refusals_name_what_the_engine_has_of_its_own(engine, name, own):
    model = tiny_models.make_model()
    rope_patch.patch(model, name)
    assert_refused(model, engine, own)


@pytest.mark.parametrize("name", sorted({*rope_patch.list_encodings()} - {"rope"}))
def test_no_engine_is_told_that_another_encoding_rotates(name):
    model = llama()
    rope_patch.encode(model, name)
    for engine in ENGINES:
        assert_refused(model, engine, f"no form for the encoding '{name}'", "rope_patch.load")


def test_an_encoded_rotation_is_in_the_config():
    model = llama()
    rope_patch.encode(model, "rope", base=500.0)
    assert export(model, "transformers").config["rope_parameters"]["rope_theta"] == 500


@pytest.mark.parametrize(
    ("family", "method", "arguments"),
    [
        ("BloomForCausalLM", "ntk", {"trained_length": LENGTH}),
        ("XGLMForCausalLM", "linear", {}),
        ("T5ForConditionalGeneration", "log-tail", {"trained_length": LENGTH}),
        (
            "T5ForConditionalGeneration",
            "max-distance",
            {"trained_length": 512, "layer_types": ["decoder"]},
        ),
    ],
)
def test_positions_that_no_config_says_are_refused(family, method, arguments):
    model = encoding_model(family)
    rope_patch.patch(model, method, factor=4, **arguments)
    for engine in ENGINES:
        assert_refused(model, engine, "no config says other ", "serve the model with")


def test_a_saved_table_needs_its_folder_alone(tmp_path):
    model = encoding_model("GPT2LMHeadModel")
    rope_patch.patch(model, "linear", factor=4)
    assert_refused(model, "vllm", "stretched table is among the weights", "rope_patch.save")
    rope_patch.save(model, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert export(config, "vllm").arguments == ["--max-model-len", str(4 * LENGTH)]
    assert export(config, "transformers").config == {}


@torch.no_grad()
def test_t5s_largest_distance_is_a_field_that_transformers_reads(tmp_path):
    model = encoding_model("T5ForConditionalGeneration")
    model.save_pretrained(tmp_path)
    rope_patch.patch(model, "max-distance", factor=4, trained_length=512)
    fields = export(model, "transformers").config
    plain = type(model).from_pretrained(tmp_path, **fields).eval()
    torch.testing.assert_close(token_logits(plain, 400), token_logits(model, 400))


# -- methods and engines from outside --------------------------------------------------------------

GROUP = "rope_patch.engines"
SOURCE = """
from rope_patch.exporting import Export, Target

NAME = "outside-engine"


def export(target: Target) -> Export:
    target.require_static(NAME)
    frequencies = target.rotations[None].frequencies
    return Export(engine=NAME, config={"inv_freq": frequencies.inv_freq.tolist()})
"""
STRETCH = [1.0] * 4 + [4.0] * 4


@pytest.fixture
def outside(tmp_path, own_registry):
    """Return a model patched with a method from outside."""
    model = tiny_models.make_model()
    rope_patch.methods.load_plugin(str(write_method(tmp_path / "mine.py")))
    rope_patch.patch(model, "outside", factor=4)
    return model


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_get_the_stretch_of_each_pair(engine, outside):
    exported = export(outside, engine)
    if exported.tensors:  # llama.cpp
        (stretch,) = exported.tensors.values()
    else:
        fields = exported.config.get("rope_parameters") or exported.config["rope_scaling"]
        stretch = fields["long_factor"]
    assert stretch == pytest.approx(STRETCH, rel=1e-12)


def test_an_installed_package_adds_an_engine(outside, tmp_path, monkeypatch):
    install(tmp_path, "outside_engine", SOURCE, GROUP, "outside-engine")
    monkeypatch.syspath_prepend(tmp_path)
    exported = export(outside, "outside-engine")
    expected = [1e4 ** (-i / 8) / stretch for i, stretch in enumerate(STRETCH)]
    assert exported.config["inv_freq"] == pytest.approx(expected, rel=1e-12)
    assert_refused(outside, "no-such-one", "mlx-vlm, axolotl, llama-factory, outside-engine")
    rope_patch.unpatch(outside)
    rope_patch.patch(outside, "dynamic-yarn")
    assert_refused(outside, "outside-engine", "outside-engine cannot run dynamic-yarn")


@pytest.mark.parametrize(
    ("source", "fact"),
    [
        ("1 / 0", "failed: ZeroDivisionError"),
        ("NAME = 'other'\ndef export(target): ...", "got NAME = 'other'"),
        ("NAME = 'outside-engine'", "and export = None"),
        ("NAME = 'outside-engine'\ndef export(target): return {}", "got dict"),
    ],
)
def test_broken_engines_are_named(outside, tmp_path, monkeypatch, source, fact):
    module = f"broken_engine_{abs(hash(source))}"
    install(tmp_path, module, source, GROUP, "outside-engine")
    monkeypatch.syspath_prepend(tmp_path)
    assert_refused(outside, "outside-engine", "broken-engine", GROUP, fact)
    assert export(outside, "vllm").arguments
