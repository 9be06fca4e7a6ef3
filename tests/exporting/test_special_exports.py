"""Test exports of unusual checkpoints, methods and combinations."""

import copy
import json
import math
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from architectures.tiny_architectures import tiny_model
from checkpoints import CHECKPOINTS, GEMMA3, PHI3_LONG, make_checkpoint_model, make_patched
from helpers.tiny_models import make_model
from roundtrip import assert_same_rotation, empty_model, needs_nested_yarn
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Phi3Config,
    Qwen2VLTextConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

import rope_patch
from rope_patch.exporting import ENGINES
from rope_patch.serving import method_name, our_parameters, read_request

OTHER_ENGINES = [engine for engine in ENGINES if not engine.startswith("transformers")]


@pytest.mark.parametrize(
    ("name", "method", "start", "refused"),
    [
        ("Llama-3.1", "yarn", "unscaled", ()),
        ("Llama-3.1", "linear", "unscaled", ()),
        ("Llama-3.1", "ntk", "unscaled", ()),
        ("gpt-oss", "linear", "running", ("vllm", "mlx", "mlx-vlm", "llama.cpp")),
        ("gpt-oss", "yarn", "running", ("mlx", "mlx-vlm", "llama.cpp")),  # these truncate always
    ],
)
def test_start_options_export(name, method, start, refused):
    patched_model, handle = make_patched(name, method, start=start)
    for engine in ENGINES:
        if engine in refused:
            with pytest.raises(rope_patch.Refused, match=f"{engine} cannot run"):
                rope_patch.export(patched_model, engine)
            continue
        export = rope_patch.export(patched_model, engine)
        assert_same_rotation(
            CHECKPOINTS[name], patched_model, handle, export, loose=start == "running"
        )


@pytest.mark.parametrize("method", ["ntk", "linear"])
def test_scaled_sliding_layers_export_or_are_refused(method):
    patched_model, handle = make_patched("Gemma-3-1B", method, layer_types=["sliding_attention"])
    takes = {"ntk": set(ENGINES) - {"llama.cpp"}, "linear": {"transformers", "vllm"}}[method]
    for engine in ENGINES:
        if engine in takes:
            export = rope_patch.export(patched_model, engine)
            assert_same_rotation(CHECKPOINTS["Gemma-3-1B"], patched_model, handle, export)
        else:
            with pytest.raises(rope_patch.Refused, match=r"windows|layer types"):
                rope_patch.export(patched_model, engine)


def gemma(**changes):
    """Return the config of Gemma 3 from 4B on: linear full layers, windows of another theta."""
    config = copy.deepcopy(CHECKPOINTS["Gemma-3-1B"])
    config.rope_parameters = {**copy.deepcopy(GEMMA3), **changes}
    return config


def test_gemmas_own_scaling_exports_and_is_replaced():
    config, unpatched = gemma(), SimpleNamespace(frequencies={})
    model = empty_model(config)
    for engine in ENGINES:
        assert_same_rotation(config, model, unpatched, rope_patch.export(config, engine))
    handle = rope_patch.patch(model, "yarn", factor=4.0, trained_length=32768, kernels="hf")
    for engine in ENGINES:
        assert_same_rotation(config, model, handle, rope_patch.export(model, engine))


def test_windows_scaled_by_their_own_config_are_refused_by_llama_cpp():
    windows = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(rope_patch.Refused, match="layer types rotate differently"):
        rope_patch.export(gemma(sliding_attention=windows), "llama.cpp")


@pytest.mark.parametrize(
    "attention", [{"attention_factor": 1.2}, {"mscale": 1.0, "mscale_all_dim": 0.5}]
)
@pytest.mark.parametrize("method", ["linear", "ntk", "yarn", "ntk-by-parts", "llama3"])
def test_replaced_yarn_leaves_no_fields(method, attention):
    config = copy.deepcopy(CHECKPOINTS["Llama-3"])
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        **attention,
    }
    patched_model = empty_model(config)
    handle = rope_patch.patch(patched_model, method, factor=4.0, kernels="hf")
    for engine in ENGINES:
        assert_same_rotation(
            config, patched_model, handle, rope_patch.export(patched_model, engine)
        )


class TestLengthDependent:
    METHODS: ClassVar = [
        ("dynamic", {}),
        ("dynamic-yarn", {}),
        ("mixed-ntk", {"factor": 4.0}),
        ("longrope", {"factor": 4.0, "long_factor": [2.0] * 64}),
    ]

    @pytest.mark.parametrize(("method", "options"), METHODS)
    def test_vllm_takes_the_plugin_and_engines_with_one_rotation_refuse(self, method, options):
        patched_model = make_checkpoint_model("Llama-2")
        rope_patch.patch(patched_model, method, kernels="hf", **options)
        for engine in set(OTHER_ENGINES) - {"vllm"}:
            with pytest.raises(rope_patch.Refused, match=rf"{engine} cannot run {method}.*yarn"):
                rope_patch.export(patched_model, engine)
        export = rope_patch.export(patched_model, "vllm")
        (parameters,) = our_parameters(export.config["rope_parameters"])
        assert method_name(parameters["rope_type"]) == method
        assert any("needs the plugin" in note for note in export.notes)

    @pytest.mark.parametrize("engine", ["transformers", "transformers4"])
    def test_transformers_exports_methods_with_a_config_form(self, engine):
        for method, options, kind in [
            ("dynamic", {"length": 16384}, "dynamic"),
            ("mixed-ntk", {"factor": 4.0}, "longrope"),
        ]:
            patched_model = make_checkpoint_model("Llama-2")
            rope_patch.patch(patched_model, method, kernels="hf", **options)
            export = rope_patch.export(patched_model, engine)
            parameters = export.config.get("rope_parameters") or export.config["rope_scaling"]
            assert parameters["rope_type"] == kind
            # transformers' dynamic scaling takes this field for the trained length.
            expected = 4096 if kind == "dynamic" else 16384
            assert export.config["max_position_embeddings"] == expected
            assert any("cached" in note for note in export.notes)
            if engine == "transformers4" and kind == "longrope":  # where it switches
                assert export.config["original_max_position_embeddings"] == 4096
        rope_patch.patch(patched_model, "dynamic-yarn", kernels="hf")
        with pytest.raises(
            rope_patch.Refused, match=r"no config has a form for it.*rope_patch\.load"
        ):
            rope_patch.export(patched_model, engine)


class TestPluginForVllm:
    """Test what vLLM's plugin reads; tests/serving builds its tables from exports of one layer."""

    def export(self, family="llama", method="dynamic-yarn", **options):
        """Return the overrides that vLLM's command line has, the export and the patch."""
        model = make_model(family)
        handle = rope_patch.patch(model, method, kernels="hf", **options)
        export = rope_patch.export(model, "vllm")
        assert export.arguments[0] == "--hf-overrides"
        return json.loads(export.arguments[1]), export, handle

    @pytest.mark.parametrize(
        ("method", "options"),
        [
            ("dynamic-ntk-by-parts", {"length": 256, "beta_fast": 16.0}),
            ("mixed-abf", {"factor": 4}),
        ],
    )
    def test_one_of_several_layer_types_is_read_as_patched(self, method, options):
        fields, _, handle = self.export("gemma3", method, **options)
        own = handle.original_config.rope_parameters["sliding_attention"]
        assert fields["rope_parameters"]["sliding_attention"] == own
        (parameters,) = our_parameters(fields["rope_parameters"])
        request = read_request(parameters)
        ((layer_type, geometry),) = handle.geometries.items()
        geometry_read = request.geometry(geometry.head_dim, geometry.rotary_dim)
        for length in (10, 64, 65, 100, 256):
            got = request.method.frequencies_at(geometry_read, length)
            assert got.close_to(handle.frequencies_at(length)[layer_type])

    @pytest.mark.parametrize("length", [256, 100, 193, 777])
    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_vllm_derives_at_least_the_length_from_the_fields(self, family, length):
        fields, export, _ = self.export(family, length=length)
        (parameters,) = our_parameters(fields["rope_parameters"])
        # The rule of vLLM 0.32's config/model.py.
        scale = 1 if family == "gemma3" else parameters["factor"]
        assert length <= fields["max_position_embeddings"] * scale < length + 1
        assert export.arguments[2:] == ["--max-model-len", str(length)]

    def test_without_a_length_the_longest_request_is_four_times_the_trained_length(self):
        _, export, _ = self.export()
        assert export.arguments[2:] == ["--max-model-len", str(4 * 64)]
        assert any("no length was named" in note for note in export.notes)

    @pytest.mark.parametrize("method", ["yarn", "linear", "ntk", "abf"])
    def test_what_vllm_has_a_form_for_needs_no_plugin(self, method):
        fields, export, _ = self.export(method=method, factor=4)
        assert not our_parameters(fields["rope_parameters"])
        assert not export.needs_plugin
        assert not any("plugin" in note for note in export.notes)

    def test_growth_with_every_token_is_refused(self):
        with pytest.raises(rope_patch.Refused, match="leave it out"):
            self.export(growth="exact")


class TestConfigs:
    @pytest.mark.parametrize("method", ["yarn", "ntk", "linear", "ntk-by-parts", "abf"])
    def test_config_of_a_patched_model_exports_like_the_model(self, method):
        patched_model, handle = make_patched("Qwen2.5", method)
        # The config as read from a saved folder.
        config = AutoConfig.for_model(**json.loads(json.dumps(patched_model.config.to_dict())))
        for engine in ENGINES:
            export = rope_patch.export(config, engine)
            assert_same_rotation(config, patched_model, handle, export, loose=True)

    def test_unpatched_model_exports_its_config(self):
        export = rope_patch.export(make_checkpoint_model("Llama-3.1"), "vllm")
        assert export.config["rope_parameters"] == CHECKPOINTS["Llama-3.1"].rope_parameters
        assert export.arguments[-1] == "131072"

    def test_phi3_longrope_exports_to_transformers_only(self):
        config = Phi3Config(
            hidden_size=3072,
            num_attention_heads=32,
            num_hidden_layers=1,
            vocab_size=64,
            intermediate_size=64,
            pad_token_id=0,
            max_position_embeddings=131072,
            original_max_position_embeddings=4096,
            rope_parameters=copy.deepcopy(PHI3_LONG),
        )
        for engine in OTHER_ENGINES:
            with pytest.raises(rope_patch.Refused, match="follows the length"):
                rope_patch.export(config, engine)
        exported = rope_patch.export(config, "transformers4").config
        assert set(exported["rope_scaling"]) == {"type", "short_factor", "long_factor"}
        assert exported["original_max_position_embeddings"] == 4096

    def test_unknown_engines_and_types_are_refused(self):
        for wrong, right in (("vlm", "vllm"), ("axolot", "axolotl")):
            with pytest.raises(rope_patch.Refused, match=f"unknown engine '{wrong}'.*'{right}'"):
                rope_patch.export(make_checkpoint_model("Llama-2"), wrong)
        with pytest.raises(TypeError, match="got str"):
            rope_patch.export("Llama-2", "vllm")


class TestNested:
    """Test a multimodal model around Gemma 3's text model."""

    def make_patched(self, config, method, **request):
        with torch.device("meta"):
            patched_model = Gemma3ForConditionalGeneration(copy.deepcopy(config))
        return patched_model, rope_patch.patch(patched_model, method, kernels="hf", **request)

    def config(self, **parameters):
        text = CHECKPOINTS["Gemma-3-1B"].to_dict()
        if parameters:
            needs_nested_yarn()
            text["rope_parameters"]["full_attention"] = {"rope_theta": 1e6, **parameters}
        config = Gemma3Config(text_config=text)
        config.vision_config.update({"num_hidden_layers": 1, "hidden_size": 16})
        config.vision_config.update({"num_attention_heads": 2, "intermediate_size": 16})
        return config

    @pytest.mark.parametrize(
        "engine", ["vllm", "sglang", "transformers", "transformers4", "mlx", "mlx-vlm", "llama.cpp"]
    )
    def test_fields_are_nested_like_the_config(self, engine):
        needs_nested_yarn()
        config = self.config()
        patched_model, handle = self.make_patched(config, "yarn", factor=4.0)
        export = rope_patch.export(patched_model, engine)
        assert list(export.config) == ["text_config"]
        flat = copy.copy(export)
        object.__setattr__(flat, "config", export.config["text_config"])
        assert_same_rotation(config.text_config, patched_model, handle, flat)

    def test_sglang_is_told_how_older_releases_read_a_nested_override(self):
        """Test the words of 0.5.23, whose get_config updates a nested config by a nested dict."""
        patched_model, _ = self.make_patched(self.config(), "ntk", factor=4.0)
        export = rope_patch.export(patched_model, "sglang")
        assert json.loads(export.arguments[1]) == export.config
        assert export.arguments[2:] == ["--context-length", str(4 * 32768)]
        assert "older releases, which put" in export.notes[0]

    @pytest.mark.parametrize("start", ["auto", "unscaled"])
    @pytest.mark.parametrize("stale", [{"beta_fast": 16.0}, {"attention_factor": 1.5}])
    def test_vllms_merge_leaves_no_old_fields(self, stale, start):
        parameters = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16384}
        config = self.config(**parameters, **stale)
        patched_model, handle = self.make_patched(config, "yarn", factor=4.0, start=start)
        export = rope_patch.export(patched_model, "vllm")
        merged = copy.deepcopy(config.text_config)
        for key, value in export.config["text_config"].items():
            if key != "rope_parameters":
                setattr(merged, key, value)
                continue
            for kind, inner in value.items():
                merged.rope_parameters[kind].update(inner)  # config/model.py:_update_nested
        assert_same_rotation(
            merged, patched_model, handle, type(export)("vllm", {}, export.arguments)
        )


class TestLatentAttention:
    @pytest.mark.parametrize(
        "engine", ["vllm", "sglang", "transformers", "transformers4", "mlx", "mlx-vlm", "llama.cpp"]
    )
    def test_yarn_has_deepseeks_form(self, engine):
        patched_model = tiny_model("deepseek_v3")
        handle = rope_patch.patch(patched_model, "yarn", factor=4.0, kernels="hf")
        config = rope_patch.export(patched_model, engine).config
        parameters = config.get("rope_parameters") or config["rope_scaling"]
        assert parameters["rope_type"] == "yarn"
        assert "attention_factor" not in parameters
        assert parameters["mscale"] == parameters["mscale_all_dim"]
        # models/deepseek_v2.py of vLLM, SGLang and transformers apply it to queries and to keys.
        mscale = 0.1 * parameters["mscale_all_dim"] * math.log(parameters["factor"]) + 1
        assert mscale == pytest.approx(handle.softmax_mscale, rel=1e-9)
        assert handle.softmax_mscale > 1.1

    def test_other_scalings_are_refused(self):
        patched_model = tiny_model("deepseek_v3")
        rope_patch.patch(patched_model, "linear", factor=4.0, kernels="hf")
        for engine in ("vllm", "sglang", "llama.cpp"):
            with pytest.raises(rope_patch.Refused, match="latent attention takes"):
                rope_patch.export(patched_model, engine)
        for engine in ("mlx", "mlx-vlm"):  # sharpen by mscale_all_dim, which this form lacks
            assert rope_patch.export(patched_model, engine).config["rope_scaling"] == {
                "rope_type": "linear",
                "factor": 4.0,
            }


class TestDeepseekV4:
    """Engines build its rotation from two thetas and, on the compressed branches, YaRN."""

    ENGINES: ClassVar = ("vllm", "sglang", "llama.cpp", "mlx-vlm")

    PUBLISHED: ClassVar = {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }

    def make_patched(self, parameters, method, **request):
        if "deepseek_v4" not in CONFIG_MAPPING:
            pytest.skip("deepseek_v4 is newer than this transformers")
        rope_parameters = copy.deepcopy(parameters)
        config = CONFIG_MAPPING["deepseek_v4"](rope_parameters=rope_parameters, num_hidden_layers=4)
        model = empty_model(config)
        return config, model, rope_patch.patch(model, method, kernels="hf", **request)

    @pytest.mark.parametrize(
        ("parameters", "method", "request_"),
        [
            (PUBLISHED, "yarn", {"factor": 2.0}),  # 32 from 65,536: the published one, continued
            (PUBLISHED | {"beta_fast": 16.0}, "yarn", {"factor": 2.0}),
            (None, "yarn", {"factor": 2.0, "attention_factor": 1.0}),
            (None, "ntk", {"factor": 2.0}),
            (None, "abf", {"factor": 2.0}),
        ],
    )
    def test_engines_rotate_as_the_patched_model(self, parameters, method, request_):
        config, model, handle = self.make_patched(parameters, method, **request_)
        for engine in self.ENGINES:
            export = rope_patch.export(model, engine)
            assert not export.needs_plugin
            assert "2097152" in (export.arguments or [str(export.config)])[-1]
            assert_same_rotation(config, model, handle, export)

    def test_sglang_and_mlx_vlm_get_flat_fields(self):
        """Their files read the YaRN and the windows' theta side by side, and no nested fields."""
        _, model, _ = self.make_patched(self.PUBLISHED, "yarn", factor=2.0)
        yarn = {**self.PUBLISHED, "factor": 32.0}
        fields = rope_patch.export(model, "sglang").config["rope_parameters"]
        assert fields == {**yarn, "rope_theta": 10000.0}
        fields = rope_patch.export(model, "mlx-vlm").config
        thetas = {"rope_theta": 10000.0, "compress_rope_theta": 160000.0}
        assert fields == {"max_position_embeddings": 2097152, "rope_scaling": yarn, **thetas}
        with pytest.raises(rope_patch.Refused, match="no model of deepseek_v4"):
            rope_patch.export(model, "mlx")

    @pytest.mark.parametrize(
        ("parameters", "method", "request_"),
        [
            (None, "yarn", {"factor": 2.0}),  # with the paper's attention factor, 1.07
            (None, "yarn", {"factor": 2.0, "attention_factor": 1.0, "truncate": False}),
            (None, "linear", {"factor": 2.0}),
            (PUBLISHED, "ntk", {"factor": 2.0}),
            (
                None,
                "yarn",
                {"factor": 2.0, "attention_factor": 1.0, "layer_types": ["main", "compress"]},
            ),
        ],
    )
    def test_what_engines_would_read_otherwise_is_refused(self, parameters, method, request_):
        _, model, _ = self.make_patched(parameters, method, **request_)
        for engine in self.ENGINES:
            with pytest.raises(rope_patch.Refused, match="compressed branches") as error:
                rope_patch.export(model, engine)
            assert ("builds its YaRN itself" in str(error.value)) == (engine == "vllm")


@pytest.mark.parametrize("architecture", ["llama", "cohere"])
@pytest.mark.parametrize("attention_factor", [0.9, 1.0, 1.3])
def test_an_attention_factor_is_plain_yarn_for_vllm(architecture, attention_factor):
    patched_model = tiny_model(architecture)
    handle = rope_patch.patch(
        patched_model, "yarn", factor=4.0, kernels="hf", attention_factor=attention_factor
    )
    export = rope_patch.export(patched_model, "vllm")
    assert export.config["rope_parameters"]["rope_type"] == "yarn"
    assert not any("slower" in note for note in export.notes)
    assert_same_rotation(handle.original_config, patched_model, handle, export)


def test_interleaved_pairs_refuse_per_pair_factors_or_take_the_plugin():
    patched_model = tiny_model("cohere")
    rope_patch.patch(patched_model, "ntk-by-parts-2023-06", factor=4.0)
    with pytest.raises(rope_patch.Refused, match="rotates neighbours"):
        rope_patch.export(patched_model, "sglang")
    rope_type = rope_patch.export(patched_model, "vllm").config["rope_parameters"]["rope_type"]
    assert rope_type == "ntk-by-parts-2023-06"  # a name that only rope_patch's plugin reads
    rope_patch.patch(patched_model, "linear", factor=4.0)
    for engine in ("vllm", "sglang"):
        parameters = rope_patch.export(patched_model, engine).config["rope_parameters"]
        assert parameters["rope_type"] == "linear"


def test_mrope_exports_yarn_or_takes_the_plugin():
    config = Qwen2VLTextConfig(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1
    )
    config.rope_parameters["mrope_section"] = [4, 6, 6]
    with torch.device("meta"):
        patched_model = Qwen2VLTextModel(config)
    rope_patch.patch(patched_model, "linear", factor=4.0, kernels="hf")
    with pytest.raises(rope_patch.Refused, match="M-RoPE"):
        rope_patch.export(patched_model, "sglang")
    parameters = rope_patch.export(patched_model, "vllm").config["rope_parameters"]
    assert parameters["rope_type"] == "rope_patch:linear"
    assert parameters["mrope_section"] == [4, 6, 6]
    rope_patch.patch(patched_model, "yarn", factor=4.0, kernels="hf")
    for engine in ("vllm", "sglang"):
        parameters = rope_patch.export(patched_model, engine).config["rope_parameters"]
        assert parameters["rope_type"] == "yarn"
        assert parameters["mrope_section"] == patched_model.config.rope_parameters["mrope_section"]
    rope_patch.patch(patched_model, "yarn", factor=4.0, attention_factor=1.25, kernels="hf")
    parameters = rope_patch.export(patched_model, "vllm").config["rope_parameters"]
    assert parameters["mrope_section"] == [4, 6, 6]
    # What its module multiplies cos and sin by, in releases from 0.30 on and before.
    paper = 0.1 * math.log(4.0) + 1
    assert (parameters["attention_factor"], parameters["attn_factor"] * paper) == (1.25, 1.25)


class TestPerPairFactorsForLlamaCpp:
    """Test per-pair factors, which a GGUF file of Llama's architecture stores as a tensor."""

    @pytest.mark.parametrize("name", ["Llama-2", "Llama-3.1", "Mistral"])
    def test_factors_are_in_the_tensor_only(self, name):
        patched_model, handle = make_patched(name, "longrope", attention_factor=1.25)
        export = rope_patch.export(patched_model, "llama.cpp")
        theta = CHECKPOINTS[name].rope_parameters["rope_theta"]
        parameters = {"rope_type": "default", "rope_theta": theta}
        assert export.config["rope_parameters"] == parameters
        (stretches,) = export.tensors.values()
        pair = torch.arange(64, dtype=torch.float64)
        inv_freq = theta ** (-pair / 64) / torch.tensor(stretches, dtype=torch.float64)
        torch.testing.assert_close(inv_freq, handle.frequencies[None].inv_freq, rtol=1e-12, atol=0)
        assert "--override-kv llama.rope.scaling.attn_factor=float:1.25" in " ".join(
            export.arguments
        )
        assert "64 numbers" in str(export)
        assert export.to_dict()["tensors"] == export.tensors

    def test_stopped_pairs_have_finite_float32_factors(self):
        patched_model, handle = make_patched("SmolLM2", "nope")
        export = rope_patch.export(patched_model, "llama.cpp")
        numbers = torch.tensor(export.tensors["rope.freqs.weight"], dtype=torch.float32)
        assert (handle.frequencies[None].inv_freq == 0).any()
        assert numbers.isfinite().all()
        angles = 2.0**20 / numbers.double() * handle.frequencies[None].inv_freq.eq(0)
        assert angles.max() < 1e-11  # radians after a million tokens

    @pytest.mark.parametrize("name", ["Qwen3", "Qwen2.5", "gpt-oss", "Gemma-3-1B"])
    def test_other_architectures_are_refused(self, name):
        patched_model, _ = make_patched(name, "longrope")
        with pytest.raises(rope_patch.Refused, match=r"Phi-3 only, none for .*; use linear"):
            rope_patch.export(patched_model, "llama.cpp")

    def test_config_with_per_pair_factors_exports(self):
        """Export a config with per-pair factors, and an extension of it."""
        patched_model, handle = make_patched("Llama-2", "longrope")
        config = AutoConfig.for_model(**json.loads(json.dumps(patched_model.config.to_dict())))
        assert_same_rotation(
            config, patched_model, handle, rope_patch.export(config, "llama.cpp"), loose=True
        )
        extended = empty_model(config)
        handle = rope_patch.patch(extended, "linear", factor=2.0, start="running", kernels="hf")
        assert_same_rotation(
            config, extended, handle, rope_patch.export(extended, "llama.cpp"), loose=True
        )
