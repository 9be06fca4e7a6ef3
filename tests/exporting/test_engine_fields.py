"""Test what is known of the fields that engines' model files read, and how it is read."""

import importlib.util
import sys
import textwrap
from pathlib import Path

import pytest
from architectures.tiny_architectures import tiny_model

import rope_patch
from rope_patch.exporting import engine_fields, mlx

GENERATOR = Path(__file__).parents[2] / "docs" / "generate" / "engine_fields.py"


def load_generator():
    spec = importlib.util.spec_from_file_location("engine_fields_generator", GENERATOR)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def export(model_type, engine, method="yarn", **options):
    model = tiny_model(model_type)
    rope_patch.patch(model, method, factor=4.0, kernels="hf", **options)
    return rope_patch.export(model, engine)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["linear", "yarn"])
@pytest.mark.parametrize(
    "model_type",
    [
        *("mixtral", "gemma", "gemma2", "granitemoe", "olmo"),
        *("stablelm", "phi", "persimmon", "starcoder2"),
    ],
)
def test_sglang_refuses_scalings_that_its_model_file_drops(model_type, method):
    with pytest.raises(ValueError, match=rf"sglang 0\.5\.\d+ the model of {model_type} reads a th"):
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
    ],
)
def test_what_no_field_reaches_is_refused(engine, model_type):
    with pytest.raises(ValueError, match=rf"{engine} cannot run|has no model of"):
        export(model_type, engine, "ntk")


def test_the_plugin_is_refused_where_vllm_runs_transformers_own_model():
    with pytest.raises(ValueError, match="which the plugin does not reach"):
        export("smollm3", "vllm", "dynamic-yarn")
    assert not export("smollm3", "vllm", "yarn").needs_plugin


# -- transformers 4 --------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["gpt_neox", "gpt_neox_japanese"])
def test_gpt_neox_has_its_own_names_in_transformers_4(model_type):
    config = export(model_type, "transformers4", "abf").config
    model = tiny_model(model_type)
    handle = rope_patch.patch(model, "abf", factor=4.0, kernels="hf")
    inv_freq = handle.frequencies[None].inv_freq
    # configuration_gpt_neox.py and modeling_rope_utils.py of 4.57.6 read these two.
    assert config["rotary_emb_base"] ** (-1 / len(inv_freq)) == pytest.approx(float(inv_freq[1]))
    assert "rope_theta" not in config
    assert config["rope_scaling"] is None


def test_olmo_takes_two_fields_in_transformers_4():
    for model_type in ("olmo", "olmo2"):
        config = export(model_type, "transformers4", "linear").config
        assert config["rope_scaling"] == {"type": "linear", "factor": 4.0}
        with pytest.raises(ValueError, match="takes linear there and no other scaling"):
            export(model_type, "transformers4", "yarn")


@pytest.mark.parametrize(
    ("model_type", "refused", "taken"),
    [
        ("nemotron", "linear", "ntk"),
        ("deepseek_v2", "yarn", "ntk"),  # no attention factor in its softmax scale
        ("llama4_text", "yarn", "llama3"),
    ],
)
def test_transformers_4_refuses_what_its_models_ignore(model_type, refused, taken):
    with pytest.raises(ValueError, match="transformers4 cannot run"):
        export(model_type, "transformers4", refused)
    assert export(model_type, "transformers4", taken).config


def test_transformers_4_gets_the_head_dim_that_its_config_lacks():
    model = tiny_model("mixtral", head_dim=None)
    rope_patch.patch(model, "yarn", factor=4.0, kernels="hf")
    assert rope_patch.export(model, "transformers4").config["head_dim"] == 16


# -- the table -------------------------------------------------------------------------------------


def test_mlx_lists_agree_with_its_files():
    table = engine_fields._table()["mlx"]
    # Not in transformers; and read by hand: windows beside full attention, and a class of its own.
    by_hand = {"mimo", "gemma3_text", "phi3"}
    assert set(mlx._SCALING_ARCHITECTURES) - by_hand <= set(table["scaling"])
    assert set(mlx._THETA_ONLY_ARCHITECTURES) <= set(table["theta"])


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
