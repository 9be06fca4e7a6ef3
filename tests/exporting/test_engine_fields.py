"""Test what is known of the fields that engines' model files read, and how it is read."""

import importlib
import json
import re
import sys
import textwrap
from pathlib import Path

import pytest
from architectures.tiny_architectures import tiny_config, tiny_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import rope_patch
from rope_patch.pretrained import empty_model

GENERATE = Path(__file__).parents[2] / "docs" / "generate"
TABLE = json.loads(Path(rope_patch.exporting.__file__).with_name("engine_fields.json").read_text())


def load_generator(name="engine_fields"):
    sys.path.insert(0, str(GENERATE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(GENERATE))


def export(model_type, engine, method="yarn", **options):
    model = tiny_model(model_type)
    rope_patch.patch(model, method, factor=4.0, kernels="hf", **options)
    return rope_patch.export(model, engine)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model_type",
    [
        *("mixtral", "gemma", "gemma2", "granitemoe", "olmo"),
        *("stablelm", "phi", "persimmon", "starcoder2"),
    ],
)
def test_sglang_refuses_scalings_that_its_model_file_drops(model_type):
    for method in ("linear", "yarn"):
        with pytest.raises(rope_patch.Refused, match=f"sglang 0.*{model_type} reads a theta"):
            export(model_type, "sglang", method)
    parameters = export(model_type, "sglang", "ntk").config["rope_parameters"]
    assert parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("engine", "model_type"),
    [
        ("sglang", "dbrx"),  # its theta is inside attn_config
        ("sglang", "exaone4"),  # reads config.rope_theta, which transformers 5 lacks
        ("vllm", "mimo_v2_flash"),
        ("transformers4", "hy_v3"),  # newer than transformers 4
        ("transformers4", "dbrx"),
        ("llama.cpp", "moshi"),
    ],
)
def test_what_no_field_reaches_is_refused(engine, model_type):
    with pytest.raises(rope_patch.Refused, match=rf"{re.escape(engine)} .*{model_type} .*read"):
        export(model_type, engine, "ntk")


def test_the_plugin_is_refused_where_vllm_runs_transformers_own_model():
    with pytest.raises(rope_patch.Refused, match="plugin does not reach"):
        export("smollm3", "vllm", "dynamic-yarn")
    assert not export("smollm3", "vllm", "yarn").needs_plugin


# -- transformers 4 --------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["gpt_neox", "gpt_neox_japanese"])
def test_gpt_neox_has_its_own_names_in_transformers_4(model_type):
    config = export(model_type, "transformers4", "abf").config
    handle = rope_patch.patch(tiny_model(model_type), "abf", factor=4.0, kernels="hf")
    inv_freq = handle.frequencies[None].inv_freq
    # configuration_gpt_neox.py and modeling_rope_utils.py of 4.57.6 read these two.
    assert config["rotary_emb_base"] ** (-1 / len(inv_freq)) == pytest.approx(float(inv_freq[1]))
    assert "rope_theta" not in config
    assert config["rope_scaling"] is None


@pytest.mark.parametrize(
    ("model_type", "refused", "taken"),
    [
        ("nemotron", "linear", "ntk"),
        ("deepseek_v2", "yarn", "ntk"),  # no attention factor in its softmax scale
        ("llama4_text", "yarn", "llama3"),
        ("olmo", "yarn", "linear"),
        ("olmo2", "yarn", "linear"),
    ],
)
def test_transformers_4_refuses_what_its_models_ignore(model_type, refused, taken):
    with pytest.raises(rope_patch.Refused, match="transformers4 cannot run"):
        export(model_type, "transformers4", refused)
    config = export(model_type, "transformers4", taken).config
    assert config
    if "olmo" in model_type:  # which takes two fields there, under an old name
        assert config["rope_scaling"] == {"type": "linear", "factor": 4.0}


def test_transformers_4_gets_the_head_dim_that_its_config_lacks():
    model = tiny_model("mixtral", head_dim=None)
    rope_patch.patch(model, "yarn", factor=4.0, kernels="hf")
    assert rope_patch.export(model, "transformers4").config["head_dim"] == 16


# -- llama.cpp -------------------------------------------------------------------------------------


def test_llama_cpps_converter_writes_no_rotation_for_gemma():
    """Without fields, Gemma takes flags; Gemma 2's windows take none, and nothing else is left."""
    exported = export("gemma", "llama.cpp")
    assert not exported.config
    assert "--rope-scaling" in exported.arguments
    with pytest.raises(rope_patch.Refused, match=r"writes no field .*gemma2"):
        export("gemma2", "llama.cpp")


@pytest.mark.parametrize("model_type", ["afmoe", "cohere2"])
def test_windows_that_take_the_files_scaling_have_fields_alone(model_type):
    exported = export(model_type, "llama.cpp", "ntk")
    assert exported.config
    assert "--rope-freq-base" not in exported.arguments


def test_architectures_that_llama_cpps_flags_name_have_graphs():
    """Flags change keys of a GGUF file, which begin with the name of its architecture."""
    table = TABLE["llama.cpp"]
    graphs = {name for kind in ("scaling", "full attention") for name in table["graphs"][kind]}
    names = set()
    for model_type in ("mixtral", "qwen2", "qwen2_moe", "qwen3_moe", "gemma", "granite", "phi3"):
        words = export(model_type, "llama.cpp", "linear").arguments
        names |= {word.partition(".")[0] for word in words if ".context_length=" in word}
    assert {"llama", "qwen2moe", "granite"} <= names <= graphs
    assert "llama" in table["graphs"]["stretches"]
    assert "bloom" not in graphs
    assert "gemma2" in table["flags"]
    assert "gemma3_text" in table["full attention"]


# Architectures whose files read a scaling in mlx-lm and in mlx-vlm, or a theta alone.
_SCALED = ("llama", "qwen2", "qwen3", "apertus", "granite", "olmo2", "seed_oss", "ministral3")
_PLAIN = ("cohere", "gemma", "glm4", "qwen2_moe", "stablelm", "starcoder2")


@pytest.mark.parametrize("engine", ["mlx", "mlx-vlm"])
def test_mlx_exports_what_its_files_read(engine):
    for model_type in set(_SCALED) & {*CONFIG_MAPPING}:
        assert model_type in TABLE[engine]["scaling"]
        start = "unscaled" if model_type == "ministral3" else "auto"
        scaling = export(model_type, engine, "linear", start=start).config["rope_scaling"]
        assert scaling == {"rope_type": "linear", "factor": 4.0}
    for model_type in _PLAIN:
        assert model_type in TABLE[engine]["theta"]
        with pytest.raises(rope_patch.Refused, match=f"{engine} 0.* reads a theta and no scaling"):
            export(model_type, engine, "linear")
        assert export(model_type, engine, "ntk").config["rope_theta"] > 1e4
    with pytest.raises(rope_patch.Refused, match=rf"{engine} 0.* no model of moshi"):
        export("moshi", engine)


def test_mlx_gets_rope_parameters_where_its_files_read_them():
    """mlx_lm/models/ministral3.py and mlx_vlm/models/ministral3/language.py read all from there."""
    model = tiny_model("ministral3")
    rope_patch.patch(model, "yarn", factor=4.0, kernels="hf")
    for engine in ("mlx", "mlx-vlm"):
        fields = rope_patch.export(model, engine).config["rope_parameters"]
        assert fields["factor"] == 4 * model.config.rope_parameters["factor"] / 4
        assert fields["mscale"] == fields["mscale_all_dim"] == 0  # cos and sin stay unscaled
        assert fields["llama_4_scaling_beta"] == 0.1
        assert "rope_parameters" not in export("qwen2", engine).config


def test_heads_that_rotate_neighbours_get_no_stretches_from_mlx():
    """Their longrope rotates halves of heads: `traditional=False` in SuScaledRoPE."""
    model = empty_model("", tiny_config("llama4"))
    rope_patch.patch(model, "clipped", factor=4.0, kernels="hf")
    for engine in ("mlx", "mlx-vlm"):
        with pytest.raises(rope_patch.Refused, match="rotates neighbours"):
            rope_patch.export(model, engine)


# -- how the tables are made -----------------------------------------------------------------------

_CALL = (
    "Q = ggml_rope_ext(ctx0, Q, inp_pos, {factors}, n_rot, rope_type, n_ctx_orig, {numbers}, "
    "beta_fast, beta_slow);"
)
_WHOLE = "freq_base, freq_scale, ext_factor, attn_factor"
_PICKED = "freq_base_l, freq_scale_l, ext_factor, attn_factor"
_COPIED = """
    hparams.rope_freq_base_train_swa  = hparams.rope_freq_base_train;
    hparams.rope_freq_scale_train_swa = hparams.rope_freq_scale_train;
"""


def write_llama_cpp(root, calls, loading=""):
    """Write a source with an architecture `mine`, and `other`, which takes the graph of `mine`."""
    models = root / "src" / "models"
    models.mkdir(parents=True)
    (root / "src" / "llama-arch.cpp").write_text(
        '    { LLM_ARCH_MINE,  "mine"  },\n    { LLM_ARCH_OTHER, "other-one" },\n'
    )
    (root / "src" / "llama-model.cpp").write_text(
        "case LLM_ARCH_MINE:\n return new llama_model_mine(params);\n"
        "case LLM_ARCH_OTHER:\n return new llama_model_other(params);\n"
    )
    (models / "models.h").write_text(
        "struct llama_model_mine : public llama_model_base {\n};\n"
        "struct llama_model_other : public llama_model_base {\n"
        "    using graph = llama_model_mine::graph;\n};\n"
    )
    (models / "mine.cpp").write_text(
        f"void llama_model_mine::load_arch_hparams() {{{loading}}}\n"
        f"llama_model_mine::graph::graph() {{ // ggml_rope_ext(a comment)\n{calls}\n}}\n"
    )
    (models / "other.cpp").write_text(
        f"void llama_model_other::load_arch_hparams() {{{loading}}}\n"
    )


@pytest.mark.parametrize(
    ("numbers", "loading", "kind"),
    [
        ([_WHOLE], "", "scaling"),
        ([_WHOLE, "freq_base, 1.0, 0.0f, 1.0"], "", "full attention"),
        ([_PICKED], "", "full attention"),
        ([_PICKED], _COPIED, "scaling"),
        ([_WHOLE, "10000.0f, freq_scale, ext_factor, attn_factor"], "", None),
        (["freq_base, freq_scale, 0.0f, attn_factor"], "", None),
        ([], "", None),
    ],
)
def test_graphs_are_read_by_the_arguments_of_their_rotations(tmp_path, numbers, loading, kind):
    generator = load_generator("llama_cpp_fields")
    calls = "\n".join(_CALL.format(factors="nullptr", numbers=each) for each in numbers)
    write_llama_cpp(tmp_path, calls, loading)
    assert generator.Graphs(tmp_path).kinds == {"mine": kind, "other-one": kind}


@pytest.mark.parametrize("factors", ["rope_factors", "model.get_rope_factors(cparams, il)", "NULL"])
def test_graphs_that_take_stretches_are_named(tmp_path, factors):
    generator = load_generator("llama_cpp_fields")
    loading = "create_tensor(tn(LLM_TENSOR_ROPE_FREQS));"
    write_llama_cpp(tmp_path, _CALL.format(factors=factors, numbers=_WHOLE), loading)
    expected = [] if factors == "NULL" else ["mine", "other-one"]
    assert generator.Graphs(tmp_path).stretched == expected


def test_converters_write_a_rotation_where_they_lead_to_the_text_models(tmp_path):
    generator = load_generator("llama_cpp_fields")
    (tmp_path / "conversion").mkdir()
    (tmp_path / "gguf-py" / "gguf").mkdir(parents=True)
    (tmp_path / "gguf-py" / "gguf" / "constants.py").write_text(
        'NAMES = {\n    MODEL_ARCH.MINE:      "mine",\n    MODEL_ARCH.OTHER: "other-one",\n}\n'
    )
    (tmp_path / "conversion" / "mine.py").write_text(
        textwrap.dedent(
            """
            @ModelBase.register("MineForCausalLM", "Mine")
            class MineModel(TextModel):
                model_arch = gguf.MODEL_ARCH.MINE
                def set_gguf_parameters(self):
                    super().set_gguf_parameters()
            @ModelBase.register("OtherForCausalLM")
            class OtherModel(MineModel):
                model_arch = gguf.MODEL_ARCH.OTHER
                def set_gguf_parameters(self):
                    self.gguf_writer.add_context_length(1)
            @ModelBase.register("HeirForCausalLM")
            class HeirModel(OtherModel):
                def set_gguf_parameters(self):
                    MineModel.set_gguf_parameters(self)
            @ModelBase.register("MineForCausalLM")
            class MineVisionModel(MmprojModel):
                pass
            """
        )
    )
    converters = generator.Converters(tmp_path)
    found = {
        name: (converters.file_architecture(name), converters.writes(name))
        for name in map(
            converters.text_class, ("MineForCausalLM", "OtherForCausalLM", "HeirForCausalLM")
        )
    }
    assert found == {
        "MineModel": ("mine", True),
        "OtherModel": ("other-one", False),
        "HeirModel": ("other-one", True),
    }
    assert converters.text_class("AbsentForCausalLM") is None


_COMMON = """
    from sglang.srt.layers.rotary_embedding import get_rope
    from sglang.srt.utils import get_rope_config
"""
_ATTENTION = """
    class Attention:
        def __init__(self, config, rope_theta=10000, rope_scaling=None):
            self.rope_theta = rope_theta
            self.rope_scaling = rope_scaling
            self.rotary_emb = get_rope(64, rotary_dim=64, base=self.rope_theta{more})
"""
_SCALED = ", rope_scaling=self.rope_scaling"


@pytest.mark.parametrize(
    ("arguments", "more", "reads"),
    [
        ("theta, scaling", _SCALED, "scaling"),
        ("theta", _SCALED, "theta"),
        ("theta, scaling", "", "theta"),
        ("config.rope_parameters['rope_theta'], config.rope_parameters", _SCALED, "scaling"),
        ("rope_theta=config.rope_parameters['rope_theta']", _SCALED, "theta"),
        ("getattr(config, 'rope_theta', 1e4), config.rope_parameters", _SCALED, None),
        ("theta, {'rope_type': scaling['rope_type']}", _SCALED, "theta"),
        ("Imported", _SCALED, "scaling"),
        ("LAYERS[config.kind]", _SCALED, "scaling"),
    ],
)
def test_arguments_are_traced_to_the_config(tmp_path, arguments, more, reads):
    """Trace through parameters, attributes, tuples, other modules and tables of classes."""
    generator = load_generator()
    models = tmp_path / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    (tmp_path / "sglang-9.9.dist-info").mkdir()
    common, attention = textwrap.dedent(_COMMON), textwrap.dedent(_ATTENTION.format(more=more))
    (models / "other.py").write_text(
        common
        + attention
        + textwrap.dedent(
            """
            class Layer(Attention):
                def __init__(self, config):
                    theta, scaling = get_rope_config(config)
                    super().__init__(config, theta, rope_scaling=scaling)
            """
        )
    )
    is_elsewhere = arguments in ("Imported", "LAYERS[config.kind]")
    layer = f"{arguments}(config)" if is_elsewhere else f"Attention(config, {arguments})"
    own = "" if is_elsewhere else attention
    (models / "mine.py").write_text(
        common
        + "from sglang.srt.models.other import Layer as Imported\nLAYERS = {'a': Imported}\n"
        + own
        + textwrap.dedent(
            f"""
            class MineForCausalLM:
                def __init__(self, config):
                    theta, scaling = get_rope_config(config)
                    {layer}
            EntryClass = MineForCausalLM
            """
        )
    )
    package = generator.Package("sglang", tmp_path)
    assert package.version == "9.9"
    assert generator.read_architecture(package, "MineForCausalLM") == reads
    assert generator.read_architecture(package, "AbsentForCausalLM") == "transformers"
